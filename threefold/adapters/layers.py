"""Layers with an adapter: y = W·x + s · B·(A·x), whole or sharded as the layer itself (Hu et al., arXiv 2106.09685).

Of a layer whose output features are divided, each rank has all of A, and the rows of B for its features; of one whose
input features are divided, the columns of A for its features, and all of B. The sum that such a layer needs anyway then
includes its adapter, so that a forward or backward pass has no further collective. The gradient of the weight that each
rank has whole is partial (`Split.partial`), and is summed once a step.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from threefold.comm.layout import shard_bounds
from threefold.errors import UserError
from threefold.models.layers.decoder import NOTHING, Embedding, Linear
from threefold.models.layers.experts import Experts
from threefold.models.sharding import LORA_A, LORA_B, TABLE_A, TABLE_B
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
        place = (torch.arange(b.shape[-2], device=b.device) + self.first) % self.period
        chosen = torch.stack([(place >= start) & (place < end) for start, end in self.spans], -1)
        return (b.unsqueeze(-2) * chosen.unsqueeze(-1).to(b.dtype)).flatten(-2)

    def inner(self, x: Tensor, a: Tensor) -> Tensor:
        """Compute s · A·x [..., projections · rank] of `x` [..., in]."""
        if self.dropout is not None and self.samples is not None:
            keys = self.samples.keys
            if keys is not None and (x.dim() != 3 or len(x) != len(keys)):
                raise UserError(
                    f"{self.dropout.name} drops elements of an input of the shape {[*x.shape]}, which must be that of "
                    f"{len(keys)} samples, positions and features; use dropout 0."
                )
            x = self.dropout(x, keys)
        return linear(x, a) * self.factor

    def output(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Compute s · B·A·x [..., out]."""
        return linear(self.inner(x, a), self.spread(b))

    def looked_up(self, ids: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Compute s · B·A·(one-hot vectors of the `ids`) [..., H] with `a` [rank, V]."""
        return linear(embedding(ids, a.t()) * self.factor, b)

    def product(self, compute: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Any:
        """Return the function that computes with an input and a weight so that their product includes the adapter."""

        def joined(x: Tensor, weight: Tensor) -> Tensor:
            return compute(torch.cat([x, self.inner(x, a)], -1), torch.cat([weight, self.spread(b)], -1))

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

    def extend_replacement(self, made: nn.Module, context: ShardingContext) -> None:
        positions = context.cut if made is self else context.cut.across_context
        if made is self:
            self.adapter = self.adapter.of_part({1: positions})
            return
        assert isinstance(made, SplitLayer)
        for name in (LORA_A, LORA_B, TABLE_A, TABLE_B):
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
        return out + self.adapter.output(input, *self.factors())

    def with_weight(self, compute: Callable[[Tensor, Tensor], Tensor], x: Tensor) -> Any:
        """Return `compute(x, weight)` for an input and a weight whose product includes the adapter."""
        return super().with_weight(self.adapter.product(compute, *self.factors()), x)  # type: ignore[misc]


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
        return out + self.adapter.output(x, *self.factors())


class AdaptedRow(AdaptedLayer):
    """Linear layer with divided input features, and an adapter, whose input is this rank's part already."""

    def partial_sum(self, x: Tensor) -> Tensor:
        """Return this rank's summand of the output, with that of the adapter."""
        out: Tensor = super().partial_sum(x)  # type: ignore[misc]
        return out + self.adapter.output(x, *self.factors())


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
