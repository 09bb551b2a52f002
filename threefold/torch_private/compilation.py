"""Private parts of torch that concern `torch.compile`."""

import signal
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that end a run after its step (`threefold.launch.process`)."""


def keep_signals_from_compilers() -> None:
    """Have the programs that `torch.compile` starts get none of the signals that end a run, until `compiler.reset`.

    They are blocked in a thread while it compiles, which the threads and processes that it starts inherit. A signal
    that comes meanwhile is taken by another thread of the process, or afterwards.

    Why: a signal that ends a run may be sent to all its processes, and a C++ compiler that it ends would fail the step
    that is to be finished first. Torch tells the begin and the end of a compilation to callbacks of a module whose name
    is private. A setting of torch that gives compilers a session of their own would replace this.
    """
    from torch._dynamo.callback import on_compile_end, on_compile_start  # imports a compiler, which few runs have

    before: list[set[Any]] = []

    def begin(_: Any) -> None:
        before.append(signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING))

    def end(_: Any) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.pop())

    on_compile_start(begin)
    on_compile_end(end)


class CompileCounts:
    """What torch has compiled in this process since the object was made.

    Why: whether layers share one compilation is visible in nothing else; torch's counters are in a module whose name is
    private. A public way to ask how often a function was compiled would replace it.
    """

    def __init__(self) -> None:
        self._before = self._now()

    @property
    def graphs(self) -> int:
        """Graphs, each with its forward and backward pass."""
        return self._now()["graphs"] - self._before["graphs"]

    @property
    def breaks(self) -> int:
        """Places where a function could not be compiled whole."""
        return self._now()["breaks"] - self._before["breaks"]

    @staticmethod
    def _now() -> dict[str, int]:
        from torch._dynamo.utils import counters

        return {"graphs": counters["stats"]["unique_graphs"], "breaks": sum(counters["graph_break"].values())}


_F = TypeVar("_F", bound=Callable[..., Any])
_LIBRARY: Final = torch.library.Library("threefold", "FRAGMENT")


class Handle(OpaqueBase):
    """An object that compiled code passes to operators without looking into it.

    Args:
        value: the object.

    Why: code that is compiled once and called with the objects of each layer has to take them as inputs, and operators
    take no other objects of Python. A public name would replace it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


register_opaque_type(Handle, typ="reference")


def operator(name: str, result: Callable[..., Any]) -> Callable[[_F], _F]:
    """Make a function the operator `torch.ops.threefold.<name>`, which compiled code and dry runs call as a whole.

    Args:
        name: of the operator.
        result: called with the same arguments, gives tensors like the function's results, not computed.

    The function changes no argument, and its results share no memory with them. It is not differentiable: an
    `autograd.Function` calls it in both passes.

    Not `torch.library.custom_op`, whose operators take three times as long to call. All of this is public but
    `Handle` as the type of an argument.
    """

    def make(function: _F) -> _F:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"threefold::{name}", result, lib=_LIBRARY)
        made: _F = getattr(torch.ops.threefold, name).default
        return made

    return make


def cpu_attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> tuple[Tensor, Tensor]:
    """Torch's fused attention of a CPU, with the logarithm of the sum of each query's exponentiated scores.

    Args:
        q: [B, heads, Q, d].
        k, v: [B, key-value heads, K, d]; each key-value head serves a group of neighbouring heads of `q`.
        bias: [Q, K], added to the scores, in the dtype of `q` or fp32.
        causal: whether a query attends to its own place and those before it alone; then K is Q.

    Returns:
        [B, heads, Q, d], and [B, heads, Q] in fp32 at least.

    Why: `F.scaled_dot_product_attention` keeps that logarithm for its own backward pass alone, so that its results of
    parts of a sequence could not be written into one tensor that is kept once. An argument that asks for it, as
    `return_aux` of `torch.nn.attention.varlen`, would replace it.
    """
    mask = None if bias is None else bias[None, None]
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask
    )
    return found


def cpu_attention_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, sums: Tensor, bias: Tensor | None, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `q`, `k` and `v` of `cpu_attention`, whose results are `out` and `sums`.

    Why, and what would replace it: as `cpu_attention`.
    """
    mask: Any = None if bias is None else bias[None, None]
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask
    )
    return found


def softmax_gradient(grad: Tensor, weights: Tensor) -> Tensor:
    """The gradient of what `softmax(-1)` made `weights` of, `grad` being theirs: weights · (grad − Σ weights · grad).

    Why: it is one pass over both, where public operations take two and a sum that has to be known before; autograd
    calls it, but not for weights that are computed again. A public name would replace it.
    """
    found: Tensor = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
    return found
