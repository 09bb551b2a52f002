"""Products of an exact run's own sizes, in the parts that its layouts have: they have the bits of the whole.

`threefold verify --exact` trains a shrunk model; the bits of a product may depend on its size.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import Final, Literal

import torch
from torch import Tensor, nn

from threefold.config import Config
from threefold.dtypes import DTYPES
from threefold.exact.experts import computed_rows
from threefold.exact.layers import RowSum
from threefold.exact.products import PRODUCTS, WHOLE, Parts, equal_parts, product, tree_sum
from threefold.models.sharding import ModelPlan
from threefold.models.source import ModelSource, skeleton

_LARGEST: Final = 1 << 37
"""Maximum number of multiply-adds of a product that is tried whole; of a larger one, two pieces and fewer rows are."""
_RANKS: Final = 2  # tensor ranks whose parts are compared with the whole


@dataclass(frozen=True)
class ProductsTried:
    """Products of a run's own sizes, in the parts that its layouts have, each with several numbers of threads.

    Attributes:
        layers: number of linear layers of different sizes, each with three products.
        experts: number of those that are experts', each with all numbers of rows that an expert computes.
        different: sizes [out, in] of those whose parts have other bits than the whole.
        trials: number of trials in which a faster way was compared with the calls that define the bits.
        refused: number of these that found other bits, so that the product is computed in parts.
    """

    layers: int
    experts: int
    different: tuple[str, ...]
    trials: int
    refused: int
    seconds: float


@dataclass(frozen=True, order=True)
class _Layer:
    """Linear layer [out, in], of which tensor ranks cut the output features, the input features, or the rows."""

    out: int
    inner: int
    cut: Literal["out", "in", "rows"]
    is_expert: bool = False

    def __str__(self) -> str:
        return f"{self.out} × {self.inner}{' of an expert' if self.is_expert else ''}"

    def smaller(self, rows: int, pieces: int) -> tuple["_Layer", int]:
        """Return the layer and its number of pieces; two of these pieces alone if the whole is too large to try."""
        if self.cut == "rows" or rows * self.out * self.inner <= _LARGEST or pieces <= _RANKS:
            return self, pieces
        out, inner = self.out, self.inner
        if self.cut == "in":
            inner = inner // pieces * _RANKS
        else:
            out = out // pieces * _RANKS
        return _Layer(out, inner, self.cut, self.is_expert), _RANKS


def try_products(source: ModelSource, config: Config, threads: Sequence[int]) -> ProductsTried:
    """Compute the products of the model's layers, forward and backward, whole and in the parts of tensor ranks.

    An expert has each number of rows that a sequence may give it, as a run computes them, or some if there are many;
    a product that would take minutes has fewer rows.
    """
    make_model, plan = source.load(config)
    layers = sorted(_layers(skeleton(make_model, config.train.seed), plan))
    train, dtype, sequence = config.train, DTYPES[config.precision.dtype], config.data.sequence_length
    grain, group = train.grain_tensor or 1, (train.grain_leaf or 1) * sequence
    of_group = RowSum(context=train.grain_context or 1).parts()
    before, started, trials, refused = torch.get_num_threads(), time.perf_counter(), PRODUCTS.trials, PRODUCTS.refused
    different = []
    try:
        for layer in layers:
            pieces = gcd(grain, {"out": layer.out, "in": layer.inner, "rows": sequence}[layer.cut])
            tried, pieces = layer.smaller(sequence if layer.is_expert else group, pieces)
            rows = of_group if layer.cut != "rows" else equal_parts(pieces)
            each = [(_fewer(group, tried, rows), rows)]
            if layer.is_expert:
                each = [(number, WHOLE) for number in _numbers(sequence, tried)]
            if not all(_has_bits_of_parts(tried, number, pieces, parts, dtype, threads) for number, parts in each):
                different.append(str(layer))
    finally:
        torch.set_num_threads(before)
    made = PRODUCTS.trials - trials, PRODUCTS.refused - refused
    experts = sum(layer.is_expert for layer in layers)
    return ProductsTried(len(layers), experts, tuple(dict.fromkeys(different)), *made, time.perf_counter() - started)


def _layers(model: nn.Module, plan: ModelPlan) -> set[_Layer]:
    """Return the linear layers of a model and those of its experts, each size once."""
    found = set()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        module = model.get_submodule(name.rpartition(".")[0])
        rule, dims = plan.split_of(name), parameter.dim()
        if name.endswith(".weight") and isinstance(module, nn.Linear):
            dim = None if rule is None else rule.cut_dim("weight", "tp")
        elif dims == 3 and rule is not None and rule.cut_dim(name.rpartition(".")[2], "ep") == 0:
            dim = rule.cut_dim(name.rpartition(".")[2], "tp")
        else:
            continue
        out, inner = parameter.shape[-2:]
        cut: Literal["out", "in", "rows"] = "rows" if dim is None else "out" if dim == dims - 2 else "in"
        found.add(_Layer(out, inner, cut, dims == 3))
    return found


def _numbers(sequence: int, layer: _Layer) -> list[int]:
    """Return the numbers of rows with which an expert may be computed; every second one while they are too many."""
    numbers = sorted({computed_rows(count) for count in range(1, sequence + 1)})
    numbers = [number for number in numbers if number * layer.out * layer.inner <= _LARGEST] or numbers[:1]
    while sum(numbers) * layer.out * layer.inner > 2 * _LARGEST and len(numbers) > 1:
        numbers = numbers[::-2][::-1]  # with the largest
    return numbers


def _fewer(rows: int, layer: _Layer, parts: Parts) -> int:
    """Return the number of rows to try, which is halved while the product is too large and no part is cut."""
    chunks = sum(map(len, parts))
    while rows * layer.out * layer.inner > _LARGEST and rows % (2 * chunks) == 0:
        rows //= 2
    return rows


def _has_bits_of_parts(
    layer: _Layer, rows: int, pieces: int, parts: Parts, dtype: torch.dtype, threads: Sequence[int]
) -> bool:
    """Return whether the products of a layer are those of two tensor ranks, for each number of threads."""
    draws = torch.Generator().manual_seed(0)
    x, weight, grad = (
        torch.randn(*shape, generator=draws).to(dtype)
        for shape in ((rows, layer.inner), (layer.out, layer.inner), (rows, layer.out))
    )
    first: list[Tensor] = []
    ranks = _RANKS if pieces % _RANKS == 0 else 1
    for count, number in ((count, number) for count in (1, ranks) for number in threads):
        torch.set_num_threads(number)
        found = _of_ranks(layer.cut, count, pieces // count, parts, x, weight, grad)
        first = first or found
        if not all(map(torch.equal, first, found)):
            return False
    return True


def _of_ranks(
    cut: Literal["out", "in", "rows"], ranks: int, local: int, parts: Parts, x: Tensor, weight: Tensor, grad: Tensor
) -> list[Tensor]:
    """Return the output and the gradients of input and weight, put together from the parts of `ranks` ranks."""
    by_inner, by_outer, by_rows = (local if cut == each else 1 for each in ("in", "out", "rows"))
    dims = {"out": (None, 0, 1), "in": (1, 1, None), "rows": (0, None, 0)}[cut]
    parts = equal_parts(local) if cut == "rows" else parts
    cuts = (
        [each] * ranks if dim is None else each.chunk(ranks, dim)
        for each, dim in zip((x, weight, grad), dims, strict=True)
    )
    found: list[tuple[Tensor, ...]] = []
    for each in zip(*cuts, strict=True):
        rows, matrix, upper = (part.contiguous() for part in each)
        found.append(
            (
                product(rows, matrix, by_inner, parts, by_outer),
                product(upper, matrix.t(), by_outer, parts, by_inner),
                product(upper.t(), rows.t(), by_rows, equal_parts(by_outer), by_inner),
            )
        )
    outputs, of_inputs, of_weights = zip(*found, strict=True)
    if cut == "rows":
        return [torch.cat(outputs), torch.cat(of_inputs), tree_sum(of_weights)]
    if cut == "in":
        return [tree_sum(outputs), torch.cat(of_inputs, 1), torch.cat(of_weights, 1)]
    return [torch.cat(outputs, 1), tree_sum(of_inputs), torch.cat(of_weights)]
