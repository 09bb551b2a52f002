"""Tensor-parallel layers: linear layers and embeddings with weights split over a mesh axis.

Their parameters have the shape of the whole weight. In a loop of the user's, they and their gradients are of a class
that torch's optimizers take (`compat.split_tensor`). Where `parallelize` or `prepare` has taken a model over, the
layers compute with plain leaves instead (`parallel.leaf`).
"""

from collections.abc import Callable
from typing import Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from threefold.comm.axis import Axis
from threefold.comm.differentiable import copy_to, gather_from, over_gathered, reduce_from, reduce_to_shares, scatter_to
from threefold.comm.layout import shard_bounds
from threefold.models.sharding import Column, Row, Vocab
from threefold.ops.arithmetic import PLAIN, LayerArithmetic
from threefold.parallel.parameter import in_place_of
from threefold.parallel.split_layer import (
    Initializer,
    SplitLayer,
    SplitLinear,
    check_sizes,
    explaining_arguments,
    fill_,
    new_key,
)
from threefold.torch_private.tensors import assert_async


class VocabParallelEmbedding(SplitLayer):
    """`nn.Embedding` with the rows of the table split over an axis.

    Args:
        num_embeddings: rows V of the whole table; need not be divisible by the axis.
        embedding_dim: columns H of the table.
        axis: mesh axis to split over.
        name, seed: key of the initial weights; give every layer of a model its own name. Without a name they come from
            torch's default generator, as for `nn.Embedding`; seed it alike on every rank.
        weight_init: draws the whole table, with the same values in every layout, such as `nn.init.xavier_normal_`; None
            for N(0, 0.02²) with a name, N(0, 1) without.
        pad_to: pads rows with zeros to a multiple of this before use; storage and results do not change.
        sequence_dim: dim of the output along which each rank gets its shard; None for the whole output on every rank.
        arithmetic: how the layer multiplies and adds.

    Attributes:
        padding_idx: row without a gradient, from the `nn.Embedding` that the layer was made of; None for none.

    Example:
        >>> embed = threefold.VocabParallelEmbedding(50257, 512, mesh.tp)
        >>> embed(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 512])
    """

    rule = Vocab()
    padding_idx: int | None = None

    @explaining_arguments
    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        axis: Axis,
        *,
        name: str | None = None,
        seed: int = 0,
        weight_init: Initializer | None = None,
        pad_to: int = 1,
        sequence_dim: int | None = None,
        arithmetic: LayerArithmetic = PLAIN,
    ) -> None:
        super().__init__()
        check_sizes(axis, num_embeddings=num_embeddings, embedding_dim=embedding_dim)
        self.axis, self.pad_to, self.sequence_dim, self.arithmetic = axis, pad_to, sequence_dim, arithmetic
        self.num_embeddings = num_embeddings
        self.start, self.end = shard_bounds(num_embeddings, axis.size, axis.index)
        self.weight = self._empty("weight", (num_embeddings, embedding_dim))
        if name is not None:
            self.reset_parameters(name, seed)
        if weight_init is not None or name is None:
            fill_(self.weight, weight_init or nn.init.normal_, new_key(name, seed), "weight_init")

    @classmethod
    def from_embedding(
        cls,
        embedding: nn.Embedding,
        axis: Axis,
        *,
        sequence_dim: int | None = None,
        arithmetic: LayerArithmetic = PLAIN,
    ) -> Self:
        """Split the table of an `nn.Embedding`."""
        sizes = embedding.num_embeddings, embedding.embedding_dim
        with torch.device("meta"):
            layer = cls(*sizes, axis, name="", sequence_dim=sequence_dim, arithmetic=arithmetic)
        layer.weight = layer._split("weight", embedding.weight)
        layer.padding_idx = embedding.padding_idx
        return in_place_of(layer, embedding)

    def forward(self, input: Tensor) -> Tensor:
        """Look up ids [...], the same on every rank → rows [..., H], whole on every rank, or its shard.

        Raises:
            RuntimeError, IndexError: an id is outside the table (on a GPU as a device-side assertion).
        """
        return _leave(self.local_rows(input), self.axis, self.sequence_dim)

    def local_rows(self, ids: Tensor) -> Tensor:
        """Return this rank's part of the look-up [..., H]: zero rows for ids that another rank holds."""
        table = _pad_rows(_computed(self.weight), self.pad_to)
        if self.axis.size == 1:
            return self._without_gradient(ids, self.arithmetic.embedding(ids, table))
        assert_async(
            ((ids >= 0) & (ids < self.num_embeddings)).all(), f"an id is not in the table of {self.num_embeddings} rows"
        )
        foreign = (ids < self.start) | (ids >= self.end)
        looked_up = self.arithmetic.embedding((ids - self.start).masked_fill(foreign, 0), table)
        return self._without_gradient(ids, looked_up.masked_fill(foreign.unsqueeze(-1), 0))

    def _without_gradient(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Detach the rows of `padding_idx`, which get no gradient."""
        if self.padding_idx is None:
            return rows
        return torch.where((ids == self.padding_idx).unsqueeze(-1), rows.detach(), rows)

    def extra_repr(self) -> str:
        return f"{self._shapes()}, rows {self.start}:{self.end}"


class ColumnParallelLinear(SplitLinear):
    """`nn.Linear` with the output features split over an axis.

    Args:
        in_features: size of the input's last dim.
        out_features: whole size of the output's last dim; need not be divisible by the axis.
        axis: mesh axis to split over.
        name, seed: key of the initial weights; give every layer of a model its own name. Without a name they come from
            torch's default generator, as for `nn.Linear`; seed it alike on every rank.
        weight_init, bias_init: draw the whole weight [out, in] and bias [out], with the same values in every layout,
            such as `nn.init.xavier_normal_`; None for N(0, 0.02²) and zero with a name, as `nn.Linear` draws them
            without.
        bias: whether to add a (split) bias.
        gather_output: whether to return the whole output on every rank; otherwise this rank's part, as
            `RowParallelLinear` with `input_is_parallel` and the rule `Column` of a plan need it.
        pad_to: computes this rank's output features in multiples of this; the padding is cut off again.
        sequence_dim: dim of the input of which each rank passes its shard; None for the whole input on every rank.
        arithmetic: how the layer multiplies and adds.

    Attributes:
        unit_parts: parts that the plan's unit of output features is divided into.
        sums_input_gradient: whether the layer gives each rank the whole input and sums their gradients of it.

    Example:
        >>> up = threefold.ColumnParallelLinear(512, 2048, mesh.tp, gather_output=False)
        >>> down = threefold.RowParallelLinear(2048, 512, mesh.tp, input_is_parallel=True)
        >>> y = down(F.gelu(up(x)))  # one all-reduce in the forward pass, and one in the backward pass
    """

    rule = Column()
    unit_parts: int = 1
    sums_input_gradient: bool = True

    @explaining_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        name: str | None = None,
        seed: int = 0,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        bias: bool = True,
        gather_output: bool = True,
        pad_to: int = 1,
        sequence_dim: int | None = None,
        arithmetic: LayerArithmetic = PLAIN,
    ) -> None:
        super().__init__()
        check_sizes(axis, in_features=in_features, out_features=out_features)
        self.axis, self.gather_output, self.pad_to, self.sequence_dim = axis, gather_output, pad_to, sequence_dim
        self.arithmetic = arithmetic
        self._initialise((out_features, in_features), bias, name, seed, weight_init, bias_init)

    @classmethod
    def from_linear(
        cls,
        module: nn.Linear,
        axis: Axis,
        *,
        gather_output: bool = True,
        sequence_dim: int | None = None,
        arithmetic: LayerArithmetic = PLAIN,
    ) -> Self:
        """Split the weight and bias of an `nn.Linear`."""
        return cls._from(module, axis, gather_output=gather_output, sequence_dim=sequence_dim, arithmetic=arithmetic)

    def forward(self, input: Tensor) -> Tensor:
        """Compute [..., out], or this rank's part, from [..., in], the same on every rank or its shard."""
        out = self._over_whole_input(self._local_features, input)
        return gather_from(out, self.axis) if self.gather_output else out

    # Code that compilers skip must not run again in a recomputation that they compile.
    @torch.compiler.disable
    def with_weight(self, compute: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Tensor:
        """Return `compute(x, weight)` instead of this layer's product, for the whole input and this rank's rows.

        Args:
            compute: must not return a view of `x`; its gradient of `x` is summed over the axis.
            x: input, as for `forward`.
        """
        return self._over_whole_input(lambda whole: compute(whole, _computed(self.weight)), x)

    def _over_whole_input(self, compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if not self.sums_input_gradient:
            return compute(x)
        if self.sequence_dim is None:
            return compute(copy_to(x, self.axis))
        return over_gathered(compute, x, self.axis, self.sequence_dim)

    def _local_features(self, x: Tensor) -> Tensor:
        weight, bias = _computed(self.weight), None if self.bias is None else _computed(self.bias)
        if self.pad_to == 1:
            return self.arithmetic.linear(x, weight, bias)
        out = self.arithmetic.linear(x, _pad_rows(weight, self.pad_to))[..., : weight.shape[0]]
        return out if bias is None else out + bias

    def extra_repr(self) -> str:
        return f"{self._shapes()}, gather_output={self.gather_output}"


class RowParallelLinear(SplitLinear):
    """`nn.Linear` with the input features split over an axis.

    Args:
        in_features: whole size of the input's last dim; need not be divisible by the axis.
        out_features: size of the output's last dim.
        axis: mesh axis to split over.
        name, seed: key of the initial weights; give every layer of a model its own name. Without a name they come from
            torch's default generator, as for `nn.Linear`; seed it alike on every rank.
        weight_init, bias_init: draw the whole weight [out, in] and bias [out], with the same values in every layout,
            such as `nn.init.xavier_normal_`; None for N(0, 0.02²) and zero with a name, as `nn.Linear` draws them
            without.
        bias: whether to add a bias, once, after the sum.
        input_is_parallel: whether the input is already this rank's part (the output of a column-parallel layer);
            otherwise it is whole on every rank, and this rank takes its part.
        sequence_dim: dim of the output along which each rank gets its shard; None for the whole output on every rank.
        arithmetic: how the layer multiplies and adds.

    Example:
        >>> down = threefold.RowParallelLinear(2048, 512, mesh.tp, input_is_parallel=True, weight_init=nn.init.zeros_)
    """

    rule = Row()

    @explaining_arguments
    def __init__(
        self,
        in_features: int,
        out_features: int,
        axis: Axis,
        *,
        name: str | None = None,
        seed: int = 0,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
        bias: bool = True,
        input_is_parallel: bool = False,
        sequence_dim: int | None = None,
        arithmetic: LayerArithmetic = PLAIN,
    ) -> None:
        super().__init__()
        check_sizes(axis, in_features=in_features, out_features=out_features)
        self.axis, self.input_is_parallel, self.sequence_dim = axis, input_is_parallel, sequence_dim
        self.arithmetic = arithmetic
        self._initialise((out_features, in_features), bias, name, seed, weight_init, bias_init)

    @classmethod
    def from_linear(
        cls,
        module: nn.Linear,
        axis: Axis,
        *,
        input_is_parallel: bool = False,
        sequence_dim: int | None = None,
        arithmetic: LayerArithmetic = PLAIN,
    ) -> Self:
        """Split the weight of an `nn.Linear`, whose bias every rank keeps."""
        return cls._from(
            module, axis, input_is_parallel=input_is_parallel, sequence_dim=sequence_dim, arithmetic=arithmetic
        )

    def forward(self, input: Tensor) -> Tensor:
        """Compute [..., out], the same on every rank or its shard, from [..., in] or this rank's part."""
        out = _leave(self.partial_sum(input), self.axis, self.sequence_dim)
        return out if self.bias is None else self.arithmetic.add_bias(out, self.bias)

    def partial_sum(self, x: Tensor) -> Tensor:
        """Return this rank's summand of the output [..., out], without the bias, from [..., in] or its part."""
        if not self.input_is_parallel:
            x = scatter_to(x, self.axis)
        return self.arithmetic.partial_linear(x, _computed(self.weight))

    def extra_repr(self) -> str:
        return f"{self._shapes()}, input_is_parallel={self.input_is_parallel}"


def _leave(x: Tensor, axis: Axis, sequence_dim: int | None) -> Tensor:
    """Sum a layer's output over the tensor ranks: all of it (all-reduce), or this rank's shard (reduce-scatter)."""
    return reduce_from(x, axis) if sequence_dim is None else reduce_to_shares(x, axis, sequence_dim)


def _pad_rows(weight: Tensor, multiple: int) -> Tensor:
    """Pad with zero rows to a multiple, at least one: matrix units need whole tiles, a look-up needs a row."""
    rows = max(1, -(-weight.shape[0] // multiple) * multiple)
    return weight if rows == weight.shape[0] else F.pad(weight, (0, 0, 0, rows - weight.shape[0]))


def _computed(parameter: Tensor) -> Tensor:
    """Return the tensor that a layer computes with: the leaf, or the shard of a parameter that has none."""
    if not isinstance(parameter, DTensor):
        return parameter
    leaf: Tensor | None = getattr(parameter, "local_leaf", None)
    return parameter.to_local() if leaf is None else leaf
