"""The mesh and everything that is split over it; its layers also serve models of your own."""

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
