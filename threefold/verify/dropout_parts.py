"""Parts of activations that a user's dropout layers get on a rank, as follows from the layers before them.

Masks depend on the positions of elements in the whole activation (`random.dropout`). Between a column-parallel layer
and a row-parallel one a rank has some features or heads, and with sequence parallelism elsewhere some positions. A
forward pass of the whole model and one of a tensor rank's part, both on the meta device, show the shapes of every
activation that a dropout layer gets; a dim whose sizes differ is cut.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.layout import shard_bounds
from threefold.errors import UserError
from threefold.models import sharding
from threefold.models.custom_batch import map_tensors
from threefold.models.layers.decoder import SampleInfo
from threefold.models.source import error_line
from threefold.parallel.context import ShardingContext
from threefold.parallel.layout_check import made_on_meta, undecided_dropouts
from threefold.parallel.pipeline.partition import covers
from threefold.parallel.pipeline.stage import CustomBatch, LocalBatch, Stage, StepSamples
from threefold.random.dropout import Dropout
from threefold.random.rng import Positions, Slice
from threefold.verify.rank_part import cut_to_rank

Parts = Mapping[int, Positions]


def dropout_parts(
    make_model: Callable[[], nn.Module], plan: sharding.ModelPlan, context: ShardingContext, samples: StepSamples
) -> dict[str, Parts]:
    """Return the parts that each undecided dropout layer gets on this rank, by name; those left out are whole.

    `samples` are a micro-batch of whole sequences, of which only the shapes are used.

    Raises:
        UserError: the part is not known, is not a run of the whole, or differs between calls of the layer.
    """
    tp, index = context.tp.size, context.tp.index
    whole, part = made_on_meta(make_model), made_on_meta(make_model)
    names = undecided_dropouts(whole, plan)
    if not names:
        return {}
    cut_to_rank(part, plan, tp, index)
    length = samples.tokens.shape[1] if isinstance(samples, LocalBatch) else 0
    trial = _on_meta(samples)
    try:
        all_of, local = (_shapes(model, plan, trial, names) for model in (whole, part))
    except Exception as error:
        raise UserError(
            f"{min(names)!r} is a threefold.Dropout, and which part of its input a rank of tp {tp} gets is not known, "
            f"as the forward pass fails without values ({error_line(error)}); have it read no values, or call the "
            "dropout where the activation is whole, after a Row() layer, and name it in shard as Replicated()."
        ) from None
    found: dict[str, Parts] = {}
    of_layer: dict[Dropout, Parts] = {}  # a layer may have several names
    for name, dropout in names.items():
        for shapes in zip(all_of[name], local[name], strict=True):
            parts = _parts(name, *shapes, plan, whole, context, length)
            if of_layer.setdefault(dropout, parts) != parts:
                raise UserError(
                    f"{name!r} is a threefold.Dropout that gets different parts of its inputs with tp {tp}, as it is "
                    "called before and after a Column() layer; use a layer for each."
                )
        found[name] = of_layer.get(dropout, {})
    return found


def _parts(
    name: str,
    whole: torch.Size,
    local: torch.Size,
    plan: sharding.ModelPlan,
    model: nn.Module,
    context: ShardingContext,
    length: int,
) -> Parts:
    """Return the parts of an activation of the shape `local` on this rank, in one of the shape `whole`."""
    tp, index, found = context.tp.size, context.tp.index, dict[int, Positions]()
    if len(whole) != len(local):
        raise UserError(_unknown(name, whole, local, tp))
    for dim, (size, held) in enumerate(zip(whole, local, strict=True)):
        if size == held:
            continue
        start, end = shard_bounds(size, tp, index)
        if end - start != held or whole[dim:].numel() in _grouped(name, plan, model):
            raise UserError(_unknown(name, whole, local, tp))
        found[dim] = Slice(start, size)
    cut = context.cut.across_context if found else context.cut  # whole sequences inside tensor-parallel layers
    if cut.shares > 1:
        if 1 in found or whole[1:2] != (length,):
            raise UserError(
                f"{name!r} is a threefold.Dropout whose input is {[*whole]} in one process, and which of its positions "
                f"a rank gets is not known, as sequences of {length} are split over {cut.shares} ranks; call it on an "
                "activation of the shape [samples, positions, …]."
            )
        found[1] = cut
    return found


def _unknown(name: str, whole: torch.Size, local: torch.Size, tp: int) -> str:
    return (
        f"{name!r} is a threefold.Dropout whose input is {[*whole]} in one process and {[*local]} on a rank of tp "
        f"{tp}, which is no run of features or heads; call it where the activation is whole, after a Row() layer, or "
        "for a Column(groups=…) after chunk, on one group."
    )


def _grouped(name: str, plan: sharding.ModelPlan, model: nn.Module) -> set[int]:
    """Return the numbers of output features of layers in groups that are in the same layer of the plan as a module."""
    layer = next((each for each in plan.layers if covers(each, name)), "")
    found = set()
    for other, module in model.named_modules():
        pattern = plan.patterns.naming(other) if covers(layer, other) else None
        rule = None if pattern is None else plan.split[pattern]
        if isinstance(rule, sharding.Column) and rule.groups > 1 and isinstance(module, nn.Linear):
            found.add(module.out_features)
    return found


def _shapes(
    model: nn.Module, plan: sharding.ModelPlan, samples: StepSamples, names: Mapping[str, Dropout]
) -> dict[str, list[torch.Size]]:
    """Return the shapes of the inputs of dropout layers in a forward pass on the meta device, in order."""
    found: dict[str, list[torch.Size]] = {name: [] for name in names}

    def noting(name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(_module: nn.Module, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
            found[name].append((inputs[0] if inputs else named["x"]).shape)

        return note

    for name in names:
        model.get_submodule(name).register_forward_pre_hook(noting(name), with_kwargs=True)
    with torch.device("meta"), torch.no_grad():
        samples.through(Stage(model, plan, 0, len(plan.layers)))
    return found


def _on_meta(samples: StepSamples) -> StepSamples:
    """Return the samples on the meta device, with the dtype of a model that is made there, without a loss."""

    def moved(tensor: Tensor) -> Tensor:
        return torch.empty_like(tensor, device="meta")

    if isinstance(samples, CustomBatch):
        data = map_tensors(samples.data, moved)
        return replace(samples, data=data, loss=None, dtype=torch.get_default_dtype(), samples=_keyed(samples.samples))
    assert isinstance(samples, LocalBatch)
    labels = None if samples.labels is None else moved(samples.labels)
    return LocalBatch(moved(samples.tokens), labels, _keyed(samples.samples))


def _keyed(samples: SampleInfo) -> SampleInfo:
    return SampleInfo(*(None if each is None else torch.empty_like(each, device="meta") for each in samples))
