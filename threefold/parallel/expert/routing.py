"""Routing to experts where a sequence is spread over ranks: capacities and the load balancing loss need all of it."""

from torch import Tensor

from threefold.comm.compiled import all_reduce
from threefold.models.layers.router import Routing
from threefold.parallel.context.attention import whole_sequence
from threefold.parallel.context.sequence import ShardingContext


class ParallelRouting(Routing):
    """`Routing` of this rank's positions, each choice as it would be with the whole sequence at hand.

    Args:
        routing: of the whole sequence.
        context: how the sequence is spread over ranks.
    """

    def __init__(self, routing: Routing, context: ShardingContext) -> None:
        super().__init__(
            routing.experts,
            routing.per_token,
            routing.capacity_factor,
            routing.normalize,
            routing.aux_loss,
            routing.z_loss,
        )
        self._context = context

    def _whole(self, own: Tensor) -> Tensor:
        return whole_sequence(own, self._context)

    def _own(self, whole: Tensor) -> Tensor:
        cut = self._context.cut
        return whole if cut.shares == 1 else whole[:, cut.indices(whole.shape[1] // cut.shares, whole.device)]

    def _sum_over_shares(self, counts: Tensor) -> Tensor:
        if self._context.sequence_parallel:
            counts = all_reduce(counts, self._context.tp)
        return all_reduce(counts, self._context.cp)
