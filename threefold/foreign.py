"""Files of runs, checkpoints and model folders, which anyone may have made: the one place that opens them.

A downloaded folder may hold links to files of the user, FIFOs, devices, sparse files of a terabyte, and files beside
those that its manifest names. Such a file is neither read nor waited for, and nothing is written through a link.
"""

import errno
import io
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from threefold.errors import UserError
from threefold.files import LARGEST_TEXT, content_of, no_file, open_regular, parse_json, shown, text_of

MANIFEST: Final = "checkpoint.json"
FORMAT: Final = "threefold-checkpoint"
_LARGEST_RECORD: Final = 2 << 30  # metrics of some five million steps
_LONGEST_LINE: Final = 16 << 20


def is_plain_name(name: Any) -> bool:
    """Return whether a value is the name of a file directly in a folder: no separators, not absolute."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & set("/\\\0")


class FolderFiles:
    """Files of a run, a checkpoint or a model folder, to be read by their names.

    A file is read if it is a regular one, is in the folder with links resolved (in a cache of Hugging Face, also among
    its blobs) and, in a checkpoint, is named in the manifest with its size. The folder itself may be a link.
    """

    def __init__(self, folder: Path, sizes: Mapping[str, int] | None = None) -> None:
        """`sizes` are those of the files that the manifest names, where it has been read already."""
        self.folder, self._sizes = folder, sizes

    @cached_property
    def listed(self) -> Mapping[str, int] | None:
        """Sizes of the files that the manifest of a checkpoint names; None in other folders."""
        if self._sizes is not None:
            return self._sizes
        with suppress(UserError, AttributeError, KeyError, TypeError):
            document = parse_json(text_of(self.folder / MANIFEST, self._read(MANIFEST, LARGEST_TEXT)), MANIFEST)
            sizes = {name: held["bytes"] for name, held in document["files"].items()}
            if document["format"] == FORMAT and all(type(size) is int for size in sizes.values()):
                return sizes
        return None

    def holds(self, name: str) -> bool:
        """Return whether the folder has an entry of this name, in a checkpoint one that its manifest names."""
        path = self.folder / name
        return self._is_listed(name) and os.path.lexists(path) and not _is_sink(path)

    def path(self, name: str) -> Path:
        """Return the path of a file, links resolved, for a library that opens it; OSError if it may not be read."""
        path = self._place(name)
        self._size(path)
        return path

    def size(self, name: str) -> int:
        """Return the size of a file in bytes; raise OSError if it may not be read."""
        return self._size(self._place(name))

    def opened(self, name: str) -> io.FileIO:
        """Open a file for reading, unbuffered; raise OSError, whose `strerror` is a clause, if it may not be read."""
        file = open_regular(self._place(name), os.O_NOFOLLOW)
        size = os.fstat(file.fileno()).st_size
        wanted = None if name == MANIFEST else (self.listed or {}).get(name)
        if wanted is not None and size != wanted:
            file.close()
            raise OSError(errno.EINVAL, f"it has {size:,} bytes and was written with {wanted:,}")
        return file

    def record(self, name: str) -> io.BufferedReader:
        """Open a file of lines as `opened` does, for `lines_of`; raise OSError also if it has more than 2 GiB."""
        file = self.opened(name)
        if (size := os.fstat(file.fileno()).st_size) > _LARGEST_RECORD:
            file.close()
            raise OSError(errno.EFBIG, f"it holds {size:,} bytes and {_LARGEST_RECORD:,} are allowed")
        return io.BufferedReader(file)

    def text(self, name: str, called: str = "", limit: int = LARGEST_TEXT) -> str:
        """Return the text of a file as `files.read_text` does; raise UserError if it may not be read."""
        return text_of(self.folder / name, self._read(name, limit, called), called)

    def json(self, name: str) -> Any:
        """Return the value in a JSON file; raise UserError as `text` does, or if it is not JSON."""
        return parse_json(self.text(name), shown(self.folder / name))

    def _size(self, place: Path) -> int:
        found = os.stat(place)
        if problem := no_file(found.st_mode):
            raise OSError(errno.EINVAL, problem)
        return found.st_size

    def _place(self, name: str) -> Path:
        if not is_plain_name(name):
            raise OSError(errno.EINVAL, "its name is not that of a file in its folder")
        if not self._is_listed(name):
            raise OSError(errno.EINVAL, f"the {MANIFEST} beside it does not name it")
        path = self.folder / name
        if path.is_symlink():
            path = Path(os.path.realpath(path))
            if not any(place in path.parents for place in self._places):
                raise OSError(errno.ELOOP, "it is a link that leads out of its folder")
        return path

    def _read(self, name: str, limit: int, called: str = "") -> bytes:
        try:
            with self.opened(name) as file:
                return content_of(file, self.folder / name, called, limit)
        except OSError as error:
            raise UserError(f"Cannot read {called}{shown(self.folder / name)}: {error.strerror}.") from None

    def _is_listed(self, name: str) -> bool:
        return name == MANIFEST or self.listed is None or name in self.listed

    @cached_property
    def _places(self) -> tuple[Path, ...]:
        here = Path(os.path.realpath(self.folder))
        # models--NAME/snapshots/REVISION/FILE is a link to models--NAME/blobs/HASH.
        caches = (each.parents[1] for each in (here, *here.parents) if each.parent.name == "snapshots")
        return (here, *(cache / "blobs" for cache in caches))


_SINKS: Final = (os.makedev(1, 3), os.makedev(1, 7))
"""Devices that keep nothing, /dev/null and /dev/full: a link to one stays, as of a user who wants no such file."""


def lines_of(file: io.BufferedReader) -> Iterator[bytes]:
    """Yield the lines of a file with their ends, and very long ones in parts, of which only the last has an end."""
    while line := file.readline(_LONGEST_LINE):
        yield line


def nofollow_file(path: Path) -> Path:
    """Return the path of a file to write, after removing a link that has its name.

    Raises OSError if a folder, a pipe or a device has its name, for which a writer might wait forever.
    """
    if _is_sink(path):
        return path
    with suppress(FileNotFoundError):
        mode = os.lstat(path).st_mode
        if stat.S_ISLNK(mode):
            path.unlink(missing_ok=True)
        elif stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        elif problem := no_file(mode):
            raise OSError(errno.EINVAL, problem.partition(";")[0], str(path))
    return path


def _is_sink(path: Path) -> bool:
    with suppress(OSError):
        found = os.stat(path)
        return stat.S_ISCHR(found.st_mode) and found.st_rdev in _SINKS
    return False


def open_nofollow(path: Path, flags: int = os.O_TRUNC) -> int:
    """Open an `nofollow_file` to write, with flags such as O_APPEND, and return its descriptor."""
    flags |= os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC
    return os.open(nofollow_file(path), flags if _is_sink(path) else flags | os.O_NOFOLLOW, 0o666)


def write_nofollow(path: Path, content: str | bytes, *, durable: bool = False) -> None:
    """Write a file, in place of a link of its name; `durable` flushes it to disk."""
    with open(open_nofollow(path), "wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        if durable:
            file.flush()
            os.fsync(file.fileno())


def nofollow_folder(path: Path) -> Path:
    """Make a folder in the folder of a run, in place of a link of its name; return its path."""
    if path.is_symlink():
        with suppress(FileNotFoundError, IsADirectoryError):  # another rank has made it meanwhile
            path.unlink()
    path.mkdir(parents=True, exist_ok=True)
    return path
