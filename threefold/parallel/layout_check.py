"""Checks of a layout against a model before ranks start, and the sizes of one tensor rank's part of a model."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.comm.layout import shard_bounds, shard_length
from threefold.config import Config
from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.models import sharding
from threefold.models.source import ModelSource
from threefold.parallel.arithmetic import arithmetic_of
from threefold.parallel.context import check_whole_sequences
from threefold.parallel.parameter import set_in
from threefold.parallel.pipeline.partition import stage_map
from threefold.torch_private.tensors import tensors_in


def check_source(source: ModelSource, config: Config) -> tuple[int, int]:
    """Return the numbers of all and of trained parameters; raise a `UserError` if model and plan do not match."""
    make_model, plan = source.load(config)
    model = made_on_meta(make_model)
    try:
        call_hook("check_plan", model, plan)
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
"""Rules whose effect on sizes `cut_to_rank` knows: those of a `Plan`."""


def made_on_meta(make_model: Callable[[], nn.Module]) -> nn.Module:
    """Return the whole model on the meta device."""
    with torch.device("meta"):
        return make_model()


class _CutWeight(nn.Parameter):
    """Weight on the meta device that raises a `UserError` where it meets another tensor; `said` is what cuts it."""

    said: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = tensors_in((args, kwargs))
        weight = next(each for each in tensors if isinstance(each, _CutWeight))
        if any(each is not weight and each.dim() for each in tensors):
            raise UserError(
                f"{weight.said} for tp, so that a rank has a part of its weight, but the model computes with that by "
                "itself, as in F.linear(x, layer.weight); call the layer, or use Replicated() for it."
            )
        return super().__torch_function__(func, types, args, kwargs or {})


class _CutLinear(nn.Linear):
    """Linear layer on the meta device with the widths of one tensor rank."""

    def __init__(self, inputs: int, outputs: int, bias: bool, said: str) -> None:
        super().__init__(inputs, outputs, bias, device="meta")
        self.whole = (self.weight,)  # as a tuple, which is no parameter
        self.weight = _CutWeight(self.weight)
        self.weight.said = said

    def forward(self, input: Tensor) -> Tensor:
        """Compute this rank's product."""
        return F.linear(input, self.whole[0], self.bias)


class _CutTable(nn.Embedding):
    """Embedding on the meta device, with all of its rows, whose weight is a rank's part."""

    def __init__(self, of: nn.Embedding, said: str) -> None:
        super().__init__(of.num_embeddings, of.embedding_dim, of.padding_idx, device="meta")
        self.whole = (self.weight,)
        self.weight = _CutWeight(self.weight)
        self.weight.said = said

    def forward(self, input: Tensor) -> Tensor:
        """Look up rows."""
        return F.embedding(input, self.whole[0], self.padding_idx)


def cut_to_rank(model: nn.Module, plan: sharding.ModelPlan, tp: int, rank: int) -> None:
    """Shrink a model on the meta device to the sizes of one tensor rank, in place."""
    made: dict[nn.Module, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        pattern = plan.patterns.naming(name) if name else None
        said = "" if pattern is None else f"{type(plan.split[pattern]).__name__} cuts {name!r}"
        if pattern is not None and isinstance(module, nn.Embedding) and isinstance(plan.split[pattern], sharding.Vocab):
            set_in(model, name, made.setdefault(module, _CutTable(module, said)))
        if pattern is not None and isinstance(module, nn.Linear):
            rule, inputs, outputs = plan.split[pattern], module.in_features, module.out_features
            if isinstance(rule, sharding.Column):
                outputs = rule.groups * shard_length(outputs // rule.groups, tp, rank)
            elif isinstance(rule, sharding.Row):
                inputs = shard_length(inputs, tp, rank)
            else:
                continue
            if module not in made:
                made[module] = _CutLinear(inputs, outputs, module.bias is not None, said)
            set_in(model, name, made[module])
    bare = sharding.Patterns(plan.bare)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named if plan.bare else []:
        pattern = bare.naming(name)
        dim = None if pattern is None else plan.bare[pattern].cut_dim(name.rpartition(".")[2], "tp")
        if dim is not None:
            start, end = shard_bounds(tensor.shape[dim], tp, rank)
            part: Tensor = tensor.detach().narrow(dim, start, end - start)
            set_in(model, name, nn.Parameter(part) if isinstance(tensor, nn.Parameter) else part)
