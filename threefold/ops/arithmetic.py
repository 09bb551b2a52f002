"""How layers compute: products, biases, look-ups and sums, which a run's arithmetic may replace.

Linear layers and those that parallelism splits have an arithmetic, and so has an optimizer that multiplies matrices.
`LayerArithmetic` itself leaves all to torch and to `ops.kernels`; a subclass computes otherwise, such as in float8
(below), or in sums whose order no layout decides (the room `exact`). `parallel/arithmetic.py` chooses the one of a run.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Final, Self

import torch
from torch import Tensor

from threefold.ops import fp8, kernels
from threefold.ops.cross_entropy import tops_and_sums


class LayerArithmetic:
    """Arithmetic of a layer on a rank, as torch has it; the base class of all others.

    Attributes:
        replaces_layers: whether layers compute otherwise even where they are not split.
        fuses_updates: whether an optimizer may compute a tensor's elements with different instructions.
    """

    replaces_layers: ClassVar[bool] = False
    fuses_updates: ClassVar[bool] = True

    def of_units(self, count: int) -> Self:
        """Return the arithmetic of a layer whose split features are `count` units that no rank divides."""
        return self

    def feature_parts(self, ranks: int) -> int:
        """Return the number of parts that features are divided into, given the number of tensor ranks."""
        return ranks

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute `F.linear` of `x` [..., in] and this rank's output features [out, in]: [..., out]."""
        return kernels.linear(x, weight, bias)

    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute `F.linear` of this rank's input features: a summand of the output [..., out]."""
        return kernels.linear(x, weight)

    def add_bias(self, x: Tensor, bias: Tensor) -> Tensor:
        """Add a bias [out] to a complete output [..., out]."""
        return x + bias

    def embedding(self, ids: Tensor, table: Tensor) -> Tensor:
        """Look up rows of this rank's `table` [V, H] at int64 `ids` [...]: [..., H]."""
        return kernels.embedding(ids, table)

    def repeat(self, x: Tensor, times: int) -> Tensor:
        """Repeat `x` [..., 1, n] along its last dim but one: [..., times, n]."""
        return x.expand(*x.shape[:-2], times, -1)

    def weighted_sum(self, x: Tensor, weights: Tensor) -> Tensor:
        """Sum `x` [..., k, n] over k, weighted by `weights` [..., k]: [..., n]."""
        return (x * weights.unsqueeze(-1)).sum(-2)

    def softmax_sums(self, logits: Tensor, largest: Callable[[Tensor], Tensor], at_once: int) -> tuple[Tensor, Tensor]:
        """Return each row's maximum over all ranks, and this rank's sum of exp(logit − maximum): [T] each.

        `logits` are this rank's columns [T, V], `largest` is the maximum over the ranks, and `at_once` the number of
        logits that are processed together.
        """
        # Finite, so that a shard whose logits are all −∞ adds zero to the sum, not NaN.
        wide = torch.promote_types(logits.dtype, torch.float32)
        least = logits.new_full(logits.shape[:1], torch.finfo(wide).min, dtype=wide)
        tops, total = tops_and_sums(logits, least, at_once) if logits.shape[1] else (least, torch.zeros_like(least))
        top = largest(tops)
        return top, total * (tops - top).exp()

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Compute `a @ b` of matrices or batches of them, in an optimizer's update."""
        return a @ b

    def matrix_norms(self, x: Tensor) -> Tensor:
        """Return the Frobenius norm of each matrix of `x` [..., m, n]: [..., 1, 1]."""
        return x.norm(dim=(-2, -1), keepdim=True)


class Float8(LayerArithmetic):
    """Linear layers in float8 (`ops.fp8`); the rest as torch has it."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return fp8.linear(x, weight, bias)

    def partial_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return fp8.linear(x, weight)


PLAIN: Final = LayerArithmetic()
FLOAT8: Final = Float8()


class PassContext:
    """Context of a stage's forward passes and their recomputations, which does nothing by itself."""

    def __call__(self) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        return nullcontext()

    def ended(self, key: int, outputs: Any) -> None:
        """Take note of the outputs of a pass; `key` identifies the stage, or its loss."""


PLAIN_PASS: Final = PassContext()
