"""Horovod's collectives.

Horovod finds the tensors that belong together by name. Here ranks make the same calls in the same order, as with
`torch.distributed`; calls on CPU tensors compare themselves first, and other calls on another rank are an error.
"""

import zlib
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.comm.differentiable import differentiable
from threefold.compat.horovod.ranks import rank, world
from threefold.dtypes import DTYPES
from threefold.errors import UserError


class ReduceOperation(Enum):
    """How `allreduce` combines the tensors of the ranks, under Horovod's names."""

    AVERAGE = "Average"
    SUM = "Sum"
    ADASUM = "Adasum"
    MIN = "Min"
    MAX = "Max"
    PRODUCT = "Product"


Average = ReduceOperation.AVERAGE
"""The mean over the ranks."""
Sum = ReduceOperation.SUM
"""The sum over the ranks."""
Adasum = ReduceOperation.ADASUM
"""Horovod's adaptive sum, which has no counterpart: every call that gets it refuses it."""
Min = ReduceOperation.MIN
"""The minimum over the ranks, element by element."""
Max = ReduceOperation.MAX
"""The maximum over the ranks, element by element."""
Product = ReduceOperation.PRODUCT
"""The product over the ranks, element by element."""

_TORCH: Final = {
    Average: dist.ReduceOp.SUM,
    Sum: dist.ReduceOp.SUM,
    Min: dist.ReduceOp.MIN,
    Max: dist.ReduceOp.MAX,
    Product: dist.ReduceOp.PRODUCT,
}


class Compressor:
    """Rounding of tensors before they are sent.

    Args:
        name: dtype to round to: none, fp16 or bf16.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"Compression.{self.name}"

    def compress(self, tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        """Return the tensor to send, and what `decompress` needs."""
        wire = DTYPES.get(self.name)
        return (tensor if wire is None or not tensor.is_floating_point() else tensor.to(wire)), tensor.dtype

    def decompress(self, tensor: Tensor, context: torch.dtype) -> Tensor:
        """Return a received tensor in the dtype of the original."""
        return tensor.to(context)


class Compression:
    """Roundings of tensors before they are sent.

    Attributes:
        none: send tensors as they are.
        fp16: send floating-point tensors in 16 bits.
        bf16: send them in bfloat16, which Horovod does not have.
    """

    none = Compressor("none")
    fp16 = Compressor("fp16")
    bf16 = Compressor("bf16")


def barrier(process_set: None = None) -> None:
    """Wait until every rank has called this function.

    Args:
        process_set: None for all ranks.
    """
    _agree("barrier", None, process_set=process_set).barrier()


class PendingResult:
    """Result of an asynchronous call, for `poll` and `synchronize`.

    Args:
        work: collective to wait for; None if it has run.
        finish: function that returns the result after it.
    """

    def __init__(self, work: dist.Work | None, finish: Callable[[], Tensor]) -> None:
        self.work, self._finish = work, finish
        self._result: Tensor | None = None

    def is_complete(self) -> bool:
        """Return whether `wait` returns at once."""
        return self.work is None or self._result is not None or self.work.is_completed()

    def wait(self) -> Tensor:
        """Wait for the other ranks, and return the result."""
        if self._result is None:
            if self.work is not None:
                self.work.wait()
            self._result = self._finish()
        return self._result


def poll(handle: PendingResult) -> bool:
    """Return whether an asynchronous call has completed, so that `synchronize` returns at once.

    Args:
        handle: what the asynchronous call returned.
    """
    return _handle(handle).is_complete()


def synchronize(handle: PendingResult) -> Tensor:
    """Wait for an asynchronous call, and return its result.

    Args:
        handle: what the asynchronous call returned.
    """
    return _handle(handle).wait()


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Tensor:
    """Return the mean, or another combination, of a tensor over the ranks; differentiable for means and sums.

    Args:
        tensor: tensor of the same shape on every rank; unchanged.
        average: Horovod's older form of `op`: True for `Average`, False for `Sum`.
        name: name of the tensor, the same on every rank.
        compression: `Compression.fp16` or `Compression.bf16` sends 16 bits of each element.
        op: `Average`, `Sum`, `Min`, `Max` or `Product`; None for `Average`.
        prescale_factor: factor before the combination.
        postscale_factor: factor after it.
        process_set: None for all ranks.

    Returns:
        a new tensor, the same on every rank, of the dtype of `tensor`; the mean of integers is truncated.

    Raises:
        UserError: `torch.distributed` is not initialised, another rank makes another call, or an argument is wrong.

    Example:
        ```python
        mean = t3.compat.horovod.allreduce(torch.tensor(correct / rows))
        ```
    """
    sent, context = compressor(compression).compress(_tensor("allreduce", tensor))
    arguments = (_operation(op, average), name, prescale_factor, postscale_factor, process_set)
    total = _AllReduce.apply(sent, *arguments) if _tracks(sent, arguments[0]) else _reduced(sent, *arguments)
    return compressor(compression).decompress(total, context)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> Tensor:
    """Combine a tensor over the ranks in place, and return it.

    Args:
        tensor: tensor of the same shape on every rank; overwritten.
        average, name, op, prescale_factor, postscale_factor, process_set: as in `allreduce`.
    """
    return allreduce_async_(tensor, average, name, op, prescale_factor, postscale_factor, process_set).wait()


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> PendingResult:
    """Start an `allreduce`; `synchronize` of what it returns gives the result.

    Args:
        tensor: tensor of the same shape on every rank; unchanged.
        average, name, op, prescale_factor, postscale_factor, process_set: as in `allreduce`.
    """
    copy = _tensor("allreduce", tensor).detach().clone(memory_format=torch.contiguous_format)
    return allreduce_async_(copy, average, name, op, prescale_factor, postscale_factor, process_set)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: None = None,
) -> PendingResult:
    """Start an `allreduce_`; `tensor` has the result once `synchronize` of what it returns has run.

    Args:
        tensor: tensor of the same shape on every rank; overwritten.
        average, name, op, prescale_factor, postscale_factor, process_set: as in `allreduce`.
    """
    operation = _operation(op, average)
    axis = _agree("allreduce", name, tensor, tuple(tensor.shape), operation, process_set=process_set)
    sent = tensor.detach().contiguous()
    _scale_(sent, prescale_factor)
    work = dist.all_reduce(sent, _TORCH[operation], group=axis.group, async_op=True) if axis.size > 1 else None

    def finish() -> Tensor:
        if operation is Average and sent.is_floating_point():
            sent.div_(axis.size)
        elif operation is Average:
            sent.copy_(torch.div(sent, axis.size, rounding_mode="trunc"))
        _scale_(sent, postscale_factor)
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)
        return tensor

    return PendingResult(work, finish)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Compressor = Compression.none,
    op: ReduceOperation | None = None,
) -> list[Tensor]:
    """Return the `allreduce` of each of several tensors.

    Args:
        tensors: tensors, of the same shapes on every rank; unchanged.
        average, name, compression, op: as in `allreduce`.
    """
    return [allreduce(each, average, _part(name, n), compression, op) for n, each in enumerate(tensors)]


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOperation | None = None,
) -> list[Tensor]:
    """Combine each of several tensors over the ranks in place, and return them.

    Args:
        tensors: tensors, of the same shapes on every rank; overwritten.
        average, name, op: as in `allreduce`.
    """
    started = [allreduce_async_(each, average, _part(name, n), op) for n, each in enumerate(tensors)]
    return [each.wait() for each in started]


def allgather(tensor: Tensor, name: str | None = None, process_set: None = None) -> Tensor:
    """Concatenate the ranks' tensors along their first dim, where their sizes may differ; differentiable.

    As with Horovod, the gradient of a rank's tensor is the mean over the ranks of its part of the gradients.

    Args:
        tensor: tensor with at least one dim; unchanged.
        name: name of the tensor, the same on every rank.
        process_set: None for all ranks.

    Raises:
        UserError: the tensor has no dim, or another rank makes another call.

    Example:
        ```python
        scores = t3.compat.horovod.allgather(torch.arange(2.0))  # of both ranks
        ```
    """
    if _tracks(_tensor("allgather", tensor)):
        joined: Tensor = _AllGather.apply(tensor, name, process_set)
        return joined
    return _gathered(tensor, name, process_set)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: None = None) -> PendingResult:
    """Run an `allgather` at once; `synchronize` of what it returns gives the result.

    Args:
        tensor, name, process_set: as in `allgather`.
    """
    joined = _gathered(tensor.detach(), name, process_set)
    return PendingResult(None, lambda: joined)


def allgather_object(obj: Any, name: str | None = None) -> list[Any]:
    """Gather a Python object from each rank, in the order of the ranks.

    Args:
        obj: a picklable object.
        name: ignored; Horovod's name of the operation.

    Example:
        ```python
        counts = t3.compat.horovod.allgather_object({"rows": rows})
        ```
    """
    return world().gather_objects(obj)


def broadcast(tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None) -> Tensor:
    """Return the tensor of one rank on all ranks; differentiable.

    As with Horovod, the gradient of the root's tensor is the mean over the ranks, and that of the others is zero.

    Args:
        tensor: tensor of the same shape and dtype on every rank; unchanged.
        root_rank: rank whose tensor it is.
        name: name of the tensor, the same on every rank.
        process_set: None for all ranks.

    Raises:
        UserError: the rank does not exist, or another rank makes another call.

    Example:
        ```python
        first = t3.compat.horovod.broadcast(torch.tensor(first_epoch), root_rank=0).item()
        ```
    """
    if _tracks(_tensor("broadcast", tensor)):
        found: Tensor = _Broadcast.apply(tensor, root_rank, name, process_set)
        return found
    return _broadcasted(tensor, root_rank, name, process_set)


def broadcast_(tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None) -> Tensor:
    """Overwrite a tensor with that of one rank, and return it.

    Args:
        tensor: tensor of the same shape and dtype on every rank; overwritten.
        root_rank, name, process_set: as in `broadcast`.
    """
    return broadcast_async_(tensor, root_rank, name, process_set).wait()


def broadcast_async(tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None) -> PendingResult:
    """Start a `broadcast`; `synchronize` of what it returns gives the result.

    Args:
        tensor, root_rank, name, process_set: as in `broadcast`.
    """
    copy = _tensor("broadcast", tensor).detach().clone(memory_format=torch.contiguous_format)
    return broadcast_async_(copy, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: None = None
) -> PendingResult:
    """Start a `broadcast_`; `tensor` has the result once `synchronize` of what it returns has run.

    Args:
        tensor: tensor of the same shape and dtype on every rank; overwritten.
        root_rank, name, process_set: as in `broadcast`.
    """
    world(root_rank)
    axis = _agree("broadcast", name, tensor, tuple(tensor.shape), root_rank, process_set=process_set)
    sent = tensor.detach().contiguous()
    work = dist.broadcast(sent, root_rank, group=axis.group, async_op=True) if axis.size > 1 else None

    def finish() -> Tensor:
        if sent.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(sent)
        return tensor

    return PendingResult(work, finish)


def broadcast_object(obj: Any, root_rank: int = 0, name: str | None = None, process_set: None = None) -> Any:
    """Return the Python object of one rank on all ranks.

    Args:
        obj: a picklable object; ignored on the other ranks.
        root_rank: rank whose object it is.
        name: ignored; Horovod's name of the operation.
        process_set: None for all ranks.

    Returns:
        the object of the root rank.

    Raises:
        UserError: the rank does not exist.

    Example:
        ```python
        first_epoch = t3.compat.horovod.broadcast_object(first_epoch, root_rank=0)
        ```
    """
    axis = world(root_rank, process_set)
    return axis.gather_objects(obj if axis.index == root_rank else None)[root_rank]


def compressor(given: Any) -> Compressor:
    """Return a compression by its name or itself; raise a `UserError` for anything else."""
    if isinstance(given, str) and given in ("none", "fp16", "bf16"):
        found: Compressor = getattr(Compression, given)
        return found
    if not isinstance(given, Compressor):
        raise UserError(
            f"compression is {given!r} but must be one of Compression.none, Compression.fp16 and Compression.bf16; "
            "use Compression.fp16."
        )
    return given


def require_operation(op: Any) -> ReduceOperation:
    """Raise a `UserError` unless `op` is an operation that ranks can compute."""
    if op is Adasum:
        raise UserError("op is Adasum, which has no counterpart; use hvd.Average.")
    if not isinstance(op, ReduceOperation):
        raise UserError(f"op is {op!r} but must be one of hvd.Average, Sum, Min, Max and Product; use hvd.Average.")
    return op


def _operation(op: ReduceOperation | None, average: bool | None) -> ReduceOperation:
    if op is not None and average is not None:
        raise UserError(f"average is {average!r} and op is {op}, which say the same thing twice; leave out average.")
    if op is None:
        return Sum if average is False else Average
    return require_operation(op)


def _tracks(tensor: Tensor, operation: ReduceOperation = Average) -> bool:
    needed = torch.is_grad_enabled() and tensor.requires_grad
    if needed and operation not in (Average, Sum):
        raise UserError(
            f"op is {operation.value} but the tensor needs a gradient, which only Average and Sum have; use "
            "tensor.detach()."
        )
    return needed


def _reduced(
    tensor: Tensor,
    operation: ReduceOperation,
    name: str | None = None,
    before: float = 1.0,
    after: float = 1.0,
    process_set: None = None,
) -> Tensor:
    return allreduce_async(tensor, None, name, operation, before, after, process_set).wait()


_AllReduce = differentiable(_reduced, _reduced)


def _gathered(tensor: Tensor, name: str | None, process_set: None = None) -> Tensor:
    if not tensor.dim():
        raise UserError("allgather was given a tensor without a dim to concatenate along; use tensor.reshape(1).")
    return _agree("allgather", name, tensor, tuple(tensor.shape[1:]), process_set=process_set).all_gather(tensor, 0)


def _broadcasted(tensor: Tensor, root_rank: int, name: str | None, process_set: None = None) -> Tensor:
    return broadcast_async(tensor, root_rank, name, process_set).wait()


def _mean_at_root(grad: Tensor, root_rank: int, name: str | None, process_set: None = None) -> Tensor:
    mean = _reduced(grad, Average)
    return mean if rank() == root_rank else torch.zeros_like(mean)


_Broadcast = differentiable(_broadcasted, _mean_at_root)


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str | None, process_set: None) -> Tensor:
        sizes = world().gather_objects(len(x))
        ctx.start, ctx.rows = sum(sizes[: rank()]), len(x)
        return _gathered(x, name, process_set)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _reduced(grad, Average).narrow(0, ctx.start, ctx.rows), None, None


def _agree(call: str, name: str | None, tensor: Tensor | None = None, *what: Any, process_set: None = None) -> Axis:
    """Return the axis of all ranks; raise a `UserError` on all of them if one makes another call. Collective."""
    axis = world(process_set=process_set)
    if axis.size == 1 or (tensor is not None and not _tensor(call, tensor).is_cpu):  # a GPU would wait for the answer
        return axis
    said = [call, "" if name is None else repr(name), "" if tensor is None else str(tensor.dtype), *map(str, what)]
    number = zlib.crc32(" ".join(said).encode())
    least, most = axis.all_reduce_max_(torch.tensor([-number, number])).tolist()
    if -least != most:
        raise UserError(
            f"Rank {axis.index} called hvd.{' '.join(each for each in said if each)} while another rank made another "
            "call; make the same calls in the same order on all ranks."
        )
    return axis


def _tensor(call: str, given: Any) -> Tensor:
    if not isinstance(given, Tensor):
        raise UserError(f"{call} was given a {type(given).__name__} but needs a tensor; use torch.tensor(value).")
    return given


def _part(name: str | None, number: int) -> str | None:
    return None if name is None else f"{name}.{number}"


def _scale_(tensor: Tensor, factor: float) -> None:
    if factor != 1.0 and tensor.is_floating_point():
        tensor.mul_(factor)
    elif factor != 1.0:
        tensor.copy_(tensor.double().mul_(factor))  # truncated


def _handle(given: Any) -> PendingResult:
    if not isinstance(given, PendingResult):
        raise UserError(
            f"handle is of the type {type(given).__name__} but must be what an asynchronous call returned; use "
            "handle = hvd.allreduce_async(tensor)."
        )
    return given
