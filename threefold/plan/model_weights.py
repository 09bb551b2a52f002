"""The weights of a model, layer by layer, and how many elements of them a rank holds; layers that are alike are counted
once. Needs no torch, but for a family that does not say its shapes."""

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from threefold.config.model import FAMILIES, OWN, ModelConfig
from threefold.models.registry import family_of, make_model, model_plan
from threefold.models.sharding import ModelPlan, OverExperts, Split
from threefold.parallel.recomputed_layers import chosen_layers
from threefold.parallel.shard_shapes import Place, local_shape

if TYPE_CHECKING:
    from torch import nn


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
