"""Horovod's calls for PyTorch scripts, of which only the import changes: `import threefold.compat.horovod as hvd`.

The ranks are those of `torchrun`, of Slurm's `srun`, of `threefold.run`, or of an existing process group.
"""

from typing import Any, Final

from threefold.compat.horovod.collectives import (
    Adasum,
    Average,
    Compression,
    Compressor,
    Max,
    Min,
    PendingResult,
    Product,
    ReduceOperation,
    Sum,
    allgather,
    allgather_async,
    allgather_object,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    broadcast_object,
    grouped_allreduce,
    grouped_allreduce_,
    poll,
    synchronize,
)
from threefold.compat.horovod.optimizer import (
    DistributedOptimizer,
    broadcast_optimizer_state,
    broadcast_parameters,
)
from threefold.compat.horovod.ranks import (
    gloo_built,
    init,
    is_initialized,
    join,
    local_rank,
    local_size,
    mpi_built,
    nccl_built,
    rank,
    shutdown,
    size,
)

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "Compressor",
    "DistributedOptimizer",
    "Max",
    "Min",
    "PendingResult",
    "Product",
    "ReduceOperation",
    "Sum",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "gloo_built",
    "grouped_allreduce",
    "grouped_allreduce_",
    "init",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "nccl_built",
    "poll",
    "rank",
    "shutdown",
    "size",
    "synchronize",
]

_INSTEAD: Final = {
    "ProcessSet": "threefold.init_mesh, whose axes are groups of ranks",
    "SyncBatchNorm": "torch.nn.BatchNorm1d with threefold.prepare, which computes statistics of the global batch",
    "add_process_set": "threefold.init_mesh, whose axes are groups of ranks",
    "alltoall": "all_to_all of an axis of threefold.init_mesh()",
    "cross_rank": "rank() // local_size()",
    "cross_size": "size() // local_size()",
    "elastic": "torchrun --max-restarts, or threefold train with train.max_restarts",
    "global_process_set": "no process_set, which means all ranks",
    "reducescatter": "reduce_scatter of an axis of threefold.init_mesh()",
    "sparse_allreduce_async": "DistributedOptimizer, which sums sparse gradients too",
    "start_timeline": "torch.profiler",
    "stop_timeline": "torch.profiler",
}
"""Name of Horovod that has no counterpart here → what to use."""


def __getattr__(name: str) -> Any:
    if name in _INSTEAD:
        raise AttributeError(f"Horovod's {name} has no counterpart here; use {_INSTEAD[name]}.")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
