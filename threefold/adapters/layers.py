"""Layers with an adapter: y = W·x + s · B·(A·x), whole or sharded as the layer itself (Hu et al., arXiv 2106.09685).

Of a layer whose output features are divided, each rank has all of A, and the rows of B for its features; of one whose
input features are divided, the columns of A for its features, and all of B. The sum that such a layer needs anyway then
includes its adapter, so that a forward or backward pass has no further collective. The gradient of the weight that each
rank has whole is partial (`Split.partial`), and is summed once a step.

With magnitudes (DoRA, arXiv 2402.09353), y = g · (W·x + s · B·(A·x)) row by row, where g = m / ‖W + s·B·A‖ and
m = ‖W‖ + a trained change, which is zero at first. As in `peft`, the norm is a constant in the backward pass, and
dropout is that of the input of all but the plain W·x: y = W·x + (g − 1) · W·x' + g · s·B·A·x'. Of a layer whose input
features are divided, the squares of each row are summed over the ranks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.axis import Axis
from threefold.comm.differentiable import reduce_from
from threefold.comm.layout import shard_bounds
from threefold.errors import UserError
from threefold.models.layers.decoder import NOTHING, Embedding, Linear
from threefold.models.layers.experts import Experts
from threefold.models.sharding import LORA_A, LORA_B, MAGNITUDE, TABLE_A, TABLE_B
from threefold.ops.kernels import embedding, linear
from threefold.parallel.context import ShardingContext
from threefold.parallel.experts import ParallelExperts
from threefold.parallel.leaf import local
from threefold.parallel.shard_modules import Extended, extend
from threefold.parallel.split_layer import SplitLayer
from threefold.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from threefold.random.dropout import Dropout
from threefold.random.rng import Slice


class PassSamples:
    """Keys of the samples that pass through a layer of the model at the moment; None to drop nothing."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None


@dataclass(frozen=True)
class Adapter:
    """How an adapter computes.

    A layer of several projections, such as queries, keys and values of Llama, has an adapter for each: A has `rank`
    rows for each of them, one after another, and each row of B, one for an output feature, has the factors of its
    projection's.

    Attributes:
        factor: s, the factor of B·A.
        spans: start and end of each projection among the `period` output features that repeat; None for one that has
            them all. Features in no span have no adapter.
        first: first output feature on this rank.
        dropout: drops elements of the input by the keys in `samples`; None without dropout.
    """

    factor: float
    spans: tuple[tuple[int, int], ...] | None = None
    period: int = 1
    first: int = 0
    dropout: Dropout | None = None
    samples: PassSamples | None = None

    def spread(self, b: Tensor) -> Tensor:
        """Return B [..., features, projections · rank] for all rows of A, from its factors [..., features, rank]."""
        if self.spans is None:
            return b
        return (b.unsqueeze(-2) * self._projection_of_rows(b).unsqueeze(-1).to(b.dtype)).flatten(-2)

    def _projection_of_rows(self, b: Tensor) -> Tensor:
        """Return whether each of B's features is one of each projection [features, projections]."""
        assert self.spans is not None
        place = (torch.arange(b.shape[-2], device=b.device) + self.first) % self.period
        return torch.stack([(place >= start) & (place < end) for start, end in self.spans], -1)

    def dropped(self, x: Tensor) -> Tensor:
        """Drop elements of the input; return `x` itself if nothing is dropped."""
        if self.dropout is None or self.samples is None:
            return x
        keys = self.samples.keys
        if keys is not None and (x.dim() != 3 or len(x) != len(keys)):
            raise UserError(
                f"{self.dropout.name} drops elements of an input of the shape {[*x.shape]}, which must be that of "
                f"{len(keys)} samples, positions and features; use dropout 0."
            )
        dropped: Tensor = self.dropout(x, keys)
        return dropped

    def output(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Compute s · B·A·x [..., out] of `x` [..., in] after its dropout."""
        return linear(linear(x, a) * self.factor, self.spread(b))

    def scale(self, weight: Tensor, a: Tensor, b: Tensor, change: Tensor, axis: Axis | None = None) -> Tensor:
        """Return g [out] of the changes of the magnitudes; `axis` has the other columns of the weight."""
        wide = torch.promote_types(weight.dtype, torch.float32)
        with torch.no_grad():
            base = weight.detach().to(wide)
            both = base + dense_delta(self, a.detach().to(wide), b.detach().to(wide))
            squares = torch.stack([base.square().sum(-1), both.square().sum(-1)])
            if axis is not None:
                squares = reduce_from(squares, axis)
            plain, norm = squares.sqrt()
            used = norm > 0  # a row of zeros has no direction
            if self.spans is not None:
                used &= self._projection_of_rows(b).any(-1)
            norm = norm.masked_fill(norm == 0, 1.0)
        return torch.where(used, (plain + change.to(wide)) / norm, 1.0).to(weight.dtype)

    def looked_up(self, ids: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Compute s · B·A·(one-hot vectors of the `ids`) [..., H] with `a` [rank, V]."""
        return linear(embedding(ids, a.t()) * self.factor, b)

    def product(
        self, compute: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, change: Tensor | None = None
    ) -> Any:
        """Return the function that computes with an input and a weight so that their product includes the adapter."""

        def joined(x: Tensor, weight: Tensor) -> Tensor:
            dropped = self.dropped(x)
            inputs, weights = [x, linear(dropped, a) * self.factor], [weight, self.spread(b)]
            if change is not None:
                scale = self.scale(weight, a, b, change).unsqueeze(-1)
                weights[1] = scale * weights[1]
                if dropped is x:
                    weights[0] = scale * weight
                else:
                    inputs, weights = [*inputs, dropped], [*weights, (scale - 1) * weight]
            return compute(torch.cat(inputs, -1), torch.cat(weights, -1))

        return joined

    def of_part(self, parts: Mapping[int, Any], first: int = 0) -> "Adapter":
        """Return the adapter for a part of the input, and for output features from the `first` on."""
        return replace(self, dropout=None if self.dropout is None else self.dropout.of_part(parts), first=first)


def dense_delta(adapter: Adapter, a: Tensor, b: Tensor) -> Tensor:
    """Return s · B·A [..., out, in], which a merged weight adds."""
    return adapter.spread(b) @ a * adapter.factor


class AdaptedLayer(Extended):
    """Linear layer or table with an adapter; the base of classes that come before the layer's own.

    It is a layer of one device, and `extend_replacement` gives its adapter to the layer that replaces it.
    """

    adapter: Adapter

    @property
    def drops(self) -> bool:
        return self.adapter.dropout is not None

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return this rank's A and B to compute with."""
        names = (LORA_A, LORA_B) if hasattr(self, LORA_A) else (TABLE_A, TABLE_B)
        a, b = (local(getattr(self, name)) for name in names)
        return a, b

    @property
    def sums_columns_over(self) -> Axis | None:
        """Axis whose ranks have the other columns of the weight."""
        return None

    def added(self, x: Tensor, product: Tensor) -> Tensor:
        """Return what the adapter adds to the `product` W·x."""
        adapter, (a, b) = self.adapter, self.factors()
        dropped = adapter.dropped(x)
        out = adapter.output(dropped, a, b)
        if not hasattr(self, MAGNITUDE):
            return out
        weight: Tensor = local(self.weight)  # type: ignore[arg-type]
        scale = adapter.scale(weight, a, b, local(getattr(self, MAGNITUDE)), self.sums_columns_over)
        if dropped is not x:
            product = linear(dropped, weight)
        return (scale - 1) * product + scale * out

    def extend_replacement(self, made: nn.Module, context: ShardingContext) -> None:
        positions = context.cut if made is self else context.cut.across_context
        if made is self:
            self.adapter = self.adapter.of_part({1: positions})
            return
        assert isinstance(made, SplitLayer)
        for name in (LORA_A, LORA_B, MAGNITUDE, TABLE_A, TABLE_B):
            if hasattr(self, name):
                made.register_parameter(name, made._split(name, getattr(self, name)))
        axis = made.axis
        if isinstance(made, RowParallelLinear):
            start, _ = shard_bounds(made.weight.shape[1], axis.size, axis.index)
            vars(made)["adapter"] = self.adapter.of_part({1: positions, 2: Slice(start, made.weight.shape[1])})
        else:
            start, _ = shard_bounds(made.weight.shape[0], axis.size, axis.index)
            vars(made)["adapter"] = self.adapter.of_part({1: positions}, start)
        prepend(made, next(mixin for kind, mixin in _SPLIT.items() if isinstance(made, kind)))


class AdaptedLinear(AdaptedLayer):
    """`nn.Linear` with an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = super().forward(input)
        return out + self.added(input, self.without_bias(out))

    def without_bias(self, out: Tensor) -> Tensor:
        """Return W·x of an output that has the bias added."""
        bias: Tensor | None = self.bias  # type: ignore[assignment]
        return out if bias is None or not hasattr(self, MAGNITUDE) else out - local(bias)

    def with_weight(self, compute: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Any:
        """Return `compute(x, weight)` for an input and a weight whose product includes the adapter."""
        change = local(getattr(self, MAGNITUDE)) if hasattr(self, MAGNITUDE) else None
        return super().with_weight(self.adapter.product(compute, *self.factors(), change), x)  # type: ignore[misc]


class AdaptedTable(AdaptedLayer):
    """`nn.Embedding` with an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = super().forward(input)
        return out + self.adapter.looked_up(input, *self.factors())


class AdaptedColumn(AdaptedLinear):
    """Linear layer with divided output features, and an adapter."""

    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = super(AdaptedLinear, self).forward(input)
        return out

    def _local_features(self, x: Tensor) -> Tensor:
        out: Tensor = super()._local_features(x)  # type: ignore[misc]
        return out + self.added(x, self.without_bias(out))


class AdaptedRow(AdaptedLayer):
    """Linear layer with divided input features, and an adapter, whose input is this rank's part already."""

    axis: Axis

    @property
    def sums_columns_over(self) -> Axis | None:
        return self.axis

    def partial_sum(self, x: Tensor) -> Tensor:
        """Return this rank's summand of the output, with that of the adapter."""
        out: Tensor = super().partial_sum(x)  # type: ignore[misc]
        return out + self.added(x, out)


class AdaptedVocab(AdaptedLayer):
    """Table with divided rows, and an adapter."""

    start: int
    end: int

    def local_rows(self, ids: Tensor) -> Tensor:
        """Return this rank's part of the look-up, with that of the adapter."""
        rows: Tensor = super().local_rows(ids)  # type: ignore[misc]
        a, b = self.factors()
        if not a.shape[1]:  # more ranks than rows
            return rows
        foreign = (ids < self.start) | (ids >= self.end)
        added = self.adapter.looked_up((ids - self.start).masked_fill(foreign, 0), a, b)
        return rows + added.masked_fill(foreign.unsqueeze(-1), 0)


_SPLIT: dict[type[nn.Module], type[AdaptedLayer]] = {
    ColumnParallelLinear: AdaptedColumn,
    RowParallelLinear: AdaptedRow,
    VocabParallelEmbedding: AdaptedVocab,
}


class AdaptedExperts(Extended):
    """Experts with adapters, whole or divided over ranks."""

    gate_up: Tensor
    adapters: dict[str, Adapter]

    def linear(self, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """Compute one product for each expert, with that of its adapter."""
        out: Tensor = super().linear(rows, weight, counts)  # type: ignore[misc]
        name = "gate_up" if weight is local(self.gate_up) else "down"
        if name not in self.adapters:
            return out
        adapter = self.adapters[name]
        a, b = (local(getattr(self, f"{name}_{each}")) for each in (LORA_A, LORA_B))
        inner: Tensor = super().linear(rows, a, counts) * adapter.factor  # type: ignore[misc]
        added: Tensor = super().linear(inner, adapter.spread(b), counts)  # type: ignore[misc]
        return out + added

    def extend_replacement(self, made: nn.Module, context: ShardingContext) -> None:
        if made is self:
            return
        assert isinstance(made, ParallelExperts)
        start, _ = shard_bounds(made.gate_up.shape[1], context.tp.size, context.tp.index)
        vars(made)["adapters"] = {name: each.of_part({}, start) for name, each in self.adapters.items()}
        prepend(made, AdaptedExperts)


def prepend(module: nn.Module, kind: type[nn.Module]) -> None:
    """Make a module one of a class that comes before its own, which keeps its name."""
    own = type(module)
    module.__class__ = type(own.__name__, (kind, own), {"__module__": own.__module__})


def mixin_of(module: nn.Module) -> type[Extended] | None:
    """Return the class that gives a layer of one device an adapter; None for a module that can have none."""
    if isinstance(module, nn.Linear) and type(module).forward in (nn.Linear.forward, Linear.forward):
        return AdaptedLinear
    if isinstance(module, nn.Embedding) and type(module).forward in (nn.Embedding.forward, Embedding.forward):
        return AdaptedTable
    return AdaptedExperts if isinstance(module, Experts) else None


def keep_samples(layer: nn.Module, samples: PassSamples) -> None:
    """Make a layer note the keys of the samples that it is called with, also in a recomputation."""
    forward: Callable[..., Any] = type(layer).forward
    binds = signature(forward)
    vars(layer)["pass_samples"] = samples

    @wraps(forward)
    def noting(self: Any, *args: Any, **options: Any) -> Any:
        self.pass_samples.keys = binds.bind(self, *args, **options).arguments.get("samples", NOTHING).keys
        return forward(self, *args, **options)

    extend(layer, {"forward": noting})
