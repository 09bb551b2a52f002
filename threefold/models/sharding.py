"""Sharding rules and plans: patterns of module names, initial values, rules of each kind of module, and `ModelPlan`.

A pattern is a dotted name in which a part may be `*`, any one part, or `**`, one or more parts; inside a part, `*`
matches any characters of that part, as in `attn_*`.
"""

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import gcd
from typing import TYPE_CHECKING, ClassVar, Final, NamedTuple

from threefold.config.section import divisors, nearest_divisor
from threefold.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def matches(name: str, pattern: str) -> bool:
    """Return whether a whole name matches a pattern: `blocks.3` matches `blocks.*`, and `blocks.3.attn` does not."""
    return _expression(pattern).fullmatch(name) is not None


def covers(pattern: str, name: str) -> bool:
    """Return whether a pattern matches a name, or that of a module around it: `blocks.*` covers `blocks.3.attn`."""
    return _covering(pattern).match(name) is not None


def specificity(pattern: str) -> tuple[int, int, int, int]:
    """Return the sort key of a pattern: parts without a star, parts with a star inside, parts `*`, and fewer `**`."""
    parts = pattern.split(".")
    several, single = parts.count("**"), parts.count("*")
    literal = sum("*" not in part for part in parts)
    return literal, len(parts) - several - single - literal, single, -several


class Patterns:
    """Set of patterns, of which the most specific match applies to a module and everything inside it."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._ranked = sorted(((specificity(each), each) for each in patterns), reverse=True)
        for _, pattern in self._ranked:
            _expression(pattern)

    def deciding(self, name: str) -> str | None:
        """Return the pattern that applies to a module, if any; raise UserError if two are equally specific."""
        found: list[tuple[tuple[int, int, int, int], str]] = []
        for rank, pattern in self._ranked:
            if found and rank < found[0][0]:
                break
            if covers(pattern, name):
                found.append((rank, pattern))
        if len(found) > 1:
            one, other = sorted(pattern for _, pattern in found[:2])
            raise UserError(
                f"split has {one!r} and {other!r}, which both match {name!r} and are equally specific; write one of "
                f"them with more of the name, such as {name!r}."
            )
        return found[0][1] if found else None

    def naming(self, name: str) -> str | None:
        """Return the pattern that applies to a module if it matches its own name, not that of a module around it."""
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
        value: initial value.
    """

    value: float


@dataclass(frozen=True)
class Drawn:
    """Initial values from a function such as `torch.nn.init.xavier_uniform_` that fills a whole tensor in place."""

    fill: Callable[["Tensor"], object]


@dataclass(frozen=True)
class AsConstructed:
    """Initial values that the constructor draws: every rank constructs the whole model once, in host memory."""


Initial = Normal | Constant | Drawn | AsConstructed


LORA_A, LORA_B, TABLE_A, TABLE_B = "lora_a", "lora_b", "lora_embedding_a", "lora_embedding_b"
"""Weights of an adapter (the room `adapters`) beside the weight of a linear layer, and beside a table that is looked
up."""
MAGNITUDE: Final = "lora_magnitude"
"""Changes of the magnitudes of a linear layer's rows (DoRA)."""
_OF_ADAPTER: Final = re.compile(rf"(?:.*[._])?(?:{LORA_A}|{LORA_B}|{TABLE_A}|{TABLE_B}|{MAGNITUDE})")


def is_of_adapter(parameter: str) -> bool:
    """Return whether a parameter's name is that of an adapter's weight."""
    return _OF_ADAPTER.fullmatch(parameter) is not None


HEADS: Final = "heads"  # name of a unit that is counted by a rule itself instead of a setting


class Cut(NamedTuple):
    """Sharding of a parameter: the ranks of `axis` (`tp` or `ep`) divide its dim `dim` among them."""

    axis: str
    dim: int


@dataclass(frozen=True)
class Unit:
    """Run of indices that stays on one rank: a sharded dim consists of `count` units, one after another.

    Its `parts`, as (name, indices of the dim), are queries, keys and values of a GQA group, or a gate and the feature
    that it gates. Several ranks hold the `repeated` parts whole, keys and values, if the axis has a multiple of `count`
    ranks, which then divide the other parts of a unit among them. An adapter treats each part as a layer of its own,
    unless they are `one_layer` in other systems too.
    """

    setting: str  # of the config, which counts the units; the size of the axis must divide it
    count: int
    parts: tuple[tuple[str, int], ...] = (("", 1),)
    repeated: tuple[str, ...] = ()
    one_layer: bool = False

    @property
    def size(self) -> int:
        """Number of indices in one unit."""
        return sum(size for _, size in self.parts)

    def is_shared(self, ranks: int) -> bool:
        """Return whether, on `ranks` ranks, several ranks share each unit."""
        return bool(self.repeated) and ranks > self.count and ranks % self.count == 0

    def fits(self, ranks: int) -> bool:
        """Return whether `ranks` ranks can divide the units among them, or share them."""
        return self.count % ranks == 0 or self.is_shared(ranks)


@dataclass(frozen=True)
class Split:
    """Rule that shards a module; base class of all rules.

    Attributes:
        parameters: parameters that the module may have, with the cuts of each; None for any parameters, all replicated.
        partial: parameters that each tensor rank has whole, with a partial gradient.
        buffers: persistent buffers that the module may have, in their own dtype, with the plan's initial values.
        needs_tensor_axis: whether the rule has no effect on a tensor axis of one rank.
    """

    parameters: ClassVar[Mapping[str, tuple[Cut, ...]] | None] = None
    partial: ClassVar[frozenset[str]] = frozenset()
    buffers: ClassVar[frozenset[str]] = frozenset()
    needs_tensor_axis: ClassVar[bool] = False

    def cuts(self, parameter: str) -> tuple[Cut, ...]:
        """Return the cuts of a parameter of the module, the mesh's outer axis first; empty for a replicated one."""
        return (self.parameters or {}).get(parameter, ())

    def cut_dim(self, parameter: str, axis: str) -> int | None:
        """Return the dim of a parameter that an axis (`tp` or `ep`) shards; None if its ranks hold all of it."""
        return next((cut.dim for cut in self.cuts(parameter) if cut.axis == axis), None)

    def is_partial(self, parameter: str) -> bool:
        """Return whether each tensor rank has the whole parameter, and a partial gradient of it."""
        return parameter in self.partial

    def units(self, parameter: str) -> Mapping[str, Unit]:
        """Return the units of a sharded parameter, by axis; an axis that may cut anywhere has none."""
        return {}


@dataclass(frozen=True)
class Column(Split):
    """Linear layer whose output features are sharded; the next layer takes the shard.

    Args:
        unit: unit of the output features; None if they may be cut anywhere.
        heads: short form of `unit`: number of heads (or other units of equal width) in the output features; 0 if they
            may be cut anywhere. The size of the tensor axis must divide it.
        groups: number of groups of equal size in the output features, each of which is sharded: 3 for queries, keys and
            values that one layer computes and `chunk(3, -1)` separates; `heads` counts the heads of one group. Ranks
            hold equal parts of the weight and gather all features, which costs an all-gather that separate layers
            avoid.
        sums_input_gradient: whether the layer itself gives each rank its whole input, and sums the ranks' gradients of
            it; False if a module before it does so (`AcrossHeads`).

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
    sums_input_gradient: bool = True

    parameters = {  # noqa: RUF012
        "weight": (Cut("tp", 0),),
        "bias": (Cut("tp", 0),),
        LORA_A: (),
        LORA_B: (Cut("tp", 0),),
        MAGNITUDE: (Cut("tp", 0),),
    }
    partial = frozenset((LORA_A,))
    needs_tensor_axis = True

    def units(self, parameter: str) -> Mapping[str, Unit]:
        return {} if parameter == LORA_A else _of_tensor_axis(self.unit, self.heads)


@dataclass(frozen=True)
class Row(Split):
    """Linear layer whose input features are sharded, as is its input; its output is summed over the ranks.

    Args:
        unit: unit of the input features; None if they may be cut anywhere.
        heads: number of heads in the input features, as for `Column`.
    """

    unit: Unit | None = None
    heads: int = 0

    parameters = {  # noqa: RUF012
        "weight": (Cut("tp", 1),),
        "bias": (),
        LORA_A: (Cut("tp", 1),),
        LORA_B: (),
        MAGNITUDE: (),
    }
    partial = frozenset((LORA_B, MAGNITUDE))
    needs_tensor_axis = True

    def units(self, parameter: str) -> Mapping[str, Unit]:
        return _of_tensor_axis(self.unit, self.heads) if self.cuts(parameter) else {}


def _of_tensor_axis(unit: Unit | None, heads: int) -> Mapping[str, Unit]:
    unit = Unit(HEADS, heads) if unit is None and heads else unit
    return {} if unit is None else {"tp": unit}


@dataclass(frozen=True)
class Vocab(Split):
    """Embedding table with sharded rows, or linear layer to logits that is sharded the same way and gathers its output.

    The rows may be cut anywhere.
    """

    parameters = {**Column.parameters, TABLE_A: (Cut("tp", 1),), TABLE_B: ()}  # noqa: RUF012
    partial = frozenset((LORA_A, TABLE_B))
    needs_tensor_axis = True


@dataclass(frozen=True)
class VocabLoss(Split):
    """Cross-entropy of logits that are sharded over a vocabulary of `vocab_size`."""

    parameters = {}  # noqa: RUF012
    needs_tensor_axis = True
    vocab_size: int


@dataclass(frozen=True)
class AttentionCore(Split):
    """`CausalAttention` with `heads` heads in total, of which each rank of the tensor axis attends with its own."""

    parameters = {"sinks": (Cut("tp", 0),)}  # noqa: RUF012
    heads: int


@dataclass(frozen=True)
class AcrossHeads(Split):
    """`SharedByHeads`, whose output the heads of all tensor ranks use."""

    parameters = {}  # noqa: RUF012


@dataclass(frozen=True)
class OverContext(Split):
    """`Rotary` on queries and keys for which all ranks of a tensor axis hold the same positions."""


@dataclass(frozen=True)
class OverSequence(Split):
    """`Dropout`, `PositionEmbedding` or `Rotary` on activations [B, S, …] that may be sharded along the sequence."""


@dataclass(frozen=True)
class Replicated(Split):
    """Module that is whole on every rank, to compute the same result, or the result for its shard of the sequence."""


@dataclass(frozen=True)
class PerHead(Split):
    """Module that is whole on every tensor rank, which applies it only to its own heads, such as QK-norm.

    Each rank has a partial gradient of its weights; the partial gradients are summed over the tensor axis.
    """

    def is_partial(self, parameter: str) -> bool:
        return True


@dataclass(frozen=True)
class OverWidth(PerHead):
    """`WidthNorm` of `heads` heads in total, of which each rank of the tensor axis normalizes its own."""

    needs_tensor_axis = True
    heads: int


@dataclass(frozen=True)
class TokenRouting(Split):
    """`Routing`, whose capacity and load balancing loss depend on the other positions of a sequence.

    Args:
        experts: number of experts.
        bias_rate: rate at which the biases of the experts follow the load; 0 for biases that stay, or none.
    """

    buffers = frozenset(("bias",))
    experts: int = 0
    bias_rate: float = 0.0


@dataclass(frozen=True)
class OverExperts(Split):
    """`Experts`, divided over the expert axis, with each expert sharded over the tensor axis."""

    parameters = {  # noqa: RUF012
        "gate_up": (Cut("ep", 0), Cut("tp", 1)),
        "down": (Cut("ep", 0), Cut("tp", 2)),
        "gate_up_bias": (Cut("ep", 0), Cut("tp", 1)),
        "down_bias": (Cut("ep", 0), Cut("tp", 1)),
        f"gate_up_{LORA_A}": (Cut("ep", 0),),
        f"gate_up_{LORA_B}": (Cut("ep", 0), Cut("tp", 1)),
        f"down_{LORA_A}": (Cut("ep", 0), Cut("tp", 2)),
        f"down_{LORA_B}": (Cut("ep", 0),),
    }
    partial = frozenset((f"gate_up_{LORA_A}", f"down_{LORA_B}"))
    experts: Unit | None = None  # None if there may be any number
    inner: Unit | None = None  # features of each expert, as a unit of `gate_up`; None if they may be cut anywhere

    def zero_dim(self, parameter: str) -> int:
        """Return the dim along which ZeRO shards among ranks with the same experts: one without a cut, or else 0.

        Of adapters it is 0, since only that dim may divide unevenly, and their ranks are small.
        """
        if is_of_adapter(parameter):
            return 0
        dims = 2 if parameter.endswith("_bias") else 3
        return next((dim for dim in range(dims) if dim not in {cut.dim for cut in self.cuts(parameter)}), 0)

    def units(self, parameter: str) -> Mapping[str, Unit]:
        inner = self.inner
        if inner is not None and parameter in ("down", f"down_{LORA_A}"):
            inner = Unit(inner.setting, inner.count)
        if parameter == "down_bias" or self.cut_dim(parameter, "tp") is None:  # biases of outputs may be cut anywhere
            inner = None
        return {axis: unit for axis, unit in (("ep", self.experts), ("tp", inner)) if unit is not None}


@dataclass(frozen=True)
class ModelPlan:
    """Complete plan of a model: how it is sharded, partitioned into stages and initialized.

    Attributes:
        split: pattern of module names (`*` for one part, `**` for several) → rule of these modules. It applies to the
            modules that it matches and everything inside them, except where a more specific pattern does, in any order.
            Each pattern matches a module, and each parameter has a rule.
        layers: names of the modules that the model runs through, in order; every parameter is in one of them. All but
            the last are called as `layer(x, samples)`, the last as `layer(x, labels)`, with `samples` if it takes them.
        costs: cost of running each layer, in any unit; balances the pipeline stages.
        initial: parameter name → initial values.
        ties: parameter name → name of the parameter whose weight it shares (tied embeddings), and under which it is
            stored.
        recompute: mode of `train.recompute` → patterns (without `**`) of the modules that it recomputes in the backward
            pass; each module is in one of the layers.
        shared: groups of modules that share all their parameters, stored under the name of a group's first module.
        kinds: class of each layer, for stages with equally many layers of one class; may be omitted.
        standalone: pattern of names of buffers, and of parameters in no module of `split` → rule.
        frozen: names of the parameters that are not trained (`requires_grad` is False): they keep their initial values,
            without gradients and optimizer state; and of expert biases that stay.
        terms: term of the loss that the last layer, a `TermsHead`, computes → its weight; empty for one mean.
        of_pairs: whether the loss is a mean over pairs of documents, of which each sample is one, not over tokens.
        width: width of a `Decoder` in units of the base width of µP; 1 without µP.
        constructed: whether buffers keep the values that the model's constructor gives them, as constants that no
            checkpoint stores. If False, the model must not have buffers.

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
    standalone: Mapping[str, Split] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    terms: Mapping[str, float] = field(default_factory=dict)
    of_pairs: bool = False
    width: float = 1.0
    constructed: bool = False

    def __post_init__(self) -> None:
        borrowed = {user: owner for owner, *users in self.tied_groups() for user in users}
        for user, owner in borrowed.items():
            if owner in borrowed:
                raise ValueError(f"{user!r} shares the weights of {owner!r}, which shares those of {borrowed[owner]!r}")

    @cached_property
    def patterns(self) -> Patterns:
        """Patterns of `split`."""
        return Patterns(self.split)

    def split_of(self, parameter: str) -> Split | None:
        """Return the rule of a parameter's module, or of a standalone parameter itself; None if no pattern matches."""
        if self.standalone and (found := Patterns(self.standalone).naming(parameter)) is not None:
            return self.standalone[found]
        found = self.patterns.deciding(parameter.rpartition(".")[0])
        return None if found is None else self.split[found]

    def is_standalone(self, parameter: str) -> bool:
        """Return whether a parameter has its own rule."""
        return bool(self.standalone) and Patterns(self.standalone).naming(parameter) is not None

    def initializes_buffer(self, name: str) -> bool:
        """Return whether a rule initializes a buffer, which keeps its dtype, unlike those of custom models."""
        rule = self.split_of(name)
        return rule is not None and name.rpartition(".")[2] in rule.buffers

    def is_hidden_matrix(self, name: str, dims: int) -> bool:
        """Return whether a parameter of this unsharded name has two `dims` or more and is in an inner layer.

        A tied weight has the name of its first use.
        """
        parts = name.split(".")
        return dims - self.is_stack(name) >= 2 and any(
            ".".join(parts[:end]) in self.inner_layers for end in range(1, len(parts))
        )

    def is_stack(self, name: str) -> bool:
        """Return whether the first dim of a parameter counts experts, each with a matrix or a vector of its own."""
        return isinstance(self.split_of(name), OverExperts)

    @cached_property
    def inner_layers(self) -> frozenset[str]:
        """Layers between the first and the last, and the module of the further blocks of a `PredictingHead`."""
        # With several terms of the loss, the last layer has the blocks of multi-token prediction.
        further = (f"{self.layers[-1]}.depths",) if self.terms and not self.of_pairs else ()
        return frozenset((*self.layers[1:-1], *further))

    def units(self, axis: str) -> dict[str, Unit]:
        """Return the units that an axis (`tp` or `ep`) keeps together, by the setting that counts them."""
        found: dict[str, Unit] = {}
        for rule in self.split.values():
            for parameter in rule.parameters or ():
                unit = rule.units(parameter).get(axis)
                if unit is not None:
                    found[unit.setting] = unit
        return found

    def nearest_size(self, axis: str, size: int, settings: Collection[str] | None = None) -> int:
        """Return the nearest size of an axis (`tp` or `ep`) that fits the units of `settings`; of two, the smaller."""
        units = [unit for setting, unit in self.units(axis).items() if settings is None or setting in settings]
        most = gcd(*(unit.count for unit in units if not unit.repeated)) or max(unit.count for unit in units)
        fitting = (number for number in divisors(most) if all(unit.fits(number) for unit in units))
        return min(fitting, key=lambda number: (abs(number - size), number))

    def has_partial_gradient(self, name: str) -> bool:
        """Return whether a parameter is whole on each tensor rank, with only a partial gradient."""
        rule = self.split_of(name)
        return rule is not None and rule.is_partial(name.rpartition(".")[2])

    def tied_groups(self) -> list[tuple[str, ...]]:
        """Return the groups of parameters or modules that share their weights, the one that stores them first."""
        users: dict[str, list[str]] = {}
        for user, owner in self.ties.items():
            users.setdefault(owner, [owner]).append(user)
        return [*map(tuple, users.values()), *self.shared]

    def whole_name(self, name: str) -> str:
        """Return the name that a parameter is stored under."""
        for owner, *users in self.shared:
            for user in users:
                if name.startswith(user + "."):
                    return owner + name.removeprefix(user)
        return self.ties.get(name, name)


@dataclass(frozen=True)
class Sharded(Split):
    """Standalone parameter or buffer that the tensor axis shards along `dim`, such as a factor for each head.

    It may also be a factor for each feature of a `Column` layer. The module reads its shard, just as it sees its shard
    of that layer's output. A buffer is registered with `persistent=False`, and each shard is cut from the values that
    the constructor computes.

    Args:
        dim: dim of the parameter or buffer.
        heads: number of heads (or other units of equal width) along that dim, as in the surrounding `Column` layers; 0
            if it may be cut anywhere. The size of the tensor axis must divide it.

    Example:
        >>> plan = threefold.Plan(
        ...     layers=["embed", "blocks.*", "head"],
        ...     shard={
        ...         "embed": threefold.Vocab(),
        ...         "blocks.*.attn.temperature": threefold.Sharded(0, heads=8),
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
        return _of_tensor_axis(None, self.heads)


def check_tensor_axis(plan: ModelPlan, size: int, setting: str = "parallel.tp") -> None:
    """Raise a `UserError`, which names `setting`, unless the tensor axis divides the heads in a plan's rules."""
    for pattern, rule in (*plan.split.items(), *plan.standalone.items()):
        for parameter in rule.parameters or ("",):
            unit = rule.units(parameter).get("tp")
            if unit is not None and unit.setting == HEADS and unit.count % size:
                raise UserError(
                    f"{setting} is {size} but must divide the {unit.count} heads of {pattern!r}; use "
                    f"{nearest_divisor(size, unit.count)}."
                )
