"""Which tensors of a dry run have memory: integers do, so that Python may read them; floating-point numbers do not."""

from typing import Any

import torch
from torch import Tensor

from threefold.torch_private.fake import (
    ALL_GATHER,
    RECEIVE,
    SPLIT,
    TOP_K,
    FakeTensor,
    OperationMode,
    leaves,
    with_memory,
)


class FakeNumbers(OperationMode):
    """Within fake tensors, has operations on integers computed.

    An operation with a fake tensor among its arguments gives fake ones; new floating-point tensors are fake. All else
    is computed: tokens, labels, positions, and how many of each there are. A router's choice, which has no values, is
    taken to be even; and other ranks to have the integers that this one has.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_fake(func, args, kwargs):
            if func is SPLIT:
                args = _coarser(*args)
            return even_choice(func(*args, **kwargs), *args) if func is TOP_K else func(*args, **kwargs)
        with with_memory():
            done = func(*args, **kwargs)
            if func is RECEIVE:  # the others' answer to what torch asks: 1 for yes
                for tensor in args[0]:
                    tensor.fill_(1)
            elif func is ALL_GATHER:
                gathered, own = args[:2]
                gathered.view(-1, own.numel()).copy_(own.flatten())
            return done


_MOST_PARTS = 256


def even_choice(found: tuple[Tensor, Tensor], scores: Tensor, count: int, *_rest: Any) -> tuple[Tensor, Tensor]:
    """The result of `topk` with indices that choose each about equally often, the next ones in turn.

    Args:
        found: values and indices.
        scores: [..., n], of which `count` are chosen.
    """
    values, indices = found
    with with_memory():
        return values, (torch.arange(indices.numel()) % scores.shape[-1]).view(indices.shape)


def _coarser(tensor: Tensor, size: int, dim: int = 0) -> tuple[Tensor, int, int]:
    """Arguments of a split into no more than so many parts: a norm of billions of elements is taken in many thousands
    of pieces, each of which is soon a single number."""
    return tensor, max(size, -(-tensor.shape[dim] // _MOST_PARTS)), dim


def _is_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = [each for each in leaves((args, kwargs)) if isinstance(each, Tensor)]
    if any(isinstance(each, FakeTensor) for each in given):
        return True
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    if given and (device is None or not given[0].is_meta):
        return False
    # A new tensor, perhaps with the shape of one on the meta device.
    if device is not None and torch.device(device).type == "meta":
        return False
    if dtype is not None:
        return bool(dtype.is_floating_point)
    if given:
        return given[0].is_floating_point()
    return func.overloadpacket is not torch.ops.aten.arange or any(isinstance(each, float) for each in args)
