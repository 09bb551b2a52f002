"""Evaluation: the loss on the validation part."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from threefold.comm.heartbeat import Activity
from threefold.data.loader import Loader
from threefold.errors import UserError
from threefold.models.loss_terms import LOSS, LossSums
from threefold.train.callbacks.base import EvaluationRecord
from threefold.train.engine import Engine


def evaluate(engine: Engine, loader: Loader, batches: int, step: int) -> EvaluationRecord | None:
    """Mean loss over the tokens of the first `batches` global batches of the validation part; the same on every rank.

    The corpora of a mixture get batches by their weights, and the loss is the mean of theirs by the same weights.
    Gradients and randomness stay as they are. Collective over the world.

    Args:
        engine: the model.
        loader: has the validation samples; gives every rank the same number of batches.
        batches: at most so many.
        step: updates made so far.

    Returns:
        None where the run is to end before all batches were seen (`engine.stop`).

    Raises:
        UserError: all their labels are masked.
    """
    started = time.perf_counter()
    loss, tokens, by_corpus, terms = 0.0, 0, {}, dict[str, float]()
    for part, count in loader.eval_parts(batches):
        measured = _sums(engine, loader.eval_batches(count, part.samples), part.name)
        if measured is None:
            return None
        loss, tokens = loss + part.weight * measured.loss, tokens + _counted(measured)
        by_corpus[part.name] = measured.loss
        for name, mean in several(measured.terms).items():
            terms[name] = terms.get(name, 0.0) + part.weight * mean
    seconds = time.perf_counter() - started
    return EvaluationRecord(step, loss, tokens, seconds, by_corpus if loader.is_mixture else {}, terms)


def several(terms: Mapping[str, float]) -> dict[str, float]:
    """The terms of a loss where they say more than the loss: none of a loss that is a single mean."""
    return {} if set(terms) <= {LOSS} else dict(terms)


def _counted(sums: LossSums) -> int:
    """What the mean is taken over: valid tokens, or what the one term counts; the samples where there are several."""
    (only, *others) = sums.counts.values()
    return sums.samples if others else int(only)


def _sums(engine: Engine, batches: Iterator[Any], name: str) -> LossSums | None:
    """The loss over the valid tokens, or of the user's terms; None where the run is to end."""
    sums, heartbeat = LossSums(), engine.mesh.heartbeat
    heartbeat.activity(Activity.DATA)
    for batch in batches:
        sums = sums + engine.eval_batch(batch, engine.loss)
        heartbeat.activity(Activity.DATA)
        if engine.stop.is_due:
            return None
    if not any(sums.counts.values()):
        of = f" of {name}" if name else ""
        raise UserError(
            f"All labels of the validation batches{of} are masked, as its documents are empty; prepare other data."
        )
    return sums
