"""Process groups between ranks that are threads of one process."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.comm.tree import PostponedWork, accumulate
from threefold.lesson.turns import Turns
from threefold.torch_private.distributed import PythonGroup, Work

Given = list[list[Tensor]]
"""Tensors that the ranks of a group give to a collective, in the order of the ranks."""
Told = Callable[[Sequence[Tensor]], None]
"""Function that takes what a rank receives in a collective."""
Begins = Callable[[int, "GroupCall", Sequence[Tensor]], Told]
"""Function that takes the rank, the collective that it calls and what it gives; returns what takes the results."""


class GroupCall:
    """One collective of a group, which each of its ranks calls.

    Attributes:
        operation: name of the group's method.
        ranks: global ranks that take part: those of the group, or sender and receiver.
        number: number of this call, from 1.
    """

    def __init__(self, operation: str, ranks: tuple[int, ...], number: int) -> None:
        self.operation, self.ranks, self.number = operation, ranks, number
        self.given: dict[int, list[Tensor]] = {}


class Exchange:
    """Where ranks in threads meet: the calls of all groups that are under way.

    Args:
        turns: order in which the ranks run.
        begins: called at each collective on each rank.
    """

    def __init__(self, turns: Turns, begins: Begins) -> None:
        self.turns, self.begins = turns, begins
        self._calls: dict[tuple[Any, ...], GroupCall] = {}
        self._made = 0

    def group(self, name: str, ranks: tuple[int, ...], index: int) -> dist.ProcessGroup:
        """Make a rank's process group, as `threefold.torch_private.threads.MakeGroup`."""
        made: dist.ProcessGroup = ThreadGroup(self, name, ranks, index)
        return made

    def call(self, key: tuple[Any, ...], operation: str, ranks: tuple[int, ...]) -> GroupCall:
        """Return the call under a key, made by the first rank that asks for it."""
        if key not in self._calls:
            self._made += 1
            self._calls[key] = GroupCall(operation, ranks, self._made)
        return self._calls[key]

    def end(self, key: tuple[Any, ...]) -> None:
        """Forget a call whose ranks have what they came for."""
        self._calls.pop(key, None)


class ThreadGroup(PythonGroup):
    """Process group of ranks that are threads of this process.

    `torch.distributed` accepts it as it does one of gloo. A rank that waits for others lets them run (`Turns`). Sums
    are added in a binary tree over the ranks, as over shared memory (`threefold.cpu.shared_memory`), so that all ranks
    have the same bits. Tensors are copied when they are given, and the results written when they are waited for.
    """

    def __init__(self, exchange: Exchange, name: str, ranks: tuple[int, ...], index: int) -> None:
        super().__init__(index, len(ranks))
        self._exchange, self._name, self._ranks, self._index = exchange, name, ranks, index
        self._number = 0
        self._posted: defaultdict[tuple[int, int, int], int] = defaultdict(int)
        self._under_way: set[Work] = set()  # torch's C++ code may hold a work that nothing in Python does

    @property
    def group_name(self) -> str:
        """Name under which torch finds the group; its own method asks a backend, which a group in Python lacks."""
        return self._name

    def getBackendName(self) -> str:
        return "threads"

    # -- collectives, each with the arguments of torch's method of that name ----------------------------------------

    def allreduce(self, tensors: list[Tensor], opts: Any) -> Work:
        def finish(given: Given) -> list[Tensor]:
            for place, tensor in enumerate(tensors):
                _combine(opts.reduceOp, [each[place] for each in given], tensor)
            return tensors

        return self._meet("allreduce", tensors, finish, opts)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: list[Tensor], opts: Any) -> Work:
        def finish(given: Given) -> list[Tensor]:
            if self._index == opts.rootRank:
                _combine(opts.reduceOp, [each[0] for each in given], tensors[0])
            return tensors

        return self._meet("reduce", tensors, finish, opts)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Work:
        def finish(given: Given) -> list[Tensor]:
            return _write(tensors, given[opts.rootRank])

        return self._meet("broadcast", tensors, finish, opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        def finish(given: Given) -> list[Tensor]:
            return _write(outputs[0], [each[0] for each in given])

        return self._meet("allgather", inputs, finish, opts)

    def all_gather_single(self, output: Tensor, source: Tensor, opts: Any) -> Work:
        def finish(given: Given) -> list[Tensor]:
            return _write([output.view(-1)], [torch.cat([each[0].reshape(-1) for each in given])], of=output)

        return self._meet("all_gather_single", [source], finish, opts)

    def all_gather_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        for output, source in zip(outputs, inputs, strict=True):
            self.all_gather_single(output, source, opts).wait()
        return _DONE

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> Work:
        def finish(given: Given) -> list[Tensor]:
            is_root = self._index == opts.rootRank
            return _write(outputs[0], [each[0] for each in given]) if is_root else []

        return self._meet("gather", inputs, finish, opts)

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        def finish(given: Given) -> list[Tensor]:
            return _write(outputs, [given[opts.rootRank][self._index]])

        return self._meet("scatter", inputs[0] if inputs else [], finish, opts)

    def reduce_scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> Work:
        def finish(given: Given) -> list[Tensor]:
            _combine(opts.reduceOp, [each[self._index] for each in given], outputs[0])
            return outputs

        return self._meet("reduce_scatter", inputs[0], finish, opts)

    def reduce_scatter_single(self, output: Tensor, source: Tensor, opts: Any) -> Work:
        def finish(given: Given) -> list[Tensor]:
            parts = [each[0].reshape(self.size(), -1)[self._index] for each in given]
            _combine(opts.reduceOp, parts, output.view(-1))
            return [output]

        return self._meet("reduce_scatter_single", [source], finish, opts)

    def reduce_scatter_single_coalesced(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any) -> Work:
        for output, source in zip(outputs, inputs, strict=True):
            self.reduce_scatter_single(output, source, opts).wait()
        return _DONE

    def all_to_all_single(
        self, output: Tensor, source: Tensor, received: list[int], sent: list[int], opts: Any
    ) -> Work:
        rows = list(sent) or [source.shape[0] // self.size()] * self.size()
        return self.alltoall([output], list(source.split(rows)), opts, joined=True)

    def alltoall(self, outputs: list[Tensor], inputs: list[Tensor], opts: Any, joined: bool = False) -> Work:
        def finish(given: Given) -> list[Tensor]:
            arrived = [each[self._index] for each in given]
            return _write(outputs, [torch.cat(arrived)] if joined else arrived)

        return self._meet("alltoall", inputs, finish, opts)

    def barrier(self, opts: Any) -> Work:
        return self._meet("barrier", [], lambda _: [], opts)

    def send(self, tensors: list[Tensor], to: int, tag: int) -> Work:
        """Leave a tensor for the rank at index `to`; done at once, as the tensor is copied."""
        _, call = self._message(self._index, to, tag)
        self._exchange.begins(self._rank, call, tensors)(tensors)
        call.given[0] = [tensor.detach().clone() for tensor in tensors]
        return _DONE

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Work:
        key, call = self._message(source, self._index, tag)

        def run() -> None:
            self._wait(lambda: 0 in call.given, f"a tensor of rank {self._ranks[source]}")
            _write(tensors, call.given[0])
            self._exchange.end(key)

        return PostponedWork(run)

    # -- implementation --------------------------------------------------------------------------------------------

    @property
    def _rank(self) -> int:
        return self._ranks[self._index]

    def _message(self, source: int, to: int, tag: int) -> tuple[tuple[Any, ...], GroupCall]:
        """Return the next message from one index to another, in the order in which this rank sends or receives."""
        self._posted[source, to, tag] += 1
        key = (self._name, self._ranks, source, to, tag, self._posted[source, to, tag])
        return key, self._exchange.call(key, "send", (self._ranks[source], self._ranks[to]))

    def _meet(
        self, operation: str, inputs: Sequence[Tensor], finish: Callable[[Given], Sequence[Tensor]], opts: Any
    ) -> Work:
        self._number += 1
        key, size = (self._name, self._ranks, self._number), self.size()
        call = self._exchange.call(key, operation, self._ranks)
        if call.operation != operation:
            raise RuntimeError(
                f"rank {self._rank} calls {operation} where another of the ranks {list(self._ranks)} calls "
                f"{call.operation}"
            )
        told = self._exchange.begins(self._rank, call, inputs)
        call.given[self._index] = [tensor.detach().clone() for tensor in inputs]

        def run() -> None:
            self._under_way.discard(work)
            self._wait(lambda: len(call.given) == size, f"{operation} of the ranks {list(self._ranks)}")
            with torch.no_grad():
                told(finish([call.given[index] for index in range(size)]))
            self._exchange.end(key)

        work = PostponedWork(run)
        if not getattr(opts, "asyncOp", False):
            work.wait()
            return _DONE
        self._under_way.add(work)
        return work

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        self._exchange.turns.wait(self._rank, ready, what)


_DONE = PostponedWork()
_OPERATIONS: dict[Any, Callable[..., Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.AVG: torch.add,
    dist.ReduceOp.MAX: torch.maximum,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.PRODUCT: torch.mul,
}


def _combine(operation: Any, parts: list[Tensor], out: Tensor) -> None:
    combine = next(function for known, function in _OPERATIONS.items() if operation == known)
    flat = torch.empty_like(parts[0].reshape(-1))
    accumulate(combine, [part.reshape(-1) for part in parts], flat)
    out.detach().copy_(flat.view(out.shape))
    if operation == dist.ReduceOp.AVG:
        out.detach().div_(len(parts))


def _write(into: Sequence[Tensor], found: Sequence[Tensor], of: Tensor | None = None) -> list[Tensor]:
    """Copy tensors into others of as many elements, and return these, or `of`."""
    with torch.no_grad():
        for place, tensor in zip(into, found, strict=True):
            place.detach().copy_(tensor.view(place.shape))
    return [*into] if of is None else [of]
