"""Diagnosis of a bad step: reruns it with checks that find the first non-finite output or gradient."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from math import isfinite
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from threefold.checksums import checksum_of_blocks
from threefold.comm.layout import Layout
from threefold.data.loader import Batch, Loader
from threefold.models.custom_batch import map_tensors
from threefold.parallel.gradients import squared_norm
from threefold.parallel.leaf import local
from threefold.parallel.pipeline.runner import PipelineRunner
from threefold.parallel.pipeline.stage import Stage
from threefold.train.step import Engine, GradientStep

_OUTPUT, _WEIGHT = 0, 1


class BadValue(NamedTuple):
    """First non-finite value (`NaN` or `Inf`) of a rank; the smallest of several comes first in the step.

    `order` is 0 in the forward pass and 1 in the backward pass; then stage and module in the order of that pass; then
    outputs before weights. Micro-batches count from 0 in their replica.
    """

    order: tuple[int, int, int, int]
    micro_batch: int
    place: str
    value: str


class FiniteChecks:
    """Check that the outputs and gradients of a rank's modules are finite, within `running`; find the first that is
    not.

    Gradients of module outputs and weights are checked as autograd computes them, before they are summed over
    micro-batches or ranks. So a rank sees only values that arose on it or reached it through its activations.
    Recomputed activations are not checked again.
    """

    def __init__(self, engine: GradientStep) -> None:
        self._engine = engine
        self.first: BadValue | None = None
        self._handles: list[RemovableHandle] = []
        self._forward: tuple[int, int] | None = None  # stage and micro-batch of the running forward pass
        self._backward = 0  # micro-batch of the running backward pass
        self._calls: dict[tuple[int, int], dict[str, int]] = {}  # by forward pass, the order in which modules ended
        self._ended_calls = 0
        self._seen: dict[int, ReferenceType[Tensor]] = {}
        self._weights: set[Tensor] = set()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Check the step inside the block; compiled layers run eagerly."""
        deferred = self._engine.parallelism.deferred
        watching = nullcontext() if deferred is None else deferred.watching(self._deferred)
        with torch.compiler.set_stance("force_eager"), watching:
            try:
                for number, stage in self._stages():
                    self._register(number, stage)
                yield
            finally:
                for handle in self._handles:
                    handle.remove()

    def _stages(self) -> Iterator[tuple[int, Stage]]:
        engine = self._engine
        return zip(engine.parallelism.stages.held_by(engine.mesh.pp.index), engine.stages, strict=True)

    def _register(self, number: int, stage: Stage) -> None:
        runner = self._engine.runner
        if isinstance(runner, PipelineRunner):
            (scheduled,) = (each for each in runner.scheduled_stages if each.stage_index == number)

            def begins(_module: nn.Module, _args: Any, options: Mapping[str, Any]) -> None:
                self._begin(number, int(options["number"]))

            self._handles.append(scheduled.submod.register_forward_pre_hook(begins, with_kwargs=True))
        else:
            hook = lambda *_: self._begin(0, len(self._calls))  # noqa: E731
            self._handles.append(stage.register_forward_pre_hook(hook, prepend=True))
        for name, module in stage.named_modules():
            holds = name in stage.layer_names or isinstance(module, FSDPModule)
            if holds or next(module.parameters(recurse=False), None) is not None:
                self._handles.append(module.register_forward_pre_hook(partial(self._before, number, stage, name)))
            if name:
                self._handles.append(module.register_forward_hook(partial(self._after, number, name)))
        self._handles.append(stage.register_forward_hook(lambda *_: setattr(self, "_forward", None)))

    def _begin(self, number: int, micro_batch: int) -> None:
        self._forward = number, micro_batch
        self._calls[number, micro_batch], self._ended_calls = {}, 0
        self._seen.clear()
        if not isinstance(self._engine.runner, PipelineRunner):
            self._backward = micro_batch

    def _before(self, number: int, stage: Stage, name: str, module: nn.Module, _args: Any) -> None:
        """Check the gradients of the weights inside, as they are while the module runs (ZeRO gathers them)."""
        for inner, parameter in module.named_parameters():
            leaf = parameter if self._engine.parallelism.zero is not None else local(parameter)
            if isinstance(leaf, DTensor) or not leaf.requires_grad or leaf in self._weights:
                continue
            self._weights.add(leaf)
            whole = stage.model_plan.whole_name(f"{name}.{inner}" if name else inner)
            self._handles.append(leaf.register_hook(partial(self._weight_gradient, number, whole, None)))

    def _after(self, number: int, name: str, _module: nn.Module, _args: Any, output: Any) -> None:
        if self._forward is None or self._forward[0] != number:  # recomputed activations
            return
        micro_batch, calls = self._forward[1], self._calls[self._forward]
        calls[name] = place = self._ended_calls
        self._ended_calls += 1
        for tensor in _floats(output):
            known = self._seen.get(id(tensor))
            if known is not None and known() is tensor:  # output of an inner module
                continue
            self._seen[id(tensor)] = ref(tensor)
            self._check(tensor, (0, number, place, _OUTPUT), micro_batch, f"the output of {name}")
            if tensor.requires_grad:
                hook = partial(self._output_gradient, (1, -number, -place, _OUTPUT), micro_batch, name)
                tensor.register_hook(hook)

    def _output_gradient(
        self, order: tuple[int, int, int, int], micro_batch: int, name: str, gradient: Tensor | None
    ) -> None:
        self._backward = micro_batch
        self._check(gradient, order, micro_batch, f"the gradient of the output of {name}")

    def _weight_gradient(self, number: int, name: str, micro_batch: int | None, gradient: Tensor | None) -> None:
        micro_batch = self._backward if micro_batch is None else micro_batch
        calls, module = self._calls.get((number, micro_batch), {}), name.rpartition(".")[0]
        while module and module not in calls:  # the weight is used by another module
            module = module.rpartition(".")[0]
        self._check(gradient, (1, -number, -calls.get(module, 0), _WEIGHT), micro_batch, f"the gradient of {name}")

    def _deferred(self, leaf: Tensor) -> Callable[[Tensor], None]:
        weight = next(weight for weight in self._engine.model.weights if weight.leaf is leaf)
        held = (number for number, stage in self._stages() if any(local(each) is leaf for each in stage.parameters()))
        return partial(self._weight_gradient, next(held), weight.name, self._backward)

    def _check(self, tensor: Tensor | None, order: tuple[int, int, int, int], micro_batch: int, place: str) -> None:
        if tensor is None:  # gradient is zero or deferred
            return
        found = BadValue(order, micro_batch, place, "")
        if (self.first is None or found < self.first) and (value := bad_value(tensor)):
            self.first = found._replace(value=value)


@torch.no_grad()
def bad_value(tensor: Tensor) -> str:
    """Return `NaN` or `Inf` if a tensor holds one, and an empty string if all of it is finite."""
    if bool(tensor.isfinite().all()):
        return ""
    return "NaN" if bool(tensor.isnan().any()) else "Inf"


def _floats(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _floats(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _floats(each)


_NAMED = 8  # maximum number of samples and ranks that a sentence lists


@dataclass(frozen=True)
class RankFindings:
    """Findings of one rank from the reruns of a step.

    Attributes:
        same, finite: whether loss and gradients had the same bits in the second run, and whether they were finite.
        loss: this rank's term of the second run's mean loss.
        first: first bad value of the run with checks; None if there was none.
        weight: first weight that was not finite before the step.
        summed: first weight whose gradient was not finite after all sums.
        large: first weight whose gradient was finite but too large for its norm, with its largest value, in words.
        bad_loss, bad_data: whether this rank's term of the loss, or floats of its part of the batch, were not finite.
        samples: samples of the micro-batch of `first`.
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
    """Cause of a bad step, from the findings of all ranks; the same on every rank."""

    findings: tuple[RankFindings, ...]
    layout: Layout

    @property
    def is_reproducible(self) -> bool:
        """Whether a second run of the step was bad too, or gave the same bits."""
        return not all(found.finite for found in self.findings) or not self.differing

    @property
    def differing(self) -> list[int]:
        """The ranks on which a second run of the step gave different bits."""
        return [rank for rank, found in enumerate(self.findings) if not found.same]

    def clauses(self) -> list[str]:
        """Return the parts of a sentence: the origin of the bad value, and the result of a second run."""
        others = self.differing
        if not self.is_reproducible:
            loss = sum(found.loss for found in self.findings)
            ranks = "" if len(others) == len(self.findings) else f", with other bits on {self._named(others)} alone"
            return [
                f"a second run of the step, on the same weights and samples, was finite (loss {loss:g}){ranks}, so the "
                "hardware is the likely cause, not data or model"
            ]
        if not others:
            bits = "a second run of the step gave the same bits, so data or model is the cause, not the hardware"
        else:
            bits = (
                f"a second run of the step was not finite either, but had other bits on {self._named(others)}, so the "
                "hardware, or an operation that is not deterministic, may be the cause"
            )
        return [self._where(), bits]

    def _where(self) -> str:
        known = [(found.first, rank) for rank, found in enumerate(self.findings) if found.first is not None]
        weight = next((found.weight for found in self.findings if found.weight), None)
        bad_weight = f"the weight {weight} was not finite before the step"
        if not known and weight:
            return bad_weight
        if not known:
            if losses := [rank for rank, found in enumerate(self.findings) if found.bad_loss]:
                loss = f"the loss computed of them on {self._named(losses)}"
                return f"the outputs of all modules are finite, and {loss} is not"
            if summed := next((found.summed for found in self.findings if found.summed), None):
                return f"the gradient of {summed} is finite in each micro-batch on each rank, and their sum is not"
            if large := next((found.large for found in self.findings if found.large), None):
                return f"loss and gradients are finite, and {large} overflows the norm"
            return "no module's output and no gradient was found that is not finite"
        first, rank = min(known)  # in model order
        ranks = [other for value, other in known if value.order == first.order]
        found, replica = self.findings[rank], self.layout.coordinates(rank).dp
        of_replica = f" of replica {replica}" if self.layout.dp > 1 else ""
        direction = "backward" if first.order[0] else "forward"
        where = (
            f"the first value that is not finite is {'an' if first.value == 'Inf' else 'a'} {first.value} in "
            f"{first.place}, in the {direction} pass of micro-batch {first.micro_batch}{of_replica} "
            f"({_listed('sample', found.samples)})"
        )
        if self.layout.world_size > 1:
            where += f" on {self._named(ranks)}"
        if found.bad_data:
            where += ", whose data is not finite"
        return f"{where}; {bad_weight}" if weight else where

    def _named(self, ranks: Sequence[int]) -> str:
        if len(ranks) > 1:
            return "all ranks" if len(ranks) == self.layout.world_size else _listed("rank", list(map(str, ranks)))
        (rank,) = ranks
        place = self.layout.coordinates(rank)
        axes = ", ".join(f"{axis} {getattr(place, axis)}" for axis in place._fields if self.layout.size(axis) > 1)
        return f"rank {rank}" + (f" ({axes})" if axes else "")


def diagnose(
    engine: Engine, loader: Loader, batch: Any, done: int, loss: Tensor, streams: Mapping[str, Tensor]
) -> Diagnosis:
    """Rerun a bad step, at most twice; weights and random streams are unchanged. Collective over the world.

    Args:
        engine: engine that still holds the gradients of the bad step.
        batch: this replica's samples.
        done: updates made before the step.
        loss: this rank's term of the step's mean loss.
        streams: state of the random streams before the step.
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
    samples: tuple[str, ...] = ()
    large = None
    if checks.first is not None:
        indices = loader.sample_indices(done).tolist()
        size = len(indices) // engine.settings.parts(len(indices))
        start = checks.first.micro_batch * size
        samples = tuple(loader.sample_name(index) for index in indices[start : start + size])
    tensors: list[Tensor] = []
    if not isinstance(batch, Batch):  # the user's own, which may have floats
        map_tensors(batch, tensors.append)
    if overflowing is not None:
        largest = overflowing.gradient.abs().max().item()
        large = f"the gradient of {overflowing.name}, with values up to {largest:g},"
    found = replace(
        mine,
        first=checks.first,
        weight=next((each.name for each in weights if bad_value(each.master) or bad_value(each.leaf)), None),
        summed=summed,
        large=large,
        bad_loss=not isfinite(term),
        samples=samples,
        bad_data=any(tensor.is_floating_point() and bool(bad_value(tensor)) for tensor in tensors),
    )
    return Diagnosis(tuple(world.gather_objects(found)), layout)


def _digest(engine: Engine, loss: Tensor) -> str:
    """Return a checksum of a rank's loss and gradients in which all NaNs are equal."""

    def content(tensor: Tensor) -> Any:
        plain = torch.where(tensor.isnan(), torch.full_like(tensor, torch.nan), tensor)
        return plain.cpu().contiguous().flatten().view(torch.uint8).numpy().data

    tensors = [loss, *(entry.gradient for entry in engine.optimizer.entries)]
    return checksum_of_blocks(content(tensor.detach()) for tensor in tensors)


def _listed(what: str, names: Sequence[str]) -> str:
    if len(names) == 1:
        return f"{what} {names[0]}"
    shown = ", ".join(names[: _NAMED if len(names) > _NAMED else -1])
    last = f"{len(names) - _NAMED} more" if len(names) > _NAMED else names[-1]
    return f"{what}s {shown} and {last}"
