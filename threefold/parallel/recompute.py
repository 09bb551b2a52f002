"""Activation checkpointing (recompute): a module's activations are computed again in the backward pass instead of kept.

Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174); `selective` is Korthikanti et al.,
"Reducing activation recomputation in large transformer models" (arXiv 2205.05198), section 5. The recomputation draws
the same dropout masks, because those are keyed and not drawn from a generator's state, so the gradients keep every bit.

Collectives inside a module are repeated too. Torch ends a recomputation at the last tensor that the backward pass
needs; all ranks of a group run the same operations and so end at the same one.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from threefold.errors import UserError
from threefold.models.sharding import matches
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.shard_shapes import chosen_layers
from threefold.random.rng import RandomStreams, draws_in_sequence
from threefold.torch_private.compilation import keep_signals_from_compilers
from threefold.torch_private.tensors import share_contents


class Recomputed(nn.Module):
    """Wraps a module whose activations the backward pass computes again (activation checkpointing).

    It has the module's own parameters, buffers and submodules, under the same names, so names in checkpoints stay as
    they are; other attributes are read from the module. Hooks on this module's call (sharded weights) are outside the
    recomputation.

    Args:
        module: whose `forward` is checkpointed.
        streams: the random streams of modules inside, if any draws from them.
    """

    wrapped: nn.Module
    compiled: Callable[..., Any] | None

    def __init__(self, module: nn.Module, streams: RandomStreams | None = None) -> None:
        super().__init__()
        self.training = module.training
        self.__dict__["wrapped"] = module  # not among the submodules: those are the module's own
        self.__dict__["compiled"] = None
        share_contents(self, module)
        self._context = noop_context_fn if streams is None else streams.replays

    # In a layer that is compiled: what is around it is compiled, and what is computed again is not. (torch 2.13 fails
    # where a part that is computed again in compiled code is beside another one with operators that take a `Handle`.)
    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the module."""
        forward = self.compiled or self.wrapped.forward
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=self._context)
        return recomputed(forward, *args, **kwargs)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """As `nn.Module.compile`, inside the recomputation: the backward pass runs the compiled code again."""
        self.__dict__["compiled"] = torch.compile(self.wrapped.forward, *args, **kwargs)

    def train(self, mode: bool = True) -> "Recomputed":
        """As `nn.Module.train`, for the module too."""
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


def unwrapped(module: nn.Module) -> nn.Module:
    """The module itself, or the one that a `Recomputed` wraps."""
    return module.wrapped if isinstance(module, Recomputed) else module


def apply_recompute(stages: Sequence[Stage], mode: str, every: int = 1, streams: RandomStreams | None = None) -> None:
    """Wrap each module whose activations are to be computed again in a `Recomputed`.

    Args:
        stages: a rank's, with their parallel layers.
        mode: a key of the plan's `recompute`, or `none`.
        every: of the model's layers that have such modules, every so many-th (from the first) is treated. They are
            counted over the whole model, so the choice does not depend on the stages.
        streams: the random streams of modules that draw in sequence.

    Raises:
        UserError: the plan has no such mode.
    """
    if mode == "none":
        return
    if mode not in stages[0].model_plan.recompute:
        modes = ["none", *stages[0].model_plan.recompute]
        raise UserError(f"recompute is {mode} but the model's plan has no such mode; use {' or '.join(modes)}.")
    made: dict[nn.Module, Recomputed] = {}  # a module that appears in several places is one
    for stage in stages:
        plan = stage.model_plan
        chosen = set(chosen_layers(plan.layers, plan.recompute, mode, every))
        for layer in chosen.intersection(stage.layer_names):
            for name, module in _matching(stage, layer, plan.recompute[mode]):
                if isinstance(module, Recomputed):  # in a parent that another layer has too
                    continue
                if module not in made:
                    draws = any(draws_in_sequence(child) for child in module.modules())
                    made[module] = Recomputed(module, streams if draws else None)
                parent, _, attribute = name.rpartition(".")
                stage.get_submodule(parent).register_module(attribute, made[module])


def _matching(stage: Stage, layer: str, patterns: Sequence[str]) -> list[tuple[str, nn.Module]]:
    """The modules of a layer, itself included, whose names match a pattern; containers compute nothing."""
    found = []
    for inner, module in stage.get_submodule(layer).named_modules(remove_duplicate=False):
        name = f"{layer}.{inner}" if inner else layer
        if type(module).forward is not nn.Module.forward and any(matches(name, pattern) for pattern in patterns):
            found.append((name, module))
    return found


_IN_PLACE = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Compiled code that writes into no memory twice, for operators that keep their arguments."""


def compile_layers(stages: Sequence[Stage], defers: bool = False) -> None:
    """Have each layer but the model's first compiled at its first use; layers that are alike share what is compiled.

    The first is a look-up, which compiling does not speed up; and torch 2.13 on a CPU compiles a look-up with a keyed
    mask after it into code that reads and writes out of bounds.

    Args:
        stages: a rank's.
        defers: whether weight gradients are deferred, until when what they are computed of must stay as it is.
    """
    # Torch's caches belong to code, which all layers of a class and all engines of a process have in common: what an
    # earlier engine compiled would count towards the limit.
    torch.compiler.reset()
    keep_signals_from_compilers()
    first = stages[0].model_plan.layers[0]
    layers = [stage.get_submodule(name) for stage in stages for name in stage.layer_names if name != first]
    options = {"reorder_for_peak_memory": False} | (_IN_PLACE if defers else {})
    for layer in layers:
        layer.compile(recompile_limit=8 * len(layers), options=options)


def as_written(compiled: bool) -> AbstractContextManager[object]:
    """Have layers run as they are written in a block, where they are compiled at all.

    For passes of other shapes or without gradients, each of which would be a compilation of its own.
    """
    return torch.compiler.set_stance("force_eager") if compiled else nullcontext()
