"""The tensor of a weight that ranks share, as torch's own functions take it: optimizers, clipping, loss scaling, hooks.

The parameters of layers that stand alone, their gradients and their optimizer state are of this class. It is a
`DTensor`, with the shape of the whole weight. What torch computes element by element runs on this rank's shard, also in
lists that have ordinary tensors too, where `DTensor` itself raises; an ordinary tensor of the whole shape stands for
the whole. Random numbers are those of the whole weight, and results that no rank cuts are ordinary tensors.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from threefold.errors import UserError
from threefold.torch_private.distributed import local_box, shard_of, split_like
from threefold.torch_private.tensors import map_tensors, tensors_in

_ELEMENTWISE: Final = frozenset(
    {"alias", "clone", "copy_", "detach", "detach_", "empty_like", "fill_", "full_like", "lift_fresh", "ones_like"}
    | {"rand_like", "zero_", "zeros_like", "_to_copy"}
)
"""Operators of elements that torch does not mark as such."""
_UNEVEN: Final = frozenset({"var", "std", "var_mean", "std_mean", "median", "sort", "topk", "cumsum", "prod"})
"""Operators that `DTensor` may compute wrongly of shards of different lengths."""
_VIEWS: Final = frozenset({"diagonal", "expand", "narrow", "select", "slice", "split", "split_with_sizes", "unbind"})
"""Operators that give views, of which `DTensor` gives a copy where they cross the cut: a change of it would be lost."""
_NOT_COMPUTED: Final = "{0} is not computed of a weight that ranks share; use {0} of its full_tensor()."


class SplitTensor(DTensor):
    """`DTensor` of which torch's functions compute what they would of the whole tensor; see above."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.name().rpartition("::")[2].partition(".")[0], kwargs or {}
        if name.startswith(("_foreach_", "_fused_", "_amp_foreach_")):
            return _in_lists(func, name, args, kwargs)
        tensors = tensors_in((args, kwargs))
        first = next(each for each in tensors if isinstance(each, DTensor))
        changed = args[0] if name.endswith("_") and not name.startswith("__") else None
        shards = None
        if torch.Tag.pointwise in func.tags or name in _ELEMENTWISE or _sets_where(name, args):
            shards = [_shard(each, first) for each in tensors]
        if torch.Tag.nondeterministic_seeded in func.tags or (not shards and kwargs.get("out") is first):
            out = _filled(func, name, first, args, kwargs)
        elif (
            shards and all(each is not None for each in shards) and (changed is None or changed is tensors[0] is first)
        ):
            of = dict(zip(map(id, tensors), shards, strict=True))
            local, options = map_tensors(lambda each: of[id(each)], (args, kwargs))
            out = split_like(cls, func(*local, **options), first)
        elif shards and changed is not None and not isinstance(changed, DTensor):  # which needs the whole of the others
            local, options = map_tensors(_whole, (args, kwargs))
            out = func(*local, **options)
        elif not all(isinstance(each, DTensor) for each in tensors):
            raise _mixed(name, first)
        elif name == "linalg_vector_norm" and (len(args) < 3 or not args[2] or len(args[2]) == first.ndim):
            (norm,) = _norms([first], args[1] if len(args) > 1 else 2.0, kwargs.get("dtype"))
            out = norm.view([1] * first.ndim) if len(args) > 3 and args[3] else norm
        elif name in _UNEVEN:
            raise UserError(_NOT_COMPUTED.format(name))
        elif name == "mean":  # `DTensor` would take the mean over the ranks, however many elements they have
            out = torch.sum(*args, **kwargs)
            out = out * (out.numel() / first.numel())
        else:
            try:
                out = super().__torch_dispatch__(func, types, args, kwargs)
            except (RuntimeError, NotImplementedError) as error:
                raise UserError(_NOT_COMPUTED.format(name)) from error
            if name in _VIEWS and not all(map(_is_cut, tensors_in(out))):
                raise UserError(_NOT_COMPUTED.format(name))
        return map_tensors(_settled, out) if changed is None else changed

    def to_local(self, *, grad_placements: Any = None) -> Tensor:
        """Return this rank's shard, whose gradient is that of the tensor."""
        if grad_placements is not None:
            return super().to_local(grad_placements=grad_placements)
        shard: Tensor = _Shard.apply(self)
        return shard

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """Return the whole tensor on every rank (all-gather); each rank keeps its part of the gradient of that."""
        whole: Tensor = _Whole.apply(self)
        return whole

    @property
    def data(self) -> Tensor:
        """The tensor without its history, in the same memory; setting it copies values of the same shape and dtype."""
        return self.detach()

    @data.setter
    def data(self, value: Tensor) -> None:
        if value.shape != self.shape or value.dtype != self.dtype:
            raise UserError(
                f"data is set to a tensor of {' × '.join(map(str, value.shape))} in {value.dtype} but the weight has "
                f"{' × '.join(map(str, self.shape))} in {self.dtype}; give that, or use the module's .to(dtype)."
            )
        with torch.no_grad():
            self.detach().copy_(value)

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitTensor":
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user support the deepcopy protocol at the moment"
            )
        if id(self) in memo:
            return cast(SplitTensor, memo[id(self)])
        copy = restored(split_like(DTensor, shard_of(self).clone(), self), self.requires_grad, _marks(self, memo))
        memo[id(self)] = copy
        if self.grad is not None:
            copy.grad = deepcopy(self.grad, memo)
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return restored, (split_like(DTensor, shard_of(self), self), self.requires_grad, _marks(self, {}))


def restored(tensor: DTensor, requires_grad: bool, marks: Mapping[str, Any]) -> SplitTensor:
    """Return what was copied or saved, with the attributes that it had."""
    made = split_like(SplitTensor, shard_of(tensor), tensor)
    vars(made).update(marks)
    made.requires_grad_(requires_grad)
    return made


torch.serialization.add_safe_globals([restored])  # as torch does for `DTensor`


def _marks(tensor: Tensor, memo: dict[int, Any]) -> dict[str, Any]:
    """Copy the attributes of a tensor, but the leaf that something else trains in its place."""
    return {name: deepcopy(value, memo) for name, value in vars(tensor).items() if name != "local_leaf"}


class _Shard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: SplitTensor) -> Tensor:
        ctx.like = split_like(DTensor, shard_of(tensor), tensor)
        return shard_of(tensor).view_as(shard_of(tensor))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        whole: Tensor = _OfShard.apply(gradient, ctx.like)
        return whole


class _OfShard(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, shard: Tensor, like: DTensor) -> Tensor:
        return split_like(SplitTensor, shard.contiguous(), like)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[Tensor, None]:
        return gradient.to_local(), None


class _Whole(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: SplitTensor) -> Tensor:
        ctx.like = split_like(DTensor, shard_of(tensor), tensor)
        return ctx.like.full_tensor().clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        whole: Tensor = _OfShard.apply(_part(gradient, ctx.like), ctx.like)
        return whole


def _part(whole: Tensor, like: DTensor) -> Tensor:
    """Return the elements of an ordinary tensor that this rank holds of `like`, as a view."""
    starts, sizes, _, _ = local_box(like)
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        whole = whole.narrow(dim, min(start, whole.shape[dim]), size)
    return whole


def _shard(tensor: Tensor, like: DTensor) -> Tensor | None:
    """Return what this rank holds of a tensor, cut as `like` is; None if the elements do not correspond."""
    if isinstance(tensor, DTensor):
        alike = tensor.shape == like.shape and tensor.placements == like.placements
        return shard_of(tensor) if alike and tensor.device_mesh == like.device_mesh else None
    if not tensor.dim():
        return tensor
    fits = tensor.dim() <= like.dim() and all(
        size in (1, of) for size, of in zip(reversed(tensor.shape), reversed(like.shape), strict=False)
    )
    return _part(tensor.expand(like.shape), like) if fits else None


def _whole(tensor: Tensor) -> Tensor:
    with torch.no_grad():
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sets_where(name: str, args: Sequence[Any]) -> bool:
    """Return whether an operator sets the elements that a tensor of bools of the same shape has."""
    return name == "index_put_" and len(args[1]) == 1 and args[1][0] is not None and args[1][0].shape == args[0].shape


def _settled(out: Tensor) -> Tensor:
    """Return the result of a function: a tensor of this class, or an ordinary one if no rank cuts it."""
    if not isinstance(out, DTensor) or isinstance(out, SplitTensor):
        return out
    return split_like(SplitTensor, shard_of(out), out) if _is_cut(out) else _whole(out)


def _is_cut(tensor: Tensor) -> bool:
    return isinstance(tensor, DTensor) and any(each.is_shard() for each in tensor.placements)


def _mixed(name: str, like: DTensor) -> UserError:
    return UserError(
        f"{name} of a weight that ranks share and an ordinary tensor is not computed, as the shapes "
        f"({' × '.join(map(str, like.shape))} here) are those of the whole weight; call the layer that has it, or use "
        "its to_local() for this rank's part or full_tensor() for all of it."
    )


def _filled(func: Any, name: str, first: DTensor, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor:
    """Draw the random numbers of the whole tensor, as one process does, or fill it, and keep this rank's part."""
    if len(tensors_in((args, kwargs))) > 1 or not (name.endswith(("_", "_like")) or "out" in kwargs):
        raise _mixed(name, first)
    whole = torch.empty(first.shape, dtype=first.dtype, device=first.device)
    args, kwargs = map_tensors(lambda _: whole, (args, kwargs))
    part = _part(func(*args, **kwargs), first)
    if name.endswith("_like"):
        return split_like(SplitTensor, part.contiguous(), first)
    shard_of(first).copy_(part)
    return first


def _groups(tensor: Tensor) -> tuple[dist.ProcessGroup, ...]:
    """Return the process groups over which a tensor is cut."""
    if not isinstance(tensor, DTensor):
        return ()
    mesh = tensor.device_mesh
    return tuple(
        mesh.get_group(axis)
        for axis, placement in enumerate(tensor.placements)
        if placement.is_shard() and mesh.size(axis) > 1
    )


def _norms(tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None) -> list[Tensor]:
    """Return the norm of each whole tensor, an ordinary scalar that is equal on every rank."""
    order, largest = float(order), float(order) in (torch.inf, -torch.inf)
    found: list[Tensor] = []
    for each in tensors:
        shard = shard_of(each) if isinstance(each, DTensor) else each
        if largest and not shard.numel():  # torch has no largest element of none
            found.append(shard.new_full((), 0.0 if order > 0 else torch.inf, dtype=torch.float64))
            continue
        norm = torch.linalg.vector_norm(shard, order, dtype=torch.promote_types(shard.dtype, torch.float32)).double()
        found.append(norm if largest or not order else norm**order)
    operation = dist.ReduceOp.SUM if not largest else dist.ReduceOp.MAX if order > 0 else dist.ReduceOp.MIN
    for groups in dict.fromkeys(map(_groups, tensors)):
        places = [place for place, each in enumerate(tensors) if _groups(each) == groups]
        joined = torch.stack([found[place] for place in places])
        for group in groups:
            dist.all_reduce(joined, operation, group=group)
        for place, norm in zip(places, joined, strict=True):
            found[place] = norm if largest or not order else norm ** (1 / order)
    return [norm.to(dtype or each.dtype) for norm, each in zip(found, tensors, strict=True)]


def _in_lists(func: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute a function of lists of tensors (`torch._foreach_…`) on shards; some of them may be ordinary tensors."""
    if name == "_foreach_norm":
        return _norms(args[0], args[1] if len(args) > 1 else kwargs.get("ord", 2.0), kwargs.get("dtype"))
    lists = [each for each in (*args, *kwargs.values()) if _is_list(each)]
    columns = [[each[place] for each in lists if place < len(each)] for place in range(len(lists[0]))]
    likes = [next((each for each in column if isinstance(each, DTensor)), None) for column in columns]
    one = next(each for each in likes if each is not None)
    if name == "_foreach_max":
        raise _mixed(name, one)

    def local(value: Any) -> Any:
        if not _is_list(value):
            return value
        shards = [each if like is None else _shard(each, like) for each, like in zip(value, likes, strict=True)]
        if any(each is None for each in shards):
            raise _mixed(name, one)
        return shards

    out = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    if name.startswith("_amp_"):  # a rank may have found infinities in its shards alone
        for group in dict.fromkeys(group for each in likes if each is not None for group in _groups(each)):
            dist.all_reduce(args[1], dist.ReduceOp.MAX, group=group)
    if out is None:
        return None
    return [
        each if like is None else split_like(SplitTensor, each, like) for each, like in zip(out, likes, strict=True)
    ]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(isinstance(each, Tensor) for each in value)
