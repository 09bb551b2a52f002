"""Activation checkpointing (recompute): the backward pass computes a module's activations again.

Chen et al., arXiv 1604.06174; `selective` is Korthikanti et al., arXiv 2205.05198, section 5. Recomputation draws the
same dropout masks, since they are keyed, so gradients keep every bit. Collectives inside a module are repeated too.
Torch ends a recomputation at the last tensor that the backward pass needs, which is the same on all ranks of a group.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from threefold.errors import UserError
from threefold.models.sharding import matches
from threefold.ops.arithmetic import PLAIN_PASS, PassContext
from threefold.parallel.parameter import set_in
from threefold.parallel.pipeline.partition import chosen_layers
from threefold.parallel.pipeline.stage import Stage
from threefold.random.rng import RandomStreams, draws_in_sequence
from threefold.torch_private.distributed import share_contents
from threefold.torch_private.runtime import keep_signals_from_compilers


class Recomputed(nn.Module):
    """Wrapper of a module whose activations the backward pass computes again (activation checkpointing).

    It has the module's own parameters, buffers and submodules under the same names, so names in checkpoints do not
    change; other attributes are read from the module. Hooks on this wrapper's call (sharded weights) are outside the
    recomputation, which `passes` surrounds like a forward pass. `streams` are the random streams
    that modules inside draw from, if any does.
    """

    wrapped: nn.Module
    compiled: Callable[..., Any] | None

    def __init__(
        self,
        module: nn.Module,
        streams: RandomStreams | None = None,
        passes: PassContext = PLAIN_PASS,
    ) -> None:
        super().__init__()
        self.training = module.training
        self.__dict__["wrapped"] = module  # not among the submodules: those are the module's own
        self.__dict__["compiled"] = None
        share_contents(self, module)
        self._replays = noop_context_fn if streams is None else streams.replays
        self._passes = passes

    # Not compiled inside a compiled layer, though what is around it is: torch 2.13 fails if compiled code has a
    # recomputed part beside another one with operators that take a `Handle`.
    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        forward = self.compiled or self.wrapped.forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=self._context)
        return recomputed(forward, *args, **kwargs)

    def _context(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        forward, again = self._replays()
        return forward, _both(self._passes(), again)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the module inside the recomputation: the backward pass runs the compiled code again."""
        self.__dict__["compiled"] = torch.compile(self.wrapped.forward, *args, **kwargs)

    def train(self, mode: bool = True) -> "Recomputed":
        """Set the training mode of the wrapper and the module."""
        self.wrapped.train(mode)
        super().train(mode)
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["wrapped"], name)

    def __getitem__(self, key: Any) -> Any:
        return self.wrapped[key]  # type: ignore[index]

    def extra_repr(self) -> str:
        return type(self.wrapped).__name__


@contextmanager
def _both(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    with outer, inner:
        yield


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the module that a `Recomputed` wraps, or the module itself."""
    return module.wrapped if isinstance(module, Recomputed) else module


def apply_recompute(
    stages: Sequence[Stage],
    mode: str,
    every: int = 1,
    streams: RandomStreams | None = None,
    passes: PassContext = PLAIN_PASS,
) -> None:
    """Wrap each module whose activations are computed again in a `Recomputed`; `mode` is one of the plan, or `none`.

    It treats every n-th layer (`every`) that has such modules, from the first; counted over the whole model, so that
    the choice does not depend on the stages. Raises a `UserError` if the plan has no such mode.
    """
    if mode == "none":
        return
    if mode not in stages[0].model_plan.recompute:
        modes = ["none", *stages[0].model_plan.recompute]
        raise UserError(f"recompute is {mode} but the model's plan has no such mode; use {' or '.join(modes)}.")
    made: dict[nn.Module, Recomputed] = {}  # a module with several places is wrapped once
    for stage in stages:
        plan = stage.model_plan
        chosen = set(chosen_layers(plan.layers, plan.recompute, mode, every))
        for layer in chosen.intersection(stage.layer_names):
            for inner, module in list(stage.get_submodule(layer).named_modules(remove_duplicate=False)):
                name = f"{layer}.{inner}" if inner else layer
                if not any(matches(name, pattern) for pattern in plan.recompute[mode]):
                    continue
                if type(module).forward is nn.Module.forward:  # a container computes nothing
                    continue
                if isinstance(module, Recomputed):  # in a parent that another layer has too
                    continue
                if module not in made:
                    draws = any(draws_in_sequence(child) for child in module.modules())
                    made[module] = Recomputed(module, streams if draws else None, passes)
                set_in(stage, name, made[module])


def compile_layers(stages: Sequence[Stage], defers: bool = False, fp8: bool = False) -> None:
    """Compile each layer except the model's first at its first use; equal layers share the code.

    The first is a look-up, which compiling does not speed up; and on a CPU, torch 2.13 compiles a look-up followed by a
    keyed mask into code that reads and writes out of bounds. With `defers`, weight gradients are computed later, so
    that their inputs must not be overwritten until then. With `fp8`, layers multiply in float8.
    """
    # Torch's caches belong to code, which all layers of a class and all engines of a process share: what an earlier
    # engine compiled would count towards the limit.
    torch.compiler.reset()
    keep_signals_from_compilers()
    first = stages[0].model_plan.layers[0]
    layers = [stage.get_submodule(name) for stage in stages for name in stage.layer_names if name != first]
    options = {"reorder_for_peak_memory": False}
    if defers:  # no reuse of memory, since operators keep their arguments
        options |= {"allow_buffer_reuse": False, "inplace_buffers": False}
    if fp8:  # For a bias's gradient next to each row's maximum, torch 2.13 writes code that reads a buffer too early.
        options["triton.mix_order_reduction"] = False
    for layer in layers:
        layer.compile(recompile_limit=8 * len(layers), options=options)


def as_written(compiled: bool) -> AbstractContextManager[object]:
    """Run layers uncompiled in a block: other shapes, or no gradients, would each need another compilation."""
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
