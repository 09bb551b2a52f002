"""Sums of gradients that are more than an all-reduce: in the order of an exact run, and in 16 bits (compression)."""

import torch
from torch import Tensor

from threefold.comm.axis import Axis
from threefold.ops.exact_products import tree_sum

COMPRESSIONS = ("none", "fp16", "bf16")
"""Names of the dtypes that gradients may be rounded to while they are summed over the replicas."""
_TOP = 15  # sums stay below 2^15; fp16 overflows at 2^16
_FARTHEST = 126  # 2^126 and 2^-126 are both normal numbers in fp32


class LeafOrder:
    """Order of an exact run's sums over samples: which leaf is running, and the groups that leaves belong to.

    A leaf is one sample or several (`ops.exact.Grain`), whose forward and backward pass are the same in every layout.
    Context ranks add up their parts of a leaf's gradient first. The gradients of a group's leaves are added up in
    order, and those of groups, a power of two on each rank, in a balanced binary tree. The runner of the micro-batches
    sets `running`, the number of the leaf that runs.
    """

    def __init__(self, leaves: int, groups: int, context: Axis | None = None) -> None:
        self.groups, self._leaves, self._context = groups, leaves, context
        self.running = 0

    @property
    def group(self) -> int:
        """Number of the running leaf's group."""
        return self.running * self.groups // self._leaves

    def over_context(self, gradient: Tensor) -> Tensor:
        """Sum a leaf's gradient over the context ranks in a tree; each keeps a share of the sum, and zeros elsewhere.

        Collective over these ranks. The sum over replicas, which include the context ranks, puts the shares together.
        """
        axis = self._context
        if axis is None or axis.size == 1:
            return gradient
        flat = gradient.reshape(-1)
        share = -(-len(flat) // axis.size)
        padded = flat.new_zeros(share * axis.size)
        padded[: len(flat)] = flat
        own = axis.reduce_scatter(padded, 0)
        padded.zero_()[share * axis.index : share * (axis.index + 1)] = own
        return padded[: len(flat)].view(gradient.shape)


class GroupTree:
    """Sum of one parameter's gradients over the leaves of a step; holds up to log₂(groups) + 1 tensors at once."""

    def __init__(self, order: LeafOrder) -> None:
        self._order = order
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self._chain: Tensor | None = None
        self._pushed = 0
        self._sums: list[Tensor | None] = []  # of ever fewer groups, as in a binary counter

    def add_(self, gradient: Tensor, dtype: torch.dtype) -> None:
        """Add a gradient of the running leaf, which may be kept and changed; `dtype` is that of the sum."""
        group = self._order.group
        if group < self._pushed:
            raise RuntimeError(f"a gradient of group {group} of samples came after group {self._pushed} had begun")
        while self._pushed < group:
            self._push()
        gradient = self._order.over_context(gradient.to_dense() if gradient.is_sparse else gradient)
        if self._chain is None:
            self._chain = gradient.to(dtype)
        else:
            self._chain.add_(gradient)

    def total(self) -> Tensor | None:
        """Return the sum over this rank's samples; None if there is no gradient."""
        while self._pushed < self._order.groups:
            self._push()
        return self._sums[-1]

    def _push(self) -> None:
        self._pushed += 1
        carried, self._chain = self._chain, None
        for _ in range((self._pushed & -self._pushed).bit_length() - 1):  # the zeros that the number ends with
            left = self._sums.pop()
            if left is not None:
                carried = left if carried is None else left.add_(carried)
        self._sums.append(carried)


class SenderTrees:
    """Sums of one parameter's gradients over the leaves of `senders` neighboring ranks, which run theirs at once."""

    def __init__(self, order: LeafOrder, senders: int = 1) -> None:
        self._trees = [GroupTree(order) for _ in range(senders)]

    def clear(self) -> None:
        for tree in self._trees:
            tree.clear()

    def add_(self, gradient: Tensor, dtype: torch.dtype) -> None:
        """Add a gradient as `GroupTree.add_`, or one of each sender's running leaf: [senders, …]."""
        parts = (gradient,) if len(self._trees) == 1 else gradient.unbind()
        for tree, part in zip(self._trees, parts, strict=True):
            tree.add_(part, dtype)

    def total(self) -> Tensor | None:
        totals = [total for tree in self._trees if (total := tree.total()) is not None]
        return tree_sum(totals) if totals else None


class NarrowSum:
    """Asynchronous sum of a bucket (fp32 [n]) over an axis in fp16 or bf16; the sum is bit-equal on all ranks.

    An element that is not finite on one rank is not finite on any rank afterwards. `tp` are the tensor ranks, which sum
    copies or shards of the same parameters.
    """

    def __init__(self, flat: Tensor, axis: Axis, dtype: torch.dtype, tp: Axis | None = None) -> None:
        self._flat, self._axis = flat, axis
        self._narrow, self._exponent = narrowed(flat, axis, dtype, tp)
        self._work = axis.start_all_reduce_(self._narrow)

    def finish(self) -> None:
        """Wait for the sum, and copy it into the bucket."""
        if self._work is not None:
            self._axis.finish_all_reduce(self._work)
        widen_(self._flat, self._narrow, self._exponent)


def narrowed(flat: Tensor, axis: Axis, dtype: torch.dtype, tp: Axis | None = None) -> tuple[Tensor, Tensor | None]:
    """Return a 16-bit copy whose sum over the axis cannot overflow, and the exponent that scaled it (None for bf16).

    Collective over the axis, and over `tp`.
    """
    exponent = _exponent(flat, axis, tp) if dtype == torch.float16 else None
    return (flat if exponent is None else torch.ldexp(flat, exponent)).to(dtype), exponent


def widen_(into: Tensor, narrow: Tensor, exponent: Tensor | None) -> None:
    """Write a sum of tensors from `narrowed` into a wide tensor, unscaled."""
    into.copy_(narrow)
    if exponent is not None:
        torch.ldexp(into, -exponent, out=into)


def _exponent(flat: Tensor, axis: Axis, tp: Axis | None) -> Tensor:
    """Return the exponent (int32) of the power of two that scales ranks · largest element to just below 2^15."""
    largest = axis.all_reduce_max_(torch.linalg.vector_norm(flat, torch.inf))
    if tp is not None:
        tp.all_reduce_max_(largest)
    bound = largest * axis.size
    exponent = _TOP - torch.frexp(bound).exponent
    # No scaling if the largest element is zero or not finite.
    return torch.where(bound.isfinite() & (bound > 0), exponent, 0).clamp(-_FARTHEST, _FARTHEST)
