"""Checks of a layout against a model before ranks start, and dropout layers whose parts a first batch shows."""

from collections.abc import Callable
from functools import cache

import torch
from torch import nn

from threefold.config import Config
from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.models import sharding
from threefold.models.source import ModelSource
from threefold.parallel.arithmetic import arithmetic_of
from threefold.parallel.context import ContextParallelAttention, RingAttention, check_whole_sequences
from threefold.parallel.pipeline.partition import stage_map
from threefold.random.dropout import Dropout


def check_source(source: ModelSource, config: Config) -> tuple[int, int]:
    """Return the numbers of all and of trained parameters.

    Raises a `UserError` if model and plan do not match, or if context parallelism would leave out a forward or hooks.
    """
    make_model, plan = source.load(config)
    model = made_on_meta(make_model)
    try:
        call_hook("check_plan", model, plan)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    if config.parallel.cp > 1:
        kind = RingAttention if config.parallel.cp_method == "ring" else ContextParallelAttention
        for name, module in model.named_modules(remove_duplicate=False):
            pattern = plan.patterns.naming(name)
            if pattern is not None and isinstance(plan.split[pattern], sharding.AttentionCore):
                kind.check(module)
    sizes = {plan.whole_name(name): parameter.numel() for name, parameter in model.named_parameters()}
    return sum(sizes.values()), sum(size for name, size in sizes.items() if name not in plan.frozen)


def check_layout(source: ModelSource, config: Config) -> None:
    """Raise a `UserError` unless a config's layout suits a model's plan: its stages, heads and recompute mode."""
    layout_check(source, config)(config)


def layout_check(source: ModelSource, config: Config) -> Callable[[Config], None]:
    """Load a model once, and return `check_layout` for any layout of it."""
    make_model, plan = source.load(config)
    custom_loss = source.loss(config) is not None
    model = made_on_meta(make_model) if plan.constructed else None
    tokens = torch.empty(2, config.data.sequence_length, dtype=torch.int64, device="meta")

    @cache
    def failure(tp: int) -> UserError | None:
        try:
            call_hook("check_forward", make_model, plan, tp, (tokens, tokens), not custom_loss)
        except UserError as error:
            return error
        return None

    def check(config: Config) -> None:
        tp, mode = config.parallel.tp, config.train.recompute
        if custom_loss:
            check_whole_sequences(config.parallel.cp, config.parallel.sequence_parallel)
        sharding.check_tensor_axis(plan, tp)
        if model is not None:
            call_hook("check_cuts", model, plan, tp, config.parallel.zero)
            arithmetic_of(config).check(model, plan, tp)
            if (found := failure(tp)) is not None and not config.parallel.sequence_parallel:
                raise found
        if mode != "none" and mode not in plan.recompute:
            known = ", ".join(["none", *plan.recompute])
            raise UserError(f"train.recompute is {mode}, of which the model's plan says nothing; use one of {known}.")
        stage_map(plan, config)

    return check


KNOWN_RULES = (sharding.Column, sharding.Row, sharding.Vocab, sharding.Replicated, sharding.PerHead, sharding.Sharded)
"""Rules whose effect on the sizes of activations is known: those of a `Plan`."""


def made_on_meta(make_model: Callable[[], nn.Module]) -> nn.Module:
    """Return the whole model on the meta device."""
    with torch.device("meta"):
        return make_model()


def undecided_dropouts(model: nn.Module, plan: sharding.ModelPlan) -> dict[str, Dropout]:
    """Return the dropout layers of a user's model, by name, that drop something and that no rule of the plan names."""
    if not all(isinstance(rule, KNOWN_RULES) for rule in (*plan.split.values(), *plan.standalone.values())):
        return {}  # a family, whose rules name its dropout layers
    return {
        name: module
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, Dropout) and module.p > 0 and plan.patterns.naming(name) is None
    }
