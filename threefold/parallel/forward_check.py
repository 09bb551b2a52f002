"""Forward pass of one tensor rank's part of a user's model on the meta device, before any rank starts.

Linear layers have their sharded widths, bare parameters and buffers are cut, and communication is left out. A size
mismatch that the whole model does not have is an error of the plan.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.layout import shard_bounds, shard_length
from threefold.config import Config
from threefold.errors import UserError
from threefold.models.module_check import ADVICE, is_of_sizes, module_of, told_once
from threefold.models.own_batch import LayerSignature
from threefold.models.plan import as_pattern
from threefold.models.sharding import Column, ModelPlan, Patterns, PerHead, Replicated, Row, Sharded, Split, Vocab
from threefold.models.source import MakeModel, ModelSource
from threefold.parallel.pipeline.partition import stage_map
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.plan_check import check_cut_modules, check_plan, check_sharded_parameters, check_tensor_axis
from threefold.parallel.sequence import check_whole_sequences

_KNOWN = (Column, Row, Vocab, Replicated, PerHead, Sharded)


def check_forward(
    make_model: Callable[[], nn.Module], plan: ModelPlan, tp: int, batch: Any, takes_labels: bool = False
) -> None:
    """Check that the sizes in a tensor rank's part of a model fit together.

    A model whose forward pass needs values passes the check, as does one that already fails whole.

    Args:
        batch: at least one sample on the meta device, as the first layer takes it; (tokens, labels) with
            `takes_labels`.
        takes_labels: whether the last layer computes the loss from labels.

    Raises:
        UserError: sizes do not match; the message names the module, the sizes and the rule that is likely missing.
    """
    rules = (*plan.split.values(), *plan.bare.values())
    if tp == 1 or not all(isinstance(rule, _KNOWN) for rule in rules):
        return
    if _failure(_made(make_model), plan, batch, takes_labels) is not None:
        return
    for rank in dict.fromkeys((0, tp - 1)):  # every other rank has the sizes of one of these
        model = _made(make_model)
        _cut(model, plan, tp, rank)
        error = _failure(model, plan, batch, takes_labels)
        if error is not None and is_of_sizes(error):
            modules = dict(model.named_modules())
            where = module_of(error, modules)
            missing = _missing(where, modules, plan, str(error))
            raise UserError(
                f"With tp {tp}, {repr(where) if where else 'the model'} fails on tensor rank {rank}: "
                f"{told_once(' '.join(str(error).split()))}; {missing or ADVICE}."
            ) from None


def _made(make_model: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make_model()


def _failure(model: nn.Module, plan: ModelPlan, batch: Any, takes_labels: bool) -> Exception | None:
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


def _cut(model: nn.Module, plan: ModelPlan, tp: int, rank: int) -> None:
    """Shrink a model on the meta device to the sizes of one tensor rank, in place."""
    made: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        pattern = plan.patterns.naming(name) if name else None
        if pattern is not None and isinstance(module, nn.Linear):
            if module not in made:
                made[module] = _part(plan.split[pattern], module, tp, rank)
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, made[module])
    bare = Patterns(plan.bare)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named if plan.bare else []:
        pattern = bare.naming(name)
        owner, _, own = name.rpartition(".")
        dim = None if pattern is None else plan.bare[pattern].cut_dim(own, "tp")
        if dim is not None:
            start, end = shard_bounds(tensor.shape[dim], tp, rank)
            part: Tensor = tensor.detach().narrow(dim, start, end - start)
            setattr(model.get_submodule(owner), own, nn.Parameter(part) if isinstance(tensor, nn.Parameter) else part)


def _part(rule: Split, module: nn.Linear, tp: int, rank: int) -> nn.Module:
    inputs, outputs = module.in_features, module.out_features
    if isinstance(rule, Column):
        outputs = rule.groups * shard_length(outputs // rule.groups, tp, rank)
    elif isinstance(rule, Row):
        inputs = shard_length(inputs, tp, rank)
    else:
        return module
    return nn.Linear(inputs, outputs, bias=module.bias is not None, device="meta")


def _missing(where: str, modules: dict[str, nn.Module], plan: ModelPlan, message: str) -> str:
    """Suggest a rule for an uncut bare parameter or buffer of the failed module whose shape is in the message."""
    if where not in modules:
        return ""
    bare, module = Patterns(plan.bare), modules[where]
    for kind, named in (("buffer", module.named_buffers), ("parameter", module.named_parameters)):
        for own, tensor in named(recurse=False):
            name = f"{where}.{own}"
            dim = next((dim for dim, size in enumerate(tensor.shape) if size > 1), None)
            if dim is not None and str(list(tensor.shape)) in message and bare.naming(name) is None:
                shape = " × ".join(map(str, tensor.shape))
                return (
                    f"if the {kind} {name!r} ({shape}) has a value for each head or feature of a cut layer, add "
                    f"{as_pattern(name)!r}: Sharded({dim}) to shard"
                )
    return ""


def check_source(source: ModelSource, config: Config) -> tuple[int, int]:
    """Return the numbers of all and of trained parameters; raise a `UserError` if model and plan do not match."""
    make_model, plan = source.load(config)
    with torch.device("meta"):
        model = make_model()
    try:
        check_plan(model, plan)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in model.parameters()]
    return sum(size for size, _ in sizes), sum(size for size, is_trained in sizes if is_trained)


def check_layout(source: ModelSource, config: Config) -> None:
    """Raise a `UserError` unless a config's layout suits a model's plan: its stages, heads and recompute mode."""
    layout_check(source, config)(config)


def layout_check(source: ModelSource, config: Config) -> Callable[[Config], None]:
    """Load a model once, and return `check_layout` for any layout of it."""
    make_model, plan = source.load(config)
    own_loss = source.loss(config) is not None
    computes = _forward_check(make_model, plan, own_loss, config)
    with torch.device("meta"):
        model = make_model() if plan.constructed else None
    return partial(_check_plan_layout, model, plan, own_loss, computes)


def _forward_check(
    make_model: MakeModel, plan: ModelPlan, own_loss: bool, config: Config
) -> Callable[[int], UserError | None]:
    """Return a check of one tensor rank's forward pass on tokens: tp → its error, or None."""
    tokens = torch.empty(2, config.data.sequence_length, dtype=torch.int64, device="meta")

    @cache
    def failure(tp: int) -> UserError | None:
        try:
            check_forward(make_model, plan, tp, (tokens, tokens), not own_loss)
        except UserError as error:
            return error
        return None

    return failure


def _check_plan_layout(
    model: nn.Module | None,
    plan: ModelPlan,
    own_loss: bool,
    computes: Callable[[int], UserError | None],
    config: Config,
) -> None:
    tp = config.parallel.tp
    if own_loss:
        check_whole_sequences(config.parallel.cp, config.parallel.sequence_parallel)
    check_tensor_axis(plan, tp)
    if model is not None:
        check_cut_modules(model, plan, tp)
        check_sharded_parameters(model, config.parallel.zero)
        if (failure := computes(tp)) is not None and not config.parallel.sequence_parallel:
            raise failure
    mode = config.train.recompute
    if mode != "none" and mode not in plan.recompute:
        known = ", ".join(["none", *plan.recompute])
        raise UserError(f"train.recompute is {mode}, of which the model's plan says nothing; use one of {known}.")
    stage_map(plan, config)
