"""Products of experts in exact runs, and the choice of experts: the same bits whoever computes which rows."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from tests.exact.support import tree
from tests.support.bits import drawn, equal, same_in_threads, with_gradients
from tests.support.kernels import KERNELS, with_kernel
from tests.support.mistakes import patched
from tests.support.sweep import sweep
from threefold.exact import experts as exact_experts
from threefold.exact.functions import ExactFunctions
from threefold.exact.layers import RowSum
from threefold.exact.products import PRODUCTS
from threefold.models.layers.experts import Routing
from threefold.models.layers.experts import grouped_linear as plain_grouped_linear
from threefold.models.llama import LlamaConfig

COUNTS = [[5, 0, 1, 2], [0, 0, 17, 1], [3, 3, 3, 3]]
"""Rows of each expert, from each of three senders."""
IN, OUT, PIECES = 16, 24, 8


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_senders_rows_have_the_bits_that_they_have_alone(dtype: torch.dtype) -> None:
    weight = drawn(4, OUT, IN, seed=1).to(dtype)
    rows = [drawn(sum(counts), IN, seed=2).to(dtype) for counts in COUNTS]
    upper = [drawn(sum(counts), OUT, seed=3).to(dtype) for counts in COUNTS]
    handed: list[Tensor] = []
    x, shared = torch.cat(rows).requires_grad_(), weight.clone().requires_grad_()
    groups = [count for counts in COUNTS for count in counts]
    out = exact_experts.grouped_linear(x, shared, groups, outer=PIECES, add=handed.append)
    out.backward(torch.cat(upper))
    assert (shared.grad, len(handed)) == (None, 1)
    assert x.grad is not None
    found = zip(out.split([*map(len, rows)]), x.grad.split([*map(len, rows)]), handed[0], strict=True)
    for (own, of_x, of_weight), part, grad, counts in zip(found, rows, upper, COUNTS, strict=True):

        def alone(x: Tensor, weight: Tensor, counts: list[int] = counts) -> Tensor:
            return exact_experts.grouped_linear(x, weight, counts, outer=PIECES)

        expected = same_in_threads(partial(with_gradients, alone, part, weight, upper=grad))
        assert all(map(equal, (own, of_x, of_weight), expected))
        plain = with_gradients(
            lambda x, weight, counts=counts: plain_grouped_linear(x, weight, torch.tensor(counts)),
            part.double(),
            weight.double(),
            upper=grad.double(),
        )
        limit = 1e-5 if dtype == torch.float32 else 5e-2
        assert all((a - b).abs().max() <= limit * b.abs().max() for a, b in zip(expected, plain, strict=True))


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_products_over_cut_features_are_the_tree_over_ranks(ranks: int) -> None:
    counts, mine = COUNTS[0], PIECES // ranks
    x, weight, upper = drawn(sum(counts), IN), drawn(4, OUT, IN, seed=1), drawn(sum(counts), OUT, seed=2)

    def products(inner: int = 1, outer: int = 1) -> Callable[..., Tensor]:
        return partial(exact_experts.grouped_linear, counts=counts, inner=inner, outer=outer)

    column = with_gradients(products(outer=PIECES), x, weight, upper=upper)
    parts = [
        with_gradients(products(outer=mine), x, own, upper=part)
        for own, part in zip(weight.chunk(ranks, 1), upper.chunk(ranks, 1), strict=True)
    ]
    assert equal(torch.cat([part[0] for part in parts], 1), column[0])
    assert equal(tree([part[1] for part in parts]), column[1])
    assert equal(torch.cat([part[2] for part in parts], 1), column[2])
    row = with_gradients(products(inner=PIECES), x, weight, upper=upper)
    parts = [
        with_gradients(products(inner=mine), part, own, upper=upper)
        for own, part in zip(weight.chunk(ranks, 2), x.chunk(ranks, 1), strict=True)
    ]
    assert equal(tree([part[0] for part in parts]), row[0])
    assert equal(torch.cat([part[1] for part in parts], 1), row[1])
    assert equal(torch.cat([part[2] for part in parts], 2), row[2])


@sweep("kernel", KERNELS, quick=(0,))
def test_kernels_that_misbehave_leave_the_bits(kernel: str) -> None:
    before = PRODUCTS.refused
    with patched(with_kernel(kernel)):
        for dtype in (torch.float32, torch.bfloat16):
            test_a_senders_rows_have_the_bits_that_they_have_alone(dtype)
        test_products_over_cut_features_are_the_tree_over_ranks(2)
    assert PRODUCTS.refused > before, "the trials found nothing"


@pytest.mark.parametrize("chosen", [1, 2, 3, 8])
@pytest.mark.parametrize("width", [1, 7, 33, 257])
def test_weighted_sum(chosen: int, width: int) -> None:
    x, weights = drawn(33, chosen, width), drawn(33, chosen, seed=1)
    whole = same_in_threads(lambda: with_gradients(exact_experts.weighted_sum, x, weights))
    upper = drawn(33, width, seed=7)
    for cut in (slice(0, 1), slice(1, 20), slice(32, None)):
        part = with_gradients(exact_experts.weighted_sum, x[cut], weights[cut], upper=upper[cut])
        assert all(equal(each, of[cut]) for each, of in zip(part, whole, strict=True))
    plain = with_gradients(lambda x, w: (x * w.unsqueeze(-1)).sum(-2), x.double(), weights.double())
    assert all((a - b).abs().max() <= 1e-5 * b.abs().max() for a, b in zip(whole, plain, strict=True))


@pytest.mark.parametrize("router", ["softmax", "sigmoid"])
@pytest.mark.parametrize("experts", [3, 16, 130])
def test_choices_and_weights_of_a_token_do_not_depend_on_the_others(experts: int, router: str) -> None:
    routing, logits = Routing(LlamaConfig(num_experts=experts, router=router)), drawn(1, 64, experts)
    logits[0, 5] = 1.0  # no expert is best

    def weights(logits: Tensor) -> Tensor:
        with ExactFunctions(RowSum()):
            return routing(logits).weights

    upper = drawn(1, 64, 2, seed=7)
    whole = same_in_threads(lambda: with_gradients(weights, logits, upper=upper))
    experts_of = same_in_threads(lambda: routing(logits).experts)
    for cut in (slice(0, 1), slice(1, 20), slice(5, 6), slice(63, None)):
        part = with_gradients(weights, logits[:, cut], upper=upper[:, cut])
        assert all(equal(each, of[:, cut]) for each, of in zip(part, whole, strict=True))
        assert equal(routing(logits[:, cut]).experts, experts_of[:, cut])
