"""Gloo for GPU tensors, with every collective staged through copies on the CPU.

For debugging. NCCL refuses several ranks on one GPU, and gloo sends, receives and scatters CPU tensors only. Each
collective here copies its inputs to the CPU, runs gloo, and copies the results back. Layers, streams and schedules are
those of a run over NCCL, and sums are those of a run on the CPU.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.torch_private.distributed import PythonGroup, Work, with_gloo

BACKEND: Final = "staged_gloo"
"""Name of the backend, for `torch.distributed.init_process_group`."""

_Pair = tuple[Tensor, Tensor]


class _StagedWork(Work):
    """Collective in progress; waiting for it copies its results, (tensor, copy) pairs, to their tensors.

    It keeps `reads`, the copies that the collective reads, alive until it is done.
    """

    def __init__(self, work: Work, results: Sequence[_Pair], reads: Sequence[Tensor]) -> None:
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


class StagedGroup(PythonGroup):
    """Gloo process group whose collectives also take GPU tensors; its arguments are those of a backend's constructor.

    It has the collectives that this package, and the parts of torch that it uses, call, under torch's names.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo: Any = with_gloo(self, store, rank, size, timeout)

    def is_staged(self, tensor: Tensor) -> bool:
        return tensor.device.type != "cpu"

    def getBackendName(self) -> str:
        return BACKEND

    # -- collectives, each with the arguments of torch's method of that name ----------------------------------------

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        copies, pairs = self._both(tensors)
        return self._work(self.gloo.broadcast(copies, opts), pairs)

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        copies, pairs = self._both(tensors)
        return self._work(self.gloo.allreduce(copies, opts), pairs)

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any) -> Work:
        copies, pairs = self._both(tensors)
        return self._work(self.gloo.allreduce_coalesced(copies, opts), pairs)

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        copies, pairs = self._both(tensors)
        return self._work(self.gloo.reduce(copies, opts), pairs)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        written, reads = [self._empty(each) for each in outputs], self._filled(inputs)
        results = [pair for _, pairs in written for pair in pairs]
        return self._work(self.gloo.allgather([copies for copies, _ in written], reads, opts), results, reads)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any) -> Work:
        (copies, pairs), reads = self._empty([output]), self._filled([source])
        return self._work(self.gloo.all_gather_single(*copies, *reads, opts), pairs, reads)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        return self._in_turn([self.all_gather_single(*each, opts) for each in zip(outputs, inputs, strict=True)])

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        (copies, pairs), reads = self._empty(outputs), [self._filled(each) for each in inputs]
        work = self.gloo.reduce_scatter(copies, reads, opts)
        return self._work(work, pairs, [tensor for tensors in reads for tensor in tensors])

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> Work:
        (copies, pairs), reads = self._empty([output]), self._filled([source])
        return self._work(self.gloo.reduce_scatter_single(*copies, *reads, opts), pairs, reads)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        return self._in_turn([self.reduce_scatter_single(*each, opts) for each in zip(outputs, inputs, strict=True)])

    def all_to_all_single(
        self, output: Tensor, source: Tensor, received: list[int], sent: list[int], opts: Any
    ) -> Work:
        (copies, pairs), reads = self._empty([output]), self._filled([source])
        return self._work(self.gloo.all_to_all_single(*copies, *reads, received, sent, opts), pairs, reads)

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        written, reads = [self._empty(each) for each in outputs], self._filled(inputs)
        results = [pair for _, pairs in written for pair in pairs]
        return self._work(self.gloo.gather([copies for copies, _ in written], reads, opts), results, reads)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        (copies, pairs), reads = self._empty(outputs), [self._filled(each) for each in inputs]
        work = self.gloo.scatter(copies, reads, opts)
        return self._work(work, pairs, [tensor for tensors in reads for tensor in tensors])

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        reads = self._filled(tensors)
        return self._work(self.gloo.send(reads, to, tag), [], reads)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        copies, pairs = self._empty(tensors)
        return self._work(self.gloo.recv(copies, source, tag), pairs)

    def barrier(self, opts: Any) -> Work:
        return self.gloo.barrier(opts)

    # -- implementation --------------------------------------------------------------------------------------------

    def _filled(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return the inputs of a collective: CPU tensors themselves, contiguous copies of the others."""
        return [_empty_copy(each).copy_(each.detach()) if self.is_staged(each) else each for each in tensors]

    def _empty(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[_Pair]]:
        """Return the outputs of a collective, and the pairs of tensors and copies to copy back."""
        copies = [_empty_copy(each) if self.is_staged(each) else each for each in tensors]
        return copies, [pair for pair in zip(tensors, copies, strict=True) if pair[0] is not pair[1]]

    def _both(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[_Pair]]:
        """Return the in-place tensors of a collective, and the pairs of tensors and copies to copy back."""
        copies = self._filled(tensors)
        return copies, [pair for pair in zip(tensors, copies, strict=True) if pair[0] is not pair[1]]

    def _work(self, work: Work, results: Sequence[_Pair], reads: Sequence[Tensor] = ()) -> Work:
        return _StagedWork(work, results, reads)

    def _in_turn(self, works: Sequence[Work]) -> Work:
        for work in works[:-1]:
            work.wait()
        return works[-1]


def _empty_copy(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")


def register_backend() -> None:
    """Register `BACKEND` with torch, unless it is registered."""
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, StagedGroup, devices=["cpu", "cuda"])
