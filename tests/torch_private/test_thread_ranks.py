"""Canaries for the private parts of torch with which ranks are threads."""

import inspect
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import threefold
from threefold.lesson.group import Exchange
from threefold.lesson.turns import Turns
from threefold.torch_private.threads import (
    notes_of,
    notes_of_current_node,
    sharded_names,
    thread_groups,
    thread_rank,
)


def test_thread_groups() -> None:
    """Each thread has a process group of its own in the block, and the process has none after it."""
    hook, turns, store, found = sys.excepthook, Turns(2), dist.HashStore(), dict[str, tuple[int, int]]()

    def work(rank: int) -> None:
        with thread_rank(rank, 2, store):
            found[threading.current_thread().name] = dist.get_rank(), dist.get_world_size()

    with thread_groups(Exchange(turns, lambda *_: lambda _: None).group):
        turns.run(work, here=0)
        with pytest.raises(RuntimeError, match="ranks cannot be threads"), thread_groups(lambda *_: None):  # type: ignore[arg-type, return-value]
            pass
    assert found == {threading.current_thread().name: (0, 2), "rank 1": (1, 2)}
    assert not dist.is_initialized()
    assert sys.excepthook is hook


def test_notes_of_current_node() -> None:
    seen = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, grad: Tensor) -> Tensor:
            seen.append(dict(notes_of_current_node()))
            return grad

    out = Watched.apply(torch.ones(2, requires_grad=True))
    notes_of(out.grad_fn)["where"] = "here"
    out.sum().backward()
    assert seen == [{"where": "here"}]
    assert notes_of_current_node() == {}


def test_sharded_names() -> None:
    """Names of what FSDP gathers are those of the block, not of the module whose hook gathers it."""
    assert sharded_names(inspect.currentframe()) == ()
    lesson = threefold.explain({"model": {"num_layers": 2, "hidden_size": 8}}, layout="dp2 zero3")
    gathers = [e.module for e in lesson.filter(rank=0, operation="all_gather", phase="forward")]
    assert [name.split(".")[:2] for name in gathers[1:]] == [["blocks", "0"], ["blocks", "1"]]
