"""Sums over ranks in a balanced binary tree, in an order that is the same for every backend, group and tensor size.

A backend adds in its own order: gloo's and NCCL's rings begin at a different rank for each part of a tensor, and NCCL's
trees follow the machines. Here a backend only moves numbers, and ranks add them with torch's operations, on any device:
every rank gets its part of all summands (all-to-all), adds them up in the tree, and sends the sum to the others
(all-gather). That is as many bytes as a ring.
"""

from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from threefold.torch_private.distributed import Work

HALVES = (torch.bfloat16, torch.float16)


def accumulate(combine: Callable[..., Tensor], parts: list[Tensor], out: Tensor, rounding: bool = False) -> None:
    """Combine `parts` into `out` in a balanced binary tree whose left subtrees have sizes that are powers of two.

    With `rounding`, every node of the tree is rounded to the dtype of `out`, as in an exact run, rather than only the
    root: bfloat16 and float16 are otherwise combined in float32.
    """
    if len(parts) == 1:
        out.copy_(parts[0])
    elif len(parts) == 2:
        combine(*parts, out=out)
    else:
        widens = out.dtype in HALVES and not rounding
        out.copy_(_combined(combine, [part.float() for part in parts] if widens else parts))


def _combined(combine: Callable[..., Tensor], parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    left = 1 << (len(parts) - 1).bit_length() - 1  # the largest power of two below their number
    return combine(_combined(combine, parts[:left]), _combined(combine, parts[left:]))


class PostponedWork(Work):
    """Collective that runs, or whose last part runs, when it is first waited for; done at once without `run`."""

    def __init__(self, run: Callable[[], None] | None = None) -> None:
        super().__init__()
        self._run = run

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        run, self._run = self._run, None
        if run is not None:
            run()
        return True

    def is_completed(self) -> bool:
        return self._run is None


def start_sum_(flat: Tensor, group: dist.ProcessGroup, rounding: bool) -> dist.Work:
    """Start to sum a contiguous one-dimensional tensor over a group, in place.

    The summands are being sent when it returns; the additions, and the exchange of the sums, run when the work is
    waited for. All ranks wait for their work objects in the same order. `rounding` is as for `accumulate`.
    """
    size = group.size()
    part = flat.new_empty(-(-flat.numel() // size))
    gap = size * part.numel() - flat.numel()
    whole = torch.cat([flat, flat.new_zeros(gap)]) if gap else flat
    receive = _start_exchange(whole, group)

    def finish() -> None:
        accumulate(torch.add, receive(), part, rounding)
        dist.all_gather_single(whole, part, group=group)
        if gap:
            flat.copy_(whole[: flat.numel()])

    return PostponedWork(finish)


def reduce_scatter(out: Tensor, flat: Tensor, group: dist.ProcessGroup) -> None:
    """Sum a contiguous one-dimensional tensor over a group, with every addition rounded; `out` is this rank's part."""
    accumulate(torch.add, _start_exchange(flat, group)(), out, rounding=True)


def _start_exchange(whole: Tensor, group: dist.ProcessGroup) -> Callable[[], list[Tensor]]:
    """Start to send each rank its part of `whole`; return a function that waits for this rank's part of each."""
    received = torch.empty_like(whole)
    work = dist.all_to_all_single(received, whole, group=group, async_op=True)

    def receive() -> list[Tensor]:
        work.wait()
        return list(received.view(group.size(), -1))

    return receive
