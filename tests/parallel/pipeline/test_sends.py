"""Sends of a pipeline: waited for in order, and never all kept."""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.distributed as dist

from threefold.parallel.pipeline import scheduled_stage as sends
from threefold.parallel.pipeline.scheduled_stage import SendQueue


class Work:
    def __init__(self, number: int, waited: list[int]) -> None:
        self.number, self.waited = number, waited

    def wait(self) -> None:
        self.waited.append(self.number)


def test_old_sends_are_waited_for_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []
    started: list[tuple[float, int]] = []

    def isend(tensor: torch.Tensor, *, group: object, tag: int, group_dst: int) -> Work:
        started.append((tensor.item(), group_dst))
        return Work(len(started) - 1, waited)

    monkeypatch.setattr(sends.dist, "isend", isend)
    queue = SendQueue()
    for number in range(7):
        queue.start([_op(number)])
    assert started == [(number, 1) for number in range(7)]
    assert waited == [0, 1, 2]
    queue.finish()
    assert waited == list(range(7))
    queue.start([_op(7)])
    queue.abandon()
    queue.finish()
    assert waited == list(range(7))


def _op(number: int) -> dist.P2POp:
    op = SimpleNamespace(tensor=torch.tensor(float(number)), group=None, tag=0, group_peer=1)
    return cast(dist.P2POp, op)
