"""Scratch folders, and what killed processes leave of them."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from threefold.cpu import scratch
from threefold.cpu.scratch import scratch_folder

OWNER = """
import os, sys, time
from threefold.cpu import scratch
if sys.argv[2] == "between":
    scratch.Path.rename = lambda *paths: (print(flush=True), time.sleep(600))
with scratch.scratch_folder(sys.argv[1]) as folder:
    (folder / "memory").write_bytes(bytes(1000))
    print(folder, flush=True)
    if sys.argv[2] != "ends":
        time.sleep(600)
"""


def owner(parent: Path, what: str, *before: str) -> "subprocess.Popen[str]":
    """A process that has made a scratch folder in `parent`, and says so."""
    command = [*before, sys.executable, "-c", OWNER, str(parent), what]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def names(parent: Path) -> list[str]:
    return sorted(path.name for path in parent.iterdir())


def test_the_next_start_deletes_the_scratch_folder_of_a_killed_process(tmp_path: Path) -> None:
    """Whatever the moment of the kill; not that of a living one, of another host, of another name, or behind a link."""
    living, killed = owner(tmp_path, "waits"), owner(tmp_path, "waits")
    both = names(tmp_path)
    between = owner(tmp_path, "between")
    assert (len(both), len(names(tmp_path))) == (2, 3)
    tag = both[0].rpartition("-")[0]
    for kept in ("threefold-00000000-abc", "threefold-abcdefgh", "others", "target"):
        (tmp_path / kept).mkdir()
    (tmp_path / f"{tag}-link").symlink_to(tmp_path / "target")
    others = ["others", "target", "threefold-00000000-abc", "threefold-abcdefgh", f"{tag}-link"]
    for process in (killed, between):
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert len(names(tmp_path)) == 8  # nobody has cleaned up
    with scratch_folder(tmp_path) as own:
        left = [name for name in names(tmp_path) if name not in (own.name, *others)]
        assert len(left) == 1
        assert left[0] in both
        assert own.stat().st_mode & 0o077 == 0
    living.send_signal(signal.SIGKILL)
    living.wait()
    assert owner(tmp_path, "ends").wait() == 0
    assert names(tmp_path) == sorted(others)


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_a_folder_of_a_process_in_another_container_or_of_another_user_is_kept(tmp_path: Path) -> None:
    """The number of a process says nothing in another namespace of processes; the lock does."""
    inside = owner(tmp_path, "waits", "unshare", "--pid", "--fork", "--kill-child", "--mount-proc")
    (name,) = names(tmp_path)
    foreign = tmp_path / f"{name.rpartition('-')[0]}-foreign"
    foreign.mkdir()
    os.chown(foreign, 65534, 65534)
    with scratch_folder(tmp_path) as own:
        assert names(tmp_path) == sorted((name, foreign.name, own.name))
    inside.kill()
    inside.wait()


def test_a_fresh_folder_that_another_start_took_for_an_abandoned_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open
    calls = list[str]()

    def open_late(path: Path, flags: int) -> int:
        calls.append(str(path))
        if len(calls) == 1:
            scratch._delete_abandoned(tmp_path, Path(path).name.partition("new-")[0])
            assert names(tmp_path) == []
        return real(path, flags)

    monkeypatch.setattr(scratch.os, "open", open_late)
    with scratch_folder(tmp_path) as own:
        assert names(tmp_path) == [own.name]
    assert len(calls) == 2
