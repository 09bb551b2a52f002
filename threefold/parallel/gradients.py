"""Data parallelism: all-reduce of gradients in buckets, their compression, and ZeRO."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from threefold.comm.axis import Axis, Work

_TOP = 15  # sums stay below 2^15; fp16 ends just below 2^16
_FARTHEST = 126  # powers of two that fp32 holds in full, both ways


@dataclass
class NarrowSum:
    """An asynchronous sum over replicas of a 16-bit copy.

    Attributes:
        flat: the bucket, which gets the sum in `finish`.
        axis: the replicas.
        narrow: its copy.
        exponent: the copy was multiplied by 2 to this; None for 1.
        work: what to wait for.
    """

    flat: Tensor
    axis: Axis
    narrow: Tensor
    exponent: Tensor | None
    work: Work | None = field(default=None)

    def finish(self) -> None:
        """Wait, and copy the sum into the bucket."""
        if self.work is not None:
            self.axis.finish_all_reduce(self.work)
        widen_(self.flat, self.narrow, self.exponent)


def start_narrow_sum(flat: Tensor, axis: Axis, dtype: torch.dtype, tp: Axis | None = None) -> NarrowSum:
    """Start to sum a bucket over an axis of several ranks in 16 bits; the result has the same bits on all of them.

    Elements that are not finite are not finite on any rank afterwards.

    Args:
        flat: fp32 [n].
        axis: the replicas.
        dtype: `torch.float16` or `torch.bfloat16`.
        tp: the tensor ranks, which sum the same parameters or shards of them; None for no others.
    """
    narrow, exponent = narrowed(flat, axis, dtype, tp)
    return NarrowSum(flat, axis, narrow, exponent, axis.start_all_reduce_(narrow))


def narrowed(flat: Tensor, axis: Axis, dtype: torch.dtype, tp: Axis | None = None) -> tuple[Tensor, Tensor | None]:
    """A 16-bit copy of which a sum over the axis cannot overflow, and the exponent of what it was multiplied by.

    Collective over the axis, and over `tp`.

    Args:
        flat, axis, dtype, tp: as of `start_narrow_sum`.
    """
    exponent = _exponent(flat, axis, tp) if dtype == torch.float16 else None
    return (flat if exponent is None else torch.ldexp(flat, exponent)).to(dtype), exponent


def widen_(into: Tensor, narrow: Tensor, exponent: Tensor | None) -> None:
    """Set a tensor to a sum of what `narrowed` gave."""
    into.copy_(narrow)
    if exponent is not None:
        torch.ldexp(into, -exponent, out=into)


def _exponent(flat: Tensor, axis: Axis, tp: Axis | None) -> Tensor:
    """The power of two that scales n times the largest element of any rank to just below 2^15: its exponent, int32."""
    largest = axis.all_reduce_max_(torch.linalg.vector_norm(flat, torch.inf))
    if tp is not None:
        tp.all_reduce_max_(largest)
    bound = largest * axis.size
    exponent = _TOP - torch.frexp(bound).exponent
    # Nothing is scaled where the largest element is zero or NaN.
    return torch.where(bound.isfinite() & (bound > 0), exponent, 0).clamp(-_FARTHEST, _FARTHEST)


Item = TypeVar("Item")
Observer = Callable[[Tensor], None]

BUCKET_BYTES = 25 << 20


class _Place:
    """The part of a bucket that is a leaf's.

    Args:
        flat: that part, of which a shard that is longer on another tensor rank leaves some over.
        leaf: whose gradient it is for.

    Attributes:
        view: the gradient, of the leaf's shape.
        gap: what is left over.
        is_set: whether `view` holds a gradient of this step; else what was there before it.
    """

    def __init__(self, flat: Tensor, leaf: Tensor) -> None:
        # In the order in memory of a leaf without gaps, as autograd has it: fused optimizers go by the memory alone.
        stride = leaf.stride() if leaf.is_contiguous() else torch.empty_like(leaf, device="meta").stride()
        self.view = flat.as_strided(leaf.shape, stride)
        self.gap = flat[leaf.numel() :]
        self.is_set = True
        self._is_grad = flat.dtype == leaf.dtype

    def begin(self, leaf: Tensor) -> None:
        """Forget the gradient."""
        leaf.grad, self.is_set = None, False
        if len(self.gap):
            self.gap.zero_()  # `scale_` with a factor that is not finite would have left NaN

    def add_(self, leaf: Tensor, gradient: Tensor) -> None:
        """Add a gradient; autograd adds those that follow to it, where they have its dtype."""
        if self.is_set:
            self.view.add_(gradient)
            return
        if gradient.is_sparse:  # which torch cannot copy
            self.view.zero_().add_(gradient)
        else:
            self.view.copy_(gradient)
        self._hold(leaf)

    def finish(self, leaf: Tensor) -> None:
        """Set it to zeros where this rank did not use the leaf."""
        if not self.is_set:
            self.view.zero_()
            self._hold(leaf)

    def _hold(self, leaf: Tensor) -> None:
        self.is_set = True
        if self._is_grad:
            leaf.grad = self.view


class _Bucket:
    """A flat buffer, and how many gradients it still waits for in this step."""

    def __init__(self, leaves: Sequence[Tensor], dtype: torch.dtype, sizes: Sequence[int]) -> None:
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=leaves[0].device)
        parts = zip(leaves, self.flat.split(list(sizes)), strict=True)
        self.places = [(leaf, _Place(part, leaf)) for leaf, part in parts]
        self._sizes = sizes
        self.waiting = 0
        self.work: Work | None = None
        self.narrow: NarrowSum | None = None

    def runs(self, leaves: Collection[Tensor]) -> Iterator[Tensor]:
        """The parts of the buffer that are of `leaves`, neighbours together."""
        start = end = 0
        for (leaf, _), size in zip(self.places, self._sizes, strict=True):
            if leaf not in leaves:
                if start < end:
                    yield self.flat[start:end]
                start = end + size
            end += size
        if start < end:
            yield self.flat[start:end]


class Gradients(ABC):
    """The gradients of a rank's parameters, from the first micro-batch of a step to its update."""

    @abstractmethod
    def __getitem__(self, leaf: Tensor) -> Tensor:
        """The gradient of `leaf`, in the dtype that gradients are added up in; that of the step from `finish` on."""

    @abstractmethod
    def begin(self, arrivals: int | None) -> None:
        """Begin a step: forget the gradients of the step before, `.grad` of the leaves too.

        Args:
            arrivals: gradients that autograd accumulates into each parameter in the step, so that sums can start early;
                None where that is not known, and all sums wait for `finish`.
        """

    def add_(self, leaf: Tensor, gradient: Tensor) -> None:
        """Add a gradient of `leaf` that did not come from autograd, before `finish`."""
        self[leaf].add_(gradient)

    @abstractmethod
    def finish(self) -> None:
        """Wait until every gradient is the sum over the replicas."""

    def joined(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of `leaves` in as few flat tensors as they are in, with no others but for zeros."""
        return [self[leaf].flatten() for leaf in leaves]

    @abstractmethod
    def is_in_norm(self, leaf: Tensor) -> bool:
        """Whether this rank adds its gradient of `leaf` to the global norm; False where another rank, which has the
        same one, does."""

    @abstractmethod
    def weights_changed(self) -> None:
        """Drop gathered copies of the weights, which are out of date."""

    @abstractmethod
    def scale_(self, factor: float) -> None:
        """Multiply every gradient."""

    @abstractmethod
    def observe(self, observer: Observer | None) -> None:
        """Have `observer` see each buffer of this rank's own gradients before it is summed over the replicas; None for
        no observer."""


class GradientBuckets(Gradients):
    """Gradients that every replica holds, summed over an axis.

    Buckets are summed in one order on all ranks: a complete one waits for those before it, as another rank may complete
    them in another order where the ranks' samples use other parameters.

    What every tensor rank holds whole has the same sum on each, to the bit: with three replicas or more the order of
    the additions follows from the place in the buffer and from its size, so that tensor ranks whose shards are not of
    one length give them room for the longest.

    Args:
        leaves: the tensors whose gradients autograd computes.
        axis: the replicas to sum over.
        dtype: what gradients are added up in; parameters of that very dtype have their `.grad` inside the bucket from
            the first gradient of a step on.
        bucket_bytes: size from which a bucket is closed and the next started. A bucket is one collective: large ones
            cost less, small ones start earlier.
        wire: a narrower dtype to sum buckets in (gradient compression); None for their own.
        longest: by leaf, the elements of the longest shard that a tensor rank has in its place; None for its own.
        tp: the tensor ranks, whose buckets hold shards of the same parameters; None where no axis splits them.
    """

    def __init__(
        self,
        leaves: Iterable[Tensor],
        axis: Axis,
        dtype: torch.dtype,
        bucket_bytes: int = BUCKET_BYTES,
        wire: torch.dtype | None = None,
        longest: Mapping[Tensor, int] | None = None,
        tp: Axis | None = None,
    ) -> None:
        self._axis, self._tp = axis, tp
        self._wire = wire if axis.size > 1 else None

        def room(leaf: Tensor) -> int:
            return leaf.numel() if longest is None else longest[leaf]

        parts = in_buckets(list(leaves), lambda leaf: room(leaf) * dtype.itemsize, bucket_bytes)
        size = room if axis.size > 2 else Tensor.numel  # two summands have one sum in any order
        self._buckets = [_Bucket(part, dtype, [size(leaf) for leaf in part]) for part in parts]
        self._started = 0
        self._observer: Observer | None = None
        self._places: dict[Tensor, _Place] = {}
        for bucket in self._buckets:
            for leaf, place in bucket.places:
                self._places[leaf] = place
                if leaf.dtype == dtype:
                    leaf.grad = place.view
                # Weak, since garbage collection does not find the cycle from a leaf through its hook back to the leaf.
                leaf.register_post_accumulate_grad_hook(partial(_arrived, weakref.ref(self), weakref.ref(bucket)))

    def __getitem__(self, leaf: Tensor) -> Tensor:
        return self._places[leaf].view

    def __len__(self) -> int:
        """Number of buckets, which is the number of collectives in a step."""
        return len(self._buckets)

    def begin(self, arrivals: int | None) -> None:
        self._started = 0
        for bucket in self._buckets:
            for leaf, place in bucket.places:
                place.begin(leaf)
            bucket.waiting = -1 if arrivals is None else arrivals * len(bucket.places)  # from -1 it never gets to 0
            bucket.work = bucket.narrow = None

    def add_(self, leaf: Tensor, gradient: Tensor) -> None:
        self._places[leaf].add_(leaf, gradient)

    def finish(self) -> None:
        for bucket in self._buckets[self._started :]:  # what got no gradient on this rank may have got one elsewhere
            self._start(bucket)
        for bucket in self._buckets:
            if bucket.work is not None:
                self._axis.finish_all_reduce(bucket.work)
            if bucket.narrow is not None:
                bucket.narrow.finish()
                bucket.narrow = None

    def joined(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        wanted = set(leaves)
        return [run for bucket in self._buckets for run in bucket.runs(wanted)]

    def is_in_norm(self, leaf: Tensor) -> bool:
        return self._axis.is_first

    def weights_changed(self) -> None:
        """Nothing to do: there are no copies of the leaves."""

    def scale_(self, factor: float) -> None:
        for bucket in self._buckets:
            bucket.flat.mul_(factor)

    def observe(self, observer: Observer | None) -> None:
        self._observer = observer

    def _arrived(self, bucket: _Bucket, leaf: Tensor) -> None:
        gradient, place = leaf.grad, self._places[leaf]
        if gradient is not None and gradient is not place.view:  # the first of a step, or narrower
            leaf.grad = None
            place.add_(leaf, gradient)
        bucket.waiting -= 1
        while self._started < len(self._buckets) and self._buckets[self._started].waiting == 0:
            self._start(self._buckets[self._started])

    def _start(self, bucket: _Bucket) -> None:
        self._started += 1
        for leaf, place in bucket.places:
            place.finish(leaf)
        if self._observer is not None:
            self._observer(bucket.flat)
        if self._wire is None:
            bucket.work = self._axis.start_all_reduce_(bucket.flat)
        else:
            bucket.narrow = start_narrow_sum(bucket.flat, self._axis, self._wire, self._tp)


class JoinedGradients(Gradients):
    """Gradients of several groups of parameters, each summed over its own ranks.

    Args:
        parts: which leaves each is for.
    """

    def __init__(self, parts: Sequence[tuple[Iterable[Tensor], Gradients]]) -> None:
        self._parts = [gradients for _, gradients in parts]
        self._of = {leaf: gradients for leaves, gradients in parts for leaf in leaves}

    def __getitem__(self, leaf: Tensor) -> Tensor:
        return self._of[leaf][leaf]

    def begin(self, arrivals: int | None) -> None:
        for part in self._parts:
            part.begin(arrivals)

    def add_(self, leaf: Tensor, gradient: Tensor) -> None:
        self._of[leaf].add_(leaf, gradient)

    def finish(self) -> None:
        for part in self._parts:
            part.finish()

    def joined(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        of_part: dict[Gradients, list[Tensor]] = {}
        for leaf in leaves:
            of_part.setdefault(self._of[leaf], []).append(leaf)
        return [run for part, some in of_part.items() for run in part.joined(some)]

    def is_in_norm(self, leaf: Tensor) -> bool:
        return self._of[leaf].is_in_norm(leaf)

    def weights_changed(self) -> None:
        for part in self._parts:
            part.weights_changed()

    def scale_(self, factor: float) -> None:
        for part in self._parts:
            part.scale_(factor)

    def observe(self, observer: Observer | None) -> None:
        for part in self._parts:
            part.observe(observer)


def buckets_by_dtype(
    leaves: Iterable[Tensor],
    axis: Axis,
    wire: torch.dtype | None = None,
    longest: Mapping[Tensor, int] | None = None,
    tp: Axis | None = None,
) -> Gradients:
    """Buckets for leaves of any float dtypes, gradients narrower than fp32 added up in fp32.

    Args:
        leaves, axis, wire, longest, tp: as of `GradientBuckets`.
    """
    groups: dict[torch.dtype, list[Tensor]] = {}
    for leaf in leaves:
        groups.setdefault(torch.promote_types(leaf.dtype, torch.float32), []).append(leaf)
    parts = [
        (group, GradientBuckets(group, axis, dtype, wire=wire, longest=longest, tp=tp))
        for dtype, group in groups.items()
    ]
    return parts[0][1] if len(parts) == 1 else JoinedGradients(parts)


def _arrived(buckets: "weakref.ref[GradientBuckets]", bucket: "weakref.ref[_Bucket]", leaf: Tensor) -> None:
    owner, part = buckets(), bucket()
    if owner is not None and part is not None:
        owner._arrived(part, leaf)


def in_buckets(items: Sequence[Item], nbytes: Callable[[Item], int], limit: int = BUCKET_BYTES) -> Iterator[list[Item]]:
    """Parameters by bucket: the last of the model first, as the backward pass reaches them.

    Args:
        items: the parameters, in the order of the model.
        nbytes: how much one takes.
        limit: size from which a bucket is closed.
    """
    part: list[Item] = []
    size = 0
    for item in reversed(items):
        part.append(item)
        size += nbytes(item)
        if size >= limit:
            yield part
            part, size = [], 0
    if part:
        yield part
