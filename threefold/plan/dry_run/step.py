"""A training step of an engine, and what it needs: of a dry run, or of a real rank."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from threefold.comm.mesh import Event
from threefold.config import Config
from threefold.data.loader import Batch
from threefold.plan.dry_run.report import ACTIVATIONS, GRADIENTS, OPTIMIZER, WEIGHTS
from threefold.plan.dry_run.storage_tracker import OTHER, Observer, StorageTracker
from threefold.torch_private.distributed import unreduced_gradients
from threefold.train.engine import Engine

_GATHERED, _WHOLE = "gathered weights", "whole gradients"


@dataclass(frozen=True)
class Measured:
    """What a step needed.

    Attributes:
        held: bytes of weights, gradients and optimizer state.
        peak: bytes when most were alive, by kind; all but the above are activations.
        causes: the same, with gathered weights among the weights and whole gradients among the gradients.
        events: the collectives, in order.
    """

    held: dict[str, int]
    peak: dict[str, int]
    causes: dict[str, int]
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
        if engine.parallelism.zero is not None:
            _claim_whole_tensors(engine, tracker)
        tracker.begin()
        loss, counted = engine.compute_gradients(batch, 0)
        held.setdefault(GRADIENTS, 0)
        held[GRADIENTS] += tracker.claim(GRADIENTS, (engine.gradients[weight.leaf] for weight in trained))
        engine.update(loss, counted, 0)
    of_zero = {_GATHERED: WEIGHTS, _WHOLE: GRADIENTS}
    alike = _named(tracker.peak, dict.fromkeys(of_zero, ACTIVATIONS))
    return Measured(held, alike, _named(tracker.peak, of_zero), events)


def _claim_whole_tensors(engine: Engine, tracker: StorageTracker) -> None:
    """Have the weights that ZeRO gathers, and the gradients that it has not shared out yet, counted by themselves."""
    watched: set[torch.Tensor] = set()
    for stage in engine.stages:
        sharded = [module for module in stage.modules() if isinstance(module, FSDPModule)]
        for module in sharded:
            assert isinstance(module, nn.Module)
            module.register_forward_pre_hook(partial(_gathered, tracker, watched))
            module.register_forward_hook(partial(_computed, tracker, sharded))


def _gathered(tracker: StorageTracker, watched: set[torch.Tensor], module: nn.Module, _arguments: Any) -> None:
    whole = [each for each in module.parameters() if not isinstance(each, DTensor)]
    tracker.claim(_GATHERED, whole)
    for each in whole:  # torch keeps one object for each
        if each.requires_grad and each not in watched:
            watched.add(each)
            each.register_post_accumulate_grad_hook(partial(_arrived, tracker))


def _arrived(tracker: StorageTracker, parameter: torch.Tensor) -> None:
    if parameter.grad is not None:
        tracker.claim(_WHOLE, [parameter.grad])


def _computed(
    tracker: StorageTracker, sharded: Sequence[FSDPModule], _module: nn.Module, _arguments: Any, outputs: Any
) -> None:
    """When the backward pass reaches the outputs of a module, what comes after it has its gradients."""

    def claim(_gradient: torch.Tensor) -> None:
        for module in sharded:
            tracker.claim(_WHOLE, unreduced_gradients(module))

    for tensor in (outputs,) if isinstance(outputs, torch.Tensor) else outputs:
        if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
            tensor.register_hook(claim)
            return


def _named(peak: dict[str, int], names: Mapping[str, str]) -> dict[str, int]:
    found = Counter(dict.fromkeys((WEIGHTS, GRADIENTS, OPTIMIZER, ACTIVATIONS), 0))
    for kind, nbytes in peak.items():
        found[ACTIVATIONS if kind == OTHER else names.get(kind, kind)] += nbytes
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
