"""Sharding of a model's modules: a parallel layer replaces each module that the plan's rules name."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, cast

from torch import Tensor, nn

from threefold.comm.axis import Axis
from threefold.comm.layout import shard_bounds
from threefold.models.layers.attention import CausalAttention, Rotary
from threefold.models.layers.decoder import PositionEmbedding
from threefold.models.layers.experts import Experts, Routing
from threefold.models.sharding import (
    AttentionCore,
    Column,
    OverContext,
    OverExperts,
    OverSequence,
    Patterns,
    PerHead,
    Replicated,
    Row,
    Split,
    TokenRouting,
    Vocab,
    VocabLoss,
    matches,
)
from threefold.parallel.context import ContextParallelAttention, RingAttention, ShardingContext
from threefold.parallel.experts import ParallelExperts, ParallelRouting
from threefold.parallel.parameter import is_split, local, split_parameter
from threefold.parallel.tensor import (
    ColumnParallelLinear,
    ConcatenatedLinear,
    GroupedHeadsLinear,
    ParallelCrossEntropy,
    RowParallelLinear,
    VocabParallelEmbedding,
)
from threefold.random.dropout import Dropout
from threefold.random.rng import Slice


def shard_bare(model: nn.Module, rules: Mapping[str, Split], axis: Axis) -> None:
    """Shard the bare parameters that rules name, in place; the modules around them read this rank's part."""
    made: dict[nn.Parameter, nn.Parameter] = {}  # a tied parameter is split once
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        owner, _, own = name.rpartition(".")
        dim = bare_cut(rules, name, axis)
        if dim is None:
            continue
        if parameter not in made:
            made[parameter] = split_parameter(parameter, axis, dim)
        module = model.get_submodule(owner)
        setattr(module, own, made[parameter])
        _read_local(module, own)


def bare_cut(rules: Mapping[str, Split], name: str, axis: Axis) -> int | None:
    """Return the dim along which the rules cut a bare parameter or buffer; None if they do not."""
    pattern = Patterns(rules).naming(name) if rules and axis.size > 1 else None
    return None if pattern is None else rules[pattern].cut_dim(name.rpartition(".")[2], axis.name)


def _read_local(module: nn.Module, name: str) -> None:
    """Have a module read a parameter as the plain tensor that this rank computes with.

    A property of a subclass does it, as in `torch.nn.utils.parametrize` and `fully_shard`: the parameter itself stays
    under its name, where torch looks for it.
    """

    kind = type(module)
    if name in vars(kind):  # the module has several places in the model
        return

    def read(self: nn.Module) -> Tensor:
        parameter = cast(Tensor, nn.Module.__getattr__(self, name))
        return local(parameter) if is_split(parameter) else parameter  # otherwise ZeRO has taken over this rank's part

    module.__class__ = type(kind.__name__, (kind,), {name: property(read), "__module__": kind.__module__})


_CONTEXT_ATTENTION = {"all-gather": ContextParallelAttention, "ring": RingAttention}


class Sharding(NamedTuple):
    """How a rule is applied: the modules it is for, and (rule, module, context) → the module for this rank."""

    kinds: tuple[type[nn.Module], ...]
    make: Callable[[Any, Any, ShardingContext], nn.Module]


def _column(rule: Column, module: nn.Linear, context: ShardingContext) -> nn.Module:
    if rule.groups > 1:
        return ConcatenatedLinear.from_groups(module, context.tp, rule.groups, sequence_dim=context.sequence_dim)
    if rule.unit is not None and rule.unit.is_shared(context.tp.size):
        sharing = context.tp_shares.get(context.tp.size // rule.unit.count)
        return GroupedHeadsLinear.from_units(module, context.tp, rule.unit, sharing, sequence_dim=context.sequence_dim)
    return ColumnParallelLinear.from_linear(module, context.tp, gather_output=False, sequence_dim=context.sequence_dim)


def _row(rule: Row, module: nn.Linear, context: ShardingContext) -> nn.Module:
    return RowParallelLinear.from_linear(module, context.tp, input_is_parallel=True, sequence_dim=context.sequence_dim)


def _vocab(rule: Vocab, module: nn.Embedding | nn.Linear, context: ShardingContext) -> nn.Module:
    if isinstance(module, nn.Linear):
        return ColumnParallelLinear.from_linear(module, context.tp, sequence_dim=context.sequence_dim)
    return VocabParallelEmbedding.from_embedding(module, context.tp, sequence_dim=context.sequence_dim)


def _vocab_loss(rule: VocabLoss, module: nn.Module, context: ShardingContext) -> nn.Module:
    return ParallelCrossEntropy(rule.vocab_size, context.tp)


def _attention_core(rule: AttentionCore, module: CausalAttention, context: ShardingContext) -> nn.Module:
    start, _ = shard_bounds(rule.heads, context.tp.size, context.tp.index)
    heads = Slice(start, rule.heads)
    if context.cp.size > 1:
        return _CONTEXT_ATTENTION[context.cp_method](module, context.cp, heads)
    module.dropout = module.dropout.of_part({1: heads})  # of the weights [B, heads, queries, keys]
    return module


def _over_context(rule: OverContext, module: Rotary, context: ShardingContext) -> nn.Module:
    cut = context.cut.across_context
    return module.of_positions(cut) if cut.shares > 1 else module


def _over_sequence(rule: OverSequence, module: Dropout | PositionEmbedding, context: ShardingContext) -> nn.Module:
    if isinstance(module, Dropout):
        return module.of_part({1: context.cut})
    return module.of_positions(context.cut) if context.cut.shares > 1 else module


def _token_routing(rule: TokenRouting, module: Routing, context: ShardingContext) -> nn.Module:
    return ParallelRouting(module, context)


def _over_experts(rule: OverExperts, module: Experts, context: ShardingContext) -> nn.Module:
    return ParallelExperts(module, context) if context.ep.size * context.tp.size > 1 else module


def _unchanged(rule: Split, module: nn.Module, context: ShardingContext) -> nn.Module:
    return module


SHARDINGS: dict[type[Split], Sharding] = {
    Column: Sharding((nn.Linear,), _column),
    Row: Sharding((nn.Linear,), _row),
    Vocab: Sharding((nn.Embedding, nn.Linear), _vocab),
    VocabLoss: Sharding((nn.Module,), _vocab_loss),
    AttentionCore: Sharding((CausalAttention,), _attention_core),
    OverContext: Sharding((Rotary,), _over_context),
    OverSequence: Sharding((Dropout, PositionEmbedding), _over_sequence),
    TokenRouting: Sharding((Routing,), _token_routing),
    OverExperts: Sharding((Experts,), _over_experts),
    Replicated: Sharding((nn.Module,), _unchanged),
    PerHead: Sharding((nn.Module,), _unchanged),
}
"""Rule → how it is applied."""


def shard_modules(
    stages: Sequence[nn.Module],
    table: Mapping[str, Split],
    context: ShardingContext,
    bare: Mapping[str, Split] | None = None,
) -> None:
    """Replace each module that the table names by its version for `context`, and shard bare parameters, in place.

    Args:
        stages: all stages of a rank, since they may share modules.
        table: pattern of modules of the whole model → how they are split.
        bare: pattern of parameters outside the table, by their own names → how they are cut.

    Raises:
        ValueError: a parameter is in no module of the table.
    """
    named = [(stage, *each) for stage in stages for each in _named(stage, table, bare or {})]
    if not context.divides:
        return
    made: dict[nn.Module, nn.Module] = {}  # a module with several places is split once
    for stage, name, module, rule in named:
        if rule.needs_tensor_axis and context.tp.size == 1:
            continue
        if module not in made:
            made[module] = _shard(rule, module, context)
        parent, _, attribute = name.rpartition(".")
        setattr(stage.get_submodule(parent), attribute, made[module])
    if context.tp.size > 1 and bare:
        for stage in stages:
            shard_bare(stage, bare, context.tp)


def _shard(rule: Split, module: nn.Module, context: ShardingContext) -> nn.Module:
    kinds, make = SHARDINGS[type(rule)]
    if not isinstance(module, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{type(rule).__name__} is for {names}, not {type(module).__name__}")
    return make(rule, module, context)


def _named(model: nn.Module, table: Mapping[str, Split], bare: Collection[str]) -> list[tuple[str, nn.Module, Split]]:
    """Return the modules that the table names, each with its rule."""
    patterns = Patterns(table)
    for name, _ in model.named_parameters():
        if patterns.deciding(name.rpartition(".")[0]) is None and not any(matches(name, each) for each in bare):
            raise ValueError(
                f"the split table says nothing about the parameter {name!r}; give it Replicated() at least"
            )
    named = ((name, module, patterns.naming(name)) for name, module in model.named_modules(remove_duplicate=False))
    return [(name, module, table[pattern]) for name, module, pattern in named if pattern is not None]
