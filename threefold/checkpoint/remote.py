"""Copies of a run's checkpoints at an `fsspec` address, such as `s3://bucket/run`.

Object stores cannot rename, so the manifest checkpoint.json marks a copy as complete: it is uploaded after all
other files and deleted before them. It contains its own checksum, so a partial manifest does not count.
"""

import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from filelock import FileLock

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import FOLDER, complete, path_of, superfluous
from threefold.checkpoint.manifest import MANIFEST, PARTIAL, read_manifest
from threefold.checksums import is_intact
from threefold.errors import UserError
from threefold.files import hide_secrets, shown
from threefold.foreign import own_file
from threefold.host import WorkThread
from threefold.output import sync

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


_PROBE: Final = ".threefold-probe"


class RemoteCheckpoints:
    """Checkpoints at an `fsspec` address; methods raise UserError if it cannot be read or written."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        with self._failures("be opened"):
            from fsspec.core import url_to_fs

            self._files: AbstractFileSystem
            self._files, self._root = url_to_fs(self.address)

    def steps(self) -> list[int]:
        with self._failures("be read"):
            return [step for step, name in sorted(self._folders().items()) if self._is_complete(name)]

    def incomplete(self) -> dict[int, bool]:
        """Return the steps of all others, oldest first: True if damaged, False if an upload was interrupted."""
        with self._failures("be read"):
            others = [(step, name) for step, name in sorted(self._folders().items()) if not self._is_complete(name)]
            return {step: self._files.exists(f"{self._root}/{name}/{MANIFEST}") for step, name in others}

    def upload(self, folder: Path) -> None:
        """Copy a complete checkpoint, replacing any of the same step; after a failure it is complete or not listed."""
        there = f"{self._root}/{folder.name}"
        with self._failures("be written"):
            self._remove(there)
            self._make(there)
            sizes = {name: record.bytes for name, record in read_manifest(folder).files.items()}
            for name in sizes:
                self._files.put_file(str(folder / name), f"{there}/{name}")
            self._files.invalidate_cache()
            for name, size in sizes.items():
                if (found := self._files.size(f"{there}/{name}")) != size:
                    raise OSError(f"{name} has {found:,} bytes there instead of {size:,}")
            self._flush(there, sizes)
            self._files.put_file(str(folder / MANIFEST), f"{there}/{MANIFEST}")
            self._flush(there, [MANIFEST])

    def prune(self, keep: int, keep_every: int | None, newest: int) -> None:
        """Delete checkpoints up to the step `newest` that `superfluous` names, and incomplete ones."""
        whole = [step for step in self.steps() if step <= newest]
        kept = set(whole) - set(superfluous(whole, keep, keep_every))
        with self._failures("be written"):
            for step, name in self._folders().items():
                if step <= newest and step not in kept:
                    self._remove(f"{self._root}/{name}")

    def remove(self, step: int) -> None:
        with self._failures("be written"):
            self._remove(f"{self._root}/{path_of(Path(), step).name}")

    def download(self, step: int, run_dir: Path) -> Path:
        """Copy a complete checkpoint into a run's folder, atomically, and return its folder."""
        from threefold.checkpoint.save import put_in_place  # imports torch, which reading an address does not need

        path = path_of(run_dir, step)
        partial, there = path.with_name(path.name + PARTIAL), f"{self._root}/{path.name}"
        with self._failures("be read"):
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                self._files.get_file(f"{there}/{MANIFEST}", str(partial / MANIFEST))
                manifest = read_manifest(partial)
                for name in manifest.files:
                    self._files.get_file(f"{there}/{name}", str(partial / name))
                manifest.check_sizes()
                for name in manifest.files:
                    manifest.check_content(name)
                    sync(partial / name)
                sync(partial / MANIFEST)
                sync(partial)
                put_in_place(partial, path)
            except DamagedCheckpoint as damage:
                raise UserError(f"{shown(self.address)}/{path.name} is damaged: {damage.reason}; remove it.") from None
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return path

    def require_writable(self) -> None:
        """Write a small file and delete it; raises a `UserError` if that fails, for example without such a bucket."""
        probe = f"{self._root}/{_PROBE}"
        with self._failures("be written"):
            try:
                self._make(self._root)
                self._files.pipe_file(probe, b"written by threefold before a run\n")
            except FileNotFoundError:
                if self._files.exists(self._first):
                    raise
                raise UserError(
                    f"checkpoint.remote is {shown(self.address)}, but there is no {shown(self._first)}, which a run "
                    "does not make; correct the address, or make it."
                ) from None
        with suppress(Exception):  # where nothing may be deleted, the next run replaces it
            self._files.rm_file(probe)

    def require_apart(self, run_dir: Path) -> None:
        """Raise `UserError` if the address is a folder that is, contains or lies in the run's, links resolved."""
        from fsspec.implementations.local import LocalFileSystem

        if not isinstance(self._files, LocalFileSystem):
            return
        there = Path(os.path.realpath(self._root))
        for own in (run_dir, run_dir / FOLDER):
            here = Path(os.path.realpath(own))
            if there == here or there in here.parents or here in there.parents:
                what = "is" if there == here else "contains" if there in here.parents else "lies in"
                raise UserError(
                    f"checkpoint.remote is {shown(self.address)}, which {what} the run's folder {shown(own)}, where "
                    "copies would replace the checkpoints that they are made of; choose a folder apart from it."
                )

    @property
    def _first(self) -> str:
        """The bucket, or the first folder of a path."""
        return self._root[: len(self._root) - len(self._root.lstrip("/"))] + self._root.lstrip("/").partition("/")[0]

    def _make(self, folder: str) -> None:
        """Make a folder where there are folders; never a bucket, nor the first folder of a path."""
        self._files.invalidate_cache()
        if self._files.exists(self._first):
            self._files.makedirs(folder, exist_ok=True)

    def _folders(self) -> dict[int, str]:
        self._files.invalidate_cache()
        try:
            names = [entry.rstrip("/").rpartition("/")[2] for entry in self._files.ls(self._root, detail=False)]
        except FileNotFoundError:
            return {}
        found = {int(name[5:]): name for name in names if name.startswith("step_") and name[5:].isdigit()}
        return {step: name for step, name in found.items() if path_of(Path(), step).name == name}

    def _is_complete(self, name: str) -> bool:
        try:
            return is_intact(self._files.cat_file(f"{self._root}/{name}/{MANIFEST}").decode("utf-8"))
        except (FileNotFoundError, UnicodeDecodeError):
            return False

    def _remove(self, there: str) -> None:
        """Delete a folder, its manifest first, so that it counts as incomplete from the start."""
        self._files.invalidate_cache()
        if self._files.exists(f"{there}/{MANIFEST}"):
            self._files.rm_file(f"{there}/{MANIFEST}")
        if self._files.exists(there):
            self._files.rm(there, recursive=True)

    def _flush(self, there: str, names: Iterable[str]) -> None:
        """Flush files to disk if the address is local; object stores are durable at once."""
        from fsspec.implementations.local import LocalFileSystem

        if isinstance(self._files, LocalFileSystem):
            for name in names:
                sync(Path(there, name))
            sync(Path(there))
            sync(Path(there).parent)

    @contextmanager
    def _failures(self, verb: str) -> Iterator[None]:
        """Turn any package's file-system errors into one-sentence `UserError`s."""
        try:
            yield
        except UserError:
            raise
        except ImportError as error:
            raise UserError(
                f"checkpoint.remote is {shown(self.address)}, which needs another package ({_reason(error)}); "
                "install it, such as s3fs for s3://."
            ) from None
        except Exception as error:
            raise UserError(
                f"checkpoint.remote is {shown(self.address)}, which cannot {verb}: {_reason(error)}."
            ) from None  # a traceback would show the address of a proxy with its password


class Mirror:
    """Background copier of a run's checkpoints to a remote address, on one rank.

    A checkpoint still queued when a newer one arrives is skipped, unless it is kept for good. Retention at the address
    is as in `superfluous`. `failed` receives a sentence about each checkpoint that could not be copied; `copied` is
    called after each one that was.
    """

    def __init__(
        self,
        remote: RemoteCheckpoints,
        keep: int,
        keep_every: int | None,
        failed: Callable[[str], None],
        copied: Callable[[], None],
    ) -> None:
        self._remote, self._keep, self._keep_every = remote, keep, keep_every
        self._failed, self._copied = failed, copied
        self._thread = WorkThread("threefold-remote")
        self._lock = threading.Lock()
        self._waiting: dict[int, Path] = {}
        self._current: Path | None = None

    @property
    def in_use(self) -> frozenset[Path]:
        """Local folders that are still to be read."""
        with self._lock:
            return frozenset(self._waiting.values()) | ({self._current} if self._current else frozenset())

    def add(self, step: int, folder: Path) -> None:
        with self._lock:
            if self._keep:
                every = self._keep_every
                self._waiting = {old: path for old, path in self._waiting.items() if every and old % every == 0}
            self._waiting[step] = folder
        self._thread.do(self._copy_next)

    def remove(self, step: int, progress: Callable[[], None] = lambda: None) -> None:
        """Delete the remote copy of a step after the current copy; `progress` is called while that takes its time."""
        while not self._thread.wait(0.5):
            progress()
        try:
            self._remote.remove(step)
        except UserError as error:
            self._failed(str(error))

    def end(self, seconds: float | None = None) -> None:
        """End the thread after its queued work, waiting at most `seconds` (None for no limit)."""
        self._thread.wait(seconds)
        self._thread.end()

    def _copy_next(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            step = next(iter(self._waiting))
            self._current = self._waiting.pop(step)
        try:
            self._remote.upload(self._current)
            self._remote.prune(self._keep, self._keep_every, step)
            self._copied()
        except UserError as error:
            self._failed(str(error))
        except Exception as error:  # such as a checkpoint that was deleted meanwhile
            self._failed(f"{self._current} cannot be copied to {shown(self._remote.address)}: {_reason(error)}.")
        finally:
            with self._lock:
                self._current = None


def look_at_remote(address: str, run_dir: Path, resumes: bool, writes: bool = True) -> Path | None:
    """Check a remote address before a run; when resuming, download its newest checkpoint if newer than the run's.

    If several processes share the folder, only one of them copies. Returns the folder of the copy, or None. UserError
    if the newest remote checkpoint is damaged, a new run would mix its checkpoints with those at the address, the
    address is in the run's folder, or it cannot be written, which is tried if this process `writes`.
    """
    remote = RemoteCheckpoints(address)
    remote.require_apart(run_dir)
    there, incomplete = remote.steps(), remote.incomplete()
    where = f"checkpoint.remote is {shown(address)}"
    if not resumes and there:
        raise UserError(f"{where}, which already has checkpoints; resume with --resume, or choose another address.")
    if not resumes and incomplete:
        raise UserError(
            f"{where}, whose {path_of(Path(), max(incomplete)).name} is not a complete checkpoint, and a run that "
            "begins anew would delete it; choose another address, restore it and resume with --resume, or remove it."
        )
    newest_there = max((step for step in incomplete if incomplete[step]), default=-1)
    if newest_there > max(there + [each.step for each in complete(run_dir)], default=-1):
        name = path_of(Path(), newest_there).name
        raise UserError(f"{shown(address)}/{name} is damaged: its {MANIFEST} is not as it was written; remove it.")
    if writes:
        remote.require_writable()
    if not there:
        return None
    try:
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        with FileLock(own_file(run_dir / FOLDER / ".remote.lock")):
            here = [checkpoint.step for checkpoint in complete(run_dir)]
            return remote.download(there[-1], run_dir) if not here or here[-1] < there[-1] else None
    except OSError as error:
        raise UserError(f"{shown(run_dir)} cannot be written ({error.strerror}); choose another --run-dir.") from None


def _reason(error: Exception) -> str:
    return hide_secrets(" ".join(str(error).split()))[:300].removesuffix(".") or type(error).__name__
