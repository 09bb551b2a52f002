"""Sharding of a model's modules: a parallel layer replaces each module that the plan's rules name."""

from collections.abc import Callable, Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.comm.axis import Axis
from threefold.comm.differentiable import copy_to, gather_shares, reduce_from
from threefold.comm.layout import shard_bounds
from threefold.errors import UserError
from threefold.models import sharding
from threefold.models.layers.attention import CausalAttention, Rotary
from threefold.models.layers.decoder import Linear, PositionEmbedding
from threefold.models.layers.experts import Experts, Routing
from threefold.models.layers.latent_attention import SharedByHeads
from threefold.models.layers.norms import WidthNorm
from threefold.ops.arithmetic import FLOAT8, LayerArithmetic
from threefold.parallel.context import ContextParallelAttention, RingAttention, ShardingContext, SharedOverRanks
from threefold.parallel.cross_entropy import ParallelCrossEntropy
from threefold.parallel.experts import ParallelExperts, ParallelRouting
from threefold.parallel.leaf import local
from threefold.parallel.parameter import is_split, set_in, split_parameter
from threefold.parallel.split_layer import SplitLinear
from threefold.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from threefold.random.dropout import Dropout
from threefold.random.rng import Slice


def shard_standalone(model: nn.Module, rules: Mapping[str, sharding.Split], axis: Axis) -> None:
    """Shard the standalone parameters that rules name, in place; the modules around them read this rank's part."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter is split once
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, attribute = name.rpartition(".")
        dim = standalone_cut(rules, name, axis)
        if dim is None:
            continue
        if parameter not in made:
            made[parameter] = split_parameter(parameter, (axis, dim))
        set_in(model, name, made[parameter])
        _read_local(model.get_submodule(owner), attribute)


def standalone_cut(rules: Mapping[str, sharding.Split], name: str, axis: Axis) -> int | None:
    """Return the dim along which the rules cut a standalone parameter or buffer; None if they do not."""
    pattern = sharding.Patterns(rules).naming(name) if rules and axis.size > 1 else None
    return None if pattern is None else rules[pattern].cut_dim(name.rpartition(".")[2], axis.name)


def _read_local(module: nn.Module, name: str) -> None:
    """Make a module read a parameter as the plain tensor that this rank computes with.

    A property of a subclass does it, as in `torch.nn.utils.parametrize` and `fully_shard`: the parameter itself stays
    under its name, where torch looks for it.
    """
    if name in vars(type(module)):  # the module has several places in the model
        return

    def read(self: nn.Module) -> Tensor:
        parameter = cast(Tensor, nn.Module.__getattr__(self, name))
        return local(parameter) if is_split(parameter) else parameter  # otherwise ZeRO has taken over this rank's part

    extend(module, {name: property(read)})


def extend(module: nn.Module, members: Mapping[str, Any]) -> None:
    """Give a module its own members, through a subclass of its class with the same name."""
    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {**members, "__module__": kind.__module__})


# The next two layers compute with other rows than a rank stores, so ranks exchange features. The weight is stored
# and updated like that of any column-parallel layer, in equal parts without copies, so checkpoints, ZeRO and gradient
# norms need no special case. Features are gathered after the product, and their gradients reduce-scattered before its
# backward pass, which sums those of repeated parts. Megatron-LM does the same (`num_query_groups` below the
# tensor-parallel size), over the whole axis.


class ConcatenatedLinear(ColumnParallelLinear):
    """Column-parallel layer that splits each of several concatenated groups of output features over the axis.

    A rank gets its queries, then its keys, then its values. Made by `from_groups`.
    """

    groups: int
    features: int

    @classmethod
    def from_groups(cls, module: nn.Linear, axis: Axis, groups: int, **options: Any) -> Self:
        """Split a linear layer whose output features are `groups` groups of equal size."""
        layer = cls.from_linear(module, axis, gather_output=False, **options)
        layer.groups, layer.features = groups, module.out_features
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's shard of each group, concatenated, from `input` as for `ColumnParallelLinear`."""
        features = _gathered(super().forward(input), -(-self.features // self.axis.size), self.axis)
        size = self.features // self.groups
        start, end = shard_bounds(size, self.axis.size, self.axis.index)
        return torch.cat([features.narrow(-1, size * each + start, end - start) for each in range(self.groups)], -1)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, {self.groups} groups"


def _gathered(out: Tensor, longest: int, axis: Axis) -> Tensor:
    """Gather all ranks' features in order, then zeros; the last ranks may have fewer than `longest`."""
    if out.shape[-1] < longest:
        out = F.pad(out, (0, longest - out.shape[-1]))
    return gather_shares(out, axis, -1)


class GroupedHeadsLinear(ColumnParallelLinear):
    """Column-parallel layer whose units are shared by several ranks, which divide some parts and repeat others.

    Made by `from_units`.
    """

    unit: sharding.Unit
    sharing: Axis
    longest: int  # features of a rank; the last ones may have fewer

    @classmethod
    def from_units(
        cls,
        module: nn.Linear,
        axis: Axis,
        unit: sharding.Unit,
        sharing: Axis | None,
        *,
        arithmetic: LayerArithmetic,
        **options: Any,
    ) -> Self:
        """Split a linear layer over an axis, in parts whose number is a multiple of `unit.count`.

        The features are gathered over `sharing`, the neighbouring ranks that share a unit; over the whole axis if it is
        None, or if the rows of a unit do not divide equally.
        """
        layer = cls.from_linear(module, axis, gather_output=False, arithmetic=arithmetic, **options)
        layer.unit, layer.longest = unit, -(-module.out_features // axis.size)
        divides = module.out_features % axis.size == 0
        layer.sharing = sharing if sharing is not None and divides else axis
        layer.unit_parts = arithmetic.feature_parts(axis.size) // unit.count
        return layer

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's shard of a unit from `input` as for `ColumnParallelLinear`."""
        output = super().forward(input)
        if not self.unit.is_shared(self.axis.size):  # it has all of its units
            return self._parts(output, self.axis.size, 0)
        features = _gathered(output, self.longest, self.sharing)
        ranks = self.axis.size // self.unit.count
        number, index = divmod(self.axis.index, ranks)
        start = number * self.unit.size if self.sharing.size > ranks else 0
        return self._parts(features.narrow(-1, start, self.unit.size), self.unit.count, index)

    def _parts(self, features: Tensor, ranks: int, index: int) -> Tensor:
        """Select this rank's parts of `features`, one of `ranks` equal shards of the units."""
        units = features.unflatten(-1, (self.unit.count // ranks, -1))
        count = self.unit_parts * self.unit.count // max(self.axis.size, self.unit.count)  # of each of these units
        found, start = [], 0
        for name, size in self.unit.parts:
            part = units.narrow(-1, start, size)
            if name in self.unit.repeated:
                found.append(self.arithmetic.repeat(part.unsqueeze(-2), count))
            else:
                found.append(part.unflatten(-1, (self.unit_parts, -1)).narrow(-2, index * count, count))
            start += size
        return torch.cat(found, -1).flatten(-3)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, a unit in {self.unit_parts} parts"


class ParallelWidthNorm(WidthNorm):
    """`WidthNorm` of this rank's heads; each rank has the whole weight, and a partial gradient of it.

    Of several ranks that share a key head, each counts its part of the head's squares, and has its part of the gradient
    of the head's keys.
    """

    def __init__(self, norm: WidthNorm, axis: Axis) -> None:
        with torch.device("meta"):
            super().__init__(norm.heads, norm.head_dim, norm.eps, norm.offset)
        self.axis, self.weight = axis, norm.weight

    def total(self, squares: Tensor, heads: int) -> Tensor:
        """Return the sum of the squares of all heads from that of this rank's `heads`."""
        ranks = heads * self.axis.size // self.heads  # that share a head
        # Each rank's result depends on the sum, so the gradient of the sum is the sum of the ranks' gradients.
        return copy_to(reduce_from(squares / ranks, self.axis), self.axis)

    def of_heads(self, factors: Tensor, heads: int) -> Tensor:
        """Return the rows of `factors` [all heads, d] of this rank's `heads`."""
        return factors.narrow(0, self.axis.index * self.heads // self.axis.size, heads)


class Extended(nn.Module):
    """Base class of what a room adds to the class of a module, such as an adapter to a linear layer's."""

    @property
    def drops(self) -> bool:
        """Whether it drops elements by the keys of the samples."""
        return False

    def extend_replacement(self, made: nn.Module, context: ShardingContext) -> None:
        """Add the same to the module that replaces this one, which may be this one itself."""
        raise NotImplementedError


MakeModule = Callable[[Any, Any, ShardingContext], nn.Module]
"""Application of a rule to a module: (rule, module, context) → the module for this rank."""


class Sharding(NamedTuple):
    """Kinds of modules that a rule is for, and its application to one of them."""

    kinds: tuple[type[nn.Module], ...]
    make: MakeModule


def feature_units(rule: sharding.Split, module: nn.Linear) -> int:
    """Return the number of units of a linear layer's sharded features, between which sums over them may be cut."""
    unit = rule.units("weight").get("tp")
    if unit is not None:
        return unit.count * unit.size if unit.repeated else unit.count
    if isinstance(rule, sharding.Row):
        return module.in_features
    return module.out_features // (rule.groups if isinstance(rule, sharding.Column) else 1)


def _column(rule: sharding.Column, module: nn.Linear, context: ShardingContext) -> nn.Module:
    tp, dim, arithmetic = context.tp, context.sequence_dim, context.arithmetic
    of_units = arithmetic.of_units(feature_units(rule, module))
    if rule.groups > 1:
        return ConcatenatedLinear.from_groups(module, tp, rule.groups, sequence_dim=dim, arithmetic=of_units)
    if rule.unit is not None and rule.unit.is_shared(arithmetic.feature_parts(tp.size)):
        sharing = context.tp_shares.get(tp.size // rule.unit.count)
        return GroupedHeadsLinear.from_units(module, tp, rule.unit, sharing, sequence_dim=dim, arithmetic=arithmetic)
    layer = ColumnParallelLinear.from_linear(module, tp, gather_output=False, sequence_dim=dim, arithmetic=of_units)
    layer.sums_input_gradient = rule.sums_input_gradient
    return layer


def _row(rule: sharding.Row, module: nn.Linear, context: ShardingContext) -> nn.Module:
    tp, dim = context.tp, context.sequence_dim
    of_units = context.arithmetic.of_units(feature_units(rule, module))
    return RowParallelLinear.from_linear(module, tp, input_is_parallel=True, sequence_dim=dim, arithmetic=of_units)


def _vocab(rule: sharding.Vocab, module: nn.Embedding | nn.Linear, context: ShardingContext) -> nn.Module:
    tp, dim = context.tp, context.sequence_dim
    if isinstance(module, nn.Linear):
        of_units = context.arithmetic.of_units(feature_units(rule, module))
        return ColumnParallelLinear.from_linear(module, tp, sequence_dim=dim, arithmetic=of_units)
    return VocabParallelEmbedding.from_embedding(module, tp, sequence_dim=dim, arithmetic=context.arithmetic)


def _vocab_loss(rule: sharding.VocabLoss, module: nn.Module, context: ShardingContext) -> nn.Module:
    return ParallelCrossEntropy(rule.vocab_size, context.tp, arithmetic=context.arithmetic)


def heads_of(rule: sharding.AttentionCore, context: ShardingContext) -> Slice:
    """Return this rank's heads among all of them."""
    start, _ = shard_bounds(rule.heads, context.tp.size, context.tp.index)
    return Slice(start, rule.heads)


def _attention_core(rule: sharding.AttentionCore, module: CausalAttention, context: ShardingContext) -> nn.Module:
    heads = heads_of(rule, context)
    made: CausalAttention | RingAttention | ContextParallelAttention = module
    if context.cp.size > 1:
        kind = RingAttention if context.parallel.cp_method == "ring" else ContextParallelAttention
        made = kind(module, context.cp, heads)
    else:
        module.dropout = module.dropout.of_part({1: heads})  # of the weights [B, heads, queries, keys]
    if module.sinks is not None and context.tp.size > 1:
        made.sinks = split_parameter(module.sinks, (context.tp, 0))
        _read_local(made, "sinks")
    return made


def _across_heads(rule: sharding.AcrossHeads, module: nn.Module, context: ShardingContext) -> nn.Module:
    return SharedOverRanks(context)


def _over_context(rule: sharding.OverContext, module: Rotary, context: ShardingContext) -> nn.Module:
    cut = context.cut.across_context
    return module.of_positions(cut) if cut.shares > 1 else module


def _over_sequence(
    rule: sharding.OverSequence, module: Dropout | PositionEmbedding | Rotary, context: ShardingContext
) -> nn.Module:
    if isinstance(module, Dropout):
        return module.of_part({1: context.cut})
    return module.of_positions(context.cut) if context.cut.shares > 1 else module


def _token_routing(rule: sharding.TokenRouting, module: Routing, context: ShardingContext) -> nn.Module:
    return ParallelRouting(module, context)


def _over_experts(rule: sharding.OverExperts, module: Experts, context: ShardingContext) -> nn.Module:
    return ParallelExperts(module, context) if context.ep.size * context.tp.size > 1 else module


def _over_width(rule: sharding.OverWidth, module: WidthNorm, context: ShardingContext) -> nn.Module:
    return ParallelWidthNorm(module, context.tp)


def _unchanged(rule: sharding.Split, module: nn.Module, context: ShardingContext) -> nn.Module:
    return module


SHARDINGS: dict[type[sharding.Split], Sharding] = {
    sharding.Column: Sharding((nn.Linear,), _column),
    sharding.Row: Sharding((nn.Linear,), _row),
    sharding.Vocab: Sharding((nn.Embedding, nn.Linear), _vocab),
    sharding.VocabLoss: Sharding((nn.Module,), _vocab_loss),
    sharding.AttentionCore: Sharding((CausalAttention,), _attention_core),
    sharding.AcrossHeads: Sharding((SharedByHeads,), _across_heads),
    sharding.OverContext: Sharding((Rotary,), _over_context),
    sharding.OverSequence: Sharding((Dropout, PositionEmbedding, Rotary), _over_sequence),
    sharding.TokenRouting: Sharding((Routing,), _token_routing),
    sharding.OverExperts: Sharding((Experts,), _over_experts),
    sharding.Replicated: Sharding((nn.Module,), _unchanged),
    sharding.PerHead: Sharding((nn.Module,), _unchanged),
    sharding.OverWidth: Sharding((WidthNorm,), _over_width),
}
"""Rule → how it is applied, unless an arithmetic applies it otherwise."""


def shard_modules(
    stages: Sequence[nn.Module],
    table: Mapping[str, sharding.Split],
    context: ShardingContext,
    standalone: Mapping[str, sharding.Split] | None = None,
    otherwise: Mapping[type[sharding.Split], MakeModule] = MappingProxyType({}),
) -> None:
    """Replace each module that the table names by its version for `context`, and shard standalone parameters, in place.

    `stages` are all stages of a rank, since they may share modules; `standalone` has the patterns of parameters outside
    the table, by their own names. `otherwise` has the rules that are not applied as `SHARDINGS` says.
    """
    named = [(stage, *each) for stage in stages for each in _named(stage, table, standalone or {})]
    if not context.divides:
        return
    made: dict[nn.Module, nn.Module] = {}  # a module with several places is split once
    for stage, name, module, rule in named:
        if module not in made:
            make = otherwise.get(type(rule)) or SHARDINGS[type(rule)].make
            if rule.needs_tensor_axis and context.tp.size == 1 and not context.arithmetic.replaces_layers:
                make = _unchanged
            made[module] = make(rule, module, context)
            if isinstance(module, Extended):
                module.extend_replacement(made[module], context)
        set_in(stage, name, made[module])
    replaced = set(made.values())
    for module in (each for stage in stages for each in stage.modules()):
        if isinstance(module, Extended) and module not in replaced:  # inside a module that the table names
            replaced.add(module)
            module.extend_replacement(module, context)
    if context.tp.size > 1 and standalone:
        for stage in stages:
            shard_standalone(stage, standalone, context.tp)


def float8_layers(model: nn.Module, plan: sharding.ModelPlan) -> list[str]:
    """Return the names of the linear layers of a whole model that multiply in float8: the same ones in every layout.

    They are those in inner layers that the plan splits by `Column` or `Row`, so not routers, experts and the projection
    to the vocabulary. Raises a `UserError` if there is none.
    """
    inner = tuple(f"{name}." for name in plan.inner_layers)
    names = [
        name
        for name, module, rule in _named(model, plan.split, plan.standalone)
        if isinstance(rule, (sharding.Column, sharding.Row))
        and isinstance(module, nn.Linear)
        and f"{name}.".startswith(inner)
    ]
    if not names:
        raise UserError(
            "precision.fp8 is true but the model's plan splits no linear layer of a block by Column or Row, which are "
            "those that multiply in float8; use false."
        )
    return names


def use_fp8(stages: Sequence[nn.Module], names: Collection[str]) -> None:
    """Make linear layers, sharded or not, multiply in float8, in place."""
    for stage in stages:
        for name, module in stage.named_modules():
            if name not in names:
                continue
            if isinstance(module, (Linear, SplitLinear)):
                module.arithmetic = FLOAT8
            else:
                extend(module, {"forward": lambda self, x: FLOAT8.linear(x, self.weight, self.bias)})


def _named(
    model: nn.Module, table: Mapping[str, sharding.Split], standalone: Collection[str]
) -> list[tuple[str, nn.Module, sharding.Split]]:
    """Return the modules that the table names, each with its rule."""
    patterns = sharding.Patterns(table)
    for name, _ in model.named_parameters():
        is_standalone = any(sharding.matches(name, each) for each in standalone)
        if not is_standalone and patterns.deciding(name.rpartition(".")[0]) is None:
            raise ValueError(
                f"the split table says nothing about the parameter {name!r}; give it Replicated() at least"
            )
    named = ((name, module, patterns.naming(name)) for name, module in model.named_modules(remove_duplicate=False))
    return [(name, module, table[pattern]) for name, module, pattern in named if pattern is not None]
