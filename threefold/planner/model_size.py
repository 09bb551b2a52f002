"""Size of a model on each rank from shapes alone: parameters, and the memory of shards."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import NamedTuple

from threefold.comm.layout import Coordinates, Layout, shard_bounds
from threefold.config import Config, OptimizerConfig
from threefold.config.model import CUSTOM
from threefold.config.optimizer import BUILT_IN
from threefold.config.schema import ParallelConfig
from threefold.errors import UserError
from threefold.models.groups import group_of
from threefold.models.sharding import OverExperts, Split, covers, is_of_adapter
from threefold.parallel.pipeline.partition import chosen_layers, stage_map
from threefold.planner.block import (
    BlockShape,
    ModelDescription,
    UnknownBlock,
    WeightShape,
    block_shapes,
    describe_model,
    trained_blocks,
)

ZERO_STATE, ZERO_GRADIENTS, ZERO_WEIGHTS = 1, 2, 3
"""Values of `parallel.zero`, named after the part that each shards in addition to the smaller values."""


@dataclass(frozen=True)
class ShardIndex:
    """Index of one of `count` parts."""

    index: int = 0
    count: int = 1

    def within(self, start: int, end: int) -> tuple[int, int]:
        """Return the start and end of this part of the indices from `start` to `end`."""
        first, last = shard_bounds(end - start, self.count, self.index)
        return start + first, start + last


class ShardCoordinates(NamedTuple):
    """Coordinates of a rank on the axes that shard weights.

    With ZeRO, `zero` is the index among the ranks that hold shards of one copy, `zero_experts` among those of them that
    have the same experts.
    """

    tp: ShardIndex = ShardIndex()
    ep: ShardIndex = ShardIndex()
    zero: ShardIndex = ShardIndex()
    zero_experts: ShardIndex = ShardIndex()

    @property
    def unshared(self) -> "ShardCoordinates":
        """ShardCoordinates without ZeRO, which describes a gathered parameter."""
        return self._replace(zero=ShardIndex(), zero_experts=ShardIndex())


def shard_coordinates(parallel: ParallelConfig, at: Coordinates) -> ShardCoordinates:
    """Return a rank's coordinates on the axes that shard weights, from those in the mesh and a resolved config."""
    zero = experts = ShardIndex()
    if parallel.zero:
        shards = parallel.zero_shards * parallel.cp
        zero = ShardIndex((at.dp * parallel.cp + at.cp) % shards, shards)
        copies = max(1, parallel.zero_shards // parallel.ep) * parallel.cp
        experts = ShardIndex((at.dp // parallel.ep * parallel.cp + at.cp) % copies, copies)
    return ShardCoordinates(ShardIndex(at.tp, parallel.tp), ShardIndex(at.dp % parallel.ep, parallel.ep), zero, experts)


def local_shape(shape: Sequence[int], split: Split, parameter: str, place: ShardCoordinates) -> tuple[int, ...]:
    """Return the shape of a weight's shard on the rank at `place`; `parameter` is its name in the module."""
    return tuple(end - start for start, end in local_bounds(shape, split, parameter, place))


def local_bounds(
    shape: Sequence[int], split: Split, parameter: str, place: ShardCoordinates
) -> tuple[tuple[int, int], ...]:
    """Return the start and end of a weight's shard in each dim of the whole weight; arguments as for `local_shape`."""
    bounds = [(0, size) for size in shape]
    for axis, dim in split.cuts(parameter):
        bounds[dim] = getattr(place, axis).within(*bounds[dim])
    if isinstance(split, OverExperts) and place.ep.count > 1:
        dim = split.zero_dim(parameter)
        bounds[dim] = place.zero_experts.within(*bounds[dim])
    elif bounds:
        bounds[0] = place.zero.within(*bounds[0])
    return tuple(bounds)


class StageSize(NamedTuple):
    """Pipeline stage: its rank, its layers and their parameters; a tied weight counts at its first stage only."""

    pp_rank: int
    layers: tuple[str, ...]
    parameters: int


class RankSize(NamedTuple):
    """Memory of one rank, without activations: its parameters, frozen ones included, and the bytes of these with their
    compute copies, of gradients, and of optimizer state; and the number of its frozen parameters."""

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    frozen: int = 0

    @property
    def bytes(self) -> int:
        """Bytes of weights, gradients and optimizer state together."""
        return self.weights + self.gradients + self.optimizer


class ModelSize:
    """Parameters and memory of a model in a layout.

    `parameters` counts tied weights once; `active` only the experts that each token is routed to.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.weights = model_weights(config)
        self.map = stage_map(self.weights.plan, config)
        whole = self.weights.held(self.weights.layers, ShardCoordinates())
        self.parameters = whole.all
        idle = config.model.num_experts - config.model.experts_per_token
        self.active = self.parameters - (whole.experts // config.model.num_experts * idle if whole.experts else 0)

    def stages(self) -> list[StageSize]:
        found, counted = [], 0
        for number, pp_rank in enumerate(self.map.ranks):
            until = self.weights.held(self.layers_of(0, number), ShardCoordinates()).all
            found.append(StageSize(pp_rank, self.layers_of(number), until - counted))
            counted = until
        return found

    def rank(self, pp_rank: int, place: ShardCoordinates) -> RankSize:
        """Return the peak memory of a rank in a step, without activations.

        The formulas are those of docs/parallel/data.md. They exclude the buffers of gathers and reduce-scatters.
        """
        precision, zero = self._config.precision, self._config.parallel.zero
        narrow, wide = precision.itemsize, precision.master_itemsize
        layers = self.layers_of_rank(pp_rank)
        local = self.held(layers, place)
        held, trained = local.all, local.trained
        states = (self._states(layers, place) + trained * average_states(self._config)) * wide
        masters = trained * wide + local.frozen * narrow
        if not zero:
            copies = trained * narrow if narrow < wide else 0
            return RankSize(held, masters + copies, trained * wide, states, local.frozen)
        whole = self.weights.held(layers, place.unshared)
        gathered = (self._most_together(pp_rank, place) if zero == ZERO_WEIGHTS else whole.trained) * narrow
        reduced = self._most_together(pp_rank, place, trained=True) * narrow
        if zero != ZERO_STATE:
            gradients = trained * wide + reduced
        elif narrow < wide:
            gradients = max(trained * wide, whole.trained * wide + reduced)
        else:
            gradients = max(trained, whole.trained) * wide
        return RankSize(held, masters + gathered, gradients, states, local.frozen)

    def held(self, layers: Sequence[str], place: ShardCoordinates) -> "HeldElements":
        """Count the elements of some layers on the rank at `place`, of which ZeRO 1 and 2 leave frozen ones whole."""
        local = self.weights.held(layers, place)
        if self._config.parallel.zero not in (ZERO_STATE, ZERO_GRADIENTS):
            return local
        return local._replace(frozen=self.weights.held(layers, place.unshared).frozen)

    def _states(self, layers: Sequence[str], place: ShardCoordinates) -> int:
        """Return the elements of optimizer state of some layers on the rank at `place`."""
        optimizer, plan = self._config.optimizer, self.weights.plan
        if not optimizer.groups:
            local, (hidden, others) = self.weights.held(layers, place), optimizer_states(optimizer)
            return local.hidden * hidden + local.others * others
        parts = optimizer.parts
        kept = {part.match: optimizer_states(part.config) for part in parts}
        total = 0
        for weight in {weight for name in layers for weight in self.weights.layers[name]}:
            if not self.weights.is_frozen(weight.name):
                hidden, others = kept[group_of(parts, weight.name).match]
                states = hidden if plan.is_hidden_matrix(weight.name, len(weight.shape)) else others
                total += states * prod(local_shape(weight.shape, weight.split, weight.last_name, place))
        return total

    def _most_together(self, pp_rank: int, place: ShardCoordinates, trained: bool = False) -> int:
        """Return the largest number of elements that ZeRO gathers, or reduces if `trained`, at once."""
        return max(max(group) for group in self.gathered_together(pp_rank, place.unshared, trained=trained))

    def largest_rank(self, pp_rank: int) -> RankSize:
        """Return the memory of the largest rank at a pp coordinate."""
        return self.rank(pp_rank, self.largest_place(pp_rank))

    def largest_place(self, pp_rank: int) -> ShardCoordinates:
        """Return the other coordinates of the largest rank at a pp coordinate: the first, as no shard is larger."""
        return shard_coordinates(self._config.parallel, Coordinates(0, pp_rank, 0, 0))

    def layers_of(self, stage: int, last: int | None = None) -> tuple[str, ...]:
        """Return the names of the layers of a stage, or of the stages from it to the stage `last`."""
        bounds = self.map.bounds
        return self.weights.plan.layers[bounds[stage] : bounds[(stage if last is None else last) + 1]]

    def layers_of_rank(self, pp_rank: int) -> list[str]:
        return [name for stage in self.map.held_by(pp_rank) for name in self.layers_of(stage)]

    def gathered_together(self, pp_rank: int, place: ShardCoordinates, trained: bool = False) -> list[tuple[int, int]]:
        """Return the elements that a rank gathers at once with ZeRO, as (weights, experts gathered separately), for
        each layer; the layers of a stage that share weights form one group, which comes last.

        `place` is without the coordinates of ZeRO; `trained` leaves out frozen weights, which have no gradients.
        """
        found, apart = [], self._config.parallel.ep > 1
        for stage in self.map.held_by(pp_rank):
            layers = self.layers_of(stage)
            together = self.weights.sharing(layers)
            groups = [[name] for name in layers if name not in together]
            for group in [*groups, together]:
                held = self.weights.held(group, place)
                experts = held.experts - (held.frozen_experts if trained else 0)
                counted = held.trained if trained else held.all
                found.append((counted - experts, experts) if apart else (counted, 0))
        return found


def optimizer_states(config: OptimizerConfig, of_groups: Callable[[Iterable[int]], int] = max) -> tuple[int, int]:
    """Return the numbers of state tensors of a weight's shape that the optimizer keeps for matrices of layers between
    the first and the last, and for other weights. An optimizer of another package or the user is imported. With groups,
    `of_groups` chooses among the numbers of each."""
    if config.groups:
        hidden, others = zip(*(optimizer_states(part.config) for part in config.parts), strict=True)
        return of_groups(hidden), of_groups(others)
    if config.name in BUILT_IN:
        states = BUILT_IN[config.name].states
    else:
        from threefold.train.optimizers import update_rule  # imports torch

        states = update_rule(config).states_per_element
    return states(config, True), states(config, False)


def average_states(config: Config) -> int:
    """Return the number of state tensors of a weight's shape that the moving average of the weights counts as: two for
    the fp32 average of bf16 masters."""
    wide = config.precision.master_itemsize
    return max(4, wide) // wide if config.optimizer.ema_decay else 0


class HeldElements(NamedTuple):
    """Numbers of weight elements on a rank: trained weights with two or more dims in layers between the first and the
    last, all other trained weights, expert weights, which the others include, frozen weights, and frozen experts."""

    hidden: int = 0
    others: int = 0
    experts: int = 0
    frozen: int = 0
    frozen_experts: int = 0

    @property
    def all(self) -> int:
        return self.trained + self.frozen

    @property
    def trained(self) -> int:
        """Elements that have gradients and optimizer state."""
        return self.hidden + self.others


class ModelWeights:
    """Weights of a model, layer by layer.

    Layers of the same number in `kinds` have weights of equal shapes and splits; `shared` has the weights of each layer
    that another layer uses too (tied embeddings). `frozen` are the patterns of `optimizer.frozen`, and `adapters` the
    names and shapes of the weights of adapters, which the description does not have.
    """

    def __init__(
        self,
        description: ModelDescription,
        frozen: tuple[str, ...] = (),
        adapters: tuple[tuple[str, tuple[int, ...]], ...] = (),
    ) -> None:
        self.description, self.plan, self.layers = description, description.plan, dict(description.weights)
        self._frozen, self._has_adapters = frozen, bool(adapters)
        beside: dict[str, list[WeightShape]] = {}
        for name, shape in adapters:
            split = self.plan.split_of(name)
            assert split is not None  # that of the weight beside it
            weight = WeightShape(name, split, shape)
            beside.setdefault(weight.base, []).append(weight)
        if adapters:
            for layer, given in self.layers.items():
                self.layers[layer] = tuple(one for each in given for one in (each, *beside.get(each.name, ())))
        uses = Counter(weight.name for weights in self.layers.values() for weight in set(weights))
        self.shared: dict[str, tuple[WeightShape, ...]] = {}
        self.kinds: dict[str, int] = {}
        self._of_kind: list[tuple[WeightShape, ...]] = []
        numbers: dict[object, int] = {}
        for name, weights in self.layers.items():
            self.shared[name] = tuple(weight for weight in weights if uses[weight.name] > 1)
            unshared = tuple(dict.fromkeys(weight for weight in weights if uses[weight.name] == 1))
            facts = ((one.name.removeprefix(name), one.split, one.shape, self.is_frozen(one.name)) for one in unshared)
            kind = numbers.setdefault((*facts, name in self.plan.layers[1:-1]), len(numbers))
            self.kinds[name] = kind
            if kind == len(self._of_kind):
                self._of_kind.append(unshared)
        self._held: dict[tuple[int, ShardCoordinates], HeldElements] = {}

    def held(self, layers: Iterable[str], place: ShardCoordinates) -> HeldElements:
        """Count the elements of some layers on the rank at `place`; weights that they share count once."""
        counts, shared = Counter[int](), set[WeightShape]()
        for name in layers:
            counts[self.kinds[name]] += 1
            shared.update(self.shared[name])
        found = self._sum(shared, place)
        for kind, count in counts.items():
            if (kind, place) not in self._held:
                self._held[kind, place] = self._sum(self._of_kind[kind], place)
            of_layer = self._held[kind, place]
            found = HeldElements(*(all_ + count * each for all_, each in zip(found, of_layer, strict=True)))
        return found

    def sharing(self, layers: Iterable[str]) -> list[str]:
        """Return the layers that share weights with another of `layers`."""
        layers = list(layers)
        uses = Counter(weight for name in layers for weight in set(self.shared[name]))
        return [name for name in layers if any(uses[weight] > 1 for weight in self.shared[name])]

    @cached_property
    def flops_per_token(self) -> float:
        """FLOPs of a training step per token; see `ModelDescription.flops`."""
        return self.description.flops(self.layers, lambda name: not self.is_frozen(name))

    @cached_property
    def forward_flops_per_token(self) -> float:
        return self.description.flops(self.layers, lambda name: False)

    @cached_property
    def blocks(self) -> tuple[BlockShape, ...]:
        """Layers between the first and the last; an `UnknownBlock` is raised for one without formulas."""
        if not self._frozen and not self._has_adapters:
            return block_shapes(self.description)
        return trained_blocks(self.description, self.layers, lambda name: not self.is_frozen(name))

    def trains(self, layer: str) -> bool:
        """Return whether a layer has a trained weight."""
        return any(not self.is_frozen(weight.name) for weight in self.layers[layer])

    @cached_property
    def trains_head(self) -> tuple[bool, bool]:
        """Whether the last layer trains a matrix, such as that to the vocabulary, and a vector, such as its norm's."""
        trained = [weight for weight in self.layers[self.plan.layers[-1]] if not self.is_frozen(weight.name)]
        return any(len(weight.shape) > 1 for weight in trained), any(len(weight.shape) == 1 for weight in trained)

    def recomputed(self, mode: str, every: int) -> frozenset[str]:
        """Return the layers that `train.recompute` and `train.recompute_every` recompute."""
        return frozenset(chosen_layers(self.plan.layers, self.plan.recompute, mode, every))

    def is_frozen(self, name: str) -> bool:
        if self._has_adapters and not is_of_adapter(name):
            return True
        return name in self.plan.frozen or any(covers(pattern, name) for pattern in self._frozen)

    def _sum(self, weights: Iterable[WeightShape], place: ShardCoordinates) -> HeldElements:
        hidden = others = experts = frozen = frozen_experts = 0
        for weight in weights:
            elements = prod(local_shape(weight.shape, weight.split, weight.last_name, place))
            if self.is_frozen(weight.name):
                frozen += elements
                frozen_experts += elements if weight.is_of_experts else 0
            elif self.plan.is_hidden_matrix(weight.name, len(weight.shape)):
                hidden += elements
            else:
                others += elements
            experts += elements if weight.is_of_experts else 0
        return HeldElements(hidden, others, experts, frozen, frozen_experts)


def model_weights(config: Config) -> ModelWeights:
    """Return the weights of a resolved config's model, cached unless it is a custom one."""
    return _weights_of(config, config.data.sequence_length)


def _weights_of(config: Config, sequence_length: int) -> ModelWeights:
    frozen = tuple(config.optimizer.frozen or ())
    return _of_description(describe_model(config.model, sequence_length), frozen, _adapters(config))


def _adapters(config: Config) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the names and shapes of the weights of a model's adapters."""
    if not config.adapter.rank:
        return ()
    return _named_adapters(_Adapted(config.model.model_dump_json() + config.adapter.model_dump_json(), config))


@dataclass(frozen=True)
class _Adapted:
    """Config of a model with adapters; those with the same `text` have the same adapters."""

    text: str
    config: Config = field(compare=False)


@lru_cache(maxsize=16)
def _named_adapters(given: _Adapted) -> tuple[tuple[str, tuple[int, ...]], ...]:
    import torch

    from threefold.models.source import ConfigSource

    make_model, _ = ConfigSource().load(given.config)
    with torch.device("meta"):
        named = make_model().named_parameters()
    return tuple((name, tuple(weight.shape)) for name, weight in named if is_of_adapter(name))


_of_description = lru_cache(maxsize=16)(ModelWeights)


def flops_per_token(config: Config, sequence_length: int | None = None) -> float | None:
    """Return the FLOPs of a resolved config's step per token, in sequences of some length (None for the config's); None
    for a custom model, whose operations are not known."""
    if config.model.architecture == CUSTOM:
        return None
    length = sequence_length or config.data.sequence_length
    return _weights_of(config, length).flops_per_token


def described_blocks(config: Config) -> tuple[BlockShape, ...]:
    """Return the description of each block of a model, of which the planner must have formulas."""
    if config.model.architecture == CUSTOM:
        raise UserError(
            f"model.architecture is {CUSTOM}, whose operations have no formulas; plan with a family of the same sizes, "
            "or use threefold dry-run, which runs the model."
        )
    if config.adapter.rank and config.adapter.dropout:
        raise UnknownBlock(
            f"adapter.dropout is {config.adapter.dropout:g} but the planner has no formulas for dropout of adapters; "
            "use threefold dry-run, which runs the model, or adapter.dropout 0."
        )
    return model_weights(config).blocks


def bytes_of_states(config: Config, layout: Layout, first: int, count: int, custom_parameters: tuple[int, int]) -> int:
    """Return the bytes of weights, gradients and optimizer state of some ranks; a lower bound for a custom model."""
    from threefold.dtypes import DTYPES  # imports torch

    if config.model.architecture == CUSTOM:
        if count < layout.world_size:
            return 0
        each = 2 + min(optimizer_states(config.optimizer, min)) + average_states(config)
        copies = 1 if config.parallel.zero else layout.dp
        whole, trained = custom_parameters
        frozen = (whole - trained) * DTYPES[config.precision.dtype].itemsize
        return (trained * each * config.precision.master_itemsize + frozen) * copies
    size = ModelSize(config)
    by_place = {place: size.largest_rank(place).bytes for place in range(layout.pp)}
    return sum(by_place[layout.coordinates(rank).pp] for rank in range(first, min(first + count, layout.world_size)))
