"""Parameter counts of a model, and the memory of each rank's shards: counted from shapes, without processes."""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from threefold.comm.layout import Coordinates
from threefold.config import Config, OptimizerConfig
from threefold.config.model import FAMILIES, OWN, ModelConfig
from threefold.config.optimizer import BUILT_IN
from threefold.models.family import family_of, make_model, model_plan
from threefold.models.sharding import ModelPlan, OverExperts, Split
from threefold.parallel.pipeline.partition import stage_map
from threefold.parallel.shard_shapes import Place, chosen_layers, local_shape, place_of

if TYPE_CHECKING:
    from torch import nn


_STATE_ALONE, _WEIGHTS_TOO = 1, 3  # values of parallel.zero


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
        parameters: those that it keeps, frozen ones too.
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
        weights: of the whole model.
        map: its pipeline stages.

    Raises:
        UserError: the layers cannot be partitioned into the stages as the config says.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.weights = model_weights(config.model, config.data.sequence_length)
        self.map = stage_map(self.weights.plan, config)
        whole = self.weights.held(self.weights.layers, Place())
        self.parameters = whole.all
        idle = config.model.num_experts - config.model.experts_per_token
        self.active = self.parameters - (whole.experts // config.model.num_experts * idle if whole.experts else 0)

    def stages(self) -> list[StageSize]:
        """The stages of the pipeline, in order."""
        found, counted = [], 0
        for number, pp_rank in enumerate(self.map.ranks):
            until = self.weights.held(self._names(0, number), Place()).all
            found.append(StageSize(pp_rank, self.layers_of(number), until - counted))
            counted = until
        return found

    def rank(self, pp_rank: int, place: Place) -> RankSize:
        """The peak memory of a rank in a step, without activations.

        The formulas are those of docs/parallel/data.md. Gathered and scattered buffers are not among it.

        Args:
            pp_rank: its coordinate on the pp axis.
            place: its coordinates on the others.
        """
        precision, zero = self._config.precision, self._config.parallel.zero
        narrow, wide = precision.itemsize, precision.master_itemsize
        layers = self.layers_of_rank(pp_rank)
        own = self.weights.held(layers, place)
        held, trained = own.all, own.trained
        hidden, others = (optimizer_states(self._config.optimizer, hidden) for hidden in (True, False))
        states = (own.hidden * hidden + own.others * others) * wide
        if not zero:
            copies = held * narrow if narrow < wide else 0
            return RankSize(held, held * wide + copies, trained * wide, states)
        whole = self.weights.held(layers, place.unshared)
        largest = max(max(group) for group in self.gathered_together(pp_rank, place.unshared))
        gathered = (largest if zero == _WEIGHTS_TOO else whole.all) * narrow
        summed = max(max(group) for group in self.gathered_together(pp_rank, place.unshared, trained=True))
        if zero == _STATE_ALONE:
            gradients = max(trained * wide, whole.trained * wide + (summed * narrow if narrow < wide else 0))
        else:
            gradients = trained * wide + summed * narrow
        return RankSize(held, held * wide + gathered, gradients, states)

    def largest_rank(self, pp_rank: int) -> RankSize:
        """Of the ranks at a place of the pp axis, the one that holds the most: the first, as none has longer parts."""
        return self.rank(pp_rank, self.largest_place(pp_rank))

    def largest_place(self, pp_rank: int) -> Place:
        """The place of the rank that holds the most."""
        return place_of(self._config.parallel, Coordinates(0, pp_rank, 0, 0))

    def layers_of(self, stage: int) -> tuple[str, ...]:
        """The names of the layers of a stage."""
        return self._names(stage, stage)

    def layers_of_rank(self, pp_rank: int) -> list[str]:
        """Those of all stages of a rank."""
        return [name for stage in self.map.held_by(pp_rank) for name in self.layers_of(stage)]

    def gathered_together(self, pp_rank: int, place: Place, trained: bool = False) -> list[tuple[int, int]]:
        """With ZeRO: the elements that a rank gathers at once, weights and experts that are gathered by themselves; for
        each layer, and for the layers of each stage that share weights, which come last.

        Args:
            pp_rank: coordinate of the rank on the pp axis.
            place: the others, without those of ZeRO.
            trained: whether frozen weights are left out, which have no gradients.
        """
        apart = self._config.parallel.ep > 1
        found = []
        for stage in self.map.held_by(pp_rank):
            layers = self.layers_of(stage)
            together = self.weights.sharing(layers)
            groups = [[name] for name in layers if name not in together]
            for group in [*groups, together]:
                held = self.weights.held(group, place)
                if trained:  # models with experts of their own freeze none
                    held = held._replace(frozen=0)
                found.append((held.dense, held.experts) if apart else (held.all, 0))
        return found

    def _names(self, first: int, last: int) -> tuple[str, ...]:
        """The layers of some stages, the last included."""
        return self.weights.plan.layers[self.map.bounds[first] : self.map.bounds[last + 1]]


def optimizer_states(config: OptimizerConfig, hidden: bool) -> int:
    """Tensors of a weight's shape that the optimizer keeps for it.

    Args:
        config: which optimizer.
        hidden: whether it is a matrix of a layer between the first and the last.

    Raises:
        UserError: the optimizer is another package's or the user's and cannot be imported or made.
    """
    if config.name in BUILT_IN:
        return BUILT_IN[config.name].states(config, hidden)
    from threefold.train.optimizers.own import update_rule  # imports torch

    return update_rule(config).states_per_element(config, hidden)


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

    @property
    def is_of_experts(self) -> bool:
        """Whether the expert axis cuts it."""
        return isinstance(self.split, OverExperts)


class HeldElements(NamedTuple):
    """Elements of some weights on a rank.

    Attributes:
        hidden: of weights of two dims or more of a layer between the first and the last, which are trained.
        others: of all others that are trained.
        experts: of all, those of experts.
        frozen: of weights that are not trained.
    """

    hidden: int = 0
    others: int = 0
    experts: int = 0
    frozen: int = 0

    @property
    def all(self) -> int:
        return self.trained + self.frozen

    @property
    def trained(self) -> int:
        """Those that have gradients and optimizer state."""
        return self.hidden + self.others

    @property
    def dense(self) -> int:
        """Those that are not of experts."""
        return self.all - self.experts

    def plus(self, other: "HeldElements", times: int = 1) -> "HeldElements":
        return HeldElements(*(mine + times * its for mine, its in zip(self, other, strict=True)))


class ModelWeights:
    """The weights of a model.

    Args:
        config: its sizes, resolved.
        plan: its layers, and how each weight is cut.

    Attributes:
        plan: as given.
        layers: the weights of each layer, in order.
        kinds: of each layer, a number that layers alike have in common: their weights have the same shapes and splits.
        shared: of each layer, the weights that another layer uses too (tied embeddings).
    """

    def __init__(self, config: ModelConfig, plan: ModelPlan) -> None:
        self.plan = plan
        self.layers = weights_by_layer(config, plan)
        uses = Counter(weight.name for weights in self.layers.values() for weight in set(weights))
        self.shared: dict[str, tuple[WeightShape, ...]] = {}
        self.kinds: dict[str, int] = {}
        self._own: list[tuple[WeightShape, ...]] = []
        numbers: dict[object, int] = {}
        for name, weights in self.layers.items():
            self.shared[name] = tuple(weight for weight in weights if uses[weight.name] > 1)
            own = tuple(dict.fromkeys(weight for weight in weights if uses[weight.name] == 1))
            alike = tuple(
                (weight.name.removeprefix(name), weight.split, weight.shape, weight.name in plan.frozen)
                for weight in own
            )
            kind = numbers.setdefault((alike, name in plan.layers[1:-1]), len(numbers))
            self.kinds[name] = kind
            if kind == len(self._own):
                self._own.append(own)
        self._held: dict[tuple[int, Place], HeldElements] = {}
        self._recomputed: dict[tuple[str, int], frozenset[str]] = {}

    def held(self, layers: Iterable[str], place: Place) -> HeldElements:
        """What the rank at `place` holds of some layers, weights that they share once."""
        counts, shared = Counter[int](), set[WeightShape]()
        for name in layers:
            counts[self.kinds[name]] += 1
            shared.update(self.shared[name])
        found = self._sum(shared, place)
        for kind, count in counts.items():
            found = found.plus(self.of_kind(kind, place), count)
        return found

    def of_kind(self, kind: int, place: Place) -> HeldElements:
        """What the rank at `place` holds of a layer of a kind, without weights that it shares with others."""
        key = kind, place
        if key not in self._held:
            self._held[key] = self._sum(self._own[kind], place)
        return self._held[key]

    def of_shared(self, layers: Iterable[str], place: Place) -> HeldElements:
        """What it holds of the weights that some layers share with others, each once."""
        return self._sum({weight for name in layers for weight in self.shared[name]}, place)

    def sharing(self, layers: Iterable[str]) -> list[str]:
        """Those of the layers that share weights with another of them."""
        layers = list(layers)
        uses = Counter(weight for name in layers for weight in set(self.shared[name]))
        return [name for name in layers if any(uses[weight] > 1 for weight in self.shared[name])]

    def recomputed(self, mode: str, every: int) -> frozenset[str]:
        """The layers in which `train.recompute` computes activations again.

        Args:
            mode, every: as `train.recompute` and `train.recompute_every`.
        """
        if (mode, every) not in self._recomputed:
            chosen = chosen_layers(self.plan.layers, self.plan.recompute, mode, every)
            self._recomputed[mode, every] = frozenset(chosen)
        return self._recomputed[mode, every]

    def _sum(self, weights: Iterable[WeightShape], place: Place) -> HeldElements:
        hidden = others = experts = frozen = 0
        for weight in weights:
            elements = weight.held(place)
            if weight.name in self.plan.frozen:
                frozen += elements
            elif self.plan.is_hidden_matrix(weight.name, len(weight.shape)):
                hidden += elements
            else:
                others += elements
            experts += elements if weight.is_of_experts else 0
        return HeldElements(hidden, others, experts, frozen)


def model_weights(config: ModelConfig, sequence_length: int) -> ModelWeights:
    """The weights of a model.

    Args:
        config: its sizes, resolved.
        sequence_length: tokens per sample.
    """
    if config.architecture == OWN:  # the file may change
        return ModelWeights(config, model_plan(config, sequence_length))
    return _remembered(config.architecture, config.model_dump_json(exclude_none=True), sequence_length)


@lru_cache(maxsize=16)
def _remembered(family: str, settings: str, sequence_length: int) -> ModelWeights:
    config = FAMILIES.load(family).config.model_validate_json(settings)
    return ModelWeights(config, model_plan(config, sequence_length))


def weights_by_layer(config: ModelConfig, plan: ModelPlan) -> dict[str, tuple[WeightShape, ...]]:
    """The parameters of each layer of a model, in order: as its family says, else counted on the meta device."""
    found: dict[str, tuple[WeightShape, ...]] = {}
    family, model = family_of(config), None
    for layer in plan.layers:
        shapes = family.layer_shapes(config, layer)
        if shapes is None:
            model = model or _on_meta_device(config)
            named = model.get_submodule(layer).named_parameters()
            shapes = {name: tuple(weight.shape) for name, weight in named}
        names = {f"{layer}.{name}": shape for name, shape in shapes.items()}
        found[layer] = tuple(WeightShape(plan.whole_name(name), _split(name, plan), names[name]) for name in names)
    return found


def _on_meta_device(config: ModelConfig) -> "nn.Module":
    import torch

    with torch.device("meta"):
        return make_model(config)


def _split(name: str, plan: ModelPlan) -> Split:
    """How the module of a parameter of the whole model is cut."""
    found = plan.split_of(plan.whole_name(name))
    if found is None:
        raise ValueError(f"the split table says nothing about the parameter {name!r}")
    return found
