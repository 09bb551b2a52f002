"""Addition of adapters to a model of one device, and to its plan."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from inspect import signature
from typing import Any, NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from threefold.adapters.layers import AdaptedExperts, Adapter, PassSamples, keep_samples, mixin_of, prepend
from threefold.config import Config
from threefold.config.adapter import AdapterConfig
from threefold.config.loading import problem
from threefold.errors import UserError
from threefold.models.layers.experts import Experts
from threefold.models.plan import nearest
from threefold.models.sharding import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    TABLE_A,
    TABLE_B,
    Column,
    Constant,
    Initial,
    ModelPlan,
    Normal,
    OverExperts,
    Row,
    Unit,
    is_of_adapter,
    matches,
)
from threefold.random.dropout import Dropout
from threefold.random.rng import fill_normal_, stream_key

MakeModel = Callable[[], nn.Module]
Refuse = Callable[[str, str], UserError]
"""Error about a setting of the adapter: (name, the rule as it follows 'but') → the error."""


class Target(NamedTuple):
    """Layer that gets an adapter: its name, and names of its projections or products that have one; all if empty."""

    name: str
    module: nn.Module
    parts: tuple[str, ...] = ()


def adapted(make: MakeModel, plan: ModelPlan, config: Config) -> tuple[MakeModel, ModelPlan]:
    """Return a function that makes a model with the adapters of a resolved config, and its plan."""
    refuse: Refuse = lambda name, rule: problem(config, f"adapter.{name}", rule)  # noqa: E731
    made = partial(_make, make, plan, config.adapter, refuse)
    with torch.device("meta"):
        model = made()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    initial = {name: _initial(name, parameter) for name, parameter in model.named_parameters() if is_of_adapter(name)}
    frozen = frozenset(name for name in names if name not in initial)
    return made, replace(plan, frozen=frozen, initial=partial(_initial_of, initial, plan.initial))


def _make(make: MakeModel, plan: ModelPlan, settings: AdapterConfig, refuse: Refuse) -> nn.Module:
    model = make()
    _attach(model, settings, plan, refuse)
    return model


def _initial_of(known: Mapping[str, Initial], others: Callable[[str], Initial], name: str) -> Initial:
    return known[name] if name in known else others(name)


def _initial(name: str, parameter: Tensor) -> Initial:
    """Return the initial values of an adapter's weight: A has the variance of PEFT's, all else is zero."""
    is_inner = name.endswith((LORA_A, TABLE_A))
    return Normal((3 * parameter.shape[-1]) ** -0.5) if is_inner else Constant(0.0)


def add_adapter(
    model: nn.Module,
    *,
    rank: int,
    targets: Sequence[str],
    alpha: float | None = None,
    dropout: float = 0.0,
    rank_stabilized: bool = False,
    dora: bool = False,
    seed: int = 0,
) -> nn.Module:
    """Give layers of a model low-rank adapters (LoRA), in place, and freeze all its other weights; return the model.

    Call it where the model is made, so that each rank makes the same: in the function that `parallelize` gets, or
    before `prepare`. A layer gets the parameters `lora_a` [rank, in], drawn from `seed` and its name, and `lora_b`
    [out, rank], which is zero, and with `dora` the changes of its rows' magnitudes, `lora_magnitude` [out], zero too;
    an embedding `lora_embedding_a` and `lora_embedding_b`.

    Args:
        model: model of one device, on any device.
        rank: rank of the adapters.
        targets: patterns of the names of linear layers and embeddings; `*` for one part, `**` for several.
        alpha: numerator of the factor alpha / rank of the adapters; None for `rank`.
        dropout: dropout of an adapter's input, by the keys of the `samples` that a layer of the model takes.
        rank_stabilized: whether the factor is alpha / √rank.
        dora: whether the rows of the weights have trained magnitudes (DoRA); not for embeddings.
        seed: seed of the initial values.

    Raises:
        UserError: a pattern matches no such layer, or an argument is out of range.

    Example:
        >>> def make():
        ...     return threefold.add_adapter(MyModel(), rank=8, targets=["blocks.*.up"])
        >>> model = threefold.parallelize(make, plan, mesh)
    """

    def refuse(name: str, rule: str) -> UserError:
        return UserError(f"{name} is {given.get(name)!r} but {rule}.")

    given: dict[str, Any] = {"rank": rank, "alpha": alpha, "targets": targets, "dropout": dropout}
    given |= {"rank_stabilized": rank_stabilized, "dora": dora}
    if not isinstance(model, nn.Module):
        raise UserError(f"model is a {type(model).__name__} but must be a Module; give the model itself.")
    if isinstance(targets, str) or not all(isinstance(each, str) for each in targets) or not targets:
        raise refuse("targets", "must be a list of names, such as ['blocks.*.up']")
    try:
        settings = AdapterConfig.model_validate({**given, "targets": list(targets)})
    except ValidationError as error:
        first = error.errors()[0]
        raise refuse(str(first["loc"][0]), f"{first['msg'][0].lower()}{first['msg'][1:]}") from None
    if not settings.rank:
        raise refuse("rank", "must be at least 1; use 8")
    _attach(model, settings, None, refuse)
    for name, parameter in model.named_parameters():
        if is_of_adapter(name):
            with torch.no_grad():
                initial, shape = _initial(name, parameter), tuple(parameter.shape)
                if isinstance(initial, Normal):
                    key = stream_key("weights", seed, name)
                    fill_normal_(parameter, initial.std, key, shape, (0,) * len(shape))
                else:
                    parameter.zero_()
    return model


def _attach(model: nn.Module, settings: AdapterConfig, plan: ModelPlan | None, refuse: Refuse) -> None:
    """Add adapters to a model, their values not set, and freeze its other weights."""
    targets = list(_targets(model, settings, plan, refuse))
    if not targets:
        raise refuse("targets", "the model has no linear layer that tensor parallelism shards; name layers of it")
    _check_tied(model, targets, refuse)
    for target in targets if settings.dora else ():
        if not isinstance(target.module, nn.Linear):
            kind = "experts" if isinstance(target.module, Experts) else "an embedding"
            rule_ = f"{target.name!r} is {kind}, whose rows have no magnitudes; use false, or name linear layers alone"
            raise refuse("dora", f"{rule_} in targets")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    samples = _kept_samples(model, targets, refuse) if settings.dropout else None
    for target in targets:
        rule = None if plan is None else _rule_of(plan, target.name)
        if isinstance(target.module, Experts):
            if settings.dropout:
                rule_ = (
                    f"the experts {target.name!r} get tokens without their places; use 0, or leave them out of targets"
                )
                raise refuse("dropout", rule_)
            _add_to_experts(target, settings, rule)
        else:
            _add(target, settings, rule, samples)


def _targets(model: nn.Module, settings: AdapterConfig, plan: ModelPlan | None, refuse: Refuse) -> Iterator[Target]:
    able = {name: module for name, module in model.named_modules() if name and mixin_of(module) is not None}
    patterns = settings.targets or ()
    names: dict[str, tuple[str, ...]] = {}
    for name, module in able.items():
        rule = None if plan is None else _rule_of(plan, name)
        names[name] = ("gate_up", "down") if isinstance(module, Experts) else tuple(_parts(rule))
    for pattern in patterns:
        found = any(matches(each, pattern) for name, parts in names.items() for each in _known(name, parts))
        if not found:
            near = nearest(pattern, [each for name, parts in names.items() for each in _known(name, parts)])
            raise refuse("targets", f"no linear layer, embedding or experts of the model are called {pattern!r}{near}")
    for name, module in able.items():
        if not patterns:
            assert plan is not None  # `add_adapter` requires patterns
            inner = tuple(f"{layer}." for layer in plan.layers[1:-1])
            if name.startswith(inner) and isinstance(_rule_of(plan, name), (Column, Row, OverExperts)):
                yield Target(name, module)
        elif any(matches(name, pattern) for pattern in patterns):
            yield Target(name, module)
        elif parts := tuple(part for part in names[name] if any(matches(f"{name}.{part}", each) for each in patterns)):
            yield Target(name, module, parts)


def _known(name: str, parts: Sequence[str]) -> list[str]:
    return [name, *(f"{name}.{part}" for part in parts)]


def _rule_of(plan: ModelPlan, name: str) -> Any:
    """Return the rule for a module itself, not that of a module around it; None if there is none."""
    pattern = plan.patterns.naming(name)
    return None if pattern is None else plan.split[pattern]


def projections(unit: Unit | None) -> dict[str, tuple[int, int]]:
    """Return the projections of a layer: name → start and end among the features of a unit; empty for one alone."""
    found, start = {}, 0
    for name, size in () if unit is None or unit.one_layer or len(unit.parts) < 2 else unit.parts:
        found[name] = (start, start + size)
        start += size
    return found


def _parts(rule: Any) -> dict[str, tuple[int, int]]:
    return projections(rule.unit) if isinstance(rule, Column) else {}


def _check_tied(model: nn.Module, targets: Sequence[Target], refuse: Refuse) -> None:
    uses: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(parameter, []).append(name)
    modules = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    for target in targets:
        for parameter in target.module.parameters(recurse=False):
            if len(uses[parameter]) > modules[target.module]:
                one = f"{target.name}."
                other = next(name for name in uses[parameter] if not name.startswith(one))
                raise refuse(
                    "targets",
                    f"{target.name!r} shares its weight with {other!r}, so that no merged weight could have its "
                    "adapter; leave it out, or use weights of their own (model.tie_embeddings false)",
                )


def _kept_samples(model: nn.Module, targets: Sequence[Target], refuse: Refuse) -> PassSamples:
    """Make the outermost modules that take samples keep their keys for the adapters inside them."""
    samples = PassSamples()
    layers: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{layer}.") for layer in layers)
        if name and not inside and "samples" in signature(type(module).forward).parameters:
            layers.append(name)
    for target in targets:
        if isinstance(target.module, nn.Linear) and not any(target.name.startswith(f"{name}.") for name in layers):
            rule = f"{target.name!r} is in no layer whose forward takes samples, which key what is dropped; use 0"
            raise refuse("dropout", rule)
    for name in layers:
        if any(target.name.startswith(f"{name}.") for target in targets):
            keep_samples(model.get_submodule(name), samples)
    return samples


def _add(target: Target, settings: AdapterConfig, rule: Any, samples: PassSamples | None) -> None:
    name, module, chosen = target
    weight: Tensor = module.weight  # type: ignore[assignment]
    looks_up = isinstance(module, nn.Embedding)
    outputs, inputs = reversed(weight.shape) if looks_up else weight.shape
    parts = _parts(rule)
    spans = tuple(span for part, span in parts.items() if not chosen or part in chosen) or None
    period = rule.unit.size if spans else 1
    dropout = None if looks_up or not settings.dropout else Dropout(settings.dropout, f"{name}.lora_dropout")
    # Not a submodule: modules around the layer would not know its place.
    vars(module)["adapter"] = Adapter(settings.factor, spans, period, 0, dropout, samples)
    rows = settings.rank * len(spans or (None,))
    for each, shape in (
        (TABLE_A if looks_up else LORA_A, (rows, inputs)),
        (TABLE_B if looks_up else LORA_B, (outputs, settings.rank)),
    ):
        module.register_parameter(each, nn.Parameter(weight.new_empty(shape)))
    if settings.dora:
        module.register_parameter(MAGNITUDE, nn.Parameter(weight.new_empty(outputs)))
    kind = mixin_of(module)
    assert kind is not None
    prepend(module, kind)


def _add_to_experts(target: Target, settings: AdapterConfig, rule: Any) -> None:
    module, chosen = target.module, target.parts or ("gate_up", "down")
    adapters: dict[str, Adapter] = {}
    for name in chosen:
        experts, outputs, inputs = getattr(module, name).shape
        unit = rule.inner if name == "gate_up" and isinstance(rule, OverExperts) else None
        spans = tuple(projections(unit).values()) or None
        adapters[name] = Adapter(settings.factor, spans, unit.size if spans and unit else 1)
        rows = settings.rank * len(spans or (None,))
        for each, shape in ((LORA_A, (experts, rows, inputs)), (LORA_B, (experts, outputs, settings.rank))):
            module.register_parameter(f"{name}_{each}", nn.Parameter(getattr(module, name).new_empty(shape)))
    vars(module)["adapters"] = adapters
    prepend(module, AdaptedExperts)
