"""The sample corpus: prose out of a Python's own files, the same every time, without repetitions."""

import json
from pathlib import Path

import pytest

from threefold.convert.python_text import DOCSTRINGS_FILE, TOPICS_FILE, write_sample
from threefold.errors import UserError

LONG = "It says a number of things that people would like to know before they call it."
MODULE = f'''"""About this module: {LONG}"""

print("importing runs this")

class Thing:
    """A thing, indented.

        {LONG}

    The last paragraph of the description of the thing is this one.
    """

    def method(self):
        """Short."""

    async def other(self):
        """Waits for the other side until it answers or the time is up."""
'''


@pytest.fixture
def library(tmp_path: Path) -> Path:
    files = {
        "pydoc_data/topics.py": "topics = "
        + repr(
            {
                "b": f"Short topic.\n\n{LONG}\n",
                "a": f"The long topic.\n\n{LONG}\n\n" + "More on all of it is here. " * 9,
            }
        ),
        "alpha.py": MODULE,
        "beta.py": MODULE,
        "broken.py": '"""This docstring belongs to a file that does not parse, so nobody reads it."""\ndef',
        "site-packages/other.py": '"""A package that somebody else wrote and that is not everywhere."""',
        "test/test_alpha.py": '"""Tests are not everywhere either, and what they say is of no use here."""',
        "numbers_only.py": '"""' + "1234567890 " * 20 + '"""',
    }
    for name, text in files.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path / "lib"


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text(encoding="utf-8").splitlines()]


def test_what_is_taken_from_a_library(library: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    summary = write_sample(tmp_path / "out", library)
    assert texts(tmp_path / "out" / TOPICS_FILE) == [
        "The long topic.\n\n" + LONG + "\n\n" + ("More on all of it is here. " * 9).strip()
    ]
    (module,) = texts(tmp_path / "out" / DOCSTRINGS_FILE)
    assert module.split("\n\n") == [
        f"About this module: {LONG}",
        "A thing, indented.",
        "The last paragraph of the description of the thing is this one.",
        "Waits for the other side until it answers or the time is up.",
    ]
    assert summary.documents == 2
    assert summary.bytes == sum(path.stat().st_size for path in (tmp_path / "out").glob("*.jsonl"))
    assert capsys.readouterr().out == "", "nothing is imported"


def test_the_same_library_gives_the_same_bytes(library: Path, tmp_path: Path) -> None:
    for folder in ("one", "two", "two"):
        write_sample(tmp_path / folder, library)
    for name in (TOPICS_FILE, DOCSTRINGS_FILE):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


def test_a_python_without_sources_and_a_place_that_cannot_be_written(library: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no source files"):
        write_sample(tmp_path / "out", tmp_path / "empty")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="file cannot be written"):
        write_sample(tmp_path / "file", tmp_path / "empty")  # told before the library is read
