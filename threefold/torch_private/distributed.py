"""Private parts of torch for meshes, process groups, DTensor, FSDP and distributed checkpoints."""

import atexit
import glob
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import cache
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.tensor import DTensor, debug, placement_types
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def unflatten_mesh(mesh: DeviceMesh, axis: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Return the mesh with one axis split into several.

    Why: hybrid sharding and expert parallelism split `dp` without new groups. A public method would replace it.
    """
    return mesh._unflatten(axis, sizes, names)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Return the one-dimensional mesh of all ranks of a mesh.

    Why: `fully_shard` shards over one axis, here `dp` and `cp` together. A public method would replace it.
    """
    return mesh._flatten(name)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """Return one mesh with the axes of several submeshes of one mesh.

    Why: a weight that both tensor parallelism and ZeRO shard is a DTensor over both. A public function would replace
    it.
    """
    return DeviceMesh._concatenate(list(meshes))


def new_group_among(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """Create the process group of the ranks of `groups` that include this rank, and no other.

    The groups are disjoint, and equal on every rank; ranks are in ascending order as in `new_group`. Returns None if
    this rank is in no group, or alone. Collective over the world.

    Why: with `new_group`, every rank creates every group; with `use_local_synchronization`, it names a group by the
    number of groups it has created, which differs between ranks inside and outside the groups. `split_group` for CPU
    groups would replace it.
    """
    c10d = dist.distributed_c10d
    default = c10d._get_default_group()
    rank = default.rank()
    if default.bound_device_id is not None or hasattr(default, "new_group"):  # all ranks must create its groups
        made = [dist.new_group(list(ranks)) if len(ranks) > 1 else None for ranks in groups]
        return next((group for group, ranks in zip(made, groups, strict=True) if rank in ranks), None)
    name = c10d._process_group_name([], use_hashed_name=False)
    number, mine = next(((n, sorted(ranks)) for n, ranks in enumerate(groups) if rank in ranks), (0, []))
    if len(mine) < 2:
        return None
    backend, store = c10d._world.pg_map[default]
    timeout = c10d._get_default_timeout(dist.Backend(backend))
    index, group_name = mine.index(rank), type(name)(f"{name}/{number}")
    group, _ = c10d._new_process_group_helper(
        len(mine), index, mine, dist.Backend(backend), store, group_name, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {of: place for place, of in enumerate(mine)}
    return group


GLOO_THREAD: Final = "pt_gloo_runloop"
"""Name of the threads in which gloo runs collectives. Why, and what would replace it: as `settle_gloo_at_exit`."""
_LONGEST_SETTLING: Final = 2.0
"""Maximum time in seconds that the end of the process waits for these threads."""
_IDLE_LOOKS: Final = 3
"""Looks in a row, a millisecond apart, that find all these threads asleep."""


@cache
def settle_gloo_at_exit() -> None:
    """Let gloo's threads release the tensors of their last collectives before the interpreter ends.

    Why: such a thread needs the interpreter's lock to release a tensor. If the interpreter is ending, Python ends the
    thread within a C++ destructor, which aborts the process: "terminate called without an active exception". A
    `ProcessGroupGloo` that ends its threads before the interpreter would replace it.
    """
    atexit.register(settle_gloo)


def settle_gloo() -> None:
    """Sleep, so that the interpreter's lock is free, until gloo's threads of this process are asleep (on Linux)."""
    deadline, idle = time.monotonic() + _LONGEST_SETTLING, 0
    while idle < _IDLE_LOOKS and time.monotonic() < deadline:
        time.sleep(0.001)
        idle = 0 if _gloo_works() else idle + 1


def _gloo_works() -> bool:
    """Return whether a thread of gloo runs or waits for a processor; False if unknown."""
    for path in glob.iglob("/proc/self/task/*/stat"):
        with suppress(OSError), open(path) as file:  # the thread may have ended
            name, _, rest = file.read().partition(" (")[2].rpartition(") ")
            if name == GLOO_THREAD and rest[0] != "S":
                return True
    return False


def process_group_timeout(group: dist.ProcessGroup) -> float:
    """Return the timeout in seconds of a CPU group's collectives.

    Why: collectives in shared memory use the same timeout. A public accessor would replace it.
    """
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def copy_group_timeout(target: dist.ProcessGroup) -> None:
    """Give the collectives of a group the timeout of the default group, on each device.

    Why: torch creates the groups of a mesh with its own timeout, 10 or 30 minutes, and ignores that of the default
    group. New groups that inherit it would replace this.
    """
    source = dist.distributed_c10d._get_default_group()
    for device in target._device_types:
        if device in source._device_types:
            timeout = source._get_backend(device).options._timeout
            target._get_backend(device)._set_default_timeout(timeout)


Work = dist.Work
"""Handle of a collective in progress. Why: torch documents it as a type, but not how to subclass it, as a backend in
Python does. Documentation of such backends would replace this and the next."""

PythonGroup: Any = dist.ProcessGroup
"""Base class of process groups whose collectives are written in Python. Why: torch accepts an instance of a subclass
instead of a backend, but only its tests do so."""


def with_gloo(
    group: dist.ProcessGroup, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Give a `PythonGroup` gloo for the CPU, and return a group of torch's own class with the same gloo.

    Torch reads a group's timeouts, and the device of objects that it sends, from such a backend.

    Why: a process group in Python has no backends, and torch's own get theirs by `_register_backend`. Torch's own class
    has gloo's collectives under the names that torch calls. A documented way to write a backend in Python would replace
    it.
    """
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    of_torch = dist.ProcessGroup(store, rank, size)
    of_torch._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for each in (group, of_torch):
        each._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return of_torch


_SERVED: Final = (
    *("allgather_coalesced", "all_gather_single", "all_gather_single_coalesced", "allreduce_coalesced", "alltoall"),
    *("all_to_all_single", "barrier", "broadcast", "gather", "recv", "recv_anysource", "reduce", "reduce_scatter"),
    *("reduce_scatter_single", "reduce_scatter_single_coalesced", "scatter", "send"),
)


def stand_in(group: dist.ProcessGroup, gloo: dist.ProcessGroup) -> None:
    """Give a `PythonGroup` the ranks and the backend of a gloo group, which provides what the class does not define.

    Why, and what would replace it: as for `with_gloo`. Methods are gloo's own. Those that a class in Python inherits
    hold the interpreter's lock while they wait for a thread of gloo, which may need that lock to free a tensor.
    """
    for name in _SERVED:
        if name not in vars(type(group)):
            setattr(group, name, getattr(gloo, name))
    backend = gloo._get_backend(torch.device("cpu"))
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, backend)
    group._set_group_name(gloo.group_name)
    known = dist.distributed_c10d._world
    known.pg_group_ranks[group], known.pg_map[group] = known.pg_group_ranks[gloo], known.pg_map[gloo]
    known.pg_backend_config[group] = known.pg_backend_config[gloo]  # torch's profiler reads it


def withdraw(group: dist.ProcessGroup) -> None:
    """Undo what `stand_in` registered with torch for a group, so that torch no longer keeps the group alive.

    Why: torch's tables keep a group, and so the memory that its ranks share, until all groups are destroyed.
    `destroy_process_group` of one group would also shut down its gloo, which others use.
    """
    known = dist.distributed_c10d._world
    known.pg_map.pop(group, None)
    known.pg_group_ranks.pop(group, None)
    known.pg_backend_config.pop(group, None)


def _blocking(options: Any, operation: dist.ReduceOp.RedOpType | None = None) -> Any:
    options.asyncOp = False
    if operation is not None:
        options.reduceOp = operation
    return options


BLOCKING_SUM = _blocking(dist.distributed_c10d.AllreduceOptions(), dist.ReduceOp.SUM)
BLOCKING_MAX = _blocking(dist.distributed_c10d.AllreduceOptions(), dist.ReduceOp.MAX)
BLOCKING_GATHER = _blocking(dist.distributed_c10d.AllgatherOptions())
BLOCKING_SCATTER = _blocking(dist.distributed_c10d.ReduceScatterOptions(), dist.ReduceOp.SUM)
"""Options of a group's `allreduce`, `all_gather_single` and `reduce_scatter_single` that are done when they return.
Why: the methods of a group take them, and torch exports the classes of some. Public names would replace them."""


def nccl_records() -> bytes | None:
    """Return the records of NCCL's flight recorder, in the format of its tools; None if torch has no NCCL.

    Why: the rank that hangs is not the one whose watchdog writes them, and a run that is ended before NCCL's own
    timeout would have none. A public function would replace it.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return None if dump is None else bytes(dump())


def default_store() -> dist.Store:
    """Return the store through which the ranks of the default process group meet.

    Why: it keeps the arguments of the first `init_mesh`, as long as the group exists. A public accessor would replace
    it.
    """
    return dist.distributed_c10d._get_default_store()


StridedPlacement = placement_types._StridedShard
"""Placement of an axis that shards a dim which another axis has sharded before. Why: tensor parallelism shards rows,
and ZeRO shards the rest of them. A public name would replace it."""


def clear_dtensor_cache() -> None:
    """Clear DTensor's cache of sharding decisions.

    Why: the cache treats equal meshes as one, and returns destroyed process groups if a process creates several meshes
    in turn. A cache that is emptied with the process group would replace it.
    """
    debug._clear_sharding_prop_cache()


def local_box(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...], int, bool]:
    """Return where this rank's part of a DTensor begins, its size, the number of its copy, and whether it is partial.

    The part is one box. Copies are numbered along the axes that replicate the tensor; 0 is the first.

    Why: sizes and offsets of uneven shards, and of dims that two axes shard, are computed by a private function, which
    distributed checkpoints use. A public one would replace it.
    """
    size, start = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    copies = 0
    for axis, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            copies = copies * tensor.device_mesh.size(axis) + tensor.device_mesh.get_local_rank(axis)
    partial = any(placement.is_partial() for placement in tensor.placements)
    return tuple(start), tuple(size), copies, partial


_Kind = TypeVar("_Kind", bound=DTensor)


def shard_of(tensor: DTensor) -> Tensor:
    """Return the shard that a `DTensor` holds, itself.

    Why: `to_local` records autograd, or returns a new parameter. A `to_local` of detached tensors would replace it.
    """
    return tensor._local_tensor


def split_like(kind: type[_Kind], shard: Tensor, like: DTensor) -> _Kind:
    """Wrap a shard as a tensor of a class of DTensors, with the whole shape and the placement of `like`.

    Why: `from_local` makes a `DTensor` only, and records autograd. A `from_local` of subclasses would replace it.
    """
    held = like._spec
    assert held.tensor_meta is not None  # which only specifications of operators lack
    meta = held.tensor_meta._replace(dtype=shard.dtype)
    shard = shard.detach() if shard.requires_grad else shard  # the gradient of a gradient is
    return kind(shard, type(held)(held.mesh, held.placements, tensor_meta=meta), requires_grad=False)


def fresh_parameter(tensor: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """Return `nn.Parameter(tensor, requires_grad)`; a `DTensor` becomes the parameter itself.

    Nothing else may refer to the tensor.

    Why: `nn.Parameter` detaches a tensor of another class, which goes through the sharding rules of `DTensor`;
    `_is_param` is how it marks the copy. A `DTensor.from_local` that creates parameters would replace it.
    """
    if not isinstance(tensor, DTensor):
        return nn.Parameter(tensor, requires_grad)
    tensor.requires_grad_(requires_grad)._is_param = True
    return tensor  # type: ignore[return-value]


AllGather = _fsdp_api.AllGather
"""Base class for `FSDPModule.set_custom_all_gather`. Why: the method is public and the class is not. A public name
would replace it."""

ReduceScatter = _fsdp_api.ReduceScatter
"""Base class for `FSDPModule.set_custom_reduce_scatter`. Why, and what would replace it: as for `AllGather`."""


def finish_backward(root: FSDPModule) -> None:
    """Run FSDP's end of a backward pass: reduce-scatter remaining gradients, free gathered weights, wait.

    Why: with ZeRO 1 or a pipeline, the backward passes of a step end only after all micro-batches, and autograd's own
    callback comes after each. A public `finish_backward` would replace it.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


def unreduced_gradients(module: FSDPModule) -> list[Tensor]:
    """Return a module's unsharded gradients before their reduce-scatter, and the shards of those after it.

    Why: FSDP keeps accumulated gradients next to the parameters, not as `.grad`. A public accessor would replace it.
    """
    found: list[Tensor | None] = []
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for each in group.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            found += [each.unsharded_accumulated_grad, each.sharded_param.grad, None if whole is None else whole.grad]
    return [gradient for gradient in found if gradient is not None]


def share_contents(module: nn.Module, other: nn.Module) -> None:
    """Give a module the parameters, buffers and submodules of another under their names, including those set later.

    Why: a wrapper for activation checkpointing must not change parameter names. A transparent one of torch's would
    replace it.
    """
    module.__dict__.update(_parameters=other._parameters, _buffers=other._buffers, _modules=other._modules)
    module.__dict__.update(_non_persistent_buffers_set=other._non_persistent_buffers_set)


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own buffers that are in its state dict, with their names.

    Why: `state_dict` runs the hooks that gather sharded weights. An argument of `named_buffers` would replace it.
    """
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


NO_TORCH_FUNCTION: Any = torch._C._disabled_torch_function_impl
"""Value for a class's `__torch_function__` with which operations on the subclass return plain tensors. Why: the
documentation of subclasses says to use it. A public name would replace it."""


class ChunkedTensor(Tensor):
    """Tensor that declares its chunks of a global tensor, in the protocol of `torch.distributed.checkpoint`.

    Why: `dcp.save` and `dcp.load` call these methods of tensors that are neither DTensors nor ShardedTensors, but only
    a private protocol (`_Checkpointable`) names them. A public protocol would replace it.
    """

    __torch_function__ = NO_TORCH_FUNCTION

    def chunks(self) -> list[ChunkStorageMetadata]:
        """Return the chunks to load."""
        raise NotImplementedError

    def write_items(self, name: str) -> list[WriteItem]:
        """Return the chunks to save, of the tensor with this name."""
        raise NotImplementedError

    def chunk_at(self, index: MetadataIndex) -> Tensor:
        """Return the chunk at `index.offset`."""
        raise NotImplementedError

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks()

    def __create_write_items__(self, name: str, tensor: Any) -> list[WriteItem]:
        return self.write_items(name)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.chunk_at(index)
