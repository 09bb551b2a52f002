"""Weights of a rank: tensors that its layers compute with, master weights that are updated, and initial values."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.models.construct import ConstructedModel, drawn
from threefold.models.sharding import Constant, Drawn, ModelPlan, Normal
from threefold.parallel.gradients import Gradients
from threefold.parallel.parameter import like, local, offset
from threefold.random.rng import fill_normal_, stream_key
from threefold.torch_private.tensors import foreach_copy_


@dataclass(frozen=True)
class Weight:
    """A parameter of a rank.

    Attributes:
        name: name in the whole model.
        parameter: parameter as the stage stores it.
        leaf: local shard that the model computes with.
        master: weight that is updated, of the leaf's shape; the leaf itself if its dtype is wide enough.
    """

    name: str
    parameter: Tensor
    leaf: Tensor
    master: Tensor

    @property
    def is_trained(self) -> bool:
        """Whether it has a gradient; a frozen one keeps its value."""
        return self.leaf.requires_grad

    def stored(self, shard: Tensor) -> Tensor:
        """Wrap a tensor of the local shape as a global one, the way the parameter is stored."""
        return like(self.parameter, shard)


def make_weights(parameters: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> list[Weight]:
    """Make the weights of parameters, given with their names in the whole model; masters in `dtype`, not yet set."""
    weights = []
    for name, parameter in parameters:
        leaf = local(parameter)
        master = leaf if leaf.dtype == dtype else leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)
        weights.append(Weight(name, parameter, leaf, master))
    return weights


def initialise_(
    weights: Sequence[Weight],
    plan: ModelPlan,
    seed: int,
    gradients: Gradients,
    constructed: ConstructedModel | None = None,
) -> None:
    """Set masters, at their full width, and model to the initial weights of `seed`."""
    for weight in weights:
        draw_(weight.master, weight.parameter, weight.name, plan, seed, constructed)
    publish_(weights, gradients)


@torch.no_grad()
def publish_(weights: Sequence[Weight], gradients: Gradients) -> None:
    """Round the masters into the tensors that the model computes with."""
    gradients.weights_changed()
    narrow = [weight for weight in weights if weight.master is not weight.leaf]
    if narrow:
        foreach_copy_([weight.leaf.detach() for weight in narrow], [weight.master for weight in narrow])


@torch.no_grad()
def draw_(
    into: Tensor,
    parameter: Tensor,
    name: str,
    plan: ModelPlan,
    seed: int,
    constructed: ConstructedModel | None = None,
) -> Tensor:
    """Fill `into`, of the local shape of `parameter`, with this rank's part of the initial values.

    `into` may be wider than the parameter (a master copy); `constructed` has the values that the constructor draws.
    """
    initial, starts = plan.initial(name), offset(parameter)
    if isinstance(initial, Normal):
        return fill_normal_(into, initial.std, stream_key("weights", seed, name), tuple(parameter.shape), starts)
    if isinstance(initial, Constant):
        return into.fill_(initial.value)
    if isinstance(initial, Drawn):
        whole = drawn(initial.fill, name, tuple(parameter.shape), seed)
    else:
        assert constructed is not None  # `apply_parallelism` passes it
        whole = constructed.parameter(name)
    return into.copy_(whole[tuple(slice(start, start + size) for start, size in zip(starts, into.shape, strict=True))])
