"""Parallelism of a model over a mesh: tensor, sequence, context, expert, data and pipeline, applied by `parallelize`.

The parallel layers named here also work in your own models. Names are imported at first use, since
`threefold.comm.layout` alone needs no torch, which takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from threefold.comm.axis import copy_to, gather_from, gather_shares, reduce_from, reduce_to_shares, scatter_to
    from threefold.comm.layout import Layout
    from threefold.comm.mesh import Axis, Mesh
    from threefold.parallel.context import sum_over_shares_
    from threefold.parallel.cross_entropy import ParallelCrossEntropy
    from threefold.parallel.pipeline.partition import (
        layers_by_rank,
        partition_by_class,
        partition_by_cost,
        partition_uniform,
        partition_uniform_chunks,
    )
    from threefold.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from threefold.random.dropout import Dropout, sample_keys
    from threefold.random.rng import RandomStreams

__all__ = [
    "Axis",
    "ColumnParallelLinear",
    "Dropout",
    "Layout",
    "Mesh",
    "ParallelCrossEntropy",
    "RandomStreams",
    "RowParallelLinear",
    "VocabParallelEmbedding",
    "copy_to",
    "gather_from",
    "gather_shares",
    "layers_by_rank",
    "partition_by_class",
    "partition_by_cost",
    "partition_uniform",
    "partition_uniform_chunks",
    "reduce_from",
    "reduce_to_shares",
    "sample_keys",
    "scatter_to",
    "sum_over_shares_",
]

_MODULES: Final = {
    name: module
    for module, names in {
        "comm.axis": "gather_from gather_shares reduce_to_shares scatter_to Axis",
        "comm.layout": "Layout",
        "comm.mesh": "Mesh",
        "compat.paddle": "Splitter",  # where it has moved to
        "parallel.cross_entropy": "ParallelCrossEntropy",
        "parallel.context": "sum_over_shares_",
        "parallel.pipeline.partition": "layers_by_rank partition_by_class partition_by_cost partition_uniform "
        "partition_uniform_chunks",
        "parallel.tensor": "ColumnParallelLinear RowParallelLinear VocabParallelEmbedding",
        "random.dropout": "Dropout sample_keys",
        "random.rng": "RandomStreams",
    }.items()
    for name in names.split()
}
"""Name → the module below `threefold` that defines it."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"threefold.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
