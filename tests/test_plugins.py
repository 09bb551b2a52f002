"""Extension points: built-in names first, then what installed packages declare, and one sentence for any other."""

import os
import sys
from pathlib import Path

import pytest

from tests.support.plugin_package import write_package
from threefold.errors import UserError
from threefold.plugins import Registry, import_file, modules_beside, one_of

GROUP = "threefold.toys"
TOYS = Registry("toy.name", GROUP, {"join": "posixpath:join", "split": "posixpath:split"})


def test_modules_beside_a_file_are_its_own(tmp_path: Path) -> None:
    """Each of two copies of a file gets the modules of its own folder, those that only the others import as well."""
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "main.py").write_text("import json\nfrom layers_beside import VALUE\n")
        (folder / "layers_beside.py").write_text(
            "def value():\n    import widths_beside as each\n    return each.WIDTH\n\nVALUE = value()\n"
        )
        (folder / "widths_beside.py").write_text(f"WIDTH = {number}\n")
        (folder / "json.py").write_text("")  # the standard library's is meant
        (folder / "unused.py").write_text("")
    assert [import_file(tmp_path / str(number) / "main.py").VALUE for number in (1, 2)] == [1, 2]
    assert {path.name for path in modules_beside(tmp_path / "1/main.py")} == {"layers_beside.py", "widths_beside.py"}


@pytest.mark.parametrize("writes_bytecode", [True, False])
def test_a_file_is_executed_once_and_again_after_a_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, writes_bytecode: bool
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", not writes_bytecode)
    file = tmp_path / "changing.py"
    file.write_text("VALUE = [1]\n")
    first = import_file(file)
    assert import_file(file) is first
    (tmp_path / "link.py").symlink_to(file)
    assert import_file(tmp_path / "link.py") is first
    file.write_text("VALUE = [2, 3]\n")
    assert import_file(file).VALUE == [2, 3]
    before = file.stat()
    file.write_text("VALUE = [4, 5]\n")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))  # of the same size, within the clock's resolution
    assert import_file(file).VALUE == [4, 5]


@pytest.mark.parametrize("ends", ["", "raise ValueError('at the end')\n"])
def test_a_file_leaves_nothing_behind_but_its_module(tmp_path: Path, ends: str) -> None:
    """The search path is as before, and so is a module of the name of one beside the file."""
    number = str(len(ends))
    for folder, value in (("mine", 1), ("theirs", 2)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"kept_{number}.py").write_text(f"VALUE = {value}\n")
        (tmp_path / folder / "main.py").write_text(f"from kept_{number} import VALUE\n" + (ends if value == 2 else ""))
    assert import_file(tmp_path / "mine/main.py").VALUE == 1
    path, kept = [*sys.path], sys.modules[f"kept_{number}"]
    if ends:
        with pytest.raises(ValueError, match="at the end"):
            import_file(tmp_path / "theirs/main.py")
    else:
        assert import_file(tmp_path / "theirs/main.py").VALUE == 2
    assert sys.path == path
    assert sys.modules[f"kept_{number}"] is kept
    assert [name for name in sys.modules if str(tmp_path / "theirs/main.py") in name] == (
        [] if ends else [f"main@{tmp_path / 'theirs/main.py'}"]
    )


def test_built_in() -> None:
    import posixpath

    assert TOYS.names() == ["join", "split"]
    assert TOYS.load("split") is posixpath.split
    assert "join" in TOYS
    assert "toy" not in TOYS


def test_unknown_name_is_one_sentence() -> None:
    with pytest.raises(UserError) as error:
        TOYS.load("spilt")
    assert str(error.value) == "toy.name is 'spilt' but must be one of join, split; the nearest is split."


def test_another_package_adds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"toy": "toy_of_plugins:Toy", "join": "toy_of_plugins:Toy"}
    write_package(tmp_path, GROUP, entries, "class Toy: pass\n", name="toy_of_plugins")
    monkeypatch.syspath_prepend(tmp_path)
    assert TOYS.names() == ["join", "split", "toy"]
    assert "toy_of_plugins" not in sys.modules, "listing imports nothing"
    assert TOYS.load("toy").__name__ == "Toy"
    assert TOYS.load("join").__module__ == "posixpath", "a built-in name is not replaced"


def test_one_name_of_two_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("first_toys", "second_toys"):
        write_package(tmp_path / name, GROUP, {"toy": f"{name}:Toy"}, "class Toy: pass\n", name)
        monkeypatch.syspath_prepend(tmp_path / name)
    with pytest.raises(UserError, match=r"^toy.name is toy but the package \w+ and the package \w+ each declare it"):
        TOYS.load("toy")


@pytest.mark.parametrize("module", ["", "import no_such_module\n"])
def test_entry_point_that_cannot_be_imported(module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"broken_toys_{len(module)}"
    write_package(tmp_path, GROUP, {"toy": f"{name}:Toy"}, module, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UserError, match=rf"the package {name} declares it as {name}:Toy, which cannot be imported \("):
        TOYS.load("toy")


@pytest.mark.parametrize(
    ("given", "names", "told"),
    [
        ("bf61", ["fp32", "bf16", "fp16", "fp64"], "the nearest is bf16"),
        ("float8", ["fp32", "bf16", "fp16", "fp64"], "the nearest is bf16"),
        ("float8", ["none", "fp16", "bf16"], "the nearest is fp16"),
        ("gpu", ["auto", "cpu", "cuda"], "the nearest is cuda"),
        ("xx", ["none", "linear", "yarn"], "use none"),
    ],
)
def test_a_wrong_name_is_told_the_one_that_is_meant(given: str, names: list[str], told: str) -> None:
    assert one_of(given, names) == f"one of {', '.join(names)}; {told}"
