"""Rounds: nobody passes before all have come, each is woken once, and who ends does not leave the others waiting."""

import mmap
import os
import select
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from threefold.cpu.segments import BARRIER_PIPES, Shared, memory_bytes, tickets
from threefold.cpu.shared_memory import Barrier
from threefold.errors import PeerLostError


def test_all_pass_and_who_has_passed_may_end(tmp_path):
    for number in range(30):
        folder = tmp_path / str(number)
        folder.mkdir()
        with _group(folder, 3) as rounds:
            everyone(rounds, lambda each: [_meet(each) for _ in range(4)])

            def meet_and_end(each: Barrier) -> None:
                _meet(each)
                each.close()

            everyone(rounds, meet_and_end)


def test_nobody_passes_before_all_have_come(tmp_path):
    passed = []
    with _group(tmp_path, 3) as rounds, ThreadPoolExecutor(2) as others:
        waiting = [others.submit(lambda each=each: passed.append(_meet(each))) for each in rounds[:2]]
        for _ in range(100):
            assert not passed
        _meet(rounds[2])
        for each in waiting:
            each.result()
    assert len(passed) == 2


def test_system_calls_of_a_round(tmp_path):
    """A ticket for each, one that wakes the others, and one sleep for each of these."""
    reads, writes, polls = [], [], []
    read, write, poll = os.read, os.write, select.poll

    class Poll:
        def __init__(self) -> None:
            self.poller = poll()
            self.register = self.poller.register

        def poll(self, timeout: float) -> list[tuple[int, int]]:
            polls.append(timeout)
            return self.poller.poll(timeout)

    with (
        patch("select.poll", Poll),
        patch("os.read", lambda *args: reads.append(args) or read(*args)),
        patch("os.write", lambda *args: writes.append(args) or write(*args)),
        _group(tmp_path, 4) as rounds,
    ):
        writes.clear()
        everyone(rounds, lambda each: [_meet(each) for _ in range(5)])
    assert (len(reads), len(writes), len(polls)) == (5 * 4, 5, 5 * 3)


def test_who_ends_before_it_has_come_is_named(tmp_path):
    with _group(tmp_path, 3) as rounds:
        everyone(rounds, _meet)
        rounds[1].close()
        for each in (rounds[0], rounds[2]):
            with pytest.raises(PeerLostError, match=r"^rank 11 ended while rank 1[02] was in sum$"):
                _meet(each)


def test_who_does_not_come_is_named(tmp_path):
    with _group(tmp_path, 3, timeout=0.01) as rounds:
        with pytest.raises(TimeoutError, match=r"^rank 11 has waited 0\.01 s in sum for rank 10$"):
            _meet(rounds[1])
        with pytest.raises(RuntimeError, match=r"^rank 11 goes on after a round in which it has failed$"):
            _meet(rounds[1])


def test_who_comes_for_something_else_is_named_and_the_next_round_is_possible(tmp_path):
    with _group(tmp_path, 2) as rounds:

        def differ(each: Barrier) -> str:
            with pytest.raises(RuntimeError) as caught:
                each.meet(rounds.index(each), 0, 5, 1)
            _meet(each)
            return str(caught.value)

        assert everyone(rounds, differ) == [
            "rank 10 called sum of 5 elements of f while rank 11 called broadcast_ of 5 elements of f from index 1",
            "rank 11 called broadcast_ of 5 elements of f from index 1 while rank 10 called sum of 5 elements of f",
        ]


def everyone(group: list[Barrier], does: object) -> list[object]:
    with ThreadPoolExecutor(len(group)) as threads:
        return list(threads.map(does, group))


def _meet(barrier: Barrier) -> None:
    barrier.meet(0, 0, 7)


@contextmanager
def _group(folder: Path, size: int, timeout: float = 20.0) -> Iterator[list[Barrier]]:
    """The barriers of `size` ranks, from 10 on, all in this process."""
    for name in BARRIER_PIPES:
        os.mkfifo(folder / name)
    memory, ends = mmap.mmap(-1, memory_bytes(size, 1)), [os.pipe() for _ in range(size)]
    made = []
    for index in range(size):
        first, second = (os.open(folder / name, os.O_RDWR | os.O_NONBLOCK) for name in BARRIER_PIPES)
        if index == 0:
            os.write(first, tickets(size))
        alive = {peer: os.dup(ends[peer][0]) for peer in range(size) if peer != index}
        ranks = list(range(10, 10 + size))
        shared = Shared(ranks, index, memory, (first, second), alive, ends[index][1], timeout)
        made.append(Barrier(shared, ("sum", "broadcast_"), ("f",)))
    for end, _ in ends:
        os.close(end)
    try:
        yield made
    finally:
        for each in made:
            each.close()
