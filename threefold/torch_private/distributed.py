"""Private parts of torch that concern meshes, DTensor, FSDP and distributed checkpoints."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.planner import WriteItem
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_api
from torch.distributed.tensor import DTensor, debug, placement_types

from threefold.torch_private.tensors import NO_TORCH_FUNCTION

# ---- Meshes ---------------------------------------------------------------------------------------------------------


def unflatten_mesh(mesh: DeviceMesh, axis: str, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """The mesh with one axis made several.

    Why: hybrid sharding and expert parallelism cut `dp` in two without new groups for the other axes. A public method
    would replace it.
    """
    return mesh._unflatten(axis, sizes, names)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """The one-dimensional mesh of all ranks of a mesh.

    Why: `fully_shard` shards over one axis, and the replicas are those of `dp` and `cp` together. A public method would
    replace it.
    """
    return mesh._flatten(name)


def concatenate_meshes(meshes: Sequence[DeviceMesh]) -> DeviceMesh:
    """One mesh with the axes of several that come from one mesh.

    Why: a weight that tensor parallelism and ZeRO cut is a DTensor over both axes. A public function would replace it.
    """
    return DeviceMesh._concatenate(list(meshes))


def new_group_among(groups: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    """The process group of those ranks of `groups` that this rank is one of; no other is made.

    Collective over the world.

    Args:
        groups: without a rank in common, the same ones on every rank.

    Returns:
        None where this rank is in none of them, or alone in its own; else, as of `new_group`, in ascending order.

    Why: with `new_group` every rank makes every group; or, with `use_local_synchronization`, it names a group by how
    many it has made, which differs between ranks in one of the groups and ranks in none. `split_group` for CPU groups
    would replace it.
    """
    c10d = dist.distributed_c10d
    default = c10d._get_default_group()
    rank = default.rank()
    if default.bound_device_id is not None or hasattr(default, "new_group"):  # whose groups all ranks have to make
        made = [dist.new_group(list(ranks)) if len(ranks) > 1 else None for ranks in groups]
        return next((group for group, ranks in zip(made, groups, strict=True) if rank in ranks), None)
    name = c10d._process_group_name([], use_hashed_name=False)
    number, mine = next(((n, sorted(ranks)) for n, ranks in enumerate(groups) if rank in ranks), (0, []))
    if len(mine) < 2:
        return None
    backend, store = c10d._world.pg_map[default]
    timeout = c10d._get_default_timeout(dist.Backend(backend))
    index, own = mine.index(rank), type(name)(f"{name}/{number}")
    group, _ = c10d._new_process_group_helper(
        len(mine), index, mine, dist.Backend(backend), store, own, timeout=timeout
    )
    c10d._world.pg_group_ranks[group] = {of: place for place, of in enumerate(mine)}
    return group


def process_group_timeout(group: dist.ProcessGroup) -> float:
    """Seconds that collectives of a CPU group wait at most.

    Why: collectives through shared memory wait as long. A public accessor of the timeout would replace it.
    """
    seconds: float = group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
    return seconds


def copy_group_timeout(target: dist.ProcessGroup) -> None:
    """Have the collectives of a group wait as long at most as those of the default group, on each device.

    Why: torch makes the groups of a mesh with a timeout of its own, 10 or 30 minutes, whatever the default group has.
    A new group inheriting it would replace this.
    """
    source = dist.distributed_c10d._get_default_group()
    for device in target._device_types:
        if device in source._device_types:
            timeout = source._get_backend(device).options._timeout
            target._get_backend(device)._set_default_timeout(timeout)


Work = dist.Work
"""What a collective returns while it is under way. Why: torch names it in signatures and documents it, but not how to
subclass it, as a backend written in Python does. A note on such backends would replace this and the next."""

PythonGroup: Any = dist.ProcessGroup
"""Base class of a process group whose collectives are written in Python. Why: torch takes an instance of a subclass in
place of a backend, which only its tests do."""


def with_gloo(
    group: dist.ProcessGroup, store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """Give a group of such a class gloo for the CPU, where torch looks for its timeouts and the device of its objects;
    returns a group of torch's own class, with the same gloo.

    Why: a process group of Python has no backends, and `_register_backend` is how torch's own get theirs. Torch's own
    class has gloo's collectives under the names that torch calls them by. A documented way to write a backend in Python
    would replace it.
    """
    gloo = dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    gloo._set_sequence_number_for_group()
    of_torch = dist.ProcessGroup(store, rank, size)
    of_torch._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    for each in (group, of_torch):
        each._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    return of_torch


def nccl_records() -> bytes | None:
    """What NCCL's flight recorder knows, as its tools read it; None in a build of torch without NCCL.

    Why: the rank that does not answer is not the one whose watchdog writes it, and a run that is ended before NCCL's
    own timeout would have none. A public function would replace it.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return None if dump is None else bytes(dump())


def default_store() -> dist.Store:
    """The store over which the ranks of the default process group meet.

    Why: what the first call of `init_mesh` was told is kept there, for the process group's ranks and as long as it
    exists. A public accessor would replace it.
    """
    return dist.distributed_c10d._get_default_store()


FUNCTIONAL_COLLECTIVES: Any = torch.ops._c10d_functional
"""Collectives as operators that name their process group. Why: a captured graph can hold these. The documented
`torch.distributed.all_reduce` being traceable in place would replace it."""

# ---- DTensor --------------------------------------------------------------------------------------------------------

StridedPlacement = placement_types._StridedShard
"""The placement of an axis whose shards of a dim another axis has cut before. Why: tensor parallelism cuts rows, ZeRO
cuts what it leaves of them. A public name would replace it."""


def clear_dtensor_cache() -> None:
    """Forget which shardings DTensor has worked out.

    Why: its cache treats equal meshes as one, and returns destroyed process groups where a process makes several meshes
    in turn. A cache that a destroyed process group empties would replace it.
    """
    debug._clear_sharding_prop_cache()


def fresh_parameter(tensor: Tensor, requires_grad: bool = True) -> nn.Parameter:
    """`nn.Parameter(tensor, requires_grad)` of a tensor that nothing else refers to; a `DTensor` becomes the parameter
    itself.

    Why: `nn.Parameter` detaches a tensor of another class, which goes through the sharding rules of `DTensor`.
    `_is_param` is how it marks the copy. A `DTensor.from_local` that makes parameters would replace it.
    """
    if not isinstance(tensor, DTensor):
        return nn.Parameter(tensor, requires_grad)
    tensor.requires_grad_(requires_grad)._is_param = True
    return tensor  # type: ignore[return-value]


# ---- FSDP -----------------------------------------------------------------------------------------------------------

AllGather = _fsdp_api.AllGather
"""Base class of what `FSDPModule.set_custom_all_gather` takes. Why: the method is public and the class is not. A public
name would replace it."""

ReduceScatter = _fsdp_api.ReduceScatter
"""Base class of what `FSDPModule.set_custom_reduce_scatter` takes. Why, and what would replace it: as `AllGather`."""


def finish_backward(root: FSDPModule) -> None:
    """Do what FSDP does at the end of a backward pass: reduce-scatter what is not reduced yet, free gathered weights,
    wait.

    Why: the backward passes of a step, with ZeRO 1 or a pipeline, end only when all micro-batches have passed, and
    autograd's own callback comes after each. A public `finish_backward` would replace it.
    """
    root._get_fsdp_state()._root_post_backward_final_callback()


def unreduced_gradients(module: FSDPModule) -> list[Tensor]:
    """The whole gradients that a module has and that are not reduce-scattered yet, and the shards of those that are.

    Why: FSDP keeps gradients that it adds up over micro-batches beside the parameters, not as their `.grad`. A public
    accessor would replace it.
    """
    found: list[Tensor | None] = []
    for group in module._get_fsdp_state()._fsdp_param_groups:
        for each in group.fsdp_params:
            whole = getattr(each, "_unsharded_param", None)
            found += [each.unsharded_accumulated_grad, each.sharded_param.grad, None if whole is None else whole.grad]
    return [gradient for gradient in found if gradient is not None]


# ---- Distributed checkpoints ----------------------------------------------------------------------------------------


class PiecewiseTensor(Tensor):
    """A tensor that states which pieces of a global tensor it has, in the protocol of `torch.distributed.checkpoint`.

    Why: `dcp.save` and `dcp.load` call these methods of tensors that are neither DTensors nor ShardedTensors, and only
    name them in a private protocol (`_Checkpointable`). A public protocol would replace it.
    """

    __torch_function__ = NO_TORCH_FUNCTION

    def chunks(self) -> list[ChunkStorageMetadata]:
        """The pieces to load."""
        raise NotImplementedError

    def write_items(self, name: str) -> list[WriteItem]:
        """The pieces to save, of the tensor of this name."""
        raise NotImplementedError

    def piece(self, index: MetadataIndex) -> Tensor:
        """The piece at `index.offset`."""
        raise NotImplementedError

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return self.chunks()

    def __create_write_items__(self, name: str, tensor: Any) -> list[WriteItem]:
        return self.write_items(name)

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        return self.piece(index)
