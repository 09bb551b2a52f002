"""Functions of torch in custom code of an exact run: replaced, known, or named.

A function of torch that a custom model calls is replaced (`exact.custom_functions`); or known: the bits of its results
and gradients depend neither on threads nor on the size and position of the elements beside an element, which
`tests/exact/test_custom.py` shows for arithmetic of elements, while views, copies and indexing compute nothing; or runs
as torch has it, and its name is kept for the run's report, as are those of other functions of `torch.autograd`.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import resolve_name

from threefold.exact import custom_functions
from threefold.exact.custom_functions import grads
from threefold.exact.functions import ExactFunctions
from threefold.exact.layers import RowSum
from threefold.torch_private.tensors import tensors_in


class UnknownCalls:
    """Names of functions that a model's passes call and that are not known to be exact."""

    def __init__(self) -> None:
        self._names: dict[str, bool] = {}
        self._walked: set[int] = set()

    def add(self, name: str) -> None:
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
        for function in _functions([each.grad_fn for each in tensors_in(outputs) if each.grad_fn is not None]):
            if not (_is_ours(function.__module__) or function.__name__ in _SHOWN):
                self.add(f"{function.__module__}.{function.__qualname__}")


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


class CustomFunctions(ExactFunctions):
    """`ExactFunctions` that also replaces what a user's code calls; `calls` notes what is not known to be exact."""

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
        if not in_place and (replacement := custom_functions.REPLACED.get(name)) is not None:
            found = replacement(*args, **given)
            if found is not NotImplemented:
                return found
        base = _OPERATORS.get(name, name.rstrip("_") if in_place else name)
        if base in _ELEMENTWISE:
            is_unknown = given.get("alpha", 1) != 1 or any(map(grads, given.values()))
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
    *("threefold.models.layers", "threefold.ops.attention"),
    *("threefold.ops.kernels", "threefold.cpu.tiles"),
)
"""Modules of this package whose functions are exact only in the families of the package, which replace them."""
_SHOWN: Final = frozenset(("_WideEmbedding",))  # functions of these modules that are exact


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


def _is_torchs(func: Callable[..., Any]) -> bool:
    module = str(getattr(func, "__module__", ""))  # operators, which any package may register, are in torch._ops
    built_in = (type(Tensor.add), type(torch.add), type(Tensor.__getitem__), type(len))
    return isinstance(func, built_in) or (module.startswith("torch.") and not module.startswith("torch._ops."))


def _broadcast(args: Sequence[Any]) -> Sequence[Any]:
    """Expand tensors that need a gradient to the shape of the result, as the gradient of repeated ones is a sum."""
    if not any(map(grads, args)):
        return args
    shape = torch.broadcast_shapes(*(each.shape for each in args if isinstance(each, Tensor)))
    return [custom_functions.expand(each, shape) if grads(each) else each for each in args]


_OPERATORS: Final = {
    **dict.fromkeys(("__add__", "__radd__"), "add"),
    **dict.fromkeys(("__sub__", "__rsub__", "rsub", "subtract"), "sub"),
    **dict.fromkeys(("__mul__", "__rmul__", "multiply"), "mul"),
    **dict.fromkeys(("__truediv__", "__rtruediv__", "__rdiv__", "true_divide", "divide"), "div"),
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


def _extreme(x: Tensor, *args: Any, **options: Any) -> bool:
    return not grads(x) or bool(args) or "dim" in options


_CONDITIONS: Final[dict[str, Callable[..., bool]]] = {
    "__getitem__": lambda x, index: not (_repeats(index) and grads(x)),
    "__setitem__": lambda x, index, value: not (_repeats(index) or grads(value)),
    **dict.fromkeys(("max", "min"), _extreme),
    **dict.fromkeys(("cumsum", "prod"), lambda x, *_, **__: not x.is_floating_point()),
    "pad": lambda x, pad, mode="constant", value=None: mode == "constant",
    **dict.fromkeys(
        ("index_select", "take_along_dim", "topk", "repeat", "repeat_interleave"), lambda x, *_, **__: not grads(x)
    ),
}
"""Function by its name → whether it is known for these arguments."""
