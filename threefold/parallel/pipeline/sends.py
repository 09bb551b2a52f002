"""Sends of a pipeline that runs on while they are under way, and frees what was sent before its step ends."""

from collections import deque
from collections.abc import Iterable

import torch.distributed as dist
from torch import Tensor

from threefold.config.schedules import SENDS_UNDER_WAY


class SendQueue:
    """The sends of a rank's stages, in the order in which its schedule has them.

    Torch's runtime for lists of actions keeps what was sent to the end of the step, which is a tensor for each
    micro-batch. Here the fifth send waits for the first. No rank waits forever: in the order that torch puts sends and
    receives in, each receive follows at once on its send, over all ranks, so that every send could be waited for where
    it stands.
    """

    def __init__(self) -> None:
        self._under_way: deque[tuple[dist.Work | None, Tensor]] = deque()

    def start(self, ops: Iterable[dist.P2POp]) -> None:
        """Start to send, and wait for the oldest where many are under way."""
        for op in ops:
            work = dist.isend(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer)
            self._under_way.append((work, op.tensor))
        self._wait(SENDS_UNDER_WAY)

    def finish(self) -> None:
        """Wait for all of them."""
        self._wait(0)

    def abandon(self) -> None:
        """Forget those of a step that failed."""
        self._under_way.clear()

    def _wait(self, rest: int) -> None:
        while len(self._under_way) > rest:
            work, _ = self._under_way.popleft()
            if work is not None:
                work.wait()
