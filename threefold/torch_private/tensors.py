"""Private parts of torch for tensors and modules of one device."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree

assert_async = torch._assert_async
"""Raise RuntimeError if a scalar is false: at once on a CPU, as a device-side assertion on a GPU. Why: labels and token
ids are checked without making the host wait for the GPU. A public name would replace it."""

foreach_copy_ = torch._foreach_copy_
"""Copy each tensor of the second list to its place in the first, in few kernels. Why: one launch instead of one for
each parameter. Documented `torch.foreach_*` functions would replace this and the next two."""

foreach_mul_ = torch._foreach_mul_
"""Multiply each tensor by a factor, in few kernels."""


def foreach_norm(tensors: Sequence[Tensor], order: float = 2, dtype: torch.dtype | None = None) -> list[Tensor]:
    """Return the norm of each tensor, in few kernels; no tensor may be empty if `order` is infinite.

    The sums are in `dtype`, by default that of the elements. Why, and what would replace it: as for `foreach_copy_`.
    """
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


_VECTOR = 32
"""Elements of a processor's longest vector, or several of them."""


def fused_adam_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    means: Sequence[Tensor],
    squares: Sequence[Tensor],
    steps: Sequence[Tensor],
    decoupled: bool,
    *,
    lr: float,
    betas: tuple[float, float],
    weight_decay: float,
    eps: float,
) -> None:
    """Update weights by Adam, in place, in few kernels; an element's bits do not depend on the shape of its tensor.

    On a CPU, torch's kernel computes the elements after a tensor's last whole vector with other instructions, to other
    bits. These ends are copied into separate vectors. The tensors are contiguous, of one device and dtype; `steps` are
    fp32 scalars that include this update. If `decoupled`, weight decay shrinks the weight directly, as in AdamW.

    Why: `torch.optim.adam.adam` increments each step in its own operation, and sorts the tensors by device and dtype
    each time, which takes a hundredth of a small model's step. A documented function of the fused kernel would replace
    it.
    """
    update: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
    columns, counts = [list(weights), list(gradients), list(means), list(squares)], list(steps)
    cut = [at for at, each in enumerate(weights) if each.is_cpu and each.numel() % _VECTOR]
    ends: list[Tensor] = []
    copies: list[Tensor] = []
    if cut:
        counts.append(steps[cut[0]])
        for column in columns:
            rows = column[0].new_zeros(len(cut), _VECTOR)
            for row, at in zip(rows, cut, strict=True):
                flat = column[at].detach().view(-1)
                whole = len(flat) // _VECTOR * _VECTOR
                column[at] = flat[:whole]
                ends.append(flat[whole:])
                copies.append(row[: len(flat) - whole])
            column.append(rows)
        foreach_copy_(copies, ends)
    options = {"lr": lr, "beta1": betas[0], "beta2": betas[1], "weight_decay": weight_decay, "eps": eps}
    update(*columns, [], counts, **options, amsgrad=False, maximize=False)
    if cut:
        foreach_copy_(ends, copies)


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute `F.linear` through oneDNN, which takes a transposed view of `weight` as it is, but copies one of `x`.

    Why: `F.linear` copies both, which takes as long as a small product. `F.linear` without copies would replace it.
    """
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return out


def storage_key(held: Tensor | torch.UntypedStorage) -> int:
    """Return a number that is equal for tensors that share memory, and for it, as long as their storage exists.

    Why: fake and meta tensors have no address (`data_ptr` is 0). Hashable storages would replace it.
    """
    return _number(held.untyped_storage() if isinstance(held, Tensor) else held)


def _number(storage: torch.UntypedStorage) -> int:  # annotated, so that the probe finds the private part
    key: int = storage._cdata
    return key


def has_gradient_hooks(tensor: Tensor) -> bool:
    """Return whether `register_hook` or `register_post_accumulate_grad_hook` was called on a tensor.

    Why: such a hook would see only one shard of a sharded parameter. A public accessor would replace it.
    """
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def has_module_hooks(module: nn.Module) -> bool:
    """Return whether forward or backward hooks, or pre-hooks, were registered on a module.

    Why, and what would replace it: as for `has_gradient_hooks`.
    """
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks)


def map_tensors(function: Callable[[Tensor], Any], values: Any) -> Any:
    """Return values in which `function` has replaced each tensor, in tuples, lists and mappings too.

    Why: `torch.utils._pytree` is what torch's own dispatch uses. A public one would replace it.
    """
    return _pytree.tree_map_only(Tensor, function, values)


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in tuples, lists and mappings, in order. Why, and what would replace it: as `map_tensors`."""
    return [each for each in _pytree.tree_leaves(values) if isinstance(each, Tensor)]


def child_names(module: nn.Module) -> Iterable[str]:
    """Return the names of a module's children, including all names of a child that has several.

    Why: `named_children` omits further names of a module. A `remove_duplicate` argument would replace it.
    """
    return list(module._modules)


def version_of(tensor: Tensor) -> int:
    """Return a number that changes with each in-place operation on a tensor.

    Why: to detect that a forward pass has written to a buffer, whatever the values. A public name would replace it.
    """
    return int(tensor._version)
