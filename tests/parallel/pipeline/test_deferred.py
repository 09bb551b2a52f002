"""Weight gradients that are put off are those of the backward pass, whatever the layer and however its input came."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from threefold.ops.kernels import DEFERRED, linear
from threefold.parallel.pipeline.deferred import DeferredGradients


def layer(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    weight, bias = torch.randn(5, 7, dtype=dtype), torch.randn(5, dtype=dtype)
    return weight.requires_grad_(), bias.requires_grad_()


def store(*leaves: Tensor) -> tuple[DeferredGradients, dict[Tensor, Tensor]]:
    sums = {leaf: torch.zeros_like(leaf, dtype=torch.promote_types(leaf.dtype, torch.float32)) for leaf in leaves}
    return DeferredGradients(leaves, lambda leaf, gradient: sums[leaf].add_(gradient)), sums


def plain(call: Any, x: Tensor) -> Tensor:
    return call(x)


def recomputed(call: Any, x: Tensor) -> Tensor:
    return checkpoint(call, x, use_reentrant=False)


def recomputed_reentrant(call: Any, x: Tensor) -> Tensor:
    return checkpoint(call, x, use_reentrant=True)


def test_a_tensor_rank_without_features_of_its_own() -> None:
    """As where a small vocabulary is split over many."""
    weight, x = torch.empty(0, 7, requires_grad=True), torch.randn(2, 3, 7, requires_grad=True)
    deferred, sums = store(weight)
    with deferred.collecting():
        linear(x, weight, None).backward(torch.empty(2, 3, 0))
        deferred.take()()
    assert x.grad is not None
    assert not x.grad.any()
    assert sums[weight].shape == (0, 7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run", [plain, recomputed, recomputed_reentrant])
def test_the_backward_pass_leaves_them_out_and_they_follow(run: Any, dtype: torch.dtype) -> None:
    weight, bias = layer(dtype)
    inputs = [torch.randn(2, 3, 7, dtype=dtype, requires_grad=True) for _ in range(2)]
    pulls = [torch.randn(2, 3, 5, dtype=dtype) for _ in inputs]
    deferred, sums = store(weight, bias)
    with deferred.collecting():
        later = []
        for x, pull in zip(inputs, pulls, strict=True):
            run(partial(linear, weight=weight, bias=bias), x).backward(pull)
            later.append(deferred.take())
        assert weight.grad is None
        assert bias.grad is None
        assert not any(total.any() for total in sums.values())
        for work_off in later:
            work_off()
    expected = [torch.zeros_like(sums[leaf]) for leaf in (weight, bias)]
    for x, pull in zip(inputs, pulls, strict=True):
        alone = x.detach().requires_grad_()
        into_x, into_weight, into_bias = torch.autograd.grad(F.linear(alone, weight, bias), (alone, weight, bias), pull)
        torch.testing.assert_close(x.grad, into_x)
        expected = [total + part for total, part in zip(expected, (into_weight, into_bias), strict=True)]
    torch.testing.assert_close([sums[weight], sums[bias]], expected)


def test_an_input_without_gradient_and_a_frozen_weight() -> None:
    weight, bias = layer()
    frozen = torch.randn(7, 5, dtype=torch.float64)
    x = torch.randn(4, 7, dtype=torch.float64)
    deferred, sums = store(weight, bias, frozen)
    with deferred.collecting():
        linear(linear(x, weight, bias), frozen).sum().backward()
        deferred.take()()
    torch.testing.assert_close(sums[weight], frozen.sum(0).unsqueeze(1) * x.sum(0))
    torch.testing.assert_close(sums[bias], 4 * frozen.sum(0))
    assert not sums[frozen].any()


def test_nothing_is_put_off_outside_a_step() -> None:
    weight, bias = layer()
    deferred, _ = store(weight, bias)
    with deferred.collecting():
        assert getattr(weight, DEFERRED) is deferred
    linear(torch.ones(1, 7, dtype=torch.float64), weight, bias).sum().backward()
    assert weight.grad is not None
    assert not hasattr(weight, DEFERRED)


def forget(deferred: DeferredGradients, weight: Tensor, bias: Tensor) -> None:
    with deferred.collecting():
        linear(torch.ones(1, 7, dtype=torch.float64), weight, bias).sum().backward()
        deferred.take()


def test_a_gradient_that_is_never_computed_is_an_error() -> None:
    weight, bias = layer()
    deferred, _ = store(weight, bias)
    with pytest.raises(RuntimeError, match="before all weight gradients were computed"):
        forget(deferred, weight, bias)


def test_layers_that_know_nothing_of_it_compute_theirs_at_once() -> None:
    module = nn.Linear(7, 5, dtype=torch.float64)
    deferred, _ = store(*module.parameters())
    with deferred.collecting():
        module(torch.ones(1, 7, dtype=torch.float64)).sum().backward()
        deferred.take()()
    assert module.weight.grad is not None
