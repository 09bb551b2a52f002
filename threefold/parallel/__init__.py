"""The mesh and everything that is split over it; its layers also serve models of your own.

What is named here is imported when it is first used: `threefold.parallel.layout` alone needs no torch, which takes
seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from threefold.parallel.collectives import (
        copy_to,
        gather_from,
        gather_shares,
        reduce_from,
        reduce_to_shares,
        scatter_to,
    )
    from threefold.parallel.functional import Splitter
    from threefold.parallel.layout import Layout
    from threefold.parallel.loss import ParallelCrossEntropy
    from threefold.parallel.mesh import Axis, Mesh
    from threefold.parallel.pipeline.partition import partition_by_class, partition_by_cost, partition_uniform
    from threefold.parallel.random import Dropout, sample_keys
    from threefold.parallel.sequence import sum_over_shares_
    from threefold.parallel.streams import RandomStreams
    from threefold.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

__all__ = [
    "Axis",
    "ColumnParallelLinear",
    "Dropout",
    "Layout",
    "Mesh",
    "ParallelCrossEntropy",
    "RandomStreams",
    "RowParallelLinear",
    "Splitter",
    "VocabParallelEmbedding",
    "copy_to",
    "gather_from",
    "gather_shares",
    "partition_by_class",
    "partition_by_cost",
    "partition_uniform",
    "reduce_from",
    "reduce_to_shares",
    "sample_keys",
    "scatter_to",
    "sum_over_shares_",
]

_MODULES: Final = {
    "copy_to": "collectives",
    "gather_from": "collectives",
    "gather_shares": "collectives",
    "reduce_from": "collectives",
    "reduce_to_shares": "collectives",
    "scatter_to": "collectives",
    "Splitter": "functional",
    "Layout": "layout",
    "ParallelCrossEntropy": "loss",
    "Axis": "mesh",
    "Mesh": "mesh",
    "partition_by_class": "pipeline.partition",
    "partition_by_cost": "pipeline.partition",
    "partition_uniform": "pipeline.partition",
    "Dropout": "random",
    "sample_keys": "random",
    "sum_over_shares_": "sequence",
    "RandomStreams": "streams",
    "ColumnParallelLinear": "tensor",
    "RowParallelLinear": "tensor",
    "VocabParallelEmbedding": "tensor",
}
"""The module of each name."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
