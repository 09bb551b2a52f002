"""Checks that a sharding plan matches its model, and that the parts of a tensor rank fit together."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from threefold.config.section import nearest_divisor
from threefold.errors import UserError
from threefold.files import first_of
from threefold.models import sharding
from threefold.models.custom_batch import LayerSignature
from threefold.models.layers.decoder import Embedding, Linear
from threefold.models.plan import nearest
from threefold.parallel.layout_check import KNOWN_RULES, made_on_meta
from threefold.parallel.pipeline.partition import covers
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.shard_modules import SHARDINGS, Extended
from threefold.parallel.split_layer import SplitLayer
from threefold.torch_private.distributed import persistent_buffers
from threefold.torch_private.tensors import child_names, has_module_hooks
from threefold.verify import module_check
from threefold.verify.proposal import as_pattern
from threefold.verify.rank_part import cut_to_rank

_WITHIN = (sharding.Replicated, sharding.PerHead)
"""Splits that leave the modules inside a module to other patterns."""

_OF_LAYERS = (sharding.Column, sharding.Row, sharding.Vocab)
_CUT_FORWARDS = {each.forward for each in (nn.Linear, nn.Embedding, Linear, Embedding)}
"""Forward methods that a cut layer can replace."""


def has_custom_forward(module: nn.Module) -> bool:
    """Return whether a linear layer or embedding computes something else, which a cut layer would not."""
    if isinstance(module, Extended):
        return False
    return type(module).forward not in _CUT_FORWARDS or "forward" in vars(module)


def uncut_tensors(module: nn.Module, rule: sharding.Split) -> list[str]:
    """Return the parameters that a rule does not cut, and buffers that a cut layer would lack, as "parameter 'x'"."""
    if rule.parameters is None:
        return []
    parameters = [name for name, _ in module.named_parameters() if name not in rule.parameters]
    buffers = [name for name, _ in module.named_buffers()] if isinstance(rule, _OF_LAYERS) else []
    return [f"parameter {name!r}" for name in parameters] + [f"buffer {name!r}" for name in buffers]


def check_undecided(parameters: Sequence[str], split: Iterable[str], modules: Mapping[str, nn.Module]) -> None:
    """Raise a `UserError` if there are parameters for which no pattern of `split` and no default decides."""
    if not parameters:
        return
    found = list(dict.fromkeys(_named(name, modules) for name in parameters))
    idle = [pattern for pattern in split if not any(sharding.matches(name, pattern) for name in modules if name)]
    fix = f", and correct {idle[0]!r}, which no module or parameter of the model has for a name" if idle else ""
    each = "each" if len(found) > 1 else "it"
    raise UserError(
        f"shard says nothing about {first_of(found)}; give {each} Column(), Row(), Vocab() or Replicated(){fix}."
    )


def _named(parameter: str, modules: Mapping[str, nn.Module]) -> str:
    """Return the pattern and class that a rule for the parameter would name."""
    owner, _, last = parameter.rpartition(".")
    module = modules[owner]
    if last in ("weight", "bias") and type(module).__module__.startswith("torch."):
        return f"{as_pattern(owner)!r} ({type(module).__name__})"
    return f"{as_pattern(parameter)!r} (a standalone parameter)"


def check_patterns(setting: str, patterns: Iterable[str], names: Iterable[str], kind: str) -> None:
    """Raise a `UserError` if a pattern of a plan's setting matches none of the names."""
    known = [name for name in names if name]
    for pattern in patterns:
        if not any(sharding.matches(name, pattern) for name in known):
            near = nearest(pattern, known)
            raise UserError(f"{setting} has {pattern!r}, which no {kind} of the model has for a name{near}.")


def check_plan(model: nn.Module, plan: sharding.ModelPlan) -> None:
    """Raise a `UserError` unless a plan suits the whole single-device model, on any device or the meta device."""
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    _refuse_split_layers(modules)
    module_check.check_modules(model)
    _check_layers(modules, plan)
    module_check.check_hooks(modules, plan.layers)
    _check_listed(parameters, plan)
    _check_decided(modules, parameters, plan)
    _check_standalone(parameters, modules, plan)
    _check_splits(modules, plan)
    _check_recompute(modules, plan)
    _check_ties(modules, parameters, plan)
    _check_values(modules, parameters, plan)
    module_check.refuse_layout_dependent(modules)


def _refuse_split_layers(modules: Mapping[str, nn.Module]) -> None:
    """Check that no layer is cut already: the plan cuts the model of one device."""
    for name, module in modules.items():
        if isinstance(module, SplitLayer):
            kind, rule = type(module).__name__, type(module.rule).__name__
            plain = "nn.Embedding" if rule == "Vocab" else "nn.Linear"
            raise UserError(
                f"{name!r} is a {kind}, which is cut already, but a plan cuts the model of one device; use {plain} "
                f"with {rule}() in the plan, or train the model as it is, in your own loop or with threefold.prepare."
            )


def check_cuts(model: nn.Module, plan: sharding.ModelPlan, tp: int, zero: int) -> None:
    """Raise a `UserError` if a module that the tensor axis replaces has a hook, or ZeRO cannot shard a parameter."""
    for name, module in model.named_modules() if tp > 1 else ():
        pattern = plan.patterns.naming(name) if name else None
        if pattern is not None and plan.split[pattern].needs_tensor_axis and has_module_hooks(module):
            raise UserError(
                f"{name!r} has a hook, which would see a part of the features with tp {tp}, as "
                f"{type(plan.split[pattern]).__name__} cuts it; register it on a module around it that is not cut."
            )
    for name, parameter in model.named_parameters() if zero else ():
        if not parameter.dim():
            raise UserError(
                f"{name!r} is a parameter without dims, which ZeRO ({zero}) cannot shard; give it one, as "
                "torch.ones(1) has, or use zero 0."
            )


def _check_layers(modules: Mapping[str, nn.Module], plan: sharding.ModelPlan) -> None:
    for name, module in modules.items():
        for child in child_names(module):
            if "." in child or not child:
                raise UserError(
                    f"The module {child!r} in {name or 'the model'!r} has {'a dot in its' if child else 'an empty'} "
                    "name, so that no pattern or layer can name it; give it another."
                )
    if not plan.layers:
        raise UserError("layers is empty; name the modules that the model runs through, in order.")
    for layer in plan.layers:
        if layer not in modules or not layer:
            raise UserError(f"layers names {layer!r}, which is not a module of the model{nearest(layer, modules)}.")
        if plan.layers.count(layer) > 1:
            raise UserError(f"layers names {layer!r} {plan.layers.count(layer)} times; once is enough.")
        around = next((other for other in plan.layers if layer.startswith(other + ".")), None)
        if around is not None:
            raise UserError(f"layers names {layer!r}, which is in the layer {around!r}; name one of the two.")
        if type(modules[layer]).forward is nn.Module.forward:
            kind = type(modules[layer]).__name__
            raise UserError(f"layers names {layer!r}, a {kind}, which cannot be called; name the modules inside it.")
    if len(plan.costs) != len(plan.layers):
        raise UserError(f"costs has {len(plan.costs)} numbers but layers has {len(plan.layers)}; give each layer one.")
    for layer, cost in zip(plan.layers, plan.costs, strict=True):
        if not (isfinite(cost) and cost >= 0):
            raise UserError(f"costs has {cost!r} for {layer!r} but must have finite numbers from 0 on.")
    if plan.kinds and len(plan.kinds) != len(plan.layers):
        raise UserError(
            f"kinds has {len(plan.kinds)} names but layers has {len(plan.layers)}; give each layer one, or none at all."
        )


def _check_listed(parameters: Mapping[str, nn.Parameter], plan: sharding.ModelPlan) -> None:
    """Check that each parameter, tied ones included, is in a layer."""
    inside = tuple(layer + "." for layer in plan.layers)
    outside = [name for name in parameters if not name.startswith(inside)]
    modules = []
    for name in outside:
        parts = name.split(".")[:-1]
        around = (".".join(parts[:depth]) for depth in range(1, len(parts) + 1))
        # The largest module around the parameter without a layer inside.
        modules += [each for each in around if not any(layer.startswith(each + ".") for layer in plan.layers)][:1]
    if modules:
        have, them = ("have", "them") if len(set(modules)) > 1 else ("has", "it")
        raise UserError(
            f"layers lacks {first_of(map(repr, dict.fromkeys(modules)))} of the model, which {have} parameters; name "
            f"{them} where the model runs through {them}."
        )
    if outside:
        raise UserError(
            f"the parameter {outside[0]!r} is in none of the plan's layers but outside them; put it into a module "
            "that is one of the layers."
        )


def _check_decided(
    modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter], plan: sharding.ModelPlan
) -> None:
    """Check that each parameter is under a pattern, and that each pattern decides for at least one module."""
    idle = [pattern for pattern in plan.split if not any(sharding.matches(name, pattern) for name in modules if name)]
    deciding = {name: plan.patterns.deciding(name) for name in modules}
    for name in parameters:
        if plan.split_of(name) is None:
            correction = f", and correct {first_of(map(repr, idle))}, which no module of the model has for a name"
            raise UserError(
                f"split says nothing about the parameter {name!r}; give {name.rpartition('.')[0]!r} "
                f"Replicated(){correction if idle else ''}."
            )
    if idle:
        raise UserError(
            f"split has {idle[0]!r}, which no module of the model has for a name{nearest(idle[0], modules)}; "
            "correct it or leave it out."
        )
    for pattern in plan.split:
        named = [name for name in modules if name and sharding.matches(name, pattern)]
        overruled = [name for name in named if (other := deciding[name]) and not sharding.matches(name, other)]
        if overruled and all(deciding[name] != pattern for name in named):
            raise UserError(
                f"split has {pattern!r}, which decides for nothing: {deciding[overruled[0]]!r} is more specific and "
                f"decides for all inside it, {overruled[0]!r} too; write more of the name, or leave it out."
            )


def _check_standalone(
    parameters: Mapping[str, nn.Parameter], modules: Mapping[str, nn.Module], plan: sharding.ModelPlan
) -> None:
    """Check that each pattern of standalone parameters and buffers matches one, and that its rule suits it."""
    buffers = dict(_buffers(modules))
    for pattern, rule in plan.standalone.items():
        said = f"shard has {type(rule).__name__} at {pattern!r}"
        if not isinstance(rule, (*_WITHIN, sharding.Sharded)):
            raise UserError(
                f"{said}, which is a standalone parameter; use Replicated() or PerHead(), Sharded(dim) to cut it, or "
                "make it the weight of a module."
            )
        matching = [name for name in parameters if sharding.matches(name, pattern)]
        for name in matching:
            if isinstance(rule, sharding.Sharded):
                _check_shard(pattern, rule, parameters[name].shape, "parameter")
            of_module = plan.patterns.deciding(name.rpartition(".")[0])
            if isinstance(rule, sharding.PerHead) or not plan.is_standalone(name) or of_module is None:
                continue
            # A parameter of a PerHead module that the pattern takes by chance: its gradient would not be summed.
            by_chance = sharding.specificity(pattern) <= sharding.specificity(of_module)
            if by_chance and isinstance(plan.split[of_module], sharding.PerHead):
                raise UserError(
                    f"{said}, which {name!r} has for a name as well, of a module that is PerHead at {of_module!r}; "
                    "write more of the name of the parameter that is meant."
                )
        kept = [name for name in buffers if sharding.matches(name, pattern)]
        for name in kept:
            buffer, is_persistent = buffers[name]
            if isinstance(rule, sharding.PerHead):
                raise UserError(
                    f"{said}, which {name!r}, a buffer, has for a name as well; use Replicated() or Sharded(dim)."
                )
            if isinstance(rule, sharding.Sharded):
                _check_shard(pattern, rule, buffer.shape, "buffer")
                if is_persistent:
                    raise UserError(
                        f"{said}, and the buffer {name!r} is persistent, but a rank has the constructor's values for a "
                        "part of it alone; register it with persistent=False."
                    )
        if not matching and not kept:
            near = nearest(pattern, {**parameters, **buffers})
            raise UserError(f"shard has {pattern!r}, which no parameter or buffer has for a name{near}.")


def _check_shard(pattern: str, rule: sharding.Sharded, shape: Sequence[int], kind: str) -> None:
    said, sizes = f"shard has Sharded({rule.dim}) at {pattern!r}", " × ".join(map(str, shape)) or "a number"
    if not 0 <= rule.dim < len(shape):
        instead = f"use Sharded({rule.dim % len(shape)})" if shape else "use Replicated()"
        raise UserError(f"{said}, a {kind} of {sizes}, which has no such dim; {instead}.")
    if rule.heads and shape[rule.dim] % rule.heads:
        raise UserError(
            f"{said} with heads={rule.heads}, which must divide dim {rule.dim} of {sizes}; use "
            f"heads={nearest_divisor(rule.heads, shape[rule.dim])}."
        )


def _check_splits(modules: Mapping[str, nn.Module], plan: sharding.ModelPlan) -> None:
    """Check that each split suits the module that it decides for, and all that this module holds."""
    whole: dict[str, str] = {}
    met: dict[nn.Module, tuple[str, str]] = {}
    for name, module in modules.items():
        pattern = plan.patterns.naming(name)
        if pattern is None:
            continue
        _check_split(name, module, pattern, plan.split[pattern])
        around = next((other for other in whole if name.startswith(other + ".")), None)
        if around is not None:
            raise UserError(
                f"split has {pattern!r} for {name!r}, which is in {around!r}; {whole[around]!r} cuts that as one, so "
                "leave out one of the two."
            )
        if not isinstance(plan.split[pattern], _WITHIN):
            whole[name] = pattern
        other, first = met.setdefault(module, (name, pattern))
        if plan.split[first] != plan.split[pattern]:
            raise UserError(
                f"split has {first!r} for {other!r} and {pattern!r} for {name!r}, which are one module; cut them alike."
            )


def _check_split(name: str, module: nn.Module, pattern: str, split: sharding.Split) -> None:
    kind, said = type(module).__name__, f"split has {type(split).__name__} at {pattern!r}"
    if type(split) not in SHARDINGS:
        raise UserError(f"{said}, a module; it is for a standalone parameter, so name one inside, or use another rule.")
    wanted = tuple(each for each in SHARDINGS[type(split)].kinds if each is not nn.Module)
    if kind in {each.__name__ for each in wanted}:
        kind = f"{type(module).__module__}.{kind}"  # another class of the same name
    if wanted and not isinstance(module, wanted):
        kinds = " or a ".join(each.__name__ for each in wanted)
        raise UserError(f"{said}, which is for a {kinds}, but {name!r} is a {kind}; use Replicated() or another split.")
    unit = next((unit for parameter in split.parameters or () if (unit := split.units(parameter).get("tp"))), None)
    features = getattr(module, "out_features" if isinstance(split, sharding.Column) else "in_features", 0)
    if isinstance(split, sharding.Column) and split.groups != 1:
        if split.groups < 1 or features % split.groups:
            raise UserError(
                f"{said} with groups={split.groups}, which must divide the {features} features of {name!r}; use "
                f"groups={nearest_divisor(max(1, split.groups), features)}."
            )
        features //= split.groups
    if unit is not None and unit.setting == sharding.HEADS and features % unit.count:
        raise UserError(
            f"{said} with heads={unit.count}, which must divide the {features} features of {name!r}; use "
            f"heads={nearest_divisor(unit.count, features)}."
        )
    if isinstance(split, sharding.Column | sharding.Row | sharding.Vocab) and has_custom_forward(module):
        raise UserError(
            f"{said}, but {name!r} is a {kind} with a forward of its own, which a cut layer would not have; use "
            "Replicated(), or write what it adds as a module around it."
        )
    if foreign := uncut_tensors(module, split):
        raise UserError(
            f"{said} but {name!r} has the {foreign[0]}, which it does not cut; use Replicated() or keep it in a module "
            "beside it."
        )


def _check_recompute(modules: Mapping[str, nn.Module], plan: sharding.ModelPlan) -> None:
    for mode, patterns in plan.recompute.items():
        for pattern in patterns:
            if "**" in pattern:
                raise UserError(f"recompute has {pattern!r} for {mode} but may not have **; write * for each part.")
            found = [name for name in modules if sharding.matches(name, pattern)]
            if not found:
                near = nearest(pattern, modules)
                raise UserError(
                    f"recompute has {pattern!r} for {mode}, which no module of the model has for a name{near}."
                )
            stray = next((name for name in found if not any(covers(layer, name) for layer in plan.layers)), None)
            if stray is not None:
                raise UserError(f"recompute has {pattern!r} for {mode} but {stray!r} is in none of the layers.")


def _check_ties(
    modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter], plan: sharding.ModelPlan
) -> None:
    for name in (*plan.ties, *plan.ties.values()):
        if name not in parameters:
            raise UserError(f"ties names {name!r}, which is not a parameter of the model{nearest(name, parameters)}.")
    for user, owner in plan.ties.items():
        if parameters[user] is not parameters[owner]:
            raise UserError(f"ties says that {user!r} is {owner!r} but in the model they are two; make them one there.")
    for group in plan.shared:
        for name in group:
            if name not in modules:
                raise UserError(f"shared names {name!r}, which is not a module of the model{nearest(name, modules)}.")
        for one, other in pairwise(group):
            mine, others = (dict(modules[each].named_parameters(remove_duplicate=False)) for each in (one, other))
            if mine.keys() != others.keys() or any(mine[name] is not others[name] for name in mine):
                raise UserError(
                    f"shared says that {one!r} and {other!r} have the same parameters but in the model they do not; "
                    "make them one there."
                )
    uses: dict[nn.Parameter, str] = {}
    for name, parameter in parameters.items():
        first = uses.setdefault(parameter, name)
        rules = plan.split_of(first), plan.split_of(name)
        cuts = [
            rule and (rule.cuts(each.rpartition(".")[2]), isinstance(rule, sharding.PerHead))
            for rule, each in zip(rules, (first, name), strict=True)
        ]
        if cuts[0] != cuts[1]:
            kinds = " and as ".join(type(rule).__name__ for rule in rules)
            raise UserError(f"{first!r} and {name!r} are one weight, but split cuts it as {kinds}; cut both alike.")


def _check_values(
    modules: Mapping[str, nn.Module], parameters: Mapping[str, nn.Parameter], plan: sharding.ModelPlan
) -> None:
    """Check that each parameter has an initial value, and that nothing else needs one."""
    for name, (buffer, _) in _buffers(modules):
        if buffer.is_meta and not plan.constructed and not plan.initializes_buffer(name):
            raise UserError(f"The model keeps the buffer {name!r}, which nothing initialises; compute it instead.")
    for name in parameters:
        whole = plan.whole_name(name)
        try:
            initial = plan.initial(whole)
        except Exception as error:
            raise UserError(f"initial({whole!r}) raises {type(error).__name__}: {error}.") from error
        if not isinstance(initial, sharding.Initial):
            raise UserError(f"initial({whole!r}) returns {initial!r} but must return a Normal or a Constant.")


def _buffers(modules: Mapping[str, nn.Module]) -> Iterator[tuple[str, tuple[Tensor, bool]]]:
    """Yield each buffer with its name and whether it is persistent."""
    for name, module in modules.items():
        kept = dict(persistent_buffers(module))
        for buffer, value in module.named_buffers(recurse=False, remove_duplicate=False):
            yield f"{name}.{buffer}" if name else buffer, (value, buffer in kept)


def check_forward(
    make_model: Callable[[], nn.Module], plan: sharding.ModelPlan, tp: int, batch: Any, takes_labels: bool = False
) -> None:
    """Check that the sizes in a tensor rank's part of a model fit together, by its forward pass on the meta device.

    Linear layers have their sharded widths, standalone parameters and buffers are cut, and communication is left out. A
    model whose forward pass needs values passes the check, as does one that already fails without sharding. The batch,
    on the meta device, is as the first layer takes it; (tokens, labels) with `takes_labels`, if the last computes the
    loss. A `UserError` names the module, the sizes and the rule that is likely missing.
    """
    rules = (*plan.split.values(), *plan.standalone.values())
    if tp == 1 or not all(isinstance(rule, KNOWN_RULES) for rule in rules):
        return
    if _failure(made_on_meta(make_model), plan, batch, takes_labels) is not None:
        return
    for rank in dict.fromkeys((0, tp - 1)):  # every other rank has the sizes of one of these
        model = made_on_meta(make_model)
        cut_to_rank(model, plan, tp, rank)
        error = _failure(model, plan, batch, takes_labels)
        if isinstance(error, UserError):
            raise error
        if error is not None and module_check.is_of_sizes(error):
            modules = dict(model.named_modules())
            where = module_check.module_of(error, modules)
            missing = _missing(where, modules, plan, str(error))
            raise UserError(
                f"With tp {tp}, {repr(where) if where else 'the model'} fails on tensor rank {rank}: "
                f"{module_check.told_once(' '.join(str(error).split()))}; {missing or module_check.ADVICE}."
            ) from None


def _failure(model: nn.Module, plan: sharding.ModelPlan, batch: Any, takes_labels: bool) -> Exception | None:
    """Return the error of a forward pass through the layers; None if it succeeds."""
    try:
        stage = Stage(model, plan, 0, len(plan.layers))
        with torch.device("meta"), torch.no_grad():
            if takes_labels:
                stage(*batch)
            else:
                first = plan.layers[0]
                stage(LayerSignature.of(first, model.get_submodule(first)).inputs_of(batch, torch.float32))
    except Exception as error:
        return error
    return None


def _missing(where: str, modules: dict[str, nn.Module], plan: sharding.ModelPlan, message: str) -> str:
    """Suggest a rule for an uncut standalone parameter or buffer of the failed module whose shape is in the message."""
    if where not in modules:
        return ""
    standalone, module = sharding.Patterns(plan.standalone), modules[where]
    for kind, named in (("buffer", module.named_buffers), ("parameter", module.named_parameters)):
        for last, tensor in named(recurse=False):
            name = f"{where}.{last}"
            dim = next((dim for dim, size in enumerate(tensor.shape) if size > 1), None)
            if dim is not None and str(list(tensor.shape)) in message and standalone.naming(name) is None:
                shape = " × ".join(map(str, tensor.shape))
                return (
                    f"if the {kind} {name!r} ({shape}) has a value for each head or feature of a cut layer, add "
                    f"{as_pattern(name)!r}: Sharded({dim}) to shard"
                )
    return ""
