"""Horovod's calls for PyTorch scripts, of which only the import changes: `import threefold.compat.horovod as hvd`.

The ranks are those of `torchrun`, of Slurm's `srun`, of `threefold.run`, or of an existing process group.
"""

from typing import Any, Final

from threefold.compat.horovod.collectives import Adasum as Adasum
from threefold.compat.horovod.collectives import Average as Average
from threefold.compat.horovod.collectives import Compression as Compression
from threefold.compat.horovod.collectives import Compressor as Compressor
from threefold.compat.horovod.collectives import Max as Max
from threefold.compat.horovod.collectives import Min as Min
from threefold.compat.horovod.collectives import PendingResult as PendingResult
from threefold.compat.horovod.collectives import Product as Product
from threefold.compat.horovod.collectives import ReduceOperation as ReduceOperation
from threefold.compat.horovod.collectives import Sum as Sum
from threefold.compat.horovod.collectives import allgather as allgather
from threefold.compat.horovod.collectives import allgather_async as allgather_async
from threefold.compat.horovod.collectives import allgather_object as allgather_object
from threefold.compat.horovod.collectives import allreduce as allreduce
from threefold.compat.horovod.collectives import allreduce_ as allreduce_
from threefold.compat.horovod.collectives import allreduce_async as allreduce_async
from threefold.compat.horovod.collectives import allreduce_async_ as allreduce_async_
from threefold.compat.horovod.collectives import barrier as barrier
from threefold.compat.horovod.collectives import broadcast as broadcast
from threefold.compat.horovod.collectives import broadcast_ as broadcast_
from threefold.compat.horovod.collectives import broadcast_async as broadcast_async
from threefold.compat.horovod.collectives import broadcast_async_ as broadcast_async_
from threefold.compat.horovod.collectives import broadcast_object as broadcast_object
from threefold.compat.horovod.collectives import grouped_allreduce as grouped_allreduce
from threefold.compat.horovod.collectives import grouped_allreduce_ as grouped_allreduce_
from threefold.compat.horovod.collectives import poll as poll
from threefold.compat.horovod.collectives import synchronize as synchronize
from threefold.compat.horovod.optimizer import DistributedOptimizer as DistributedOptimizer
from threefold.compat.horovod.optimizer import broadcast_optimizer_state as broadcast_optimizer_state
from threefold.compat.horovod.optimizer import broadcast_parameters as broadcast_parameters
from threefold.compat.horovod.ranks import gloo_built as gloo_built
from threefold.compat.horovod.ranks import init as init
from threefold.compat.horovod.ranks import is_initialized as is_initialized
from threefold.compat.horovod.ranks import join as join
from threefold.compat.horovod.ranks import local_rank as local_rank
from threefold.compat.horovod.ranks import local_size as local_size
from threefold.compat.horovod.ranks import mpi_built as mpi_built
from threefold.compat.horovod.ranks import nccl_built as nccl_built
from threefold.compat.horovod.ranks import rank as rank
from threefold.compat.horovod.ranks import shutdown as shutdown
from threefold.compat.horovod.ranks import size as size

__all__ = [name for name, value in vars().items() if getattr(value, "__module__", "").startswith(__name__)]

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
