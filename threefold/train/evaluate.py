"""The loss on the held-out part."""

import time
from collections.abc import Iterator

from threefold.data.loader import Batch, Loader
from threefold.errors import UserError
from threefold.train.callbacks.base import EvaluationRecord
from threefold.train.engine import Engine


def evaluate(engine: Engine, loader: Loader, batches: int, step: int) -> EvaluationRecord | None:
    """Mean loss over the tokens of the first `batches` global batches of the held-out part; the same on every rank.

    A mixture's corpora share the batches by their weights, and their means add up by their weights. Gradients and
    randomness stay as they are. Collective over the world.

    Args:
        engine: the model.
        loader: has the held-out samples; gives every rank the same number of batches.
        batches: at most so many.
        step: updates made so far.

    Returns:
        None where the run is to end before all batches were seen (`engine.stop`).

    Raises:
        UserError: no token of them counts.
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
    """Mean loss over the tokens that count, and their number; None where the run is to end."""
    total, tokens = 0.0, 0
    for batch in batches:
        loss, count = engine.evaluate(batch)
        if engine.stop.signal:
            return None
        total, tokens = total + loss, tokens + count
    if tokens == 0:
        of = f" of {name}" if name else ""
        raise UserError(
            f"No token of the validation batches{of} counts for the loss, "
            "as its documents are empty; prepare other data."
        )
    return total / tokens, tokens
