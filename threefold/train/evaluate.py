"""Evaluation: the loss on the validation part."""

import time
from collections.abc import Iterator

from threefold.data.loader import Batch, Loader
from threefold.errors import UserError
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
    loss, tokens, by_corpus = 0.0, 0, {}
    for part, count in loader.eval_parts(batches):
        measured = _mean_loss(engine, loader.eval_batches(count, part.samples), part.name)
        if measured is None:
            return None
        part_loss, part_tokens = measured
        loss, tokens = loss + part.weight * part_loss, tokens + part_tokens
        by_corpus[part.name] = part_loss
    return EvaluationRecord(step, loss, tokens, time.perf_counter() - started, by_corpus if loader.is_mixture else {})


def _mean_loss(engine: Engine, batches: Iterator[Batch], name: str) -> tuple[float, int] | None:
    """Mean loss over the valid tokens, and their number; None where the run is to end."""
    total, tokens = 0.0, 0
    for batch in batches:
        loss, count = engine.evaluate(batch)
        if engine.stop.is_due:
            return None
        total, tokens = total + loss, tokens + count
    if tokens == 0:
        of = f" of {name}" if name else ""
        raise UserError(
            f"All labels of the validation batches{of} are masked, as its documents are empty; prepare other data."
        )
    return total / tokens, tokens
