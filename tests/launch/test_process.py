"""Garbage collections around imports and forks, and limits of a process."""

import gc
import os
import resource
from collections.abc import Iterator

import pytest

from threefold.errors import UserError
from threefold.launch import process
from threefold.launch.process import lasting_imports, require_room, shared_objects

MANY = 10_000
"""Fewer objects than any process of the tests has."""


@pytest.fixture
def _collector() -> Iterator[None]:
    assert gc.isenabled()
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("_collector")
def test_imports_without_collections() -> None:
    with lasting_imports():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert gc.get_freeze_count() > MANY, "later collections look at what is there"
    gc.disable()
    with pytest.raises(ZeroDivisionError), lasting_imports():
        print(1 / 0)
    assert not gc.isenabled(), "as it was"


@pytest.mark.usefixtures("_collector")
def test_forks_leave_objects_to_their_parent() -> None:
    with shared_objects():
        assert gc.get_freeze_count() > MANY
    assert gc.get_freeze_count() == 0


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
    monkeypatch.setattr(process, "_fields", files.__getitem__)
    monkeypatch.setattr(process.os, "listdir", lambda path: ["1", "2", "3"])
    assert process.worked_seconds(0) * os.sysconf("SC_CLK_TCK") == pytest.approx(800 - 200)


def test_too_few_open_files_are_refused_before_a_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 24 of them two ranks waited for minutes; with 54 four ranks trained."""
    with monkeypatch.context() as patched:
        patched.setattr(resource, "getrlimit", lambda kind: (20, 20))
        with pytest.raises(UserError) as raised:
            require_room(2)
        patched.setattr(resource, "getrlimit", lambda kind: (54, 54))
        require_room(4)
        with pytest.raises(UserError, match=r"too few for 5 ranks that are connected to each other; set it to 122 or"):
            require_room(5)
        patched.setattr(resource, "getrlimit", lambda kind: (resource.RLIM_INFINITY,) * 2)
        require_room(64)
    assert str(raised.value) == (
        "A process may have 20 files open here (ulimit -n), too few for 2 ranks that are connected to each other; set "
        "it to 80 or more with `ulimit -n 80`."
    )
