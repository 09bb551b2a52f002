"""Gloo process groups whose collectives also take GPU tensors, through the CPU: a backend of `torch.distributed`."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.constants import STAGED_GLOO
from threefold.torch_private.distributed import PythonGroup, Work, with_gloo


class _StagedWork(Work):
    """Collective in progress; waiting for it copies its results, (tensor, copy) pairs, to their tensors.

    It keeps `reads`, the copies that the collective reads, alive until it is done.
    """

    def __init__(self, work: Work, results: Sequence[tuple[Tensor, Tensor]], reads: Sequence[Tensor]) -> None:
        super().__init__()
        self._work, self._results, self._reads = work, list(results), list(reads)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait(timeout)
        for tensor, copy in self._results:
            tensor.detach().copy_(copy)
        self._results.clear()
        self._reads.clear()
        return True

    def is_completed(self) -> bool:
        return self._work.is_completed()

    def get_future(self) -> "torch.futures.Future[Any]":
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(None)
        return future


def _staged(name: str, *roles: str) -> Callable[..., Work]:
    """Make the collective of torch's name that copies its first arguments, tensors in lists, through the CPU.

    The role of each of them is `in` (it is read), `out` (it is written) or `both`; the others go to gloo as they are.
    """

    def collective(group: "StagedGroup", *args: Any) -> Work:
        results: list[tuple[Tensor, Tensor]] = []
        reads: list[Tensor] = []

        def stage(value: Any, role: str) -> Any:
            if isinstance(value, list):
                return [stage(each, role) for each in value]
            copy = value
            if group.is_staged(value):
                copy = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                if role != "out":
                    copy.copy_(value.detach())
                if role != "in":
                    results.append((value, copy))
            if role == "in":
                reads.append(copy)
            return copy

        copies = [stage(value, role) for value, role in zip(args, roles, strict=False)]
        return _StagedWork(getattr(group.gloo, name)(*copies, *args[len(roles) :]), results, reads)

    return collective


class StagedGroup(PythonGroup):
    """Gloo process group whose collectives also take GPU tensors; its arguments are those of a backend's constructor.

    For debugging: NCCL refuses several ranks on one GPU, and gloo sends, receives and scatters CPU tensors only. Each
    collective copies its inputs to the CPU, runs gloo, and copies the results back. Layers, streams and schedules are
    those of a run over NCCL, and sums are those of a run on the CPU.

    It implements, under torch's names, the collectives called by this package and by the parts of torch that it uses.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo: Any = with_gloo(self, store, rank, size, timeout)

    def is_staged(self, tensor: Tensor) -> bool:
        return tensor.device.type != "cpu"

    def getBackendName(self) -> str:
        return STAGED_GLOO

    broadcast = _staged("broadcast", "both")
    allreduce = _staged("allreduce", "both")
    allreduce_coalesced = _staged("allreduce_coalesced", "both")
    reduce = _staged("reduce", "both")
    allgather = _staged("allgather", "out", "in")
    all_gather_single = _staged("all_gather_single", "out", "in")
    reduce_scatter = _staged("reduce_scatter", "out", "in")
    reduce_scatter_single = _staged("reduce_scatter_single", "out", "in")
    all_to_all_single = _staged("all_to_all_single", "out", "in")
    gather = _staged("gather", "out", "in")
    scatter = _staged("scatter", "out", "in")
    send = _staged("send", "in")
    recv = _staged("recv", "out")

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        return self._in_turn([self.all_gather_single(*each, opts) for each in zip(outputs, inputs, strict=True)])

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        return self._in_turn([self.reduce_scatter_single(*each, opts) for each in zip(outputs, inputs, strict=True)])

    def barrier(self, opts: Any) -> Work:
        return self.gloo.barrier(opts)

    def _in_turn(self, works: Sequence[Work]) -> Work:
        for work in works[:-1]:
            work.wait()
        return works[-1]


def register_backend() -> str:
    """Register `STAGED_GLOO` with torch, unless it is registered, and return its name."""
    if STAGED_GLOO not in dist.Backend.backend_list:
        dist.Backend.register_backend(STAGED_GLOO, StagedGroup, devices=["cpu", "cuda"])
    return STAGED_GLOO
