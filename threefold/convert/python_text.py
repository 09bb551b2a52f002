"""A few MB of English that every Python has: its language reference and its docstrings, parsed, not imported."""

import ast
import inspect
import json
import os
import stat
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import typer
from typer import Argument

from threefold.errors import UserError
from threefold.files import shown
from threefold.output import staged_files

TOPICS_FILE: Final = "python_topics.jsonl"
DOCSTRINGS_FILE: Final = "python_docstrings.jsonl"
# Third-party packages, and tests, which some installations lack and which have little prose.
_LEFT_OUT: Final = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
_MIN_CHARACTERS: Final = 40


def sample(directory: Path = Argument(..., metavar="DIR", help="Folder to write to.")) -> None:
    """Write a few MB of English text, from the documentation in Python's standard library, as JSON Lines.

    Examples:
      threefold data sample text
    """
    summary = write_sample(directory)
    typer.echo(f"Wrote {summary.documents:,} documents, {summary.bytes / 1e6:.1f} MB of English text:")
    for file in summary.files:
        typer.echo(f"  {file}")
    typer.echo(f"Next: threefold data prepare {directory} --out TOKENS")


@dataclass(frozen=True)
class SampleSummary:
    """Files that were written, and their number of documents and bytes."""

    files: tuple[Path, ...]
    documents: int
    bytes: int


def write_sample(folder: Path, library: Path | None = None) -> SampleSummary:
    """Write the sample corpus to `folder` as JSON lines with the key "text": a document per topic and per module.

    The same Python, whose standard library may be given, writes the same bytes. Paragraphs that occurred before are
    left out, so that held-out documents are not copies of others.
    """
    library = library or Path(sysconfig.get_path("stdlib"))
    try:
        folder.mkdir(parents=True, exist_ok=True)  # before half a minute of reading
    except OSError as error:
        raise UserError(f"{shown(folder)} cannot be written ({error.strerror}); choose another folder") from None
    seen: set[str] = set()
    documents = {
        TOPICS_FILE: list(_distinct(_topics(library), seen)),
        DOCSTRINGS_FILE: list(_distinct(_docstrings(library), seen)),
    }
    if not any(documents.values()):
        raise UserError(f"this Python has no source files under {library}; prepare a text of your own instead")
    contents = {
        name: "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
        for name, texts in documents.items()
        if texts
    }
    if any(not _holds(folder / name, content) for name, content in contents.items()):
        # Files with this program's marker may be replaced, such as those of another Python.
        with staged_files(folder / "python_text", list(contents), inputs=(), overwrite=True) as staging:
            for name, content in contents.items():
                (staging / name).write_bytes(content)
    files = tuple(folder / name for name in contents)
    return SampleSummary(files, sum(map(len, documents.values())), sum(file.stat().st_size for file in files))


def _topics(library: Path) -> Iterator[str]:
    """Yield the topics of the language reference, longest first, because long ones contain some of the short ones."""
    tree = _parse(library / "pydoc_data" / "topics.py")
    for statement in tree.body if tree else ():
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            topics: dict[str, str] = ast.literal_eval(statement.value)
            yield from (topics[name] for name in sorted(topics, key=lambda name: (-len(topics[name]), name)))


def _docstrings(library: Path) -> Iterator[str]:
    for path in sorted(library.rglob("*.py"), key=lambda path: path.relative_to(library).parts):
        if _LEFT_OUT.isdisjoint(path.relative_to(library).parts) and (tree := _parse(path)) is not None:
            yield "\n\n".join(filter(_is_prose, _docstrings_of(tree)))


def _docstrings_of(node: ast.AST) -> Iterator[str]:
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    if isinstance(node, documented) and (docstring := ast.get_docstring(node)):
        yield docstring
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.expr):  # expressions hold no docstrings
            yield from _docstrings_of(child)


def _parse(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in the library's own strings
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):  # templates and deliberately broken files
        return None


def _is_prose(text: str) -> bool:
    letters = sum(character.isalpha() for character in text)
    return len(text) >= _MIN_CHARACTERS and len(text.split()) >= 6 and letters >= 0.55 * len(text)


def _distinct(texts: Iterable[str], seen: set[str]) -> Iterator[str]:
    for text in texts:
        paragraphs = []
        for paragraph in inspect.cleandoc(text).split("\n\n"):
            words = " ".join(paragraph.split())
            # Headings and code one-liners may repeat; sentences may not.
            if len(words) < _MIN_CHARACTERS or words not in seen:
                seen.add(words)
                paragraphs.append(paragraph.rstrip())
        document = "\n\n".join(paragraphs).strip()
        if len(document) >= 2 * _MIN_CHARACTERS:
            yield document


def _holds(path: Path, content: bytes) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode) and path.read_bytes() == content
    except OSError:
        return False
