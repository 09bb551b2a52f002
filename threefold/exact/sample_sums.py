"""Gradients of exact runs, added up over samples in an order that no layout decides."""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from threefold.comm.axis import Axis
from threefold.exact.products import tree_sum
from threefold.parallel.gradients import Place
from threefold.parallel.leaf import local, stored
from threefold.parallel.zero import ShardedGradients, ZeroSharding, units_of, when_accumulated
from threefold.torch_private import distributed
from threefold.torch_private.tensors import foreach_copy_


class SampleOrder:
    """Order of an exact run's sums over samples: the running sample group, and the part of the batch that it is in.

    A sample group is one sample or several (`exact.grain.Grain`), whose forward and backward pass are the same in every
    layout. Context ranks first add up their summands of a group's gradient. The gradients of the groups of a part of
    the batch are added up in order, and those of the parts, a power of two on each rank, in a balanced binary tree. The
    runner of the micro-batches sets `running`, the number of the sample group that runs.
    """

    def __init__(self, sample_groups: int, parts: int, context: Axis | None = None) -> None:
        self.parts, self._sample_groups, self._context = parts, sample_groups, context
        self.running = 0

    @property
    def part(self) -> int:
        """Number of the part of the batch to which the running sample group belongs."""
        return self.running * self.parts // self._sample_groups

    def over_context(self, gradient: Tensor) -> Tensor:
        """Sum a sample group's gradient over the context ranks in a tree; each keeps a part of it, and zeros elsewhere.

        Collective over these ranks. The sum over replicas, which include the context ranks, puts the parts together.
        """
        axis = self._context
        if axis is None or axis.size == 1:
            return gradient
        flat = gradient.reshape(-1)
        length = -(-len(flat) // axis.size)
        padded = flat.new_zeros(length * axis.size)
        padded[: len(flat)] = flat
        summed = axis.reduce_scatter(padded, 0)
        padded.zero_()[length * axis.index : length * (axis.index + 1)] = summed
        return padded[: len(flat)].view(gradient.shape)


class BatchTree:
    """Sum of one parameter's gradients over the samples of a step; holds up to log₂(parts) + 1 tensors at once."""

    def __init__(self, order: SampleOrder) -> None:
        self._order = order
        self.clear()

    def clear(self) -> None:
        """Begin a step."""
        self._chain: Tensor | None = None
        self._pushed = 0
        self._sums: list[Tensor | None] = []  # of ever fewer parts, as in a binary counter

    def add_(self, gradient: Tensor, dtype: torch.dtype) -> None:
        """Add a gradient of the running sample group, which may be kept and changed; `dtype` is that of the sum."""
        part = self._order.part
        if part < self._pushed:
            raise RuntimeError(f"a gradient of part {part} of the batch came after part {self._pushed} had begun")
        while self._pushed < part:
            self._push()
        gradient = self._order.over_context(gradient.to_dense() if gradient.is_sparse else gradient)
        if self._chain is None:
            self._chain = gradient.to(dtype)
        else:
            self._chain.add_(gradient)

    def total(self) -> Tensor | None:
        """Return the sum over this rank's samples; None if there is no gradient."""
        while self._pushed < self._order.parts:
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
    """Sums of one parameter's gradients over the samples of `senders` neighboring ranks, which run theirs at once."""

    def __init__(self, order: SampleOrder, senders: int = 1) -> None:
        self._trees = [BatchTree(order) for _ in range(senders)]

    def clear(self) -> None:
        for tree in self._trees:
            tree.clear()

    def add_(self, gradient: Tensor, dtype: torch.dtype) -> None:
        """Add a gradient as `BatchTree.add_`, or one of each sender's running sample group: [senders, …]."""
        parts = (gradient,) if len(self._trees) == 1 else gradient.unbind()
        for tree, part in zip(self._trees, parts, strict=True):
            tree.add_(part, dtype)

    def total(self) -> Tensor | None:
        totals = [total for tree in self._trees if (total := tree.total()) is not None]
        return tree_sum(totals) if totals else None


class TreePlace(Place):
    """Place of a leaf whose gradients are summed in the order of an exact run.

    Sample groups of `senders` ranks may run at once: then `add_` gets the gradients of all, [senders, …].
    """

    adds_in_place = False

    def __init__(self, flat: Tensor, leaf: Tensor, order: SampleOrder, senders: int) -> None:
        super().__init__(flat, leaf)
        self._tree = SenderTrees(order, senders)

    def begin(self, leaf: Tensor) -> None:
        super().begin(leaf)
        self._tree.clear()

    def add_(self, leaf: Tensor, gradient: Tensor) -> None:
        self._tree.add_(gradient, self.view.dtype)

    def finish(self, leaf: Tensor) -> None:
        total = self._tree.total()
        self._tree.clear()
        if total is not None:
            torch.add(total, 0.0, out=self.view)  # −0 + 0 is +0: whether a zero was added does not show
            self._hold(leaf)
        super().finish(leaf)


class ExactShardedGradients(ShardedGradients):
    """Sharded gradients of an exact run, with the bits of gradients that every replica holds whole.

    FSDP would add up the samples of a rank in a chain, or sum each of them over the replicas first. Here, the whole
    gradients of a rank's samples are added up in the order of the run, and their totals are reduce-scattered when all
    samples have run, over neighboring replicas first. So every ZeRO stage keeps whole gradients to the end of the step,
    as many as log₂(parts of the batch) + 1 of each parameter; stages 2 and 3 save less memory than in other runs.

    Args:
        senders: ranks that share the experts, whose samples reach an expert at once.
        copies: leaves of tied weights, each with the leaf of another use on this rank. FSDP shards every use as a
            separate parameter, whose values follow those of the first.
    """

    def __init__(
        self,
        stages: Sequence[nn.Module],
        zero: ZeroSharding,
        order: SampleOrder,
        senders: int = 1,
        copies: Sequence[tuple[Tensor, Tensor]] = (),
    ) -> None:
        super().__init__(stages, zero)
        self._copies = copies
        self._trees = {leaf: SenderTrees(order, senders if leaf in self._experts else 1) for leaf in self._parameters}
        self._reduced: list[list[Tensor]] = []  # leaves of each FSDP module, which are reduce-scattered together
        for stage in stages:
            for unit, places in units_of(stage).items():
                held = {name: local(stored(getattr(owner, attribute))) for owner, attribute, name in places}
                trained = {name: leaf for name, leaf in held.items() if leaf in self._trees}
                if trained:
                    self._reduced.append(list(trained.values()))
                    trees = {name: (self._trees[leaf], leaf.dtype) for name, leaf in trained.items()}
                    when_accumulated(unit, places, partial(_add_to_tree, trees))

    def begin(self, arrivals: int | None) -> None:
        super().begin(arrivals)
        for root in self._roots:
            root.set_requires_gradient_sync(False)
        for tree in self._trees.values():
            tree.clear()

    def add_(self, leaf: Tensor, gradient: Tensor) -> None:
        self._trees[leaf].add_(gradient, leaf.dtype)

    def finish(self) -> None:
        for root in self._roots:
            root.set_is_last_backward(True)
            root.set_reshard_after_backward(True)
            distributed.finish_backward(root)  # frees gathered weights; there are no gradients that FSDP knows of
        for leaves in self._reduced:
            self._reduce_scatter(leaves)
        self._sum_over_replicas()

    def weights_changed(self) -> None:
        if self._copies:
            with torch.no_grad():
                foreach_copy_([copy for _, copy in self._copies], [leaf for leaf, _ in self._copies])
        super().weights_changed()

    def _reduce_scatter(self, leaves: Sequence[Tensor]) -> None:
        """Sum the whole gradients of `leaves` over the shards' ranks; keep this rank's shards."""
        axis = self._zero.expert_shards if leaves[0] in self._experts else self._zero.shards
        cuts, rooms = [], []
        for parameter in (self._parameters[leaf] for leaf in leaves):
            assert isinstance(parameter, DTensor)  # what `fully_shard` made it
            (shard,) = parameter.placements
            assert isinstance(shard, Shard)
            longest = -(-parameter.shape[shard.dim] // axis.size)
            cuts.append(shard.dim)
            rooms.append(parameter.numel() // max(1, parameter.shape[shard.dim]) * longest)
        buffer = leaves[0].new_zeros(axis.size, sum(rooms), requires_grad=False)
        for leaf, dim, columns in zip(leaves, cuts, buffer.split(rooms, dim=1), strict=True):
            tree = self._trees[leaf]
            total = tree.total()
            tree.clear()
            if total is not None:
                for row, chunk in zip(columns, total.chunk(axis.size, dim), strict=False):  # the last may be missing
                    row[: chunk.numel()].view(chunk.shape).copy_(chunk)
        buffer.add_(0.0)  # as without ZeRO: −0 + 0 is +0
        if self._observer is not None and axis.size > 1:
            self._observer(buffer)
        (summed,) = axis.reduce_scatter(buffer, 0)
        for leaf, part in zip(leaves, summed.split(rooms), strict=True):
            self._gradients[leaf] = part[: leaf.numel()].view(leaf.shape)


def _add_to_tree(trees: Mapping[str, tuple[SenderTrees, torch.dtype]], name: str, parameter: Tensor) -> None:
    gradient, parameter.grad = parameter.grad, None
    if gradient is not None:
        tree, dtype = trees[name]
        tree.add_(gradient, dtype)
