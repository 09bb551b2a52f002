"""Devices and process groups for tests that run on a GPU as on the CPU.

A test with the parameter `device` compares a device with the CPU. Its `cuda` cases have the mark `gpu` and are skipped
without a GPU; its `cpu` case compares the CPU with itself, which shows that the test works.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from threefold.constants import STAGED_GLOO
from threefold.cpu.staged import StagedGroup, register_backend
from threefold.torch_private.distributed import default_store

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))

NCCL = "cpu:gloo,cuda:nccl"
STAGED_ALL = "staged_all"


def device_of(name: str) -> torch.device:
    """Return a device; for `cuda` the first GPU, which all ranks of a test share."""
    return torch.device(name, 0) if name == "cuda" else torch.device(name)


class AllStaged(StagedGroup):
    """Staged group that copies CPU tensors as it does GPU tensors.

    Attributes:
        staged: number of tensors seen.
    """

    staged = 0

    def is_staged(self, tensor: Tensor) -> bool:
        self.staged += 1
        return True


def alone_on(device: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` on the only rank of a group, as a run on this device has it: over NCCL on a GPU."""
    return _in_group(NCCL, fn, *args) if device == "cuda" else fn(*args)


def staged_on(device: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` in a gloo group that copies through the CPU, even on the CPU."""
    if device == "cuda":
        register_backend()
        return _in_group(STAGED_GLOO, fn, *args)
    if STAGED_ALL not in dist.Backend.backend_list:
        dist.Backend.register_backend(STAGED_ALL, AllStaged, devices=["cpu"])

    def counted() -> Any:
        found, group = fn(*args), dist.group.WORLD
        assert isinstance(group, AllStaged)
        assert group.staged or group.size() == 1, "no collective went through a copy"
        return found

    return _in_group(STAGED_ALL, counted)


def _in_group(backend: str, fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn` in another process group of the pool's ranks, which replaces theirs."""
    store, rank, size = default_store(), dist.get_rank(), dist.get_world_size()
    if backend != STAGED_ALL:
        torch.cuda.set_device(0)
    dist.destroy_process_group()
    dist.init_process_group(backend, store=dist.PrefixStore(backend, store), rank=rank, world_size=size)
    return fn(*args)
