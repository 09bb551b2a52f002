"""Heartbeats in memory that ranks share, and what a rank's process has worked."""

import errno
import os
from multiprocessing import heap

import pytest

from threefold.errors import UserError
from threefold.resilience import processes
from threefold.resilience.rank_watch import shared_bytes


def stat(own: int, of_children: int, niceness: int) -> list[str]:
    """Fields of a /proc stat file from the third on: user and system time, theirs of ended children, and niceness."""
    fields = ["0"] * 20
    fields[11:15] = str(own), "0", str(of_children), "0"
    fields[16] = str(niceness)
    return fields


def test_threads_of_low_priority_are_not_the_work_of_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that writes a checkpoint may compute while the rank hangs; a compiler, which has ended, counts."""
    files = {"/proc/0/stat": stat(700, 100, 5), "/proc/0/task/1/stat": stat(300, 0, 5)}
    files |= {"/proc/0/task/2/stat": stat(200, 0, 15), "/proc/0/task/3/stat": stat(70, 0, -5)}
    monkeypatch.setattr(processes, "_fields", files.__getitem__)
    monkeypatch.setattr(processes.os, "listdir", lambda path: ["1", "2", "3"])
    assert processes.worked_seconds(0) * os.sysconf("SC_CLK_TCK") == pytest.approx(800 - 200)


def test_heartbeats_need_no_file_where_ranks_are_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where /dev/shm is read-only."""

    def refuse(*given: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), "/dev/shm/pym")

    monkeypatch.setattr(heap, "Arena", refuse)
    monkeypatch.setattr(heap.BufferWrapper, "_heap", heap.Heap())
    with memoryview(shared_bytes("fork", 10_000)) as shared:
        assert shared.nbytes == 10_000
    with pytest.raises(UserError, match=r"need a file in /dev/shm or TMPDIR, and there can be none \(Read"):
        shared_bytes("spawn", 10_000)
