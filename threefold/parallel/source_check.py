"""Checks of a model and its plan before any process runs them."""

import torch

from threefold.config import Config
from threefold.errors import UserError
from threefold.models.source import ModelSource
from threefold.parallel.parallelism import stage_map
from threefold.parallel.plan_check import check_plan, check_tensor_axis


def check_source(source: ModelSource, config: Config) -> int:
    """Check that a model and its sharding plan match, before any layout is run; returns the parameter count.

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
    return sum(parameter.numel() for parameter in model.parameters())


def check_layout(source: ModelSource, config: Config) -> None:
    """Check that a resolved config's layout suits a model's plan: its stages, its heads and what is computed again.

    Raises:
        UserError: it does not.
    """
    _, plan = source.load(config)
    check_tensor_axis(plan, config.parallel.tp)
    mode = config.train.recompute
    if mode != "none" and mode not in plan.recompute:
        known = ", ".join(["none", *plan.recompute])
        raise UserError(f"train.recompute is {mode}, of which the model's plan says nothing; use one of {known}.")
    stage_map(plan, config)
