"""Data parallelism: gradients summed over replicas in buckets (all-reduce) as these fill."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import ClassVar, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.parallel.compression import NarrowSum
from threefold.torch_private.tensors import foreach_norm

Item = TypeVar("Item")
Observer = Callable[[Tensor], None]

NORM_ELEMENTS = 1 << 14  # adjacent elements whose squares are summed in the gradients' own dtype
BUCKET_BYTES = 25 << 20


class Place:
    """A leaf's part of a bucket; longer than the leaf, by `gap`, if another tensor rank has a longer shard.

    Attributes:
        adds_in_place: whether autograd may add a gradient of the bucket's dtype to `view` itself.
    """

    adds_in_place: ClassVar[bool] = True

    def __init__(self, flat: Tensor, leaf: Tensor) -> None:
        # In memory order of the dense leaf, as autograd's own gradients: fused optimizers go by memory order alone.
        stride = leaf.stride() if leaf.is_contiguous() else torch.empty_like(leaf, device="meta").stride()
        self.view = flat.as_strided(leaf.shape, stride)
        self.gap = flat[leaf.numel() :]
        self.is_set = True  # whether it holds a gradient of this step, rather than an old value
        self._is_grad = flat.dtype == leaf.dtype

    def begin(self, leaf: Tensor) -> None:
        leaf.grad, self.is_set = None, False
        if len(self.gap):
            self.gap.zero_()  # `scale_` with a factor that is not finite would have left NaN

    def add_(self, leaf: Tensor, gradient: Tensor) -> None:
        # If `view` has the leaf's dtype, autograd adds later gradients in place.
        if self.is_set:
            self.view.add_(gradient)
            return
        if gradient.is_sparse:  # which torch cannot copy
            self.view.zero_().add_(gradient)
        else:
            self.view.copy_(gradient)
        self._hold(leaf)

    def finish(self, leaf: Tensor) -> None:
        # Zero the gradient if this rank did not use the leaf.
        if not self.is_set:
            self.view.zero_()
            self._hold(leaf)

    def _hold(self, leaf: Tensor) -> None:
        self.is_set = True
        if self._is_grad:
            leaf.grad = self.view


MakePlace = Callable[[Tensor, Tensor], Place]
"""Function that makes the place of a leaf: (part of the bucket, leaf) → place."""


class _Bucket:
    """Flat buffer of gradients, and how many it is still waiting for in this step."""

    def __init__(self, leaves: Sequence[Tensor], dtype: torch.dtype, sizes: Sequence[int], place: MakePlace) -> None:
        self.flat = torch.zeros(sum(sizes), dtype=dtype, device=leaves[0].device)
        parts = zip(leaves, self.flat.split(list(sizes)), strict=True)
        self.places = [(leaf, place(part, leaf)) for leaf, part in parts]
        self._sizes = sizes
        self.waiting = 0
        self.work: dist.Work | None = None
        self.narrow: NarrowSum | None = None

    def runs(self, leaves: Collection[Tensor]) -> Iterator[Tensor]:
        """Yield the parts of the buffer that belong to `leaves`, adjacent ones joined."""
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
    """Gradients of a rank's parameters, from the first micro-batch of a step to the update."""

    @abstractmethod
    def __getitem__(self, leaf: Tensor) -> Tensor:
        """Return the gradient of `leaf`, in the dtype of accumulation; complete from `finish` on."""

    @abstractmethod
    def begin(self, arrivals: int | None) -> None:
        """Begin a step: drop the gradients of the last one, including `.grad` of the leaves.

        `arrivals` is the number of gradients that autograd accumulates into each parameter in the step, so that sums
        can start early; None if unknown, in which case all sums wait for `finish`.
        """

    def add_(self, leaf: Tensor, gradient: Tensor) -> None:
        """Add a gradient of `leaf` that did not come from autograd; call it before `finish`."""
        self[leaf].add_(gradient)

    @abstractmethod
    def finish(self) -> None:
        """Wait until every gradient is the sum over the replicas."""

    def joined(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """Return the gradients of `leaves` in as few flat tensors as possible, with zeros as the only padding."""
        return [self[leaf].flatten() for leaf in leaves]

    @abstractmethod
    def is_in_norm(self, leaf: Tensor) -> bool:
        """Return whether this rank's gradient of `leaf` is in the global norm; False if another rank adds it."""

    def weights_changed(self) -> None:  # noqa: B027
        """Drop gathered copies of the weights, which are out of date from now on."""

    @abstractmethod
    def scale_(self, factor: float) -> None:
        """Multiply every gradient by a factor."""

    @abstractmethod
    def observe(self, observer: Observer | None) -> None:
        """Call `observer` with each buffer of this rank's gradients before its sum over replicas; None to stop."""


class GradientBuckets(Gradients):
    """Gradients that every replica holds, in buckets that are summed over an axis.

    Buckets are summed in the same order on all ranks: a complete bucket waits for those before it, because other ranks
    may complete them in another order if their samples use other parameters.

    Weights that every tensor rank holds whole get bit-equal sums on all of them. With three or more replicas, the order
    of additions depends on the position in the buffer and on its size. So tensor ranks with shards of different lengths
    all reserve room for the longest.

    Args:
        dtype: dtype of accumulation; parameters of this dtype have their `.grad` inside the bucket from the first
            gradient of a step on.
        bucket_bytes: size at which a bucket is closed. A bucket is one collective: large ones cost less, small ones
            start earlier.
        wire: narrower dtype of the sums (gradient compression); None for `dtype`.
        longest: leaf → number of elements of its longest shard on any tensor rank; None for the leaf's own size.
        tp: tensor ranks, whose buckets hold shards of the same parameters; None without tensor parallelism.
        make_place: makes the place of a leaf, which adds up its gradients.
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
        make_place: MakePlace = Place,
    ) -> None:
        self._axis, self._tp = axis, tp
        self._wire = wire if axis.size > 1 else None

        def room(leaf: Tensor) -> int:
            return leaf.numel() if longest is None else longest[leaf]

        parts = in_buckets(list(leaves), lambda leaf: room(leaf) * dtype.itemsize, bucket_bytes)
        size = room if axis.size > 2 else Tensor.numel  # two summands have one sum in any order
        self._buckets = [_Bucket(part, dtype, [size(leaf) for leaf in part], make_place) for part in parts]
        self._started = 0
        self._observer: Observer | None = None
        self._places: dict[Tensor, Place] = {}
        for bucket in self._buckets:
            for leaf, place in bucket.places:
                self._places[leaf] = place
                if leaf.dtype == dtype and place.adds_in_place:
                    leaf.grad = place.view
                # Weak, since garbage collection does not find the cycle from a leaf through its hook back to the leaf.
                leaf.register_post_accumulate_grad_hook(partial(_arrived, weakref.ref(self), weakref.ref(bucket)))

    def __getitem__(self, leaf: Tensor) -> Tensor:
        return self._places[leaf].view

    def __len__(self) -> int:
        """Return the number of buckets, which is the number of collectives in a step."""
        return len(self._buckets)

    def begin(self, arrivals: int | None) -> None:
        self._started = 0
        for bucket in self._buckets:
            for leaf, place in bucket.places:
                place.begin(leaf)
            bucket.waiting = -1 if arrivals is None else arrivals * len(bucket.places)  # -1 never reaches 0
            bucket.work = bucket.narrow = None

    def add_(self, leaf: Tensor, gradient: Tensor) -> None:
        self._places[leaf].add_(leaf, gradient)

    def finish(self) -> None:
        for bucket in self._buckets[self._started :]:  # unused on this rank, maybe used on another
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

    def scale_(self, factor: float) -> None:
        for bucket in self._buckets:
            bucket.flat.mul_(factor)

    def observe(self, observer: Observer | None) -> None:
        self._observer = observer

    def _arrived(self, bucket: _Bucket, leaf: Tensor) -> None:
        gradient, place = leaf.grad, self._places[leaf]
        if gradient is not None and gradient is not place.view:  # first of the step, or narrower
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
            bucket.narrow = NarrowSum(bucket.flat, self._axis, self._wire, self._tp)


class JoinedGradients(Gradients):
    """Gradients of several groups of parameters, each summed over its own ranks."""

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


def _arrived(buckets: "weakref.ref[GradientBuckets]", bucket: "weakref.ref[_Bucket]", leaf: Tensor) -> None:
    owner, part = buckets(), bucket()
    if owner is not None and part is not None:
        owner._arrived(part, leaf)


def in_buckets(items: Sequence[Item], nbytes: Callable[[Item], int], limit: int = BUCKET_BYTES) -> Iterator[list[Item]]:
    """Group parameters into buckets of at least `limit` bytes, the model's last first, as the backward pass goes."""
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


def squared_norm(tensors: Sequence[Tensor], at_once: int = NORM_ELEMENTS) -> Tensor:
    """Sum the squares of all elements in fp64, `at_once` neighbours at a time in their own dtype.

    torch sums the squares of a tensor in the tensor's dtype, which loses three digits for fp32 and millions of
    elements. Short runs lose none that matter, at a third of the cost of fp64 throughout.
    """
    wide = torch.promote_types(tensors[0].dtype, torch.float32)
    norms, rest = [], []
    for tensor in tensors:
        flat = tensor.flatten()
        in_runs = flat.numel() // at_once * at_once
        if in_runs:
            norms.append(torch.linalg.vector_norm(flat[:in_runs].view(-1, at_once), dim=1, dtype=wide))
        if in_runs < flat.numel() or not in_runs:
            rest.append(flat[in_runs:])
    if rest:
        norms.append(torch.stack(foreach_norm(rest, dtype=wide)))
    return torch.cat(norms).double().square().sum()
