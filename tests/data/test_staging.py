"""A staged folder appears whole or not at all, and nothing of another's is lost."""

from pathlib import Path

import pytest

from threefold.data.staging import staged_directory
from threefold.errors import UserError


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_it_has_its_name_only_at_the_end(tmp_path: Path) -> None:
    final = tmp_path / "new" / "out"
    with staged_directory(final) as folder:
        (folder / "file").write_text("content")
        assert not final.exists()
        assert folder.parent == final.parent, "a rename must not cross file systems"
    assert names(tmp_path / "new") == ["out"]
    assert names(final) == ["file"]


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
    assert names(final) == ["old"]
    with staged_directory(final) as folder:
        (folder / "new").touch()
        assert names(final) == ["old"]
    assert names(final) == ["new"]
    assert names(tmp_path) == ["out"]


def test_two_writers_of_one_folder(tmp_path: Path) -> None:
    with staged_directory(tmp_path / "out") as folder:
        (folder / "file").touch()
        with (
            pytest.raises(UserError, match=r"another process is writing .*out\.partial"),
            staged_directory(tmp_path / "out"),
        ):
            pytest.fail("the second writer was let in")
        assert (folder / "file").exists()
    assert names(tmp_path / "out") == ["file"]


def test_what_a_killed_writer_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "half").touch()
    (tmp_path / "out.replaced").mkdir()
    (tmp_path / "out.replaced" / "older").touch()
    with staged_directory(tmp_path / "out") as folder:
        (folder / "file").touch()
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["file"]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"), staged_directory(tmp_path / "file" / "out"):
        pytest.fail("a folder inside a file")
