"""Buffers that forward passes change, such as running means, with equal results in every layout.

Every micro-batch of every replica starts from a buffer's value at the start of the step. After it, a float buffer is
set to the mean of its values after each sample; any other buffer must end up the same for all samples. So a running
mean covers the global batch, and a counter counts updates. A change that depends on the layout is refused.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.models.sharding import ModelPlan
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.recompute import Recomputed
from threefold.torch_private.distributed import persistent_buffers
from threefold.torch_private.fake import FakeTensor
from threefold.torch_private.tensors import version_of

_ALIKE = 1e-3
"""Relative difference between tensor ranks up to which a buffer counts as equal."""


@dataclass(eq=False)
class _Buffer:
    """A persistent buffer of a rank's stages, under its first name, with the modules and attributes that hold it."""

    name: str
    value: Tensor  # between steps; each micro-batch starts from it
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    is_recomputed: bool = False  # by activation checkpointing
    before: Tensor | None = None  # value before the last step
    given: Tensor | None = None  # copy that the current micro-batch computes with
    results: Tensor | None = None  # of the step's `count` micro-batches: their fp64 sum for floats, else the first
    count: int = 0
    differs: bool = False  # whether results that are not floats differ
    moved: bool = False  # whether a forward pass has changed it
    version: int = -1  # tensor version of `given`, or of `value` if nothing should change it

    def put(self, value: Tensor) -> None:
        for module, attribute in self.places:
            setattr(module, attribute, value)

    @property
    def held(self) -> Tensor:
        """Tensor that the modules hold; a new one if `forward` has replaced it in any."""
        held = [getattr(module, attribute) for module, attribute in self.places]
        return next((each for each in held if each is not self.given and each is not self.value), held[0])

    def begin(self) -> None:
        self.value = self.held  # a callback or a checkpoint may have replaced it
        self.results, self.count, self.differs, self.version = None, 0, False, version_of(self.value)

    def give(self) -> None:
        self.given = self.value.detach().clone()
        self.version = version_of(self.given)
        self.put(self.given)

    def take(self) -> None:
        """Collect the copy that a micro-batch has changed, and put the original value back."""
        held = self.held
        made, is_new = held.detach(), held is not self.given
        # Values may change without a new tensor version, as through `.data` or `numpy()`.
        differs = not isinstance(made, FakeTensor) and not torch.equal(made, self.value)
        self.moved = self.moved or is_new or version_of(held) != self.version or differs
        self.put(self.value)
        self.given = None
        if made.shape != self.value.shape:
            raise UserError(
                f"forward changes the shape of the buffer {self.name!r}, which checkpoints and other ranks could not "
                "follow; give it its largest shape in the constructor."
            )
        self.count += 1
        if self.results is None:
            self.results = made
        elif self.value.is_floating_point():
            if self.count == 2:
                self.results = self.results.double()
            self.results += made
        elif not isinstance(made, FakeTensor):
            self.differs = self.differs or not torch.equal(made, self.results)


class RunningStatistics:
    """Persistent buffers of a rank's stages, of which training updates those that forward passes change.

    It `is_idle`, so that steps need no `begin` and `finish`, after the first step if there are no persistent buffers.
    """

    def __init__(self, stages: Sequence[Stage], plan: ModelPlan, mesh: Mesh) -> None:
        self._mesh, self._running, self._known, self.is_idle = mesh, False, False, False
        self._stages, self._names = stages, _names(stages)
        found: dict[int, _Buffer] = {}  # a buffer that several stages hold is one
        self._by_stage: dict[Stage, list[_Buffer]] = {}
        for stage in stages:
            around = tuple(f"{name}." for name, module in stage.named_modules() if isinstance(module, Recomputed))
            mine: dict[int, _Buffer] = {}
            for name, module in stage.named_modules():
                for attribute, value in persistent_buffers(module):
                    mine[id(value)] = buffer = found.setdefault(id(value), _Buffer(_joined(name, attribute), value))
                    buffer.places.append((module, attribute))
                    buffer.is_recomputed |= f"{name}.".startswith(around)
            self._by_stage[stage] = list(mine.values())
        self._buffers = list(found.values())
        self._shared = {each.name for each in self._buffers if plan.whole_name(each.name) != each.name}
        if self._buffers:
            for stage in stages:
                stage.register_forward_pre_hook(self._before)
                stage.register_forward_hook(self._after)

    def begin(self) -> None:
        """Begin the forward passes of a step."""
        for each in self._buffers:
            each.begin()
        self._running = True

    def finish(self, fraction: float) -> None:
        """End the step: set each changed buffer to its mean, weighted by this rank's `fraction` of the samples.

        Collective over the replicas and the tensor ranks. Raises a `UserError` if a change depends on the layout.
        """
        self._running = False
        if not self._known:
            for name in sorted(_names(self._stages) - self._names):
                raise UserError(
                    f"forward makes {name!r}, which no optimizer, checkpoint or other rank knows; make it in the "
                    "constructor, at its full size, and write to it in forward."
                )
            self._known, self.is_idle = True, not self._buffers
            if self._buffers:
                self._agree()
        for each in self._buffers:
            if not each.moved and (each.held is not each.value or version_of(each.value) != each.version):
                raise UserError(
                    f"forward changes the buffer {each.name!r} now and has not in the first step, by which it has to "
                    "be known; write to it in every forward pass, if only the value that it has."
                )
        if self._moving:
            self._take_means(fraction)

    def undo(self) -> None:
        """Restore the buffers from before the last step, whose update is skipped."""
        for each in self._moving:
            if each.before is not None:
                each.value.copy_(each.before)

    @contextmanager
    def preserved(self) -> Iterator[None]:
        """At the end of the block, restore the buffers that training changes."""
        kept = [(each, each.held, each.held.clone()) for each in (self._moving if self._known else self._buffers)]
        try:
            yield
        finally:
            with torch.no_grad():
                for each, held, value in kept:
                    held.copy_(value)
                    each.put(held)

    @property
    def means(self) -> list[str]:
        """Names of the buffers that become a mean over micro-batches and replicas."""
        return [each.name for each in self._buffers if each.moved and each.value.is_floating_point()]

    @property
    def _moving(self) -> list[_Buffer]:
        return [each for each in self._buffers if each.moved]

    def _before(self, stage: Any, _inputs: Any) -> None:
        if self._running:
            for each in self._by_stage[stage]:
                if each.moved or not self._known:
                    each.give()

    def _after(self, stage: Any, _inputs: Any, _output: Any) -> None:
        if self._running:
            for each in self._by_stage[stage]:
                if each.given is not None:
                    each.take()

    def _agree(self) -> None:
        """Mark a buffer as moving on all replicas if any replica moved it."""
        flags = torch.tensor([each.moved for each in self._buffers], dtype=torch.int64, device=self._mesh.device)
        for each, count in zip(self._buffers, self._mesh.replicas.all_reduce_values(flags), strict=True):
            each.moved = count > 0
            if not each.moved:
                each.results, each.version = None, version_of(each.value)
        for each in self._moving:
            if each.is_recomputed:
                raise UserError(
                    f"forward changes the buffer {each.name!r}, and train.recompute runs it a second time; use none."
                )
            if each.name in self._shared:
                raise UserError(
                    f"forward changes the buffer {each.name!r} of a module that is another layer too, which may be on "
                    "another pipeline rank; give each layer a buffer of its own."
                )

    @torch.no_grad()
    def _take_means(self, fraction: float) -> None:
        moving, replicas = self._moving, self._mesh.replicas
        means: list[Tensor] = []
        for each in moving:
            assert each.results is not None
            if each.count == 1 and replicas.size == 1:
                means.append(each.results)
            elif each.value.is_floating_point():
                means.append(each.results.double() * (fraction / each.count))
            else:  # equal everywhere, or refused
                means.append(each.results.double() * (1 / replicas.size))
        if replicas.size > 1:
            replicas.all_reduce_together_(means)
        first = moving[0].before is None
        for each, mean in zip(moving, means, strict=True):
            assert each.results is not None
            if not each.value.is_floating_point():
                mean = mean.round().to(each.value.dtype)
                if not isinstance(mean, FakeTensor) and (
                    each.differs or not torch.equal(mean, each.results.to(mean.dtype))
                ):
                    raise UserError(
                        f"forward makes something else of the buffer {each.name!r} for other samples, and it holds no "
                        "floats, of which replicas and micro-batches could take the mean; make it one of floats that "
                        "is a running mean."
                    )
            each.before = each.value.clone()
            each.value.copy_(mean)
            each.results = None
            if first:
                self._require_same_on_tensor_ranks(each)

    def _require_same_on_tensor_ranks(self, each: _Buffer) -> None:
        tp = self._mesh.tp
        if tp.size == 1 or isinstance(each.value, FakeTensor):
            return
        value = each.value.double()
        size = value.abs().sum()
        found = torch.stack([size, -size, value.sum(), -value.sum()])
        most, least, highest, lowest = tp.all_reduce_max_(found).tolist()
        if max(most + least, highest + lowest) > _ALIKE * most:
            raise UserError(
                f"forward makes something else of the buffer {each.name!r} on each tensor rank, as it is computed of "
                "what one of them holds; compute it of activations that no rule of shard has cut."
            )


def stored_buffers(stages: Sequence[Stage]) -> dict[str, Tensor]:
    """Return the current persistent buffers of a rank's stages, by their names in the whole model."""
    found: dict[str, Tensor] = {}
    for stage in stages:
        for name, module in stage.named_modules():
            for attribute, value in persistent_buffers(module):
                found.setdefault(stage.model_plan.whole_name(_joined(name, attribute)), value)
    return found


def _names(stages: Sequence[Stage]) -> set[str]:
    names = {name for stage in stages for name, _ in stage.named_parameters(remove_duplicate=False)}
    return names | stored_buffers(stages).keys()


def _joined(module: str, attribute: str) -> str:
    return f"{module}.{attribute}" if module else attribute
