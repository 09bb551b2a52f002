"""A staged folder appears whole or not at all, and nothing of another's is lost."""

import json
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from threefold import output as staging
from threefold.errors import UserError
from threefold.output import (
    MARKER,
    check_files_replaceable,
    check_replaceable,
    marker_of,
    staged_directory,
    staged_files,
    write_durably,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_has_its_name_only_at_the_end(tmp_path: Path) -> None:
    final = tmp_path / "new" / "out"
    with staged_directory(final) as folder:
        (folder / "file").write_text("content")
        assert not final.exists()
        assert folder.stat().st_dev == final.parent.stat().st_dev, "a rename must not cross file systems"
        assert final.parent in folder.parents
    assert names(tmp_path / "new") == ["out"]
    assert names(final) == [MARKER, "file"]


@pytest.mark.parametrize("error", [RuntimeError("no"), KeyboardInterrupt()])
def test_a_failure_leaves_nothing(tmp_path: Path, error: BaseException) -> None:
    def fail_half_way() -> None:
        with staged_directory(tmp_path / "out") as folder:
            (folder / "file").write_text("content")
            raise error

    with pytest.raises(type(error)):
        fail_half_way()
    assert names(tmp_path) == []


def test_what_stood_there_is_replaced_at_the_end_only(tmp_path: Path) -> None:
    final = tmp_path / "out"
    with staged_directory(final) as folder:
        (folder / "old").touch()
    with pytest.raises(RuntimeError), staged_directory(final):
        raise RuntimeError
    assert names(final) == [MARKER, "old"]
    with staged_directory(final) as folder:
        (folder / "new").touch()
        assert names(final) == [MARKER, "old"]
    assert names(final) == [MARKER, "new"]
    assert names(tmp_path) == ["out"]


def test_a_file_is_not_written_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "thesis").write_text("mine")
    for target, name in (("thesis", "link"), ("nowhere", "dangling")):
        (tmp_path / name).symlink_to(tmp_path / target)
        write_durably(tmp_path / name, "ours")
        assert not (tmp_path / name).is_symlink()
        assert (tmp_path / name).read_text() == "ours"
    assert (tmp_path / "thesis").read_text() == "mine"
    assert names(tmp_path) == ["dangling", "link", "thesis"]


def test_an_output_with_anything_of_anothers_is_kept(tmp_path: Path) -> None:
    """Also a link in place of a file that this program wrote, and a folder of that name."""
    out = tmp_path / "out"
    with staged_directory(out) as folder:
        (folder / "inside").mkdir()
        (folder / "inside" / "file").touch()
    check_replaceable(out, [tmp_path / "input"], overwrite=True)
    with pytest.raises(UserError, match=r"exists already; choose another folder, or replace it with --overwrite"):
        check_replaceable(out, [], overwrite=False)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").touch()
    for name in ("thesis", "inside/thesis"):
        (out / name).touch()
        with pytest.raises(UserError, match=f"has {name}, which this program did not write there"):
            check_replaceable(out, [], overwrite=True)
        (out / name).unlink()
    (out / "inside" / "file").unlink()
    (out / "inside" / "file").symlink_to(tmp_path / "mine" / "file")
    with pytest.raises(UserError, match="has inside/file, which this program did not write there"):
        check_replaceable(out, [], overwrite=True)
    (out / "inside" / "file").unlink()
    (out / "inside").rmdir()
    (out / "inside").symlink_to(tmp_path / "mine")
    with pytest.raises(UserError, match="has inside, which this program did not write there"):
        check_replaceable(out, [], overwrite=True)
    (out / MARKER).unlink()
    with pytest.raises(UserError, match="was not written by this program"):
        check_replaceable(out, [], overwrite=True)


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize(
    ("out", "read", "rule"), [("a", "a", "is an input"), ("a", "a/b/c", "contains"), ("a/b", "a", "is inside")]
)
def test_an_output_is_apart_from_what_is_read(tmp_path: Path, out: str, read: str, rule: str, linked: bool) -> None:
    (tmp_path / "real" / "a" / "b" / "c").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    place = tmp_path / ("link" if linked else "real") / read
    with pytest.raises(UserError, match=rf"--out .* {rule}.*; choose a folder apart from the inputs"):
        check_replaceable(tmp_path / "real" / out, [tmp_path / "elsewhere", place], overwrite=True)


def test_files_of_another_are_not_replaced(tmp_path: Path) -> None:
    prefix, files = tmp_path / "out", [tmp_path / name for name in ("out.bin", "out.idx")]
    write_pair(tmp_path, "ours")
    check_files_replaceable(prefix, files, [], overwrite=True)
    with pytest.raises(UserError, match=r"out\.bin exists already"):
        check_files_replaceable(prefix, files, [], overwrite=False)
    (tmp_path / "hard").hardlink_to(files[1])
    with pytest.raises(UserError, match=r"out\.idx is an input"):
        check_files_replaceable(prefix, files, [tmp_path / "hard"], overwrite=True)
    files[1].write_text("mine, and longer")
    with pytest.raises(UserError, match=r"out\.idx was not written by this program"):
        check_files_replaceable(prefix, files, [], overwrite=True)
    files[1].unlink()
    files[1].symlink_to(files[0])
    with pytest.raises(UserError, match=r"out\.idx is a symbolic link"):
        check_files_replaceable(prefix, files, [], overwrite=True)
    files[1].unlink()
    marker_of(prefix).unlink()
    with pytest.raises(UserError, match=r"out\.bin was not written by this program"):
        check_files_replaceable(prefix, files, [], overwrite=True)


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    with staged_directory(tmp_path / "out") as folder:
        (folder / "file").touch()
        with (
            pytest.raises(UserError, match=r"another process is writing .*out; wait for it"),
            staged_directory(tmp_path / "out"),
        ):
            pytest.fail("the second writer was let in")
        assert (folder / "file").exists()
    assert names(tmp_path / "out") == [MARKER, "file"]


def test_a_users_files_of_like_names_are_left_alone(tmp_path: Path) -> None:
    kept = ["out.partial/half", "out.replaced/older", ".out.threefold-0123456789abcdef/mine", ".out.threefold-x/mine"]
    for name in kept:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("mine")
    for _ in range(2):
        with staged_directory(tmp_path / "out") as folder:
            (folder / "file").touch()
    assert [(tmp_path / name).read_text() for name in kept] == ["mine"] * 4
    assert names(tmp_path) == sorted(["out", *(Path(name).parts[0] for name in kept)])


def test_what_came_while_it_was_written_is_not_replaced(tmp_path: Path) -> None:
    def write() -> None:
        with staged_directory(tmp_path / "out") as folder:
            (folder / "file").touch()
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "thesis.txt").write_text("mine")

    with pytest.raises(UserError, match=r"out was not written by this program"):
        write()
    assert names(tmp_path) == ["out"]
    assert (tmp_path / "out" / "thesis.txt").read_text() == "mine"


def test_a_lock_file_that_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / ".out.threefold-lock").write_text("mine")
    with pytest.raises(UserError, match="is in the way and not this program's"), staged_directory(tmp_path / "out"):
        pytest.fail("it was taken for a lock")
    assert (tmp_path / ".out.threefold-lock").read_text() == "mine"


@pytest.mark.parametrize("name", ["file/out", "x" * 300, "/".join(["y" * 200] * 25), "/proc/out"])
def test_a_place_that_cannot_be_written(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"cannot be (made|used)") as caught, staged_directory(tmp_path / name):
        pytest.fail(f"a folder at {name}")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert names(tmp_path) == ["file"]


def write_without_rights(final: Path, report: Connection) -> None:
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)
    try:
        with staged_directory(final):
            report.send("written")
    except UserError as error:
        report.send(str(error))


def test_a_parent_that_cannot_be_written() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to others
        Path(folder).chmod(0o555)
        context = multiprocessing.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        writer = context.Process(target=write_without_rights, args=(Path(folder, "out"), theirs))
        writer.start()
        assert ours.poll(60)
        assert ours.recv() == f"{folder}/out cannot be made (Permission denied); choose another --out"
        writer.join(60)


def test_a_name_of_the_greatest_length(tmp_path: Path) -> None:
    for letter in ("x" * 255, "é" * 127):
        with staged_directory(tmp_path / letter) as folder:
            (folder / "file").touch()
        assert names(tmp_path / letter) == [MARKER, "file"]


def write_folder(parent: Path, text: str) -> None:
    with staged_directory(parent / "out") as folder:
        for name in ("a", "sub/b"):
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(text)


def write_pair(parent: Path, text: str) -> None:
    with staged_files(parent / "out", ["out.bin", "out.idx"], inputs=(), overwrite=True) as folder:
        for name in ("out.bin", "out.idx"):
            (folder / name).write_text(text)


def read_folder(parent: Path) -> set[str]:
    files = [parent / "out" / name for name in ("a", "sub/b")]
    assert sorted(json.loads((parent / "out" / MARKER).read_text())["files"]) == ["a", "sub/b"]
    return {path.read_text() for path in files}


def read_pair(parent: Path) -> set[str]:
    return {(parent / name).read_text() for name in ("out.bin", "out.idx")}


def killed_before(number: int, parent: Path, write: Callable[[Path, str], None], can_exchange: bool) -> None:
    """Replace an output in this process, which is killed before its `number`-th call that concerns a file."""
    if not can_exchange:  # as on file systems that cannot
        staging.exchange_paths = lambda one, other: False
    seen = 0

    def kill(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event.startswith(("os.", "shutil.", "ctypes.")) or event == "open":
            seen += 1
            if seen == number + 1:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(kill)
    write(parent, "new")
    os._exit(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "read", "can_exchange"),
    [(write_folder, read_folder, True), (write_folder, read_folder, False), (write_pair, read_pair, True)],
    ids=["exchanged", "moved", "pair"],
)
def test_a_writer_killed_at_any_moment(
    tmp_path: Path, write: Callable[[Path, str], None], read: Callable[[Path], set[str]], can_exchange: bool
) -> None:
    context, found = multiprocessing.get_context("fork"), set()
    for number in range(1000):
        parent = tmp_path / str(number)
        parent.mkdir()
        (parent / "out.partial").write_text("mine")
        write(parent, "old")
        writer = context.Process(target=killed_before, args=(number, parent, write, can_exchange))
        writer.start()
        writer.join(60)
        if can_exchange and write is write_folder:
            assert read(parent) in ({"old"}, {"new"}), "there is one of the two at every moment"
        with (
            pytest.raises(RuntimeError),
            staged_directory(parent / "out")
            if write is write_folder
            else staged_files(parent / "out", ["out.bin", "out.idx"], inputs=(), overwrite=True),
        ):
            raise RuntimeError  # the next call, which recovers and then fails by itself
        (now,) = read(parent)
        found.add(now)
        expected = ["out", "out.partial"]
        if write is write_pair:
            expected = [f".out{MARKER}", "out.bin", "out.idx", "out.partial"]
        assert names(parent) == expected
        write(parent, "again")
        assert read(parent) == {"again"}
        if writer.exitcode == 0:
            break
        assert writer.exitcode == -signal.SIGKILL
    assert found == {"old", "new"}
    assert number > 20
