"""Private parts of torch for how its operations run: the compiler, operators, threads, the profiler."""

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from torch import Tensor
from torch._library.opaque_object import register_opaque_type
from torch._opaque_base import OpaqueBase
from torch.overrides import _len_torch_function_stack, _pop_mode_temporarily

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Signals that end a run after its step (`threefold.launch.process`)."""


def keep_signals_from_compilers() -> None:
    """Shield the programs that `torch.compile` starts from signals that end a run, until `compiler.reset`.

    A thread blocks these signals while it compiles, and the threads and processes that it starts inherit this. A signal
    that arrives meanwhile is handled by another thread of the process, or afterwards.

    Why: a signal that ends a run may be sent to all its processes, and a C++ compiler that it kills would fail the step
    to be finished. Torch calls callbacks at the beginning and end of a compilation, but their module is private. A
    setting that starts compilers in their own session would replace this.
    """
    from torch._dynamo.callback import on_compile_end, on_compile_start  # imports the compiler, which few runs need

    before: list[set[Any]] = []

    def begin(_: Any) -> None:
        before.append(signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING))

    def end(_: Any) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, before.pop())

    on_compile_start(begin)
    on_compile_end(end)


_F = TypeVar("_F", bound=Callable[..., Any])
_LIBRARY: Final = torch.library.Library("threefold", "FRAGMENT")


class Handle(OpaqueBase):
    """Opaque object that compiled code passes to operators, with the object `value`.

    Why: code that is compiled once for all layers must take the objects of each layer as inputs, and operators take no
    other Python objects. A public name would replace it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


register_opaque_type(Handle, typ="reference")


def operator(name: str, result: Callable[..., Any]) -> Callable[[_F], _F]:
    """Register a function as the operator `torch.ops.threefold.<name>`, opaque to compiled code and dry runs.

    `result` is a function of the same arguments that returns uncomputed tensors like the operator's results. The
    function must not change its arguments, or return results that share memory with them. It is not differentiable: an
    `autograd.Function` calls it in both passes.

    Operators of `torch.library.custom_op` would take three times as long to call. Everything here is public except
    `Handle` as the type of an argument.
    """

    def make(function: _F) -> _F:
        _LIBRARY.define(name + torch.library.infer_schema(function, mutates_args=()))
        _LIBRARY.impl(name, function, "CompositeExplicitAutograd")
        torch.library.register_fake(f"threefold::{name}", result, lib=_LIBRARY)
        made: _F = getattr(torch.ops.threefold, name).default
        return made

    return make


def cpu_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Compute torch's fused CPU attention [B, heads, Q, d], and each query's log-sum-exp [B, heads, Q], fp32 at least.

    Args:
        k, v: [B, key-value heads, K, d]; each key-value head serves a group of neighboring heads of `q`.
        bias: [Q, K], added to the scores, in the dtype of `q` or fp32.
        causal: whether a query attends only to positions up to its own; K must then be Q.
        scale: factor of the scores; None for d^-0.5.

    Why: `F.scaled_dot_product_attention` keeps the log-sum-exp to its own backward pass, so that results for parts of a
    sequence could not be written into one tensor that is kept once. An argument like `return_aux` of
    `torch.nn.attention.varlen` would replace it.
    """
    mask = None if bias is None else bias[None, None]
    found: tuple[Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, causal, attn_mask=mask, scale=scale
    )
    return found


def cpu_attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    sums: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v` of `cpu_attention`, whose results are `out` and `sums`.

    Why, and what would replace it: as for `cpu_attention`.
    """
    mask: Any = None if bias is None else bias[None, None]
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, q, k, v, out, sums, 0.0, causal, attn_mask=mask, scale=scale
    )
    return found


def outside_function_mode() -> AbstractContextManager[Any]:
    """Leave the `TorchFunctionMode` that was entered last, if any, in a block.

    Why: as for `UninterceptedFunction`; code that only looks at a model must compute with torch's own functions.
    """
    return _pop_mode_temporarily() if _len_torch_function_stack() else nullcontext()


class UninterceptedFunction(torch.autograd.Function):
    """Autograd function whose forward pass calls torch's own functions, even where a `TorchFunctionMode` is entered.

    Backward passes run outside the mode. Of several modes, the one entered last is left.

    Why: an exact run replaces functions of torch (`exact.functions`), even where its own parts call them, and each
    call in a mode costs microseconds. A public way to leave a mode would replace this.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Compute the function, like `torch.autograd.Function.apply`."""
        with outside_function_mode():
            return super().apply(*args)


def backward_pass() -> int:
    """Return the number of the backward pass that autograd is running in this thread, or -1.

    Why: a hook is called once per tensor, and must tell the first call of a pass from the others, also after a pass
    that an error has ended. A public `torch.autograd` function would replace it.
    """
    return int(torch._C._current_graph_task_id())


def at_end_of_backward_pass(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass has accumulated all gradients, before it returns.

    Why: `.grad` of a leaf is complete only then, and no public hook is called after the last one. FSDP does the same.
    A public `torch.autograd` function would replace it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def softmax_gradient(grad: Tensor, weights: Tensor) -> Tensor:
    """Return weights · (grad − Σ weights · grad): the gradient of the input of `softmax(-1)` with output `weights`.

    Why: it is one pass over both, where public operations take two and need the sum first; autograd uses it, but not
    for recomputed weights. A public name would replace it.
    """
    found: Tensor = torch.ops.aten._softmax_backward_data(grad, weights, -1, weights.dtype)
    return found


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


def end_openmp_threads() -> bool:
    """End the threads that ran parallel operations of this thread; return False if torch's OpenMP library cannot.

    Why: a forked process has none of these threads and would wait for them in its first parallel operation. Torch's
    OpenMP library is a file in its package that no function names; `omp_pause_resource_all` (OpenMP 5.0, section
    3.2.44) is the library's public function. A function of torch that prepares for a fork would replace this.
    """
    for library in sorted((Path(torch.__file__).parent / "lib").glob("libgomp*")):
        pause = getattr(ctypes.CDLL(str(library)), "omp_pause_resource_all", None)
        if pause is not None:
            return int(pause(2)) == 0  # `omp_pause_hard`
    return False


def quieten_kineto() -> None:
    """Keep the profiler from printing when it starts and stops.

    Why: Kineto, which is part of torch, then writes a line to standard error, at a level above that of errors. It has
    no function to change this; it reads this variable when first used. A log level in `torch.profiler` would replace
    it.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
