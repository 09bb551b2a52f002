"""The loss on the held-out part."""

import time

from threefold.data.loader import Loader
from threefold.errors import UserError
from threefold.train.engine import Engine
from threefold.train.hooks import EvaluationRecord


def evaluate(engine: Engine, loader: Loader, batches: int, step: int) -> EvaluationRecord:
    """Mean loss over the tokens of the first `batches` global batches of the held-out part; the same on every rank.

    Gradients and randomness stay as they are. Collective over the world.

    Args:
        engine: the model.
        loader: has the held-out samples; gives every rank the same number of batches.
        batches: at most so many.
        step: updates made so far.

    Raises:
        UserError: no token of them counts.
    """
    started = time.perf_counter()
    total, tokens = 0.0, 0
    for batch in loader.eval_batches(batches):
        loss, count = engine.evaluate(batch)
        total, tokens = total + loss, tokens + count
    if tokens == 0:
        raise UserError(
            "No token of the validation batches counts for the loss, as its documents are empty; prepare other data."
        )
    return EvaluationRecord(step, total / tokens, tokens, time.perf_counter() - started)
