"""Models given as a list of layers, and partitions of layers into stages; exported as `threefold.pipeline`."""

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy

import torch
from torch import nn

from threefold.errors import UserError
from threefold.models.plan import Plan, tie_
from threefold.models.sharding import ModelPlan, Replicated, Split
from threefold.parallel.pipeline.partition import (
    layers_by_rank,
    partition_by_class,
    partition_by_cost,
    partition_uniform,
    partition_uniform_chunks,
)

__all__ = [
    "PipelineLayers",
    "layers_by_rank",
    "partition_by_class",
    "partition_by_cost",
    "partition_uniform",
    "partition_uniform_chunks",
]


class PipelineLayers:
    """Model given as a list of layers, each applied to the output of the one before; it includes its plan.

    Pass it to `parallelize` as the model, without a plan. Layers are named `0`, `1`, … in order.

    Args:
        layers: factories, such as `lambda: nn.Linear(4, 8)` or a class without arguments; or modules, whose values are
            used as they are and must therefore be equal on every rank.
        tied: pairs (user, owner) of tied parameters, such as `("4.weight", "0.weight")`, on any stages.
        shard: module pattern → rule by which the tensor axis shards the modules; all others are replicated.

    Raises:
        UserError: there is no layer, a layer is neither a module nor a factory, or `tied` names an unknown parameter.

    Example:
        >>> layers = [lambda: nn.Embedding(50, 16), *[Block] * 4, lambda: nn.Linear(16, 50, bias=False)]
        >>> pipeline = threefold.PipelineLayers(layers, tied=[("5.weight", "0.weight")])
        >>> model = threefold.parallelize(pipeline, mesh=mesh, micro_batches=4)
    """

    def __init__(
        self,
        layers: Sequence[nn.Module | Callable[[], nn.Module]],
        *,
        tied: Sequence[tuple[str, str]] = (),
        shard: Mapping[str, Split] | None = None,
    ) -> None:
        if not layers:
            raise UserError("layers is empty; give the model's layers in order.")
        for number, layer in enumerate(layers):
            if not callable(layer):
                raise UserError(f"layers[{number}] is {layer!r} but must be a module or a function that makes one.")
        self.layers, self.tied, self.shard = tuple(layers), tuple(tied), dict(shard or {})

    def __call__(self) -> nn.Sequential:
        """Make the whole model, on torch's default device."""
        model = nn.Sequential(*(self._make(number, layer) for number, layer in enumerate(self.layers)))
        tie_(model, dict(self.tied))
        return model

    def build(self, model: nn.Module) -> ModelPlan:
        """Return the complete plan of the model."""
        names = [str(number) for number in range(len(self.layers))]
        return Plan(layers=names, shard={"**": Replicated(), **self.shard}, tied=self.tied).build(model)

    def _make(self, number: int, layer: nn.Module | Callable[[], nn.Module]) -> nn.Module:
        made = deepcopy(layer).to(torch.get_default_device()) if isinstance(layer, nn.Module) else layer()
        if not isinstance(made, nn.Module):
            raise UserError(f"layers[{number}] makes a {type(made).__name__} but must make a module; return one.")
        return made
