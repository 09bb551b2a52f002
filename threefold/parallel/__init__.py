"""Parallelism of a model over a mesh: tensor, sequence, context, expert, data and pipeline, applied by `parallelize`.

The parallel layers named here also work in your own models. Names are imported at first use, since modules such as
`threefold.parallel.pipeline.partition` need no torch, which takes seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from threefold.comm.differentiable import copy_to as copy_to
    from threefold.comm.differentiable import gather_from as gather_from
    from threefold.comm.differentiable import gather_shares as gather_shares
    from threefold.comm.differentiable import reduce_from as reduce_from
    from threefold.comm.differentiable import reduce_to_shares as reduce_to_shares
    from threefold.comm.differentiable import scatter_to as scatter_to
    from threefold.comm.layout import Layout as Layout
    from threefold.comm.mesh import Axis as Axis
    from threefold.comm.mesh import Mesh as Mesh
    from threefold.parallel.context import sum_over_shares_ as sum_over_shares_
    from threefold.parallel.cross_entropy import ParallelCrossEntropy as ParallelCrossEntropy
    from threefold.parallel.pipeline.partition import layers_by_rank as layers_by_rank
    from threefold.parallel.pipeline.partition import partition_by_class as partition_by_class
    from threefold.parallel.pipeline.partition import partition_by_cost as partition_by_cost
    from threefold.parallel.pipeline.partition import partition_uniform as partition_uniform
    from threefold.parallel.pipeline.partition import partition_uniform_chunks as partition_uniform_chunks
    from threefold.parallel.tensor import ColumnParallelLinear as ColumnParallelLinear
    from threefold.parallel.tensor import RowParallelLinear as RowParallelLinear
    from threefold.parallel.tensor import VocabParallelEmbedding as VocabParallelEmbedding
    from threefold.random.dropout import Dropout as Dropout
    from threefold.random.dropout import sample_keys as sample_keys
    from threefold.random.rng import RandomStreams as RandomStreams

_MODULES: Final = {
    name: module
    for module, names in {
        "comm.axis": "Axis",
        "comm.differentiable": "copy_to gather_from gather_shares reduce_from reduce_to_shares scatter_to",
        "comm.layout": "Layout",
        "comm.mesh": "Mesh",
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
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"threefold.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
