"""How a model is cut, in the model's own words, and the tensor-parallel half of cutting it.

A model has a `ModelPlan`: a table from module names to the splits below, its layers in order, its tied weights and its
initial values. The model itself stays a single-device module; `split_modules` swaps the layers that the table names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeVar

from torch import nn

from threefold.comm.collectives import shard_bounds
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.rotary import Rotary
from threefold.models.layers.router import Routing
from threefold.models.name_pattern import Patterns
from threefold.parallel.context.attention import ContextParallelAttention
from threefold.parallel.context.ring_attention import RingAttention
from threefold.parallel.context.sequence import PositionEmbedding, Region
from threefold.parallel.expert.experts import Experts, ParallelExperts
from threefold.parallel.pipeline.partition import stage_bounds
from threefold.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from threefold.parallel.tensor.loss import ParallelCrossEntropy
from threefold.random.philox import Dropout, Slice

Kind = TypeVar("Kind", bound=nn.Module)

_CONTEXT_ATTENTION = {"all-gather": ContextParallelAttention, "ring": RingAttention}


@dataclass(frozen=True)
class Column:
    """A linear layer whose output features are split; the next layer takes its part."""

    def apply(self, module: nn.Module, region: Region) -> nn.Module:
        linear = _expect(module, nn.Linear)
        return ColumnParallelLinear.from_linear(
            linear, region.tp, gather_output=False, sequence_dim=region.sequence_dim
        )


@dataclass(frozen=True)
class Row:
    """A linear layer whose input features are split, and arrive split; its output is whole."""

    def apply(self, module: nn.Module, region: Region) -> nn.Module:
        linear = _expect(module, nn.Linear)
        return RowParallelLinear.from_linear(
            linear, region.tp, input_is_parallel=True, sequence_dim=region.sequence_dim
        )


@dataclass(frozen=True)
class Vocab:
    """An embedding table whose rows are split."""

    def apply(self, module: nn.Module, region: Region) -> nn.Module:
        table = _expect(module, nn.Embedding)
        return VocabParallelEmbedding.from_embedding(table, region.tp, sequence_dim=region.sequence_dim)


@dataclass(frozen=True)
class VocabLoss:
    """A cross-entropy whose logits are split over a vocabulary of `vocab_size`."""

    vocab_size: int

    def apply(self, module: nn.Module, region: Region) -> nn.Module:
        return ParallelCrossEntropy(self.vocab_size, region.tp)


@dataclass(frozen=True)
class AttentionCore:
    """A `CausalAttention` of `heads` heads in all: each rank of the tensor axis has some, for all that a context
    rank holds of the sequence."""

    heads: int

    def apply(self, module: nn.Module, region: Region) -> nn.Module:
        core = _expect(module, CausalAttention)
        start, _ = shard_bounds(self.heads, region.tp.size, region.tp.index)
        heads = Slice(start, self.heads)
        if region.cp.size > 1:
            return _CONTEXT_ATTENTION[region.cp_method](core, region.cp, heads)
        core.dropout.parts = {1: heads}  # of the weights [B, heads, queries, keys]
        return core


@dataclass(frozen=True)
class OverContext:
    """A `Rotary` on queries and keys, of which the tensor axis holds the sequence together."""

    def apply(self, module: nn.Module, region: Region) -> nn.Module:
        cut = region.cut.across_context
        _expect(module, Rotary).part = cut if cut.shares > 1 else Slice()
        return module


@dataclass(frozen=True)
class OverSequence:
    """A `Dropout` or `PositionEmbedding` on activations [B, S, …] that may be cut along the sequence."""

    def apply(self, module: nn.Module, region: Region) -> nn.Module:
        if isinstance(module, Dropout):
            module.parts = {1: region.cut}
        else:
            _expect(module, PositionEmbedding).part = region.cut if region.cut.shares > 1 else Slice()
        return module


@dataclass(frozen=True)
class Replicated:
    """Every rank holds the whole module and computes the same with it, or with its own part of the sequence."""

    def apply(self, module: nn.Module, region: Region) -> nn.Module:
        return module


@dataclass(frozen=True)
class PerHead:
    """A module that every rank of the tensor axis holds whole and applies to its own heads alone, so that each rank has
    a part of the gradients of its weights: the engine adds them up."""

    def apply(self, module: nn.Module, region: Region) -> nn.Module:
        return module


@dataclass(frozen=True)
class OverRegion:
    """A `Routing`, which has to know where the other positions of a sequence are."""

    def apply(self, module: nn.Module, region: Region) -> nn.Module:
        _expect(module, Routing).region = region
        return module


@dataclass(frozen=True)
class OverExperts:
    """`Experts`, of which the expert axis has some on each rank, and the tensor axis a part of each."""

    def apply(self, module: nn.Module, region: Region) -> nn.Module:
        experts = _expect(module, Experts)
        return ParallelExperts(experts, region) if region.ep.size * region.tp.size > 1 else experts


Split = (
    OverRegion
    | OverExperts
    | PerHead
    | Column
    | Row
    | Vocab
    | VocabLoss
    | AttentionCore
    | OverContext
    | OverSequence
    | Replicated
)
_OVER_TENSOR_AXIS = (Column, Row, Vocab, VocabLoss)
KINDS: dict[type, tuple[type[nn.Module], ...]] = {
    Column: (nn.Linear,),
    Row: (nn.Linear,),
    Vocab: (nn.Embedding,),
    AttentionCore: (CausalAttention,),
    OverContext: (Rotary,),
    OverSequence: (Dropout, PositionEmbedding),
    OverRegion: (Routing,),
    OverExperts: (Experts,),
}
"""Split → the modules that it is for; the others are for any."""


@dataclass(frozen=True)
class Normal:
    """Initial values from N(0, std²)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """One initial value for all elements."""

    value: float


Initial = Normal | Constant


@dataclass(frozen=True)
class ModelPlan:
    """What the parallel layers must know of a model.

    Attributes:
        split: pattern of module names (`parallel.pattern`: `*` for one part, `**` for several) → how they are cut. It
            decides for the modules that it matches and all inside them, but where a more specific pattern does, in
            whatever order they stand. Each matches a module, and each parameter is decided.
        layers: names of the modules that the model runs through, in order; every parameter lies in one of them. All
            but the last are called as `layer(x, samples)`, the last as `layer(x, labels)`.
        costs: what each of them costs to run, in any unit; the pipeline's stages are balanced by it.
        initial: parameter name → its initial values.
        ties: parameter name → the name of the parameter whose weight it shares, and under which it is stored.
        recompute: mode of `train.recompute` → patterns (without `**`) of the modules that it computes again in the
            backward pass; each lies in one of the layers.
        shared: groups of modules that share all their parameters, stored under the name of a group's first.
        kinds: the class of each layer, for stages that share the layers of one class evenly; may be left out.

    Raises:
        ValueError: a name shares the weights of one that itself shares another's.
    """

    split: Mapping[str, Split]
    layers: tuple[str, ...]
    costs: tuple[float, ...]
    initial: Callable[[str], Initial]
    ties: Mapping[str, str] = field(default_factory=dict)
    recompute: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shared: tuple[tuple[str, ...], ...] = ()
    kinds: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        borrowed = {user: owner for owner, *users in self.tied_groups() for user in users}
        for user, owner in borrowed.items():
            if owner in borrowed:
                raise ValueError(f"{user!r} shares the weights of {owner!r}, which shares those of {borrowed[owner]!r}")

    @cached_property
    def patterns(self) -> Patterns:
        """The patterns of `split`."""
        return Patterns(self.split)

    def split_of(self, parameter: str) -> Split | None:
        """How the module of a parameter is cut; None where `split` says nothing of it."""
        found = self.patterns.deciding(parameter.rpartition(".")[0])
        return None if found is None else self.split[found]

    def has_partial_gradient(self, name: str) -> bool:
        """Whether each tensor rank has a part only of the gradient of a parameter that it holds whole."""
        return isinstance(self.split_of(name), PerHead)

    def stage_bounds(self, stages: int, partition: str | Sequence[int] = "cost") -> list[int]:
        """First layer of each pipeline stage, and the number of layers.

        Args:
            stages: how many.
            partition: as in `parallel.partition`.

        Raises:
            UserError: the layers cannot be shared like that.
        """
        return stage_bounds(self.costs, self.kinds, stages, partition)

    def tied_groups(self) -> list[tuple[str, ...]]:
        """Groups of parameters or modules that share their weights, the one that stores them first."""
        users: dict[str, list[str]] = {}
        for user, owner in self.ties.items():
            users.setdefault(owner, [owner]).append(user)
        return [*map(tuple, users.values()), *self.shared]

    def whole_name(self, name: str) -> str:
        """The one name that a parameter has everywhere."""
        for owner, *users in self.shared:
            for user in users:
                if name.startswith(user + "."):
                    return owner + name.removeprefix(user)
        return self.ties.get(name, name)


def split_modules(stages: Sequence[nn.Module], table: Mapping[str, Split], region: Region) -> None:
    """Replace each module that the table names by its version for `region`, in place.

    Args:
        stages: all that a rank has of a model, as they may have modules in common.
        table: of the whole model.
        region: what the versions are for.

    Raises:
        ValueError: a parameter lies in no module of the table, so nobody said how it is to be cut.
    """
    named = [(stage, *each) for stage in stages for each in _named(stage, table)]
    if not region.divides:
        return
    made: dict[nn.Module, nn.Module] = {}  # a module that appears in several places is split once
    for stage, name, module, split in named:
        if isinstance(split, _OVER_TENSOR_AXIS) and region.tp.size == 1:
            continue
        if module not in made:
            made[module] = split.apply(module, region)
        parent, _, attribute = name.rpartition(".")
        setattr(stage.get_submodule(parent), attribute, made[module])


def _named(model: nn.Module, table: Mapping[str, Split]) -> list[tuple[str, nn.Module, Split]]:
    """The modules inside that the table names, and how each is split."""
    patterns = Patterns(table)
    for name, _ in model.named_parameters():
        if patterns.deciding(name.rpartition(".")[0]) is None:
            raise ValueError(
                f"the split table says nothing about the parameter {name!r}; give it Replicated() at least"
            )
    named = ((name, module, patterns.naming(name)) for name, module in model.named_modules(remove_duplicate=False))
    return [(name, module, table[pattern]) for name, module, pattern in named if pattern is not None]


def _expect(module: nn.Module, kind: type[Kind]) -> Kind:
    if not isinstance(module, kind):
        raise TypeError(f"this split is for {kind.__name__}, not {type(module).__name__}")
    return module
