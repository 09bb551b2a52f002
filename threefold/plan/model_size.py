"""Parameter counts of a model, and the memory of each rank's shards: counted on the meta device, without processes."""

from collections import Counter
from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import torch
from torch import nn

from threefold.comm.layout import Coordinates
from threefold.config import Config, ModelConfig
from threefold.dtypes import DTYPES
from threefold.models.registry import make_model, model_plan
from threefold.models.sharding import ModelPlan, OverExperts, Split
from threefold.parallel.pipeline.stage_map import stage_map
from threefold.parallel.shard_shapes import Place, local_shape, place_of
from threefold.train.optimizer import is_hidden_matrix
from threefold.train.optimizers.base import UpdateRule
from threefold.train.optimizers.own import update_rule

_STATE_ALONE, _WEIGHTS_TOO = 1, 3  # values of parallel.zero


class WeightShape(NamedTuple):
    """A parameter of the whole model.

    Attributes:
        name: the one name that it has; a tied weight's is that of its first use.
        split: how its module is cut.
        shape: of the whole weight.
    """

    name: str
    split: Split
    shape: tuple[int, ...]

    def held(self, place: Place) -> int:
        """How many of its elements the rank at `place` holds."""
        return prod(self.held_shape(place))

    def held_shape(self, place: Place) -> tuple[int, ...]:
        """The shape of the shard that the rank at `place` holds."""
        return local_shape(self.shape, self.split, self.own_name, place)

    @property
    def own_name(self) -> str:
        """Its name in its module."""
        return self.name.rpartition(".")[2]


class StageSize(NamedTuple):
    """A pipeline stage.

    Attributes:
        pp_rank: the coordinate on the pp axis of the rank that has it.
        layers: the names of its layers.
        parameters: of these; a tied weight is counted once, at the first stage that uses it.
    """

    pp_rank: int
    layers: tuple[str, ...]
    parameters: int


class RankSize(NamedTuple):
    """The memory of a rank.

    Attributes:
        parameters: those that it updates.
        weights: bytes of them, and of the copies that it computes with.
        gradients: bytes.
        optimizer: bytes of the optimizer state.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


class ModelSize:
    """A model under a layout.

    Args:
        config: resolved.

    Attributes:
        parameters: of the whole model, tied weights counted once.
        active: parameters active per token: of the experts, as many as each token is sent to.

    Raises:
        UserError: the layers cannot be partitioned into the stages as the config says.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self._plan = plan = model_plan(config.model, config.data.sequence_length)
        self._rule: type[UpdateRule] = update_rule(config.optimizer)
        self._map = stage_map(plan, config)
        self._layers = weights_by_layer(config.model, plan)
        self.parameters = _count(self._whole())
        experts = _count(weight for weight in self._whole() if isinstance(weight.split, OverExperts))
        idle = config.model.num_experts - config.model.experts_per_token
        self.active = self.parameters - (experts // config.model.num_experts * idle if experts else 0)

    def stages(self) -> list[StageSize]:
        """The stages of the pipeline, in order."""
        found, counted = [], set[WeightShape]()
        for number, pp_rank in enumerate(self._map.ranks):
            names = self._names(number)
            new = {weight for name in names for weight in self._layers[name]} - counted
            counted |= new
            found.append(StageSize(pp_rank, names, _count(new)))
        return found

    def rank(self, pp_rank: int, place: Place) -> RankSize:
        """The peak memory of a rank in a step, without activations.

        The formulas are those of docs/parallel/data.md. Gathered and scattered buffers are not among it.

        Args:
            pp_rank: its coordinate on the pp axis.
            place: its coordinates on the others.
        """
        precision, zero = self._config.precision, self._config.parallel.zero
        dtype = DTYPES[precision.dtype]
        narrow = dtype.itemsize
        wide = torch.promote_types(dtype, torch.float32).itemsize if precision.master_weights else narrow
        held = sum(weight.held(place) for weight in self._of_rank(pp_rank))
        states = sum(weight.held(place) * self._states(weight) for weight in self._of_rank(pp_rank)) * wide
        if not zero:
            copies = held * narrow if narrow < wide else 0
            return RankSize(held, held * wide + copies, held * wide, states)
        whole = sum(weight.held(place.unshared) for weight in self._of_rank(pp_rank))
        largest = max(
            sum(weight.held(place.unshared) for weight in group) for group in self._gathered_together(pp_rank)
        )
        gathered = (largest if zero == _WEIGHTS_TOO else whole) * narrow
        if zero == _STATE_ALONE:
            gradients = max(held * wide, whole * wide + (largest * narrow if narrow < wide else 0))
        else:
            gradients = held * wide + largest * narrow
        return RankSize(held, held * wide + gathered, gradients, states)

    def largest_rank(self, pp_rank: int) -> RankSize:
        """Of the ranks at a place of the pp axis, the one that holds the most: the first, as none has longer parts."""
        return self.rank(pp_rank, place_of(self._config.parallel, Coordinates(0, pp_rank, 0, 0)))

    def _states(self, weight: WeightShape) -> int:
        """Tensors of its shape that the optimizer keeps for a weight."""
        hidden = is_hidden_matrix(weight.name, len(weight.shape), self._plan)
        return self._rule.states_per_element(self._config.optimizer, hidden)

    def _names(self, stage: int) -> tuple[str, ...]:
        first, end = self._map.layers(stage)
        return tuple(self._layers)[first:end]

    def _whole(self) -> set[WeightShape]:
        return {weight for weights in self._layers.values() for weight in weights}

    def _of_rank(self, pp_rank: int) -> set[WeightShape]:
        """Distinct weights, those among them that another rank holds as well."""
        stages = self._map.held_by(pp_rank)
        return {weight for stage in stages for name in self._names(stage) for weight in self._layers[name]}

    def _gathered_together(self, pp_rank: int) -> Iterator[set[WeightShape]]:
        """With ZeRO: the weights of each layer, and those of the layers of a stage that share any; experts that the
        replicas share by themselves."""
        for stage in self._map.held_by(pp_rank):
            layers = [set(self._layers[name]) for name in self._names(stage)]
            if self._config.parallel.ep > 1:
                experts = [{weight for weight in layer if isinstance(weight.split, OverExperts)} for layer in layers]
                yield from experts
                layers = [layer - own for layer, own in zip(layers, experts, strict=True)]
            uses = Counter(weight for layer in layers for weight in layer)
            sharing = [layer for layer in layers if any(uses[weight] > 1 for weight in layer)]
            yield from (layer for layer in layers if layer not in sharing)
            yield set().union(*sharing)


def weights_by_layer(config: ModelConfig, plan: ModelPlan) -> dict[str, tuple[WeightShape, ...]]:
    """The parameters of each layer of a model, in order; counted on the meta device."""
    with torch.device("meta"):
        model = make_model(config)
    return {name: _weights(model, name, plan) for name in plan.layers}


def _weights(model: nn.Module, layer: str, plan: ModelPlan) -> tuple[WeightShape, ...]:
    """The parameters of a layer."""
    named = model.get_submodule(layer).named_parameters(layer)
    return tuple(WeightShape(plan.whole_name(name), _split(name, plan), tuple(weight.shape)) for name, weight in named)


def _split(name: str, plan: ModelPlan) -> Split:
    """How the module of a parameter of the whole model is cut."""
    found = plan.split_of(plan.whole_name(name))
    if found is None:
        raise ValueError(f"the split table says nothing about the parameter {name!r}")
    return found


def _count(weights: Iterable[WeightShape]) -> int:
    return sum(prod(weight.shape) for weight in weights)
