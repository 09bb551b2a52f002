"""Tensor parallelism of any model by a table of patterns over the names of its modules.

    {"**.self_attn.*_proj": Column(), "**.self_attn.o_proj": Row(), "lm_head": Vocab()}

A module that infers its number of heads from its projections' outputs (`view(…, -1, head_dim)`, as in `transformers`)
then works on the heads of its rank.
"""

from collections.abc import Mapping
from difflib import get_close_matches

from torch import nn

from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.models.sharding import Column, Patterns, PerHead, Replicated, Row, Split, Vocab, matches
from threefold.parallel.sequence import ShardingContext
from threefold.parallel.shard_modules import SHARDINGS

_RULES = (Column, Row, Vocab, PerHead, Replicated)


def shard_by_patterns(model: nn.Module, table: Mapping[str, Split], mesh: Mesh) -> list[str]:
    """Replace the modules that a table names by parallel ones, in place.

    Args:
        model: model with its weights, equal on every tensor rank.
        table: pattern → `Column` or `Row` (of `nn.Linear`), `Vocab` (of `nn.Embedding`, or of an `nn.Linear` that
            computes logits, which are gathered), `PerHead` or `Replicated`.
        mesh: mesh whose tp axis shards the modules.

    Returns:
        the names of the `PerHead` parameters, which each tensor rank holds whole with a partial gradient.

    Raises:
        UserError: the table does not fit the model, or the axis does not divide the heads.
    """
    rules = _rules_by_name(model, table)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name, rule in rules.items():
        _check(name, modules, rule, mesh.tp.size)
    if mesh.tp.size == 1:
        return []
    ties = _tied_weights(model)
    _check_ties(ties, rules)
    context = ShardingContext(mesh.tp, mesh.cp, mesh.ep)
    made: dict[nn.Module, nn.Module] = {}
    partial: list[str] = []
    for name, rule in rules.items():
        module = modules[name]
        if isinstance(rule, PerHead):
            partial += [f"{name}.{each}" for each, _ in module.named_parameters()]
        if isinstance(rule, PerHead | Replicated):
            continue
        if module not in made:
            made[module] = SHARDINGS[type(rule)].make(rule, module, context)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, made[module])
    for first, *others in ties:
        owner = model.get_submodule(first.rpartition(".")[0])
        for other in others:
            parent, _, attribute = other.rpartition(".")
            setattr(model.get_submodule(parent), attribute, getattr(owner, first.rpartition(".")[2]))
    return partial


def _rules_by_name(model: nn.Module, table: Mapping[str, Split]) -> dict[str, Split]:
    for pattern, rule in table.items():
        if not isinstance(rule, _RULES):
            raise UserError(
                f"tensor_parallel has {rule!r} for {pattern!r} but takes "
                f"{', '.join(f'{kind.__name__}()' for kind in _RULES)}; use one of them."
            )
    patterns = Patterns(table)
    names = [name for name, _ in model.named_modules(remove_duplicate=False) if name]
    for pattern in table:
        if not any(matches(name, pattern) for name in names):
            last = {name.rpartition(".")[2]: name for name in reversed(names)}
            close = get_close_matches(pattern.rpartition(".")[2], last, n=1, cutoff=0)
            hint = f"; the nearest is {last[close[0]]!r}" if close else ""
            raise UserError(f"tensor_parallel has {pattern!r}, which is no module of the model{hint}.")
    found = ((name, patterns.naming(name)) for name in names)
    return {name: table[pattern] for name, pattern in found if pattern is not None}


def _check(name: str, modules: Mapping[str, nn.Module], rule: Split, ranks: int) -> None:
    module = modules[name]
    kinds = SHARDINGS[type(rule)].kinds
    if not isinstance(module, kinds):
        suits = " or ".join(kind.__name__ for kind in kinds)
        raise UserError(
            f"tensor_parallel has {type(rule).__name__}() for {name!r}, a {type(module).__name__}, but that rule is "
            f"for {suits}; leave it out to keep the module whole."
        )
    if not isinstance(module, nn.Linear) or not isinstance(rule, Column | Row):
        return
    model = modules[""]
    output = getattr(model, "get_output_embeddings", lambda: None)()
    if module is output:
        raise UserError(
            f"tensor_parallel has {type(rule).__name__}() for {name!r}, which gives the model's logits; use Vocab(), "
            "which gathers them."
        )
    features = module.out_features if isinstance(rule, Column) else module.in_features
    width = getattr(modules[name.rpartition(".")[0]], "head_dim", None)
    if isinstance(width, int) and width > 0 and features % width == 0:
        heads = features // width
        if heads % ranks:
            fits = max(each for each in range(1, ranks) if heads % each == 0)
            raise UserError(f"The mesh has tp {ranks} but it must divide the {heads} heads of {name!r}; use tp={fits}.")


def _tied_weights(model: nn.Module) -> list[list[str]]:
    """Return the groups of names that share one parameter."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [each for each in names.values() if len(each) > 1]


def _check_ties(ties: list[list[str]], rules: Mapping[str, Split]) -> None:
    for names in ties:
        found = [rules.get(name.rpartition(".")[0]) for name in names]
        if any(type(each) is not type(found[0]) for each in found):
            one = next(name for name, rule in zip(names, found, strict=True) if rule is not None)
            others = " and ".join(repr(name) for name in names if name != one)
            raise UserError(
                f"tensor_parallel has a rule for {one!r}, the same weight as {others}; give their modules one rule."
            )
