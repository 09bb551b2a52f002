"""The head of a model that learns from preferences, which computes the loss of pairs.

Each sample has a chosen and a rejected document. Their log-probabilities are sums over tokens, which the ranks of
context parallelism add up before the sigmoid; each of these ranks has the gradient of its own summands.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.comm.axis import Axis
from threefold.comm.differentiable import reduce_from
from threefold.config import Config
from threefold.config.preference import PreferenceConfig
from threefold.models.layers.decoder import NOTHING, Head, SampleInfo, TermsHead
from threefold.models.sharding import ModelPlan
from threefold.parallel.context import ShardingContext
from threefold.parallel.shard_modules import Extended

TERMS: Final[Mapping[str, float]] = {
    "preference": 1.0,
    "accuracy": 0.0,
    "margin": 0.0,
    "chosen": 0.0,
    "rejected": 0.0,
}
"""Means over pairs → weight in the loss: its loss, whether the chosen answer has the larger reward, the difference of
the rewards, and the rewards. A reward is `beta` times the log-probability less that of the reference."""


def preferring(
    make: Callable[[], nn.Module], plan: ModelPlan, config: Config
) -> tuple[Callable[[], nn.Module], ModelPlan]:
    """Return a function that makes the model with a head for preferences, and the plan of that model."""
    return partial(_with_head, make, config.preference), replace(plan, terms=TERMS, of_pairs=True)


def _with_head(make: Callable[[], Any], settings: PreferenceConfig) -> Any:
    model = make()
    model.head = PreferenceHead(model.head, settings)
    return model


class PreferenceHead(TermsHead, Extended):
    """Head with the modules of another, under their names, that computes the summed loss of pairs.

    Without facts about pairs (`SampleInfo.pairs`), it computes what that head does.
    """

    def __init__(self, head: Head, settings: PreferenceConfig) -> None:
        nn.Module.__init__(self)
        self.norm, self.scale, self.output, self.loss = head.norm, head.scale, head.output, head.loss
        self.settings, self.cp = settings, None
        self._terms: list[Tensor] = []
        self._rows: list[Tensor] = []

    cp: Axis | None

    def extend_replacement(self, made: nn.Module, context: ShardingContext) -> None:
        assert isinstance(made, PreferenceHead)
        made.cp = context.cp

    def forward(self, x: Tensor, labels: Tensor | None = None, samples: SampleInfo = NOTHING) -> Tensor:
        """[B, S, H] → logits [B, S, V], or with `labels` [B, S] the sum of the losses of the pairs."""
        if labels is None or samples.pairs is None or samples.sides is None:
            return super().forward(x, labels)
        x = self.norm(x)
        x = x if self.scale == 1 else x * self.scale
        return self._of_pairs(self.loss(x, self.output, labels), samples.sides, samples.pairs)

    # Compiled code would be specialized to the number of kept terms.
    @torch.compiler.disable
    def _of_pairs(self, losses: Tensor, sides: Tensor, pairs: Tensor) -> Tensor:
        """Return the sum of the losses of pairs from those of tokens [B, S]; zero on all but one rank of the context.

        `sides` and `pairs` are those of `SampleInfo`. Each rank has the gradient of its positions.
        """
        of_side = [losses.masked_fill(sides != side, 0).sum(1) for side in (0, 1)]
        logps = -torch.stack(of_side, 1).double()
        if self.cp is not None:
            logps = reduce_from(logps, self.cp)
        row, counts, lengths, references = pairs[:, :1], pairs[:, 1], pairs[:, 2:4], pairs[:, 4:]
        if not references.shape[1]:  # this pass finds them
            self._rows.append(torch.cat((row, logps.detach()), 1))
            references = torch.zeros_like(logps)
        ratios = logps - references
        rewards = self.settings.beta * ratios
        margins = rewards[:, 0] - rewards[:, 1]
        of_pairs = self._losses(margins, ratios / lengths.clamp(min=1)).masked_fill(counts == 0, 0)
        is_here = self.cp is None or self.cp.is_first
        found = torch.stack((of_pairs, (margins > 0).double(), margins, *rewards.unbind(1)), 1).detach()
        self._terms.append((found * counts.unsqueeze(1)).sum(0) * is_here)
        total = of_pairs.sum()
        return (total if is_here else total - total.detach()).to(losses.dtype)

    def _losses(self, margins: Tensor, means: Tensor) -> Tensor:
        """Return the loss of each pair, from differences of rewards [B] and mean log-ratios of tokens [B, 2]."""
        settings = self.settings
        if settings.loss == "ipo":
            return (means[:, 0] - means[:, 1] - 1 / (2 * settings.beta)) ** 2
        smoothing = settings.label_smoothing
        return -(1 - smoothing) * F.logsigmoid(margins) - smoothing * F.logsigmoid(-margins)

    def take_terms(self) -> list[Tensor]:
        terms, self._terms = self._terms, []
        return terms

    def take_rows(self) -> list[Tensor]:
        """Return the log-probabilities that passes without references computed: fp64 [B, 3] each.

        The columns are the row in the global batch, the chosen and the rejected document.
        """
        rows, self._rows = self._rows, []
        return rows
