"""Private parts of torch that exact runs use, each with the reason why, and with what would replace it."""

from typing import Any

import torch
from torch import Tensor
from torch.overrides import _len_torch_function_stack, _pop_mode_temporarily


class UninterceptedFunction(torch.autograd.Function):
    """Autograd function whose forward pass calls torch's own functions, even where a `TorchFunctionMode` is entered.

    Backward passes run outside the mode. Of several modes, the one entered last is left.

    Why: an exact run replaces functions of torch (`exact.functions`), even where its own parts call them, and each
    call in a mode costs microseconds. A public way to leave a mode would replace this.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Compute the function, like `torch.autograd.Function.apply`."""
        if not _len_torch_function_stack():
            return super().apply(*args)
        with _pop_mode_temporarily():
            return super().apply(*args)


def gelu_gradient(grad: Tensor, x: Tensor, approximate: str) -> Tensor:
    """Return the gradient of the input `x` of `F.gelu(x, approximate)`.

    Why: autograd calls it with tensors of the shape that the forward pass had; an exact run pads them to whole vectors
    first. A public name would replace it, as for the two below.
    """
    found: Tensor = torch.ops.aten.gelu_backward(grad, x, approximate=approximate)
    return found


def silu_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the input `x` of `F.silu`. Why, and what would replace it: as for `gelu_gradient`."""
    found: Tensor = torch.ops.aten.silu_backward(grad, x)
    return found


def sigmoid_gradient(grad: Tensor, x: Tensor) -> Tensor:
    """Return the gradient of the input `x` of the sigmoid. Why, and what would replace it: as for `gelu_gradient`."""
    found: Tensor = torch.ops.aten.sigmoid_backward(grad, x.sigmoid())
    return found


def layer_norm_gradient(grad: Tensor, x: Tensor, mean: Tensor, scale: Tensor, weight: Tensor | None) -> Tensor:
    """Return the gradient of the input `x` [..., n] of a layer norm over the last dim, without those of its weights.

    `grad` and `x` are contiguous; `mean` and `scale` are the second and third result of `torch.native_layer_norm`.

    Why: autograd computes all gradients together; those of the weights depend on the number of threads. A public name
    would replace it.
    """
    only_x = [True, False, False]
    found: Tensor = torch.ops.aten.native_layer_norm_backward(
        grad, x, [x.shape[-1]], mean, scale, weight, None, only_x
    )[0]
    return found
