"""What made a step's loss or gradient bad: the step is run again, to compare its bits and to find where that began.

The weights have not been updated and dropout follows from the step, so that a second run computes the same numbers: it
has the same bits, unless the hardware (or an operation that adds in any order) made the difference. Megatron-LM's
rerun state machine asks the same question (`--rerun-mode validate_results`). A third run has checks on every module.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isfinite
from typing import Any

import torch
from torch import Tensor

from threefold.checksums import checksum_of_blocks
from threefold.comm.layout import Layout
from threefold.data.loader import Loader
from threefold.models.own_batch import map_tensors
from threefold.train.anomalies.finite_checks import BadValue, FiniteChecks, bad_value
from threefold.train.engine import Engine
from threefold.train.gradient_norm import squared_norm
from threefold.train.optimizers.base import Entry

_NAMED = 8
"""Samples and ranks that a sentence lists at most."""


@dataclass(frozen=True)
class RankFindings:
    """What a rank found in the runs of a step.

    Attributes:
        same: whether loss and gradients had the same bits in both runs.
        finite: whether they were finite in the second.
        loss: its term of the second run's mean loss.
        first: the first bad value with checks on; None where there was none.
        weight: the first weight that was not finite before the step; None where all are.
        summed: the first weight whose gradient was not finite after all sums; None where all are.
        large: the first weight whose gradient was finite but too large for its norm, and its largest value, in words.
        bad_loss: whether its term of the loss was not finite.
        samples: of the micro-batch of `first`.
        bad_data: whether numbers of its part of the batch were not finite.
    """

    same: bool
    finite: bool
    loss: float
    first: BadValue | None = None
    weight: str | None = None
    summed: str | None = None
    large: str | None = None
    bad_loss: bool = False
    samples: tuple[str, ...] = ()
    bad_data: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """What made a step bad, the same on every rank.

    Attributes:
        findings: of each rank.
        layout: says where the ranks are.
    """

    findings: tuple[RankFindings, ...]
    layout: Layout

    @property
    def is_reproducible(self) -> bool:
        """Whether a second run of the step was bad too, or the same."""
        return not all(found.finite for found in self.findings) or not self.differing

    @property
    def ranks(self) -> list[int]:
        """The ranks on which the first bad value appeared."""
        known = [(found.first, rank) for rank, found in enumerate(self.findings) if found.first is not None]
        if not known:
            return []
        order = min(first for first, _ in known).order
        return [rank for first, rank in known if first.order == order]

    @property
    def first(self) -> BadValue | None:
        """The first bad value of the step in the order of the model; None where no module had one."""
        return min((self.findings[rank].first for rank in self.ranks), default=None)  # type: ignore[type-var]

    @property
    def differing(self) -> list[int]:
        """The ranks on which a second run of the step had other bits than the first."""
        return [rank for rank, found in enumerate(self.findings) if not found.same]

    def clauses(self) -> list[str]:
        """The parts of a sentence: where it began, and what a second run gave."""
        if not self.is_reproducible:
            return [self._of_hardware()]
        return [self._where(), self._of_bits()]

    def _of_hardware(self) -> str:
        loss = sum(found.loss for found in self.findings)
        others = self.differing
        ranks = "" if len(others) in (0, len(self.findings)) else f", with other bits on {self._named(others)} alone"
        return (
            f"a second run of the step, on the same weights and samples, was finite (loss {loss:g}){ranks}, so the "
            "hardware is the likely cause, not data or model"
        )

    def _of_bits(self) -> str:
        if not self.differing:
            return "a second run of the step gave the same bits, so data or model is the cause, not the hardware"
        where = self._named(self.differing)
        return (
            f"a second run of the step was not finite either, but had other bits on {where}, so the "
            "hardware, or an operation that is not deterministic, may be the cause"
        )

    def _where(self) -> str:
        first = self.first
        if first is None:
            return self._without_module()
        rank = min(rank for rank in self.ranks if self.findings[rank].first == first)
        found, replica = self.findings[rank], self.layout.coordinates(rank).dp
        of_replica = f" of replica {replica}" if self.layout.dp > 1 else ""
        direction = "backward" if first.is_backward else "forward"
        where = (
            f"the first value that is not finite is {'an' if first.value == 'Inf' else 'a'} {first.value} in "
            f"{first.place}, in the {direction} pass of micro-batch {first.micro_batch}{of_replica} "
            f"({_listed('sample', found.samples)})"
        )
        if self.layout.world_size > 1:
            where += f" on {self._named(self.ranks)}"
        if found.bad_data:
            where += ", whose data is not finite"
        if weight := self._weight():
            where += f"; the weight {weight} was not finite before the step"
        return where

    def _without_module(self) -> str:
        if weight := self._weight():
            return f"the weight {weight} was not finite before the step"
        losses = [rank for rank, found in enumerate(self.findings) if found.bad_loss]
        if losses:
            return (
                f"the outputs of all modules are finite, and the loss computed of them on {self._named(losses)} is not"
            )
        summed = next((found.summed for found in self.findings if found.summed), None)
        if summed:
            return f"the gradient of {summed} is finite in each micro-batch on each rank, and their sum is not"
        large = next((found.large for found in self.findings if found.large), None)
        if large:
            return f"loss and gradients are finite, and {large} overflows the norm"
        return "no module's output and no gradient was found that is not finite"

    def _weight(self) -> str | None:
        return next((found.weight for found in self.findings if found.weight), None)

    def _named(self, ranks: Sequence[int]) -> str:
        """Ranks in words, a single one with its coordinates."""
        if len(ranks) > 1:
            return "all ranks" if len(ranks) == self.layout.world_size else _listed("rank", list(map(str, ranks)))
        (rank,) = ranks
        place = self.layout.coordinates(rank)
        axes = ", ".join(f"{axis} {getattr(place, axis)}" for axis in place._fields if self.layout.size(axis) > 1)
        return f"rank {rank}" + (f" ({axes})" if axes else "")


def diagnose(
    engine: Engine, loader: Loader, batch: Any, done: int, loss: Tensor, streams: Mapping[str, Tensor]
) -> Diagnosis:
    """Run a bad step again, twice at most. Collective over the world; weights and random streams stay as they are.

    Args:
        engine: whose gradients are still those of the bad step.
        loader: of its batch.
        batch: this replica's samples.
        done: updates made before it.
        loss: this rank's term of its mean loss.
        streams: the state of the random streams before it.
    """
    world, layout = engine.mesh.world, engine.mesh.layout
    before = _digest(engine, loss)
    with engine.preserved(streams):
        again, _ = engine.compute_gradients(batch, done)
    entries, term = engine.optimizer.entries, again.item()
    summed = next((entry.name for entry in entries if bad_value(entry.gradient)), None)
    overflowing = next((entry for entry in entries if bad_value(squared_norm([entry.gradient]))), None)
    finite = isfinite(term) and overflowing is None
    mine = RankFindings(_digest(engine, again) == before, finite, term if engine.mesh.tp.is_first else 0.0)
    second = Diagnosis(tuple(world.gather_objects(mine)), layout)
    if not second.is_reproducible:
        return second
    checks = FiniteChecks(engine)
    with engine.preserved(streams), checks.running():
        engine.compute_gradients(batch, done)
    weights = engine.model.weights
    weight = next((each.name for each in weights if bad_value(each.master) or bad_value(each.leaf)), None)
    samples: tuple[str, ...] = ()
    if checks.first is not None:
        samples = _samples(loader, done, checks.first.micro_batch, engine.settings.micro_batches)
    found = replace(
        mine,
        first=checks.first,
        weight=weight,
        summed=summed,
        large=None if overflowing is None else _of_gradient(overflowing),
        bad_loss=not isfinite(term),
        samples=samples,
        bad_data=_is_bad(batch),
    )
    return Diagnosis(tuple(world.gather_objects(found)), layout)


def _digest(engine: Engine, loss: Tensor) -> str:
    """A checksum of a rank's loss and gradients, in which one NaN is as another."""
    tensors = [loss, *(entry.gradient for entry in engine.optimizer.entries)]
    return checksum_of_blocks(_bytes(tensor.detach()) for tensor in tensors)


def _bytes(tensor: Tensor) -> memoryview:
    plain = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
    content: memoryview = plain.cpu().contiguous().flatten().view(torch.uint8).numpy().data
    return content


def _of_gradient(entry: Entry) -> str:
    return f"the gradient of {entry.name}, with values up to {entry.gradient.abs().max().item():g},"


def _is_bad(batch: Any) -> bool:
    """Whether the floats of a batch of a user's own are not all finite."""
    if not isinstance(getattr(batch, "tokens", None), Tensor) or isinstance(batch, tuple):
        found: list[str] = []
        map_tensors(batch, lambda tensor: found.append(bad_value(tensor)) if tensor.is_floating_point() else None)
        return any(found)
    return False


def _samples(loader: Loader, done: int, micro_batch: int, micro_batches: int) -> tuple[str, ...]:
    """The samples of a micro-batch of this rank's replica: their numbers, of a mixture with the name of the corpus."""
    indices = loader.sample_indices(done).tolist()
    size = len(indices) // micro_batches
    return tuple(loader.sample_name(index) for index in indices[micro_batch * size : (micro_batch + 1) * size])


def _listed(what: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{what} {names[0]}"
    shown = ", ".join(names[: _NAMED if len(names) > _NAMED else -1])
    last = f"{len(names) - _NAMED} more" if len(names) > _NAMED else names[-1]
    return f"{what}s {shown} and {last}"
