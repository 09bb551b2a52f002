"""A whole model on the meta device, shrunk to the sizes of one tensor rank."""

from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from threefold.comm.layout import shard_bounds
from threefold.errors import UserError
from threefold.models import sharding
from threefold.parallel.parameter import set_in
from threefold.torch_private.tensors import tensors_in


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
    standalone = sharding.Patterns(plan.standalone)
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in named if plan.standalone else []:
        pattern = standalone.naming(name)
        dim = None if pattern is None else plan.standalone[pattern].cut_dim(name.rpartition(".")[2], "tp")
        if dim is not None:
            start, end = shard_bounds(tensor.shape[dim], tp, rank)
            part: Tensor = tensor.detach().narrow(dim, start, end - start)
            set_in(model, name, nn.Parameter(part) if isinstance(tensor, nn.Parameter) else part)


def shard_length(size: int, shards: int, index: int) -> int:
    """Return the length of a shard, as `shard_bounds` cuts it."""
    start, end = shard_bounds(size, shards, index)
    return end - start
