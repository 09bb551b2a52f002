"""A forward pass without memory of what one tensor rank has of a user's model, before any rank is started.

Each linear layer that the plan cuts is as wide as its part, bare parameters and buffers have their parts, and whatever
ranks communicate is left out. Sizes that do not go together are an error of the plan if the whole model has none.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.shards import shard_bounds
from threefold.errors import UserError
from threefold.models.bare_sharding import Shard
from threefold.models.forward_errors import ADVICE, is_of_sizes, module_of, told_once
from threefold.models.name_pattern import Patterns
from threefold.models.own_batch import LayerSignature
from threefold.models.plan import as_pattern
from threefold.models.sharding import Column, ModelPlan, PerHead, Replicated, Row, Split, Vocab
from threefold.parallel.pipeline.stage import Stage

_KNOWN = (Column, Row, Vocab, Replicated, PerHead, Shard)


def check_forward(
    make_model: Callable[[], nn.Module], plan: ModelPlan, tp: int, batch: Any, takes_labels: bool = False
) -> None:
    """Check that what a tensor rank has of a model computes, as far as sizes say.

    A model whose forward pass needs values is not refused, nor is one whose whole model fails alike.

    Args:
        make_model: makes the whole model.
        plan: of it.
        tp: ranks of the tensor axis.
        batch: of one sample or more, on the meta device, as the first layer takes it; tokens and labels, with
            `takes_labels`.
        takes_labels: whether the last layer computes the loss of labels.

    Raises:
        UserError: sizes do not go together; names the module, the sizes and what is likely to be missing.
    """
    rules = (*plan.split.values(), *plan.bare.values())
    if tp == 1 or not all(isinstance(rule, _KNOWN) for rule in rules):
        return
    if _failure(_made(make_model), plan, batch, takes_labels) is not None:
        return
    for rank in dict.fromkeys((0, tp - 1)):  # all others have sizes of one of the two
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
    """What a forward pass through the layers raises."""
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
    """Give a model on the meta device the sizes that a tensor rank has, in place."""
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
        outputs = rule.groups * _length(outputs // rule.groups, tp, rank)
    elif isinstance(rule, Row):
        inputs = _length(inputs, tp, rank)
    else:
        return module
    return nn.Linear(inputs, outputs, bias=module.bias is not None, device="meta")


def _length(size: int, tp: int, rank: int) -> int:
    start, end = shard_bounds(size, tp, rank)
    return end - start


def _missing(where: str, modules: dict[str, nn.Module], plan: ModelPlan, message: str) -> str:
    """A bare parameter or buffer of the module that failed whose shape the message has, and no rule cuts."""
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
                    f"{as_pattern(name)!r}: Shard({dim}) to shard"
                )
    return ""
