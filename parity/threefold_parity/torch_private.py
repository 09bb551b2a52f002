"""Private parts of PyTorch, each with the reason for its use; `tests/test_torch_private.py` tells when one changes."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


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


def persistent_buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's own buffers that are in its state dict, with their names.

    Why: `state_dict` runs the hooks that gather sharded weights. An argument of `named_buffers` would replace it.
    """
    for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
        if name not in module._non_persistent_buffers_set:
            yield name, buffer


def in_backward_pass() -> bool:
    """Return whether autograd is running a backward pass in this thread.

    Why: a recomputed forward pass is not one of the model's. A public `torch.autograd` function would replace it.
    """
    return int(torch._C._current_graph_task_id()) != -1
