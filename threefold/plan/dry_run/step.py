"""A training step of an engine, and what it needs: of a dry run, or of a real rank."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from threefold.comm.mesh import Event
from threefold.config import Config
from threefold.data.loader import Batch
from threefold.plan.dry_run.report import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS
from threefold.plan.dry_run.storage_tracker import OTHER, Observer, StorageTracker
from threefold.train.engine import Engine


@dataclass(frozen=True)
class Measured:
    """What a step needed.

    Attributes:
        held: bytes of weights, gradients and optimizer state.
        peak: bytes when most were alive, by kind; all but the above are activations.
        events: the collectives, in order.
    """

    held: dict[str, int]
    peak: dict[str, int]
    events: list[Event]


def measure_step(engine: Engine, batch: Batch, observer: Observer | None = None) -> Measured:
    """Run the first training step of an engine. Collective over the world.

    Args:
        engine: new.
        batch: its replica's rows of a global batch.
        observer: of all operations.
    """
    weights, trained = engine.model.weights, engine.model.trained
    with StorageTracker(observer) as tracker, engine.mesh.recorder.recording() as events:
        held = {
            WEIGHTS: tracker.claim(WEIGHTS, (each for weight in weights for each in (weight.leaf, weight.master))),
            OPTIMIZER: tracker.claim(OPTIMIZER, (state for _, _, state in engine.optimizer.states())),
        }
        if engine.parallelism.zero is None:  # else they are made in the step
            held[GRADIENTS] = tracker.claim(GRADIENTS, (engine.gradients[weight.leaf] for weight in trained))
        tracker.begin()
        loss, counted = engine.compute_gradients(batch, 0)
        held.setdefault(GRADIENTS, 0)
        held[GRADIENTS] += tracker.claim(GRADIENTS, (engine.gradients[weight.leaf] for weight in trained))
        engine.update(loss, counted, 0)
    return Measured(held, _named(tracker.peak), events)


def _named(peak: dict[str, int]) -> dict[str, int]:
    found = Counter(dict.fromkeys((WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS), 0))
    for kind, nbytes in peak.items():
        found[ACTIVATIONS if kind == OTHER else kind] += nbytes
    return dict(found)


def batch_of(config: Config, replica: int) -> Batch:
    """A replica's rows of a global batch of made-up tokens, none of them padding.

    Args:
        config: resolved.
        replica: its coordinate on the dp axis.
    """
    rows, length = config.train.global_batch_size // config.parallel.dp, config.data.sequence_length
    places = torch.arange(rows * (length + 1)).view(rows, length + 1)
    tokens = (places * 7919 + replica) % config.model.vocab_size
    documents = torch.zeros(rows, length, dtype=torch.int64) if config.data.separate_documents else None
    numbers = torch.arange(replica * rows, (replica + 1) * rows)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), numbers, documents)


def totals(events: Sequence[Event]) -> dict[tuple[str, str], tuple[int, int]]:
    """How many collectives of each axis and operation, and their bytes together."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for event in events:
        count, nbytes = found.get((event.axis, event.operation), (0, 0))
        found[event.axis, event.operation] = count + 1, nbytes + event.nbytes
    return found
