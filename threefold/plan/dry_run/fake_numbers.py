"""Which tensors of a dry run have memory: integers do, so that Python may read them; floating-point numbers do not."""

from typing import Any

import torch
from torch import Tensor

from threefold.torch_private.fake import ALL_GATHER, RECEIVE, TOP_K, FakeTensor, OperationMode, leaves, with_memory


class FakeNumbers(OperationMode):
    """Within fake tensors, has operations on integers computed.

    An operation with a fake tensor among its arguments gives fake ones; new floating-point tensors are fake. All else
    is computed: tokens, labels, positions, and how many of each there are. A router's choice, which has no values, is
    taken to be even; and other ranks to have the integers that this one has.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if _is_fake(func, args, kwargs):
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


def even_choice(found: tuple[Tensor, Tensor], scores: Tensor, count: int, *_rest: Any) -> tuple[Tensor, Tensor]:
    """The result of `topk` with indices that choose each about equally often, the next ones in turn.

    Args:
        found: values and indices.
        scores: [..., n], of which `count` are chosen.
    """
    values, indices = found
    with with_memory():
        return values, (torch.arange(indices.numel()) % scores.shape[-1]).view(indices.shape)


def _is_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    tensors = False
    for each in leaves((args, kwargs)):
        if isinstance(each, FakeTensor):
            return True
        tensors = tensors or isinstance(each, Tensor)
    if tensors:
        return False
    # A new tensor.
    device = kwargs.get("device")
    if device is not None and torch.device(device).type == "meta":
        return False
    dtype = kwargs.get("dtype")
    if dtype is None:
        integers = func.overloadpacket is torch.ops.aten.arange and not any(isinstance(each, float) for each in args)
        return not integers
    return bool(dtype.is_floating_point)
