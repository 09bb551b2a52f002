"""Faults in a training step: a non-finite value in an activation, a gradient or a weight, on one rank."""

import contextlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from tests.train.support import Run
from threefold.parallel.leaf import local
from threefold.train import run as entry_point
from threefold.train.callbacks.base import Callback
from threefold.train.optim import Entry
from threefold.train.step import Engine, StepResult


@dataclass(frozen=True)
class Fault:
    """One bad value.

    Attributes:
        kind: location: the `output` of a module, the `gradient` of that output, a gradient of its `weight`, a
            `deferred` gradient, one `summed` over micro-batches and ranks, the `value` of its weight (bad from the step
            on), or the weight `updated` in the step.
        module: name of the module in the whole model.
        rank: rank that gets the bad value.
        step: step number, 1 for the first.
        micro_batch: index within the replica's step; unused for `value`.
        number: the bad value.
        runs: runs of the step in which it occurs; None for all, as with a fault of data or model.
    """

    kind: str
    module: str
    rank: int
    step: int
    micro_batch: int = 0
    number: float = float("nan")
    runs: tuple[int, ...] | None = None


class FaultyEngine(Engine):
    """Engine with faults; later faults are applied after earlier ones."""

    faults: Sequence[Fault] = ()

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._now, self._runs = 0, dict[int, int]()
        self._calls: dict[Fault, int] = {}
        self._backwards: dict[Fault, int] = {}
        for fault in self.faults:
            if fault.rank == self.mesh.rank:
                self._register_fault(fault)

    def compute_gradients(self, batch: Any, step: int, *args: Any, **options: Any) -> tuple[Tensor, int]:
        self._now, self._runs[step + 1] = step + 1, self._runs.get(step + 1, -1) + 1
        self._calls.clear()
        self._backwards.clear()
        for fault in self.faults:
            if fault.kind == "value" and (fault.rank, fault.step) == (self.mesh.rank, self._now):
                self._spoil_weight(fault)
        found = super().compute_gradients(batch, step, *args, **options)
        for fault in self.faults:
            if fault.kind == "summed" and fault.rank == self.mesh.rank and self._is_now(fault, fault.micro_batch):
                self._entry(fault).gradient.flatten()[0] = fault.number
        return found

    def update(self, *args: Any, **options: Any) -> StepResult:
        result = super().update(*args, **options)
        for fault in self.faults:
            if fault.kind == "updated" and (fault.rank, fault.step) == (self.mesh.rank, self._now):
                self._spoil_weight(fault)
        return result

    def _spoil_weight(self, fault: Fault) -> None:
        entry = self._entry(fault)
        for tensor in {entry.leaf, entry.master}:
            tensor.detach().flatten()[0] = fault.number

    def _entry(self, fault: Fault) -> Entry:
        return next(each for each in self.optimizer.entries if each.name == f"{fault.module}.weight")

    def _register_fault(self, fault: Fault) -> None:
        (module,) = (stage.get_submodule(fault.module) for stage in self.stages if _has(stage, fault.module))
        if fault.kind in ("value", "summed", "updated"):
            return
        watched: set[Tensor] = set()

        def of_weight(gradient: Tensor) -> Tensor:
            number = self._backwards[fault] = self._backwards.get(fault, -1) + 1
            return _spoilt(gradient, fault.number) if self._is_now(fault, number) else gradient

        if fault.kind == "deferred":
            store = self.parallelism.deferred
            assert store is not None
            defer = store.defer

            def spoil(leaf: Tensor, gradient: Callable[[], Tensor]) -> None:
                defer(leaf, (lambda: of_weight(gradient())) if leaf is local(module.weight) else gradient)

            store.defer = spoil
            return

        def begins(module: nn.Module, *_: Any) -> None:
            self._calls[fault] = self._calls.get(fault, -1) + 1
            if fault.kind == "weight":
                weight = module.weight if self.parallelism.zero is not None else local(module.weight)
                if weight not in watched:
                    watched.add(weight)
                    weight.register_hook(of_weight)

        def ends(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
            # Recomputed activations are a second call, after the one of the forward pass.
            number, is_second = divmod(self._calls[fault], 1 + (self.config.train.recompute != "none"))
            now = not is_second and self._is_now(fault, number)
            if fault.kind == "gradient" and now:
                output.register_hook(lambda gradient: _spoilt(gradient, fault.number))
            return _spoilt(output, fault.number) if fault.kind == "output" and now else output

        module.register_forward_pre_hook(begins)
        module.register_forward_hook(ends)

    def _is_now(self, fault: Fault, number: int) -> bool:
        in_run = fault.runs is None or self._runs.get(self._now) in fault.runs
        return fault.step == self._now and in_run and number == fault.micro_batch


def train_with(
    faults: Sequence[Fault], run: Run, run_dir: Path, resume: bool = False, callbacks: Sequence[Callback] = ()
) -> str:
    """Train as a pool rank whose engine has these faults, and return what it printed."""
    printed = io.StringIO()
    kind = type("FaultyEngine", (FaultyEngine,), {"faults": tuple(faults)})
    with patch.object(entry_point, "Engine", kind), contextlib.redirect_stdout(printed):
        entry_point.train(run.config, run_dir, resume, entry_point.RunOptions(callbacks=callbacks))
    return printed.getvalue()


def _has(stage: nn.Module, name: str) -> bool:
    try:
        stage.get_submodule(name)
    except AttributeError:
        return False
    return True


def _spoilt(tensor: Tensor, number: float) -> Tensor:
    bad = torch.zeros(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    bad.view(-1)[bad.numel() // 2] = number
    return tensor + bad
