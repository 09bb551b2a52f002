"""Deferred weight gradients are those of the backward pass, whatever the layer and however its input came."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from threefold.ops.kernels import DeferrableWeight, gradient_store, linear
from threefold.parallel.pipeline.schedules import DeferredGradients


def layer(deferred: DeferredGradients, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    weight, bias = torch.randn(5, 7, dtype=dtype), torch.randn(5, dtype=dtype)
    return DeferrableWeight(weight, deferred), DeferrableWeight(bias, deferred)


def sums_of(*leaves: Tensor) -> tuple[dict[Tensor, Tensor], Callable[[Tensor, Tensor], None]]:
    """Wide sums of the gradients of leaves, and what adds to them."""
    sums = {leaf: torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves}

    def add(leaf: Tensor, gradient: Tensor) -> None:
        sums[leaf].add_(gradient)

    return sums, add


def plain(call: Any, x: Tensor) -> Tensor:
    return call(x)


def recomputed(call: Any, x: Tensor) -> Tensor:
    return checkpoint(call, x, use_reentrant=False)


def recomputed_reentrant(call: Any, x: Tensor) -> Tensor:
    return checkpoint(call, x, use_reentrant=True)


def test_a_tensor_rank_without_features_of_its_own() -> None:
    """As where a small vocabulary is split over many."""
    deferred = DeferredGradients()
    weight, x = DeferrableWeight(torch.empty(0, 7), deferred), torch.randn(2, 3, 7, requires_grad=True)
    sums, add = sums_of(weight)
    with deferred.collecting(add):
        linear(x, weight, None).backward(torch.empty(2, 3, 0))
        deferred.take()()
    assert x.grad is not None
    assert not x.grad.any()
    assert sums[weight].shape == (0, 7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [plain, recomputed, recomputed_reentrant])
def test_the_backward_pass_leaves_them_out_and_they_follow(run: Any, dtype: torch.dtype) -> None:
    deferred = DeferredGradients()
    weight, bias = layer(deferred, dtype)
    inputs = [torch.randn(2, 3, 7, dtype=dtype, requires_grad=True) for _ in range(2)]
    pulls = [torch.randn(2, 3, 5, dtype=dtype) for _ in inputs]
    sums, add = sums_of(weight, bias)
    with deferred.collecting(add):
        later = []
        for x, pull in zip(inputs, pulls, strict=True):
            run(partial(linear, weight=weight, bias=bias), x).backward(pull)
            later.append(deferred.take())
        assert weight.grad is None
        assert bias.grad is None
        assert not any(total.any() for total in sums.values())
        for compute in later:
            compute()
    expected = [torch.zeros_like(sums[leaf]) for leaf in (weight, bias)]
    for x, pull in zip(inputs, pulls, strict=True):
        alone = x.detach().requires_grad_()
        into_x, into_weight, into_bias = torch.autograd.grad(F.linear(alone, weight, bias), (alone, weight, bias), pull)
        torch.testing.assert_close(x.grad, into_x)
        expected = [total + part for total, part in zip(expected, (into_weight, into_bias), strict=True)]
    torch.testing.assert_close([sums[weight], sums[bias]], expected)


def test_an_input_without_gradient_and_a_frozen_weight() -> None:
    deferred = DeferredGradients()
    weight, bias = layer(deferred)
    frozen = DeferrableWeight(torch.randn(7, 5, dtype=torch.float64), deferred).requires_grad_(False)
    x = torch.randn(4, 7, dtype=torch.float64)
    sums, add = sums_of(weight, bias, frozen)
    with deferred.collecting(add):
        linear(linear(x, weight, bias), frozen).sum().backward()
        deferred.take()()
    torch.testing.assert_close(sums[weight], frozen.sum(0).unsqueeze(1) * x.sum(0))
    torch.testing.assert_close(sums[bias], 4 * frozen.sum(0))
    assert not sums[frozen].any()


def test_nothing_is_deferred_outside_a_step() -> None:
    deferred = DeferredGradients()
    weight, bias = layer(deferred)
    with deferred.collecting(sums_of(weight, bias)[1]):
        assert gradient_store(weight) is deferred
    linear(torch.ones(1, 7, dtype=torch.float64), weight, bias).sum().backward()
    assert weight.grad is not None
    assert gradient_store(weight) is None


def forget(deferred: DeferredGradients, weight: Tensor, bias: Tensor) -> None:
    with deferred.collecting(sums_of(weight, bias)[1]):
        linear(torch.ones(1, 7, dtype=torch.float64), weight, bias).sum().backward()
        deferred.take()


def test_a_gradient_that_is_never_computed_is_an_error() -> None:
    deferred = DeferredGradients()
    weight, bias = layer(deferred)
    with pytest.raises(RuntimeError, match="before all weight gradients were computed"):
        forget(deferred, weight, bias)


def test_layers_that_do_not_use_the_store_compute_theirs_at_once() -> None:
    deferred = DeferredGradients()
    module = nn.Linear(7, 5, dtype=torch.float64)
    module.weight, module.bias = layer(deferred)  # type: ignore[assignment]
    with deferred.collecting(sums_of(*module.parameters())[1]):
        module(torch.ones(1, 7, dtype=torch.float64)).sum().backward()
        deferred.take()()
    assert module.weight.grad is not None
