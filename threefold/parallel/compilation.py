"""Compiling the layers of a model, each kind once."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from threefold.parallel.pipeline.stage import Stage
from threefold.torch_private.compilation import keep_signals_from_compilers

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
