"""Checks of a model and its plan before any process runs them."""

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import nn

from threefold.config import Config
from threefold.errors import UserError
from threefold.models.sharding import ModelPlan
from threefold.models.source import MakeModel, ModelSource
from threefold.parallel.forward_check import check_forward
from threefold.parallel.gradient_step import check_whole_sequences
from threefold.parallel.pipeline.stage_map import stage_map
from threefold.parallel.plan_check import check_cut_modules, check_plan, check_sharded_parameters, check_tensor_axis


def check_source(source: ModelSource, config: Config) -> tuple[int, int]:
    """Check that a model and its sharding plan match, before any layout is run.

    Returns:
        the number of its parameters, and of those that are trained.

    Raises:
        UserError: they do not.
    """
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
    """Check that a resolved config's layout suits a model's plan: its stages, its heads and what is computed again.

    Raises:
        UserError: it does not.
    """
    layout_check(source, config)(config)


def layout_check(source: ModelSource, config: Config) -> Callable[[Config], None]:
    """`check_layout` for any layout of one model, which is loaded once.

    Args:
        source: of the model.
        config: that it is made from, in whatever layout.
    """
    make_model, plan = source.load(config)
    own_loss = source.loss(config) is not None
    computes = _forward_check(make_model, plan, own_loss, config)
    with torch.device("meta"):
        model = make_model() if plan.constructed else None
    return partial(_check_plan_layout, model, plan, own_loss, computes)


def _forward_check(
    make_model: MakeModel, plan: ModelPlan, own_loss: bool, config: Config
) -> Callable[[int], UserError | None]:
    """What a forward pass of one tensor rank's part of a user's model on tokens says, by the size of the axis."""
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
