"""Patterns over the dotted names of modules, and which of several patterns decides for a name.

A pattern is a dotted name in which a part may be `*`, any one part, or `**`, one or more parts; inside a part `*` is
any characters of that part, as in `attn_*`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import gcd
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from threefold.config.section import divisors
from threefold.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def matches(name: str, pattern: str) -> bool:
    """Whether a whole name fits a pattern: `blocks.3` fits `blocks.*`, and `blocks.3.attn` does not."""
    return _expression(pattern).fullmatch(name) is not None


def specificity(pattern: str) -> tuple[int, int, int, int]:
    """What patterns are compared by; of two, the larger is the more specific.

    More parts without a star; where those are equally many, more parts with a star inside; then more parts that are
    `*`; then fewer that are `**`.
    """
    parts = pattern.split(".")
    several, single = parts.count("**"), parts.count("*")
    literal = sum("*" not in part for part in parts)
    return literal, len(parts) - several - single - literal, single, -several


class Patterns:
    """Patterns of which each decides for the modules whose names it matches and for everything inside them, unless a
    more specific one does.

    Args:
        patterns: of `split`, in any order.

    Raises:
        UserError: one of them is no pattern.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self._ranked = sorted(((specificity(each), each) for each in patterns), reverse=True)
        for _, pattern in self._ranked:
            _expression(pattern)

    def deciding(self, name: str) -> str | None:
        """The pattern that decides for a module; None where none matches it or a module around it.

        Raises:
            UserError: two do, and neither is more specific.
        """
        found: list[tuple[tuple[int, int, int, int], str]] = []
        for rank, pattern in self._ranked:
            if found and rank < found[0][0]:
                break
            if _covering(pattern).match(name):
                found.append((rank, pattern))
        if len(found) > 1:
            one, other = sorted(pattern for _, pattern in found[:2])
            raise UserError(
                f"split has {one!r} and {other!r}, which both match {name!r} and are equally specific; write one of "
                f"them with more of the name, such as {name!r}."
            )
        return found[0][1] if found else None

    def naming(self, name: str) -> str | None:
        """The pattern that decides for a module and matches its own name, not that of a module around it alone.

        Raises:
            UserError: as for `deciding`.
        """
        found = self.deciding(name)
        return found if found is not None and matches(name, found) else None


@lru_cache(4096)
def _expression(pattern: str) -> re.Pattern[str]:
    return re.compile(r"\.".join(_part(part, pattern) for part in pattern.split(".")))


@lru_cache(4096)
def _covering(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{_expression(pattern).pattern})(?:\.|$)")


def _part(part: str, pattern: str) -> str:
    if part == "**":
        return r"[^.]+(?:\.[^.]+)*"
    if part == "*":
        return r"[^.]+"
    if not part or "**" in part:
        rule = "has an empty part" if not part else "has ** beside other characters"
        raise UserError(f"The pattern {pattern!r} {rule}; write it as in 'blocks.*.mlp.up' or 'blocks.**'.")
    return re.escape(part).replace(r"\*", "[^.]*")


@dataclass(frozen=True)
class Normal:
    """Initial values from N(0, std²).

    Args:
        std: standard deviation.
    """

    std: float


@dataclass(frozen=True)
class Constant:
    """One initial value for all elements.

    Args:
        value: of each element.
    """

    value: float


@dataclass(frozen=True)
class Drawn:
    """Initial values that a function such as `torch.nn.init.xavier_uniform_` draws.

    A rank holds one whole parameter at a time while it keeps its shard.

    Args:
        fill: fills a whole parameter in place, with torch's random numbers.
    """

    fill: Callable[["Tensor"], object]


@dataclass(frozen=True)
class AsConstructed:
    """The initial values that the model's own constructor draws.

    Every rank makes the whole model once, in its memory and not in that of its device, and keeps its shards.
    """


Initial = Normal | Constant | Drawn | AsConstructed


HEADS: Final = "heads"
"""The name of a unit that no setting counts, but a rule itself."""


class Cut(NamedTuple):
    """One cut of a parameter.

    Attributes:
        axis: of the mesh, `tp` or `ep`.
        dim: of the parameter, which the ranks of that axis divide among them.
    """

    axis: str
    dim: int


@dataclass(frozen=True)
class Unit:
    """What a cut keeps together: a dim is so many units one after another, and each is on one rank as a whole.

    Attributes:
        setting: of the config, which counts the units; the axis that cuts the dim has to divide it.
        count: its value.
        parts: what follows one another inside a unit, as (name, indices of the dim): the queries, keys and values of a
            GQA group, a gate and the feature that it gates.
        repeated: the parts that each of several ranks may have whole, where the axis has a multiple of `count` ranks,
            which divide the other parts of a unit among them: the keys and values of a GQA group. Empty where a unit is
            on one rank only.
    """

    setting: str
    count: int
    parts: tuple[tuple[str, int], ...] = (("", 1),)
    repeated: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Indices of the dim that one unit has."""
        return sum(size for _, size in self.parts)

    def is_shared(self, ranks: int) -> bool:
        """Whether each unit is shared by several of so many ranks."""
        return bool(self.repeated) and ranks > self.count and ranks % self.count == 0

    def fits(self, ranks: int) -> bool:
        """Whether so many ranks can divide the units among them, or share them."""
        return self.count % ranks == 0 or self.is_shared(ranks)


@dataclass(frozen=True)
class Split:
    """How a module is cut; the base of all rules.

    Attributes:
        parameters: the parameters that the module may have, and how each is cut; None where it may have any, which are
            whole on every rank.
        needs_tensor_axis: whether the rule changes nothing where the tensor axis has one rank.
    """

    parameters: ClassVar[Mapping[str, tuple[Cut, ...]] | None] = None
    needs_tensor_axis: ClassVar[bool] = False

    def cuts(self, parameter: str) -> tuple[Cut, ...]:
        """The cuts of one of the module's parameters, the mesh's outer axis first; empty for one that is whole.

        Args:
            parameter: its name in the module.
        """
        return (self.parameters or {}).get(parameter, ())

    def cut_dim(self, parameter: str, axis: str) -> int | None:
        """The dim of a parameter that an axis cuts; None where its ranks have the whole of it.

        Args:
            parameter: its name in the module.
            axis: `tp` or `ep`.
        """
        return next((cut.dim for cut in self.cuts(parameter) if cut.axis == axis), None)

    def units(self, parameter: str) -> Mapping[str, Unit]:
        """What the cuts of a parameter keep together, by axis; nothing for an axis that may cut anywhere."""
        return {}


@dataclass(frozen=True)
class Column(Split):
    """A linear layer whose output features are split; the next layer takes the shard.

    Args:
        unit: of the output features; None where they may be cut anywhere.
        heads: the same in short: how many heads (or other units of equal width) the output features are; 0 where they
            may be cut anywhere. The tensor axis has to divide it.
        groups: how many groups of equal size follow one another in the output features, each of which is split: 3 for
            queries, keys and values that one layer computes and `chunk(3, -1)` separates; `heads` counts those of each.
            Ranks hold equal parts of the weight and gather all features, which costs an all-gather that separate
            layers do without.

    Example:
        >>> plan = threefold.Plan(
        ...     layers=["embed", "blocks.*", "head"],
        ...     shard={
        ...         "embed": threefold.Vocab(),
        ...         "blocks.*.query": threefold.Column(heads=8),
        ...         "blocks.*.out": threefold.Row(heads=8),
        ...         "head.output": threefold.Vocab(),
        ...     },
        ... )
    """

    unit: Unit | None = None
    heads: int = 0
    groups: int = 1

    parameters = {"weight": (Cut("tp", 0),), "bias": (Cut("tp", 0),)}  # noqa: RUF012
    needs_tensor_axis = True

    def units(self, parameter: str) -> Mapping[str, Unit]:
        unit = _unit(self.unit, self.heads)
        return {} if unit is None else {"tp": unit}


@dataclass(frozen=True)
class Row(Split):
    """A linear layer whose input features are split, and arrive split; its output is whole.

    Args:
        unit: of the input features; None where they may be cut anywhere.
        heads: as of `Column`, of the input features.
    """

    unit: Unit | None = None
    heads: int = 0

    parameters = {"weight": (Cut("tp", 1),), "bias": ()}  # noqa: RUF012
    needs_tensor_axis = True

    def units(self, parameter: str) -> Mapping[str, Unit]:
        unit = _unit(self.unit, self.heads)
        return {} if unit is None or parameter == "bias" else {"tp": unit}


def _unit(unit: Unit | None, heads: int) -> Unit | None:
    return Unit(HEADS, heads) if unit is None and heads else unit


@dataclass(frozen=True)
class Vocab(Split):
    """An embedding table whose rows are split, anywhere; or the linear layer that makes logits, split likewise, whose
    output every rank gathers whole."""

    parameters = {"weight": (Cut("tp", 0),), "bias": (Cut("tp", 0),)}  # noqa: RUF012
    needs_tensor_axis = True


@dataclass(frozen=True)
class VocabLoss(Split):
    """A cross-entropy whose logits are split over a vocabulary of `vocab_size`."""

    parameters = {}  # noqa: RUF012
    needs_tensor_axis = True
    vocab_size: int


@dataclass(frozen=True)
class AttentionCore(Split):
    """A `CausalAttention` of `heads` heads in all: each rank of the tensor axis has some, for all that a context
    rank holds of the sequence."""

    parameters = {}  # noqa: RUF012
    heads: int


@dataclass(frozen=True)
class OverContext(Split):
    """A `Rotary` on queries and keys, of which the tensor axis holds the sequence together."""


@dataclass(frozen=True)
class OverSequence(Split):
    """A `Dropout` or `PositionEmbedding` on activations [B, S, …] that may be cut along the sequence."""


@dataclass(frozen=True)
class Replicated(Split):
    """Every rank holds the whole module and computes the same with it, or with its shard of the sequence."""


@dataclass(frozen=True)
class PerHead(Split):
    """A module that every rank of the tensor axis holds whole and applies to its own heads alone (as QK-norm), so that
    each rank has a part of the gradients of its weights: the engine adds them up."""


@dataclass(frozen=True)
class TokenRouting(Split):
    """A `Routing`, whose capacity and load balancing loss need the other positions of a sequence."""


@dataclass(frozen=True)
class OverExperts(Split):
    """`Experts`, of which the expert axis has some on each rank, and the tensor axis a part of each.

    Args:
        experts: how many there are, as a unit; None where that may be any number.
        inner: the features inside each, as a unit of `gate_up`; None where they may be cut anywhere.
    """

    parameters = {"gate_up": (Cut("ep", 0), Cut("tp", 1)), "down": (Cut("ep", 0), Cut("tp", 2))}  # noqa: RUF012
    experts: Unit | None = None
    inner: Unit | None = None

    def uncut_dim(self, parameter: str) -> int:
        """The dim that neither axis cuts; ZeRO shards along it among the ranks that have the same experts."""
        return next(dim for dim in range(3) if dim not in {cut.dim for cut in self.cuts(parameter)})

    def units(self, parameter: str) -> Mapping[str, Unit]:
        inner = self.inner
        if inner is not None and parameter == "down":
            inner = Unit(inner.setting, inner.count)
        return {axis: unit for axis, unit in (("ep", self.experts), ("tp", inner)) if unit is not None}


@dataclass(frozen=True)
class ModelPlan:
    """The plan of a model: how it is sharded, partitioned into stages and initialised.

    Attributes:
        split: pattern of module names (`models.name_pattern`: `*` for one part, `**` for several) → how they are cut.
            It decides for the modules that it matches and all inside them, but where a more specific pattern does, in
            whatever order they are given. Each matches a module, and each parameter is decided.
        layers: names of the modules that the model runs through, in order; every parameter is in one of them. All
            but the last are called as `layer(x, samples)`, the last as `layer(x, labels)`.
        costs: what each of them costs to run, in any unit; the pipeline's stages are balanced by it.
        initial: parameter name → its initial values.
        ties: parameter name → the name of the parameter whose weight it shares (tied embeddings), and under which it
            is stored.
        recompute: mode of `train.recompute` → patterns (without `**`) of the modules that it computes again in the
            backward pass; each is in one of the layers.
        shared: groups of modules that share all their parameters, stored under the name of a group's first.
        kinds: the class of each layer, for stages with equally many layers of one class; may be left out.
        bare: pattern of the names of parameters that are in no module of `split`, and of buffers → how they are cut.
        frozen: names of the parameters that are not trained (`requires_grad` is False): they keep their initial values,
            without gradients and optimizer state.
        constructed: whether buffers have the values that the model's constructor gives them; they are constants, which
            no checkpoint has. Without, a model may have none.

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
    bare: Mapping[str, Split] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    constructed: bool = False

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
        """How the module of a parameter is cut, or a bare parameter itself; None where no pattern matches it."""
        if self.bare and (found := Patterns(self.bare).naming(parameter)) is not None:
            return self.bare[found]
        found = self.patterns.deciding(parameter.rpartition(".")[0])
        return None if found is None else self.split[found]

    def is_bare(self, parameter: str) -> bool:
        """Whether a parameter has a rule by itself."""
        return bool(self.bare) and Patterns(self.bare).naming(parameter) is not None

    def is_hidden_matrix(self, name: str, dims: int) -> bool:
        """Whether a parameter is a weight of two dims or more of a layer between the model's first and its last.

        Args:
            name: in the whole model; a tied weight's is that of its first use.
            dims: how many it has.
        """
        parts = name.split(".")
        return dims >= 2 and any(".".join(parts[:end]) in self._hidden_layers for end in range(1, len(parts)))

    @cached_property
    def _hidden_layers(self) -> frozenset[str]:
        return frozenset(self.layers[1:-1])

    def divided_settings(self, axis: str) -> dict[str, int]:
        """The settings of the model's config that the size of an axis has to divide, and their values.

        Args:
            axis: `tp` or `ep`.
        """
        return {setting: unit.count for setting, unit in self.units(axis).items()}

    def units(self, axis: str) -> dict[str, Unit]:
        """What the cuts of an axis keep together, by the setting that counts it.

        Args:
            axis: `tp` or `ep`.
        """
        found: dict[str, Unit] = {}
        for rule in self.split.values():
            for parameter in rule.parameters or ():
                unit = rule.units(parameter).get(axis)
                if unit is not None:
                    found[unit.setting] = unit
        return found

    def nearest_size(self, axis: str, size: int, settings: Collection[str] | None = None) -> int:
        """The size of an axis nearest to `size` that units fit, the smaller of two.

        Args:
            axis: `tp` or `ep`.
            size: one that they do not fit.
            settings: those that count the units; None for all.
        """
        units = [unit for setting, unit in self.units(axis).items() if settings is None or setting in settings]
        most = gcd(*(unit.count for unit in units if not unit.repeated)) or max(unit.count for unit in units)
        fitting = (number for number in divisors(most) if all(unit.fits(number) for unit in units))
        return min(fitting, key=lambda number: (abs(number - size), number))

    def has_partial_gradient(self, name: str) -> bool:
        """Whether each tensor rank has a part only of the gradient of a parameter that it holds whole."""
        return isinstance(self.split_of(name), PerHead)

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


@dataclass(frozen=True)
class Shard(Split):
    """A bare parameter or a buffer of which each rank of the tensor axis has a part along `dim`, such as a factor for
    each head or for each feature of a `Column` layer. The module reads its part, as it sees its part of that layer's
    output. A buffer is registered with `persistent=False`, and each part is cut from what the constructor computes.

    Args:
        dim: of the parameter or buffer.
        heads: how many heads (or other units of equal width) that dim is, as of the `Column` layers around; 0 where it
            may be cut anywhere. The tensor axis has to divide it.

    Example:
        >>> plan = threefold.Plan(
        ...     layers=["embed", "blocks.*", "head"],
        ...     shard={
        ...         "embed": threefold.Vocab(),
        ...         "blocks.*.attn.temperature": threefold.Shard(0, heads=8),
        ...         "head.output": threefold.Vocab(),
        ...     },
        ... )
    """

    dim: int
    heads: int = 0

    needs_tensor_axis = True

    def cuts(self, parameter: str) -> tuple[Cut, ...]:
        return (Cut("tp", self.dim),)

    def units(self, parameter: str) -> Mapping[str, Unit]:
        return {"tp": Unit(HEADS, self.heads)} if self.heads else {}
