"""Expert biases that follow the load instead of a loss: "Auxiliary-loss-free load balancing", arXiv 2408.15664.

After an update, the bias of an expert grows by the rate if fewer tokens of the global batch chose the expert than the
mean, and shrinks if more did. The counts are whole numbers, and each token counts once, on the rank that routes it in a
backward pass; so biases have the same bits in every layout. Neither an evaluation nor a recomputation counts.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from threefold.comm.mesh import Mesh
from threefold.models.layers.experts import Routing
from threefold.models.sharding import ModelPlan, TokenRouting
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.running_statistics import stored_buffers


class ExpertBiases:
    """Biases of a rank's experts, whose counts are summed over the world for all layers at once.

    Frozen ones stay. Methods are to be called on all ranks; `sum_counts` is collective over the world.

    Attributes:
        counts: tokens of the last step's global batch that chose each expert, int64 [layers, experts], then those of
            further mixtures in the last layer.

    Args:
        shares_sequence: whether each tensor rank routes a share of the sequence, instead of all routing the same.
    """

    def __init__(self, stages: Sequence[Stage], plan: ModelPlan, mesh: Mesh, shares_sequence: bool) -> None:
        self._mesh, self._counts_here = mesh, shares_sequence or mesh.tp.is_first
        rules = (rule for rule in plan.split.values() if isinstance(rule, TokenRouting) and rule.bias_rate)
        self._rule = next(rules, TokenRouting())
        held = {name: stage.get_submodule(name) for stage in stages for name in stage.layer_names}
        layers, last = len(plan.layers), f"{plan.layers[-1]}."
        in_last = sum(isinstance(rule, TokenRouting) and name.startswith(last) for name, rule in plan.split.items())
        self._rows = layers + max(0, in_last - 1)
        kept = {buffer for name, buffer in stored_buffers(stages).items() if name in plan.frozen}
        self._routings: dict[int, Routing] = {}
        for number, name in enumerate(plan.layers):
            modules = held[name].modules() if name in held else ()
            found = [each for each in modules if isinstance(each, Routing) and each.bias_rate and each.bias not in kept]
            self._routings |= {layers + place - 1 if place else number: each for place, each in enumerate(found)}
        self.counts: Tensor | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no layer of the whole model has biases to update."""
        return not self._rule.bias_rate

    def begin(self) -> None:
        """Begin the backward passes of a step."""
        for routing in self._routings.values():
            routing.take_counts()

    def sum_counts(self) -> None:
        """Sum the counts of the step's backward passes over the world."""
        self.counts = torch.zeros(self._rows, self._rule.experts, dtype=torch.int64, device=self._mesh.device)
        for number, routing in self._routings.items():
            if (counts := routing.take_counts()) is not None and self._counts_here:
                self.counts[number] = counts
        self._mesh.world.all_reduce_(self.counts)

    @torch.no_grad()
    def update(self) -> None:
        """Move each bias by the rate, after the weights were updated."""
        assert self.counts is not None
        for number, routing in self._routings.items():
            assert routing.bias is not None
            counts = self.counts[number]
            below = (counts.sum() - counts * len(counts)).sign()  # of the mean
            routing.bias.add_(below.to(routing.bias.dtype), alpha=routing.bias_rate)
