"""Inspection of a model's modules and their shards (`threefold inspect`, and `threefold.inspect` in Python)."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from io import StringIO
from math import prod
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from threefold.api.model import with_arguments
from threefold.errors import UserError
from threefold.models.plan import Plan, tie_
from threefold.models.sharding import ModelPlan, Split, check_tensor_axis
from threefold.verify.plan_check import check_plan
from threefold.verify.proposal import as_pattern, propose
from threefold.verify.rank_part import shard_length

_WIDTH = 160


@dataclass(frozen=True)
class InspectedModule:
    """Modules of one class with the same sharding rule, whose names differ only in numbers; or a standalone parameter.

    Attributes:
        pattern: pattern of their names.
        kind: name of their class.
        count: number of modules.
        parameters: total number of parameters.
        per_rank: number of parameters on the first rank of the tensor axis.
        rule: sharding rule.
        undecided: why a proposed plan could not decide on a rule; otherwise empty.
    """

    pattern: str
    kind: str
    count: int
    parameters: int
    per_rank: int
    rule: str
    undecided: str = ""


@dataclass(frozen=True)
class Inspection:
    """Modules of a model and how they are sharded; `str()` gives a table.

    Attributes:
        modules: modules with parameters, in the order of the model.
        tp: size of the tensor axis assumed.
        layers: layers of the plan, in order.
        proposal: the proposed plan as Python code; empty if the model has a plan.
        problem: why the model cannot be trained with the proposed plan as is; empty if it can.
    """

    modules: tuple[InspectedModule, ...]
    tp: int
    layers: tuple[str, ...]
    proposal: str = ""
    problem: str = ""

    @property
    def undecided(self) -> tuple[str, ...]:
        """Patterns that the proposed plan could not decide on."""
        return tuple(module.pattern for module in self.modules if module.undecided)

    @property
    def parameters(self) -> int:
        """Number of parameters of the whole model, counting tied weights once."""
        return sum(module.parameters for module in self.modules)

    def __str__(self) -> str:
        table = Table(box=None, pad_edge=False, title_justify="left")
        for title, align in (("module", "left"), ("class", "left"), ("number", "right"), ("parameters", "right")):
            table.add_column(title, justify=align, no_wrap=True)  # type: ignore[arg-type]
        table.add_column("proposed cut" if self.proposal else "cut", no_wrap=True)
        table.add_column(f"per rank, tp {self.tp}", justify="right", no_wrap=True)
        for each in self.modules:
            rule = f"{each.rule} ?" if each.undecided else each.rule
            table.add_row(
                each.pattern, each.kind, f"{each.count:,}", f"{each.parameters:,}", rule, f"{each.per_rank:,}"
            )
        total = sum(each.per_rank for each in self.modules)
        table.add_row("together", "", "", f"{self.parameters:,}", "", f"{total:,}")
        text = StringIO()
        Console(file=text, width=_WIDTH, highlight=False, no_color=True).print(table)
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        names, first = self.layers, ", ".join(self.layers[:3])
        lines.append(f"layers: {', '.join(names) if len(names) <= 8 else f'{first}, … {names[-1]} ({len(names)})'}")
        lines += [f"undecided: {each.pattern}: {each.undecided}." for each in self.modules if each.undecided]
        lines += [f"problem: {self.problem}"] * bool(self.problem)
        return "\n".join([*lines, *(["", self.proposal] if self.proposal else [])])


def inspect(
    model: Callable[..., nn.Module] | nn.Module,
    plan: Plan | ModelPlan | None = None,
    *,
    tp: int = 2,
    arguments: Mapping[str, Any] | None = None,
) -> Inspection:
    """List the modules of a model with their parameters and how each is sharded.

    For a model without a plan, one is proposed from the classes and names of its modules. The inspection lists what
    could not be decided, prints the plan as Python code to paste, and names the first problem. Nothing is allocated.

    Args:
        model: a class or function that makes the model, or a model.
        plan: plan of the model; defaults to the class's attribute `plan`, or a proposed plan.
        tp: size of the tensor axis to report shard sizes for.
        arguments: keyword arguments of `model`.

    Returns:
        an `Inspection` with `modules`, `parameters`, `undecided` and `proposal`; it prints as a table.

    Raises:
        UserError: the plan does not fit the model, or `tp` does not divide its heads.

    Example:
        >>> import threefold as t3
        >>> from torch import nn
        >>> print(t3.inspect(lambda: nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))))  # doctest: +ELLIPSIS
        module...
    """
    if tp < 1:
        raise UserError(f"tp is {tp} but must be at least 1.")
    if isinstance(model, nn.Module):
        made = model
    else:
        make = with_arguments(model, arguments)
        with torch.device("meta"):
            made = make()
    chosen = plan if plan is not None else getattr(model, "plan", None)
    return inspect_made(made, chosen, tp)


def inspect_made(model: nn.Module, plan: Plan | ModelPlan | None, tp: int) -> Inspection:
    proposal, problem = propose(model) if plan is None else None, ""
    known = plan if proposal is None else proposal.plan
    assert known is not None
    complete = None
    try:
        complete = known.build(model) if isinstance(known, Plan) else known
        if next(model.parameters()).is_meta:  # made for this; a model that the user gave stays as it is
            tie_(model, complete.ties)
        check_plan(model, complete)
    except UserError as error:
        if proposal is None:
            raise
        problem = str(error)
    if complete is not None and not problem:
        check_tensor_axis(complete, tp, "tp")
    found: dict[tuple[str, str, str], list[tuple[str, int, int]]] = {}
    for name, parameter in model.named_parameters():  # tied weights appear once
        owner, _, last = name.rpartition(".")
        if proposal is not None:
            rule: Split | None = proposal.rule(name)
            is_standalone = proposal.label(name) in (proposal.plan.shard or {})
            pattern = proposal.label(name if is_standalone else owner)
        else:
            assert complete is not None
            rule, is_standalone = complete.split_of(name), complete.is_standalone(name)
            pattern = as_pattern(name if is_standalone else owner)
        assert rule is not None  # ensured by `check_plan`
        dim = rule.cut_dim(last, "tp")
        lengths = (shard_length(size, tp, 0) if axis == dim else size for axis, size in enumerate(parameter.shape))
        kind = "Parameter" if is_standalone else type(model.get_submodule(owner)).__name__
        parts = found.setdefault((pattern, kind, _told(rule)), [])
        parts.append((name if is_standalone else owner, parameter.numel(), prod(lengths)))
    undecided = {} if proposal is None else proposal.undecided
    modules = tuple(
        InspectedModule(
            pattern=pattern,
            kind=kind,
            count=len({owner for owner, _, _ in parts}),
            parameters=sum(whole for _, whole, _ in parts),
            per_rank=sum(held for _, _, held in parts),
            rule=rule_name,
            undecided=undecided.get(pattern, ""),
        )
        for (pattern, kind, rule_name), parts in found.items()
    )
    source = "" if proposal is None else proposal.source()
    return Inspection(modules, tp, tuple(known.layers), source, problem)


def _told(rule: Split) -> str:
    heads, groups, dim = (getattr(rule, name, None) for name in ("heads", "groups", "dim"))
    of_groups = f" in {groups} groups" if groups and groups > 1 else ""
    along = "" if dim is None else f" of dim {dim}"
    return f"{type(rule).__name__}{along}{of_groups}{f' by {heads} heads' if heads else ''}"
