"""Checks, while a step runs, that what each module gives and every gradient is finite: finds where that ends first."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from threefold.parallel.gradient_step import GradientStep
from threefold.parallel.parameter import local
from threefold.parallel.pipeline.runner import PipelineRunner
from threefold.parallel.pipeline.stage import Stage

_OUTPUT, _WEIGHT = 0, 1


class BadValue(NamedTuple):
    """The first value of a rank that is not finite. Of several the smallest is the one that comes first in a step.

    Attributes:
        order: 0 in the forward pass and 1 in the backward pass; then the stage and, within it, the module, as they come
            in that pass; then outputs before weights.
        micro_batch: number of the micro-batch on its replica, 0 for the first.
        place: such as `the output of blocks.1.mlp.up`.
        value: `NaN` or `Inf`.
    """

    order: tuple[int, int, int, int]
    micro_batch: int
    place: str
    value: str

    @property
    def is_backward(self) -> bool:
        return self.order[0] == 1


class FiniteChecks:
    """Checks the modules of a rank's stages, in `running`.

    The gradient of a module's output and those of weights are checked as autograd computes them, before they are added
    up over micro-batches or ranks; so a rank sees only what began on it or reached it through its activations.
    Activations that are recomputed are not checked again.

    Args:
        engine: whose next step is checked.

    Attributes:
        first: what was found; None while everything is finite.
    """

    def __init__(self, engine: GradientStep) -> None:
        self._engine = engine
        self.first: BadValue | None = None
        self._handles: list[RemovableHandle] = []
        self._forward: tuple[int, int] | None = None  # stage and micro-batch of the forward pass that runs
        self._backward = 0  # micro-batch of the backward pass that runs
        self._calls: dict[tuple[int, int], dict[str, int]] = {}  # of a forward pass: the modules, and when each ended
        self._ended_calls = 0
        self._seen: dict[int, ReferenceType[Tensor]] = {}
        self._weights: set[Tensor] = set()

    @contextmanager
    def running(self) -> Iterator["FiniteChecks"]:
        """Check the step that the block runs; compiled layers run as they are written."""
        deferred = self._engine.parallelism.deferred
        with ExitStack() as stack:
            stack.callback(self._remove)
            stack.enter_context(torch.compiler.set_stance("force_eager"))
            if deferred is not None:
                stack.enter_context(deferred.watching(self._deferred))
            self._register()
            yield self

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _register(self) -> None:
        engine = self._engine
        numbers = engine.parallelism.stages.held_by(engine.mesh.pp.index)
        for number, stage in zip(numbers, engine.stages, strict=True):
            self._register_begin(number, stage)
            for name, module in stage.named_modules():
                holds = name in stage.layer_names or isinstance(module, FSDPModule)
                if holds or next(module.parameters(recurse=False), None) is not None:
                    self._handles.append(module.register_forward_pre_hook(partial(self._before, number, stage, name)))
                if name:
                    self._handles.append(module.register_forward_hook(partial(self._after, number, name)))
            self._handles.append(stage.register_forward_hook(self._ended))

    def _register_begin(self, number: int, stage: Stage) -> None:
        """Note which micro-batch each forward pass is of."""
        runner = self._engine.runner
        if isinstance(runner, PipelineRunner):
            (scheduled,) = (each for each in runner.scheduled_stages if each.stage_index == number)

            def begins(_module: nn.Module, _args: Any, options: Mapping[str, Any]) -> None:
                self._begin(number, int(options["number"]))

            self._handles.append(scheduled.submod.register_forward_pre_hook(begins, with_kwargs=True))
        else:
            hook = lambda *_: self._begin(0, len(self._calls))  # noqa: E731
            self._handles.append(stage.register_forward_pre_hook(hook, prepend=True))

    def _begin(self, number: int, micro_batch: int) -> None:
        self._forward = number, micro_batch
        self._calls[number, micro_batch], self._ended_calls = {}, 0
        self._seen.clear()
        if not isinstance(self._engine.runner, PipelineRunner):
            self._backward = micro_batch

    def _ended(self, *_: Any) -> None:
        self._forward = None

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
        if self._forward is None or self._forward[0] != number:  # activations that are recomputed
            return
        micro_batch, place = self._forward[1], self._ended_calls
        self._calls[self._forward][name] = place
        self._ended_calls += 1
        for tensor in _floats(output):
            known = self._seen.get(id(tensor))
            if known is not None and known() is tensor:  # the output of a module inside
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
        while module and module not in calls:  # a weight that another module used
            module = module.rpartition(".")[0]
        self._check(gradient, (1, -number, -calls.get(module, 0), _WEIGHT), micro_batch, f"the gradient of {name}")

    def _deferred(self, leaf: Tensor) -> Callable[[Tensor], None]:
        """Check a weight gradient that the schedule computes later."""
        engine = self._engine
        weight = next(weight for weight in engine.model.weights if weight.leaf is leaf)
        numbers = engine.parallelism.stages.held_by(engine.mesh.pp.index)
        (number, *_) = (
            number
            for number, stage in zip(numbers, engine.stages, strict=True)
            if any(local(parameter) is leaf for parameter in stage.parameters())
        )
        return partial(self._weight_gradient, number, weight.name, self._backward)

    def _check(self, tensor: Tensor | None, order: tuple[int, int, int, int], micro_batch: int, place: str) -> None:
        if tensor is None:  # a gradient that is zero, or deferred
            return
        found = BadValue(order, micro_batch, place, "")
        if (self.first is None or found < self.first) and (value := bad_value(tensor)):
            self.first = found._replace(value=value)


@torch.no_grad()
def bad_value(tensor: Tensor) -> str:
    """`NaN` or `Inf` where a tensor has one, and an empty string where all of it is finite."""
    if bool(tensor.isfinite().all()):
        return ""
    return "NaN" if bool(tensor.isnan().any()) else "Inf"


def _floats(value: Any) -> Iterator[Tensor]:
    """The tensors of floats in what a module returns."""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _floats(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _floats(each)
