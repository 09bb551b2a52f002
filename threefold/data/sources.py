"""Input files of text, read as documents: JSON lines and plain text, compressed or not; a room adds parquet."""

import hashlib
import io
import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from threefold.constants import LONGEST_DOCUMENT
from threefold.data.conversations import Chat, Document, chat_of, is_chat, is_preference, preference_of, utf8
from threefold.data.corpus import META_FILE, TOKENS_FILE
from threefold.data.tokenizer import END_OF_DOCUMENT
from threefold.doors import needed
from threefold.errors import UserError
from threefold.files import load_json

_KINDS: Final = {".jsonl": "json", ".json": "json", ".txt": "text", ".parquet": "parquet"}
_COMPRESSED: Final = (".gz", ".zst")
_KNOWN: Final = ".jsonl, .json, .txt, one of these and .gz or .zst, or .parquet"

# Characters after which a long text is cut at the next blank line, or after 4 times as many at the next line, so that
# a single big file can be held in memory and divided into splits.
_TEXT_DOCUMENT: Final = 65_536
_READ_LINE_LIMIT: Final = 4 * _TEXT_DOCUMENT
CHUNK: Final = 1 << 18


def find_inputs(inputs: Iterable[Path]) -> list[Path]:
    """Return the files to read: given files, and all files of a known kind in given folders, sorted by name."""
    found: list[Path] = []
    for path in inputs:
        if path.is_dir():
            made_here = {meta.parent for meta in path.rglob(META_FILE) if (meta.parent / TOKENS_FILE).exists()}
            visible = (file for file in sorted(path.rglob("*")) if _kind(file) and not file.name.startswith("."))
            inside = [file for file in visible if file.is_file() and made_here.isdisjoint(file.parents)]
            if not inside:
                raise UserError(f"{path} holds no file to read; it needs {_KNOWN}")
            found += inside
        elif not path.exists():
            raise UserError(f"input {path} does not exist")
        elif _kind(path) is None:
            raise UserError(f"input {path} is of an unknown kind; it must end in {_KNOWN}")
        else:
            found.append(path)
    return list(dict.fromkeys(found))


def is_json_lines(path: Path) -> bool:
    """Return whether `path` is a file named as JSON lines, compressed or not."""
    return _kind(path) == "json" and path.is_file()


def holds_chat(path: Path, key: str) -> bool:
    """Return whether a file's first line has a conversation or a pair; all its lines must be of one kind."""
    first = _first_line(path)
    return is_chat(first, key) or is_preference(first, key)


def holds_preferences(path: Path, key: str) -> bool:
    """Return whether a file's first line has a chosen and a rejected answer."""
    return is_preference(_first_line(path), key)


def _first_line(path: Path) -> Any:
    if _kind(path) != "json" or not path.is_file():  # a pipe can be read only once
        return None
    with _explained(path), path.open("rb") as raw:
        first = next((line for line in _lines(_decompressed(raw, path), path) if line.strip()), "null")
    try:
        return load_json(first)
    except ValueError:
        return None  # the reader of all lines reports it


class SourceReader:
    """Documents of one input file; counts the `documents` yielded and the `bytes` of the file read so far.

    `key` is the key of the text (or the messages) in JSON objects, or the column of a parquet file; error messages say
    what gave it (`key_given_by`). `on_read` is called with the number of bytes, as stored, at every read.
    """

    def __init__(self, path: Path, key: str, on_read: Callable[[int], None], key_given_by: str = "--key") -> None:
        self.path, self.key, self._on_read, self._key_given_by = path, key, on_read, key_given_by
        self.documents = self.bytes = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        """SHA-256 of the bytes read so far: of the whole file once its documents are exhausted."""
        return self._hash.hexdigest()

    def texts(self) -> Iterator[str]:
        """Yield the documents of a file with only texts. Raises UserError if one is a conversation or a pair."""
        for document in self:
            if not isinstance(document, str):
                what = "messages" if isinstance(document, Chat) else "a prompt and a completion"
                raise UserError(f"{document.where} has {what} in place of a text; give texts under a key.")
            yield document

    def __iter__(self) -> Iterator[Document]:
        """Yield the non-empty documents. Raises UserError if the file cannot be read or a line is malformed."""
        readers = {"parquet": self._parquet_texts, "text": self._text_documents}
        for document in readers.get(_kind(self.path) or "", self._json_documents)():
            if not isinstance(document, str) or document.strip():
                self.documents += 1
                yield document

    def objects(self) -> Iterator[tuple[dict[str, Any], int]]:
        """Yield each JSON line's object and number. Raises UserError if a line cannot be read or is not an object."""
        with self._stream() as lines:
            for number, line in enumerate(_lines(lines, self.path), start=1):
                if not line.strip():
                    continue
                try:
                    value = load_json(line)
                except ValueError as error:
                    reason = getattr(error, "msg", str(error))
                    raise UserError(
                        f"{self.path}:{number} is not JSON ({reason}); every line must be one JSON object"
                    ) from None
                if not isinstance(value, dict):
                    raise UserError(
                        f'{self.path}:{number} is not a JSON object; every line must be one, such as {{"text": "..."}}'
                    )
                yield value, number

    def text_of(self, value: dict[str, Any], number: int) -> str:
        """Return the text in the object of a line. Raises UserError if there is none under the key."""
        if self.key not in value:
            keys = ", ".join(f'"{key}"' for key in value) or "none"
            raise UserError(
                f'{self.path}:{number} has no key "{self.key}" (its keys: {keys}); '
                f"name the right one with {self._key_given_by}"
            )
        text = value[self.key]
        if not isinstance(text, str):
            raise UserError(
                f'{self.path}:{number} has no text under "{self.key}" but {json.dumps(text)[:40]}; it must be a string'
            )
        return utf8(text)

    def _json_documents(self) -> Iterator[Document]:
        holds_chat = holds_preferences = None
        for value, number in self.objects():
            where = f"{self.path}:{number}"
            if holds_preferences is None:
                holds_preferences = is_preference(value, self.key)
            if is_preference(value, self.key) != holds_preferences:
                has, have = ("no chosen and rejected", "have") if holds_preferences else ("chosen and rejected", "lack")
                raise UserError(
                    f"{where} has {has} answers, which the lines before it {have}; put lines of another kind into "
                    "another file"
                )
            if holds_preferences:
                yield from preference_of(value, where)
                continue
            holds_chat = is_chat(value, self.key) if holds_chat is None else holds_chat
            if holds_chat and not is_chat(value, self.key):
                raise UserError(
                    f"{self.path}:{number} has no messages and no prompt with a completion, which the lines before it "
                    "have; put lines of another kind into another file"
                )
            yield chat_of(value, self.key, where) if holds_chat else self.text_of(value, number)

    def _text_documents(self) -> Iterator[str]:
        document: list[str] = []
        size = 0
        with self._stream() as stream:
            for line in iter(lambda: stream.readline(_READ_LINE_LIMIT), ""):
                is_end = line.strip() == END_OF_DOCUMENT  # alone on a line, as in other public corpora
                if not is_end:
                    document.append(line)
                    size += len(line)
                if is_end or size >= _READ_LINE_LIMIT or (size >= _TEXT_DOCUMENT and not line.strip()):
                    yield "".join(document)
                    document, size = [], 0
            yield "".join(document)

    def _parquet_texts(self) -> Iterator[str]:
        yield from needed("parquet_texts", f"Parquet, as of {self.path},", "convert")(self)

    @contextmanager
    def _stream(self) -> Iterator[io.TextIOWrapper]:
        """Open the file as text, decompressed; if the block reads to the end, the hash is of the whole file."""
        with self.opened() as raw, _explained(self.path):
            yield _decompressed(raw, self.path)
            while raw.read(1 << 20):  # the last bytes, which a decompressor may leave unread
                pass

    @contextmanager
    def opened(self) -> Iterator[io.BufferedReader]:
        """Open the file as stored, of which every read counts for the hash and the progress."""

        def watch(data: memoryview) -> None:
            self._hash.update(data)
            self.bytes += len(data)
            self._on_read(len(data))

        try:
            file = _Watched(self.path, watch)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror})") from None
        with file:
            yield io.BufferedReader(file, CHUNK)


class _Watched(io.FileIO):
    def __init__(self, path: Path, watch: Callable[[memoryview], None]) -> None:
        super().__init__(path)
        self._watch = watch

    def readinto(self, buffer: Any) -> int:
        count = super().readinto(buffer) or 0
        self._watch(memoryview(buffer)[:count])
        return count


def _kind(path: Path) -> str | None:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if is_compressed := bool(suffixes) and suffixes[-1] in _COMPRESSED:
        suffixes.pop()
    kind = _KINDS.get(suffixes[-1]) if suffixes else None
    return None if kind == "parquet" and is_compressed else kind


def _decompressed(raw: io.BufferedReader, path: Path) -> io.TextIOWrapper:
    stream: Any = raw
    if path.suffix.lower() in _COMPRESSED:
        stream = needed("decompressed", f"A compressed file, as {path},", "convert")(raw, path.suffix.lower())
    return io.TextIOWrapper(stream, encoding="utf-8-sig")


def _lines(stream: io.TextIOWrapper, path: Path) -> Iterator[str]:
    """Yield the lines of JSON; raise a `UserError` for one that is too long, before it is read to its end."""
    for number, line in enumerate(iter(lambda: stream.readline(LONGEST_DOCUMENT + 1), ""), start=1):
        yield checked(line, f"{path}:{number}")


def checked(document: str, where: str) -> str:
    """Return a document; raise a `UserError` if it is too long."""
    if len(document) > LONGEST_DOCUMENT:
        raise UserError(
            f"{where} has more than {LONGEST_DOCUMENT:,} characters, and a document may have as many; cut it into "
            "several, one a line"
        )
    return document


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text ({error.reason}); convert it") from None
    except (OSError, EOFError) as error:
        raise UserError(f"{path} cannot be read ({error}); it may be truncated") from None
