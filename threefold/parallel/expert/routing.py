"""Routing to experts where a sequence is spread over ranks: capacities and the load balancing loss need all of it."""

from torch import Tensor

from threefold.models.layers.router import Routing
from threefold.parallel.context.attention import whole_sequence
from threefold.parallel.context.sequence import Region


class ParallelRouting(Routing):
    """`Routing` of this rank's positions, each choice as it would be with the whole sequence at hand.

    Args:
        routing: of the whole sequence.
        region: how the sequence is spread over ranks.
    """

    def __init__(self, routing: Routing, region: Region) -> None:
        super().__init__(
            routing.experts,
            routing.per_token,
            routing.capacity_factor,
            routing.normalize,
            routing.aux_loss,
            routing.z_loss,
        )
        self._region = region

    def _whole(self, own: Tensor) -> Tensor:
        return whole_sequence(own, self._region)

    def _own(self, whole: Tensor) -> Tensor:
        cut = self._region.cut
        return whole if cut.shares == 1 else whole[:, cut.indices(whole.shape[1] // cut.shares, whole.device)]

    def _sum_over_shares(self, counts: Tensor) -> Tensor:
        if self._region.sequence_parallel:
            counts = self._region.tp.all_reduce(counts)
        return self._region.cp.all_reduce(counts)
