"""A canary for operators of compiled code: what torch has changed, in a sentence."""

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from threefold.torch_private.runtime import Handle, operator


class Factor:
    """What no compiler could follow: the product is noted."""

    def __init__(self, value: float) -> None:
        self.value, self.handle = value, Handle(self)
        self.calls: list[Tensor] = []


@operator("test_scaled", lambda x, factor: torch.empty_like(x))
def scaled(x: Tensor, factor: Handle) -> Tensor:
    factor.value.calls.append(x)
    return x * factor.value.value


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: Factor) -> Tensor:
        ctx.factor = factor
        return scaled(x, factor.handle)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return scaled(grad, ctx.factor.handle), None


def test_one_compilation_calls_an_operator_with_the_object_of_each_call() -> None:
    torch.compiler.reset()
    counters.clear()
    compiled = torch.compile(lambda x, factor: Scaled.apply(x + 1, factor) + 1, backend="aot_eager", fullgraph=True)
    for factor in (Factor(2.0), Factor(3.0)):
        x = torch.ones(3, requires_grad=True)
        out = compiled(x, factor)
        out.sum().backward()
        assert out.tolist() == [2 * factor.value + 1] * 3
        assert x.grad is not None
        assert x.grad.tolist() == [factor.value] * 3
        assert len(factor.calls) == 2, "torch calls the operator at another time than when the code runs"
    assert counters["stats"]["unique_graphs"] == 1, "torch compiles once for each object"
