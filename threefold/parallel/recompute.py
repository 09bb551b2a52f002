"""Activation recompute: what a module's backward pass needs is computed again instead of kept.

Chen et al., "Training deep nets with sublinear memory cost" (arXiv 1604.06174); `selective` is Korthikanti et al.,
"Reducing activation recomputation in large transformer models" (arXiv 2205.05198), section 5. The replay draws the same
dropout masks, because those are keyed and not drawn from a generator's state, so the gradients keep every bit.

Collectives inside a module are replayed too. Torch ends a replay at the last tensor that the backward pass asks for;
all ranks of a group run the same operations and so end at the same one.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from threefold.models.name_pattern import matches
from threefold.parallel.pipeline.stage import Stage
from threefold.random.rng import streams_of


def recompute_(stages: Sequence[Stage], mode: str, every: int = 1) -> None:
    """Have modules of these stages keep their inputs alone, in place; names and weights stay as they are.

    Args:
        stages: a rank's, split already.
        mode: a key of the plan's `recompute`, or `none`.
        every: of the model's layers that have such modules, every so many-th (from the first) is treated. They are
            counted over the whole model, so the choice does not depend on the stages.
    """
    if mode == "none":
        return
    for stage in stages:
        chosen = set(chosen_layers(stage.model_plan.layers, stage.model_plan.recompute, mode, every))
        for layer in chosen.intersection(stage.layer_names):
            for name in _matching(_names_below(stage, layer), stage.model_plan.recompute[mode]):
                _keep_inputs_alone(stage.get_submodule(name))


def chosen_layers(layers: Sequence[str], patterns: Mapping[str, Sequence[str]], mode: str, every: int = 1) -> list[str]:
    """The layers of a model in which `mode` recomputes something.

    Args:
        layers: of the whole model, in order.
        patterns: mode → the modules that it recomputes, as in `ModelPlan`.
        mode, every: as `recompute_` takes them.
    """
    if mode == "none":
        return []
    return [layer for layer in layers if any(_lies_in(pattern, layer) for pattern in patterns[mode])][::every]


def _lies_in(pattern: str, layer: str) -> bool:
    depth = layer.count(".") + 1
    return matches(layer, ".".join(pattern.split(".")[:depth]))


def _names_below(stage: Stage, layer: str) -> Iterator[str]:
    for name, _ in stage.get_submodule(layer).named_modules():
        yield f"{layer}.{name}" if name else layer


def _matching(names: Iterator[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(matches(name, pattern) for pattern in patterns)]


def _keep_inputs_alone(module: nn.Module) -> None:
    """Wrap `forward` of this one object: what hooks its call (sharded weights) stays outside the replay."""
    module.forward = _replayed(module.forward, module)


def _replayed(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        streams = streams_of(module)
        contexts = streams.replays if streams else noop_context_fn
        replayed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
        return replayed(forward, *args, **kwargs)

    return run
