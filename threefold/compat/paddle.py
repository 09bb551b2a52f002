"""Paddle's calls for users of Fleet: `paddle.distributed.split`, and `paddle.io.DistributedBatchSampler`."""

import gc
from contextvars import ContextVar, Token
from typing import Any, NamedTuple, Self
from weakref import ref

import torch
from torch import Tensor, nn

from threefold.comm.axis import Axis
from threefold.comm.layout import shard_bounds
from threefold.compat.batch_sampler import DistributedBatchSampler
from threefold.errors import UserError
from threefold.parallel.split_layer import Initializer, check_axis, keep_shard_
from threefold.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding

__all__ = ["DistributedBatchSampler", "Splitter", "split"]

_OPERATIONS = ("linear", "embedding")
_BLOCK: ContextVar["Splitter | None"] = ContextVar("threefold.compat.paddle.split", default=None)
"""Splitter of the innermost `with` block that runs, whose weights `split` uses."""


class _Call(NamedTuple):
    """Arguments that decide which layer a call needs; equal at each call of one name."""

    size: tuple[int, int]
    operation: str
    axis: int
    gather_out: bool
    has_bias: bool
    input_is_parallel: bool


class Splitter(nn.Module):
    """Module that holds the weights of `split` calls, for the ranks of one axis.

    Paddle keeps the weights in its global program. Here this module holds them, so it is the module to pass to an
    optimizer. The weights of a name are made at its first call, in torch's default dtype: run the model once, and make
    the optimizer after that. If anything has taken this module's parameters before, which an optimizer keeps, the call
    is an error. To notice that, there is a parameter without elements, `witness`.

        split = Splitter(mesh.tp)
        x = split(ids, (50000, 512), operation="embedding", num_partitions=mesh.tp.size, name="tokens")
        x = split(x, (512, 2048), operation="linear", axis=1, num_partitions=2, gather_out=False, name="up")
        x = split(x, (2048, 512), operation="linear", axis=0, num_partitions=2, name="down")

    In a block `with splitter:`, the function `split` of this module uses its weights, and calls need no name.

    Args:
        over: mesh axis that weights are split over.
        seed: seed of the initial weights, combined with each call's name.

    Raises:
        UserError: `over` is not an axis of a mesh.

    Example:
        >>> from threefold.compat.paddle import Splitter, split
        >>> weights = Splitter(mesh.tp)
        >>> with weights:
        ...     x = split(x, (512, 2048), "linear", axis=1, num_partitions=mesh.tp.size, gather_out=False)
    """

    def __init__(self, over: Axis, seed: int = 0) -> None:
        super().__init__()
        check_axis(over, "over")
        self.over, self.seed = over, seed
        self.layers = nn.ModuleDict()
        self.witness = nn.Parameter(torch.empty(0))
        self.register_state_dict_post_hook(_without_witness)
        self.register_load_state_dict_post_hook(_missing_no_witness)
        self._calls: dict[str, _Call] = {}
        self._blocks: list[Token[Splitter | None]] = []
        self._unnamed = 0

    def __enter__(self) -> Self:
        self._blocks.append(_BLOCK.set(self))
        self._unnamed = 0
        return self

    def __exit__(self, *exc: object) -> None:
        _BLOCK.reset(self._blocks.pop())

    def next_name(self) -> str:
        """Return a name for a call without one: its position in the block, which a model repeats in each step."""
        self._unnamed += 1
        return f"split_{self._unnamed - 1}"

    def forward(
        self,
        x: Tensor,
        size: tuple[int, int],
        operation: str,
        axis: int = 0,
        num_partitions: int = 1,
        gather_out: bool = True,
        weight_attr: Tensor | None = None,
        bias_attr: bool | Tensor | None = None,
        name: str | None = None,
        *,
        weight_init: Initializer | None = None,
        bias_init: Initializer | None = None,
    ) -> Tensor:
        """Run one split operation, with this result:

        | operation | axis | gather_out | result |
        | --- | --- | --- | --- |
        | embedding | 0 | either | the look-up, whole on every rank |
        | linear | 1 | True | the output, whole on every rank |
        | linear | 1 | False | this rank's features of the output |
        | linear | 0 | True | the output, whole on every rank |
        | linear | 0 | False | this rank's part of a sum over the ranks, which lacks the bias |

        Args:
            x: int64 [...] for an embedding; [..., in] for a linear layer, or with axis 0 this rank's part of it.
            size: (rows, columns) of an embedding's table, (in, out) of a linear layer.
            operation: `embedding` or `linear`.
            axis: dim of `size` which is split (Paddle's name; not an axis of the mesh).
            num_partitions: number of ranks that share the weight, the size of the mesh's axis.
            gather_out: see the table.
            weight_attr: initial values of the whole weight, of shape `size`; otherwise N(0, 0.02²), keyed by the name.
            bias_attr: initial values [out] of a linear layer's bias; False for no bias; otherwise zero.
            name: name of the weights, the same at each call that uses them.
            weight_init, bias_init: functions, such as `nn.init.xavier_normal_`, that draw the whole weight, [out, in]
                for a linear layer, and its bias, instead of given values.

        Raises:
            UserError: the operation is unknown, its sizes or the input do not fit it, or the name is missing or belongs
                to another operation.
        """
        self._check(x, size, operation, axis, num_partitions, name)
        assert name is not None  # checked
        _check_values("weight_attr", weight_attr, tuple(size), "weight_init")
        _check_values("bias_attr", None if isinstance(bias_attr, bool) else bias_attr, (size[1],), "bias_init")
        partial = operation == "linear" and axis == 0 and not gather_out
        bias = operation == "linear" and bias_attr is not False and not partial
        split_input = operation == "linear" and axis == 0 and x.shape[-1] != size[0]
        call = _Call((size[0], size[1]), operation, axis, gather_out, bias, split_input)
        if name not in self.layers:
            self._require_unseen(name)
            with x.device:
                layer = self._make(call, name, weight_init, bias_init)
            if weight_attr is not None:  # in Paddle's order, [in, out]
                keep_shard_(layer.get_parameter("weight"), weight_attr if operation == "embedding" else weight_attr.T)
            if isinstance(bias_attr, Tensor) and bias:
                keep_shard_(layer.get_parameter("bias"), bias_attr)
            self.layers[name] = layer
            self._calls[name] = call
        elif self._calls[name] != call:
            raise UserError(
                f"{name!r} is the name of another operation: {self._calls[name]}, now {call}; give this one another "
                "name."
            )
        layer = self.layers[name]
        out: Tensor = layer.partial_sum(x) if partial else layer(x)  # type: ignore[operator]
        return out

    def _require_unseen(self, name: str) -> None:
        """Raise a `UserError` if something keeps the parameters that there were before those of `name` are made."""
        seen = ref(self.witness)
        self.witness = nn.Parameter(torch.empty(0))
        if seen() is not None:
            gc.collect()  # an optimizer that is no longer used may be in a cycle
        if seen() is not None:
            raise UserError(
                f"The weights of {name!r} are made at the first call, now, but something has taken the splitter's "
                "parameters before, such as an optimizer, which would not train them; run the model once, and make the "
                "optimizer after that."
            )

    def _check(
        self, x: Any, size: tuple[int, int], operation: str, axis: int, num_partitions: int, name: str | None
    ) -> None:
        if operation not in _OPERATIONS:
            raise UserError(f"operation is {operation!r} but must be one of {' and '.join(_OPERATIONS)}; use linear.")
        if not isinstance(size, tuple | list) or len(size) != 2:
            raise UserError(f"size is {size} but a weight has two dims; give (rows, columns).")
        allowed = (0,) if operation == "embedding" else (0, 1)
        if axis not in allowed:
            rule = (
                "an embedding is split by its rows" if operation == "embedding" else "a linear layer has dims 0 and 1"
            )
            raise UserError(f"axis is {axis} but {rule}; use {min(allowed, key=lambda dim: abs(dim - axis))}.")
        if num_partitions != self.over.size:
            raise UserError(
                f"num_partitions is {num_partitions} but {self.over.name} has {self.over.size} ranks; "
                f"use {self.over.size}."
            )
        if not name:
            raise UserError("name is missing, by which the weights are found again at the next call; give one.")
        if not isinstance(x, Tensor):
            raise UserError(f"x is a {type(x).__name__} but must be a tensor; give one.")
        if operation != "linear":
            if x.is_floating_point():
                raise UserError(f"x is a tensor of {x.dtype} but an embedding looks up whole numbers; use x.long().")
            return
        start, end = shard_bounds(size[0], self.over.size, self.over.index)
        features = x.shape[-1] if x.dim() else 0
        if features != size[0] and (axis == 1 or features != end - start):
            part = "" if axis == 1 else f", or this rank's {end - start} of them"
            raise UserError(
                f"x has {features} features but size is {tuple(size)}, which takes {size[0]}{part}; give those."
            )

    def _make(
        self, call: _Call, name: str, weight_init: Initializer | None, bias_init: Initializer | None
    ) -> nn.Module:
        sizes, keyed = call.size, {"name": name, "seed": self.seed, "weight_init": weight_init}
        if call.operation == "embedding":
            return VocabParallelEmbedding(*sizes, self.over, **keyed)  # type: ignore[arg-type]
        linear: dict[str, Any] = {**keyed, "bias_init": bias_init, "bias": call.has_bias}
        if call.axis == 0:
            return RowParallelLinear(*sizes, self.over, **linear, input_is_parallel=call.input_is_parallel)
        return ColumnParallelLinear(*sizes, self.over, **linear, gather_output=call.gather_out)


def _without_witness(splitter: nn.Module, state: Any, prefix: str, _metadata: Any) -> None:
    state.pop(f"{prefix}witness", None)


def _missing_no_witness(splitter: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if key.rpartition(".")[2] != "witness"]


def _check_values(name: str, given: Any, shape: tuple[int, ...], function: str) -> None:
    if given is not None and (not isinstance(given, Tensor) or tuple(given.shape) != shape):
        kind = f"of shape {tuple(given.shape)}" if isinstance(given, Tensor) else f"of the type {type(given).__name__}"
        raise UserError(
            f"{name} is {kind} but must be a tensor of shape {shape}, the values of all ranks; pass a function that "
            f"draws them as {function}."
        )


def split(
    x: Tensor,
    size: tuple[int, int],
    operation: str,
    axis: int = 0,
    num_partitions: int = 1,
    gather_out: bool = True,
    weight_attr: Tensor | None = None,
    bias_attr: bool | Tensor | None = None,
    name: str | None = None,
    *,
    weight_init: Initializer | None = None,
    bias_init: Initializer | None = None,
) -> Tensor:
    """Run one linear layer or embedding whose weight is split over ranks, like `paddle.distributed.split`.

    The weights belong to the `Splitter` of the enclosing `with` block, a module that the model keeps and whose
    parameters go to the optimizer. They are made at the first call. Later calls find them by name, or without a name by
    the position among the block's calls.

    Args:
        x, size, operation, axis, num_partitions, gather_out, weight_attr, bias_attr: see `Splitter.forward`.
        name: name of the weights; None for the position of the call.
        weight_init, bias_init: see `Splitter.forward`.

    Returns:
        the result in the table of `Splitter.forward`.

    Raises:
        UserError: there is no block, or an error of `Splitter.forward`.

    Example:
        >>> from threefold.compat.paddle import Splitter, split
        >>> weights = Splitter(mesh.tp)
        >>> with weights:
        ...     x = split(x, (512, 2048), "linear", axis=1, num_partitions=2, gather_out=False)
        ...     y = split(x, (2048, 512), "linear", axis=0, num_partitions=2)
    """
    splitter = _BLOCK.get()
    if splitter is None:
        raise UserError(
            "split is called outside of a block that has its weights; make `weights = Splitter(mesh.tp)` once, and "
            "call it in `with weights:`."
        )
    called = splitter.next_name() if name is None else name
    arguments = (x, size, operation, axis, num_partitions, gather_out, weight_attr, bias_attr, called)
    out: Tensor = splitter(*arguments, weight_init=weight_init, bias_init=bias_init)
    return out
