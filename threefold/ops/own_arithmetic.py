"""Arithmetic of exact runs for code that is not this package's: replaced, known, or named.

A function of torch that a user's model calls is one of three kinds:

- replaced, by one of `ops.exact` or `ops.own_functions`;
- known: the bits of its results and of its gradients depend neither on threads nor on the size and position of the
  elements beside an element. `tests/ops/test_own_arithmetic.py` shows it for arithmetic of elements; views, copies and
  indexing compute nothing. Operands of other shapes are expanded first, as the gradient of a repeated one is a sum;
- any other. It runs as torch has it, and its name is kept for the run's report.

Functions of `torch.autograd` that are not this package's are named too.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.overrides import resolve_name

from threefold.ops import exact, exact_functions, own_functions
from threefold.ops.exact import RowSum
from threefold.ops.exact_functions import ExactArithmetic


class UnknownCalls:
    """Names of functions that a model's passes call and that are not known to be exact."""

    def __init__(self) -> None:
        self._names: dict[str, bool] = {}
        self._walked: set[int] = set()

    def add(self, name: str) -> None:
        """Note a name."""
        self._names.setdefault(name, True)

    def take_new(self) -> list[str]:
        """Return the names since the last call, sorted."""
        found = sorted(name for name, is_new in self._names.items() if is_new)
        self._names.update(dict.fromkeys(found, False))
        return found

    def walk(self, key: int, outputs: Any) -> None:
        """Note functions of `torch.autograd` in the graph of `outputs`, the first time for each `key`."""
        if key in self._walked or not torch.is_grad_enabled():
            return
        self._walked.add(key)
        for function in _functions([each.grad_fn for each in _tensors(outputs) if each.grad_fn is not None]):
            if not (_is_ours(function.__module__) or function.__name__ in _SHOWN):
                self.add(f"{function.__module__}.{function.__qualname__}")


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)


def _functions(nodes: list[Any]) -> Iterator[type]:
    seen = set(nodes)
    while nodes:
        node = nodes.pop()
        function = getattr(type(node), "_forward_cls", None)
        if function is not None:
            yield function
        fresh = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= fresh
        nodes += fresh


class OwnArithmetic(ExactArithmetic):
    """`ExactArithmetic` that also replaces functions called by a user's code, and records those not known to be exact.

    Args:
        rows: sum of the rows of a sequence, as for `ExactArithmetic`.
        calls: where names are noted.
    """

    def __init__(self, rows: RowSum, calls: UnknownCalls) -> None:
        super().__init__(rows)
        self._calls = calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if _called_by_us():
            return super().__torch_function__(func, types, args, kwargs)
        given = kwargs or {}
        name = getattr(func, "__name__", "")
        if name == "__get__" or not _is_torchs(func):
            return self._noted(func, name != "__get__", args, given)
        in_place = name.endswith("_") and not name.endswith("__")
        if given.get("out") is not None:
            return self._noted(func, True, args, given)
        if not in_place and (replacement := _REPLACED.get(name)) is not None:
            found = replacement(*args, **given)
            if found is not NotImplemented:
                return found
        base = _OPERATORS.get(name, name.rstrip("_") if in_place else name)
        if base in _ELEMENTWISE:
            is_unknown = given.get("alpha", 1) != 1 or any(map(_grads, given.values()))
            return self._noted(func, is_unknown, _broadcast(args), given)
        asked = _CONDITIONS.get(base)
        is_known = base in _KNOWN if asked is None else asked(*args, **given)
        return self._noted(func, not is_known, args, given)

    def _noted(self, func: Callable[..., Any], is_unknown: bool, args: Any, kwargs: Any) -> Any:
        if is_unknown:
            self._calls.add(resolve_name(func) or str(func))
        return func(*args, **kwargs)


_WRAPPERS: Final = (
    *("torch.overrides", "torch.nn.functional", "torch.functional", "torch._tensor", "torch._ops"),
    *("torch.distributed", "torch.autograd.profiler"),
)
"""Modules of torch that call its functions on behalf of their callers."""
_NOT_OURS: Final = (
    "threefold.models.layers",
    "threefold.ops.kernels",
    "threefold.ops.attention",
    "threefold.ops.tiles",
)
"""Modules of this package whose functions are exact only in the families of the package, which replace them."""
_SHOWN: Final = frozenset(("_WideEmbedding",))
"""Functions of these modules that are exact."""


def _is_ours(module: str) -> bool:
    # ZeRO is made of FSDP, which gathers weights around the passes of layers.
    return module.startswith(("threefold.", "torch.distributed.fsdp.")) and not module.startswith(_NOT_OURS)


def _called_by_us() -> bool:
    frame = inspect.currentframe()
    frame = None if frame is None or frame.f_back is None else frame.f_back.f_back  # behind `__torch_function__`
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if _is_ours(name):
            return True
        if not name.startswith(_WRAPPERS):
            return False
        frame = frame.f_back
    return False


_BUILT_IN: Final = tuple({type(Tensor.add), type(torch.add), type(Tensor.__getitem__), type(len)})


def _is_torchs(func: Callable[..., Any]) -> bool:
    module = str(getattr(func, "__module__", ""))  # operators, which any package may register, are in torch._ops
    return isinstance(func, _BUILT_IN) or (module.startswith("torch.") and not module.startswith("torch._ops."))


def _broadcast(args: Sequence[Any]) -> Sequence[Any]:
    """Expand tensors that need a gradient to the shape of the result, as the gradient of repeated ones is a sum."""
    if not any(map(_grads, args)):
        return args
    shape = torch.broadcast_shapes(*(each.shape for each in args if isinstance(each, Tensor)))
    return [own_functions.expand(each, shape) if _grads(each) else each for each in args]


def _grads(x: Any) -> bool:
    return isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled()


Replacement: TypeAlias = Callable[..., Any]
"""Returns a function's result, or NotImplemented to leave these arguments to torch."""


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return exact.linear(x, weight, bias)


def _layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Any:
    flat = x.flatten(-len(shape))
    weight, bias = (None if each is None else each.flatten() for each in (weight, bias))
    return exact.layer_norm(flat, weight, bias, eps, RowSum()).view(x.shape)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Any:
    weight = None if weight is None else weight.flatten()
    return exact.rms_norm(x.flatten(-len(shape)), weight, eps, RowSum()).view(x.shape)


def _softmax_by(compute: Callable[[Tensor, int], Tensor]) -> Replacement:
    def replaced(
        input: Tensor, dim: int | None = None, *args: Any, dtype: torch.dtype | None = None, _stacklevel: int = 3
    ) -> Any:
        if dim is None or args or not input.dim():
            return NotImplemented
        return compute(input if dtype is None else input.to(dtype), dim)

    return replaced


def _sum(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    x = input if dtype is None else input.to(dtype)
    if not x.is_floating_point():
        return torch.sum(x) if dim is None else torch.sum(x, dim, keepdim)
    return own_functions.total(x, _dims(dim), keepdim)


def _mean(input: Tensor, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    x = input if dtype is None else input.to(dtype)
    found = own_functions.total(x, _dims(dim), keepdim)
    return found / (x.numel() // max(1, found.numel()))


def _dims(dim: Any) -> Sequence[int] | None:
    if dim is None or (not isinstance(dim, int) and not len(dim)):
        return None
    return (dim,) if isinstance(dim, int) else tuple(dim)


def _cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    others = weight is not None or size_average is not None or reduce is not None or label_smoothing
    if others or target.is_floating_point():
        return NotImplemented
    return own_functions.cross_entropy(input, target, ignore_index, reduction)


def _nll_loss(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
) -> Any:
    if weight is not None or size_average is not None or reduce is not None:
        return NotImplemented
    return own_functions.nll_loss(input, target, ignore_index, reduction)


def _loss_of(losses: Callable[[Tensor], Tensor]) -> Replacement:
    def replaced(
        input: Tensor,
        target: Tensor,
        size_average: Any = None,
        reduce: Any = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
    ) -> Any:
        if size_average is not None or reduce is not None or weight is not None or input.shape != target.shape:
            return NotImplemented
        return own_functions.reduced(losses(input - target), reduction)

    return replaced


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if dropout_p or _grads(attn_mask):
        return NotImplemented
    return own_functions.attention(query, key, value, attn_mask, is_causal, scale, enable_gqa)


def _expand(x: Tensor, *sizes: Any, implicit: bool = False) -> Any:
    shape = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    lead = len(shape) - x.dim()
    return own_functions.expand(x, [x.shape[at - lead] if size == -1 else size for at, size in enumerate(shape)])


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    return NotImplemented if training and p else input


def _power(x: Any, exponent: Any) -> Any:
    if isinstance(exponent, int | float) and exponent in (1, 2, 3):
        return torch.pow(x, exponent)
    return torch.sqrt(x) if isinstance(exponent, int | float) and exponent == 0.5 else NotImplemented


def _of_elements(compute: Callable[..., Tensor]) -> Replacement:
    return lambda input, *args, **options: compute(input, *args, **options)


_REPLACED: Final[dict[str, Replacement]] = {
    "linear": _linear,
    "matmul": own_functions.matmul,
    "__matmul__": own_functions.matmul,
    "mm": own_functions.matmul,
    "bmm": own_functions.matmul,
    "mv": own_functions.matmul,
    "layer_norm": _layer_norm,
    "rms_norm": _rms_norm,
    "softmax": _softmax_by(own_functions.softmax),
    "log_softmax": _softmax_by(own_functions.log_softmax),
    "sum": _sum,
    "mean": _mean,
    "cross_entropy": _cross_entropy,
    "nll_loss": _nll_loss,
    "mse_loss": _loss_of(torch.square),
    "l1_loss": _loss_of(torch.abs),
    "scaled_dot_product_attention": _attention,
    "expand": _expand,
    "broadcast_to": _expand,
    "expand_as": lambda x, other: own_functions.expand(x, other.shape),
    "gelu": _of_elements(exact_functions.gelu),
    "silu": _of_elements(exact_functions.silu),
    "sigmoid": _of_elements(exact_functions.sigmoid),
    "rsqrt": lambda x: torch.sqrt(x).reciprocal(),
    "pow": _power,
    "__pow__": _power,
    "dropout": _dropout,
    "relu": lambda input, inplace=False: torch.relu_(input) if inplace else torch.relu(input),
}
"""Function by its name in torch → its replacement."""

_OPERATORS: Final = {
    "__add__": "add",
    "__radd__": "add",
    "__sub__": "sub",
    "__rsub__": "sub",
    "rsub": "sub",
    "__mul__": "mul",
    "__rmul__": "mul",
    "__truediv__": "div",
    "__rtruediv__": "div",
    "__rdiv__": "div",
    "true_divide": "div",
    "divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "__neg__": "neg",
    "__abs__": "abs",
    "absolute": "abs",
    "clip": "clamp",
}

ELEMENTWISE: Final = (
    "abs add addcdiv addcmul atan ceil clamp clamp_max clamp_min cos deg2rad div erf erfc exp expm1 floor fmod frac "
    "hardshrink hardsigmoid hardswish hardtanh leaky_relu lerp log log10 log1p log2 logaddexp logsigmoid masked_fill "
    "maximum minimum mul nan_to_num neg reciprocal relu relu6 remainder round sign sin sinc softshrink softsign sqrt "
    "square sub tan tanh tanhshrink trunc where xlogy"
)
"""Elementwise functions whose bits depend neither on the elements beside an element nor on the thread."""

_ELEMENTWISE: Final = frozenset(ELEMENTWISE.split())

_COPIES: Final = (
    "view view_as reshape reshape_as flatten ravel unflatten permute transpose t movedim moveaxis swapaxes swapdims "
    "squeeze unsqueeze narrow select split split_with_sizes tensor_split chunk unbind contiguous clone detach to "
    "float double half bfloat16 long int short bool type type_as cpu cuda cat concat concatenate stack hstack "
    "vstack dstack flip roll tril triu diagonal embedding one_hot"
)
_NEW: Final = (
    "zeros ones full empty arange tensor as_tensor scalar_tensor eye zeros_like ones_like full_like empty_like "
    "new_zeros new_ones new_full new_empty new_tensor fill zero copy"
)
_CHOICES: Final = (
    "eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isnan isinf isfinite logical_and logical_or "
    "logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor __and__ __or__ __xor__ __invert__ "
    "__rand__ __ror__ any all equal amax amin argmax argmin sort argsort floor_divide __floordiv__ nonzero bincount "
    "gather searchsorted bucketize isin unique count_nonzero triu_indices tril_indices"
)
_FACTS: Final = (
    "size dim ndimension numel nelement stride element_size storage_offset is_contiguous is_floating_point "
    "is_complex is_same_size get_device data_ptr requires_grad item tolist __len__ __bool__ __int__ __float__ "
    "__index__ __iter__ __contains__ __repr__ __str__ __format__ __hash__ broadcast_tensors broadcast_shapes "
    "is_grad_enabled is_inference _set_grad_enabled is_autocast_enabled finfo iinfo result_type promote_types"
)
_KNOWN: Final = frozenset(" ".join((_COPIES, _NEW, _CHOICES, _FACTS)).split())


def _repeats(index: Any) -> bool:
    """Return whether an index may name a position several times."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, list) or (isinstance(each, Tensor) and each.dtype != torch.bool) for each in parts)


def _gets(x: Any, index: Any) -> bool:
    return not (_repeats(index) and _grads(x))


def _sets(x: Any, index: Any, value: Any) -> bool:
    return not (_repeats(index) or _grads(value))


def _extreme(x: Tensor, *args: Any, **options: Any) -> bool:
    return not _grads(x) or bool(args) or "dim" in options


def _integers(x: Tensor, *_: Any, **__: Any) -> bool:
    return not x.is_floating_point()


def _without_gradient(x: Tensor, *_: Any, **__: Any) -> bool:
    return not _grads(x)


def _pads(x: Tensor, pad: Any, mode: str = "constant", value: Any = None) -> bool:
    return mode == "constant"


_CONDITIONS: Final[dict[str, Callable[..., bool]]] = {
    "__getitem__": _gets,
    "__setitem__": _sets,
    "max": _extreme,
    "min": _extreme,
    "cumsum": _integers,
    "prod": _integers,
    "pad": _pads,
    **dict.fromkeys(("index_select", "take_along_dim", "topk", "repeat", "repeat_interleave"), _without_gradient),
}
"""Function by its name → whether it is known for these arguments."""
