"""Copies of a run's checkpoints at an `fsspec` address, such as `s3://bucket/run`.

Object stores cannot rename, so the manifest checkpoint.json marks a copy as complete: it is uploaded after all
other files and deleted before them. It contains its own checksum, so a partial manifest does not count. A copy that
replaces a complete one is first made beside it, as `step_00000100.new`, and counts from then on.
"""

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from filelock import FileLock

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import (
    CONFIG,
    FOLDER,
    Damaged,
    check_whole,
    complete,
    folders,
    inspect_checkpoint,
    path_of,
    superfluous,
)
from threefold.checkpoint.manifest import MANIFEST, PARTIAL, read_manifest
from threefold.checksums import is_intact
from threefold.errors import UserError
from threefold.files import first_of, hide_secrets, shown
from threefold.foreign import FolderFiles, nofollow_file
from threefold.output import sync
from threefold.resilience.ownership import OWNER_FILE, Claimant, Owner

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


_PROBE: Final = ".threefold-probe"
_NEW: Final = ".new"
"""Suffix of a copy that will replace a complete one of the same step; once complete, it counts in its place."""


class AddressTaken(UserError):
    """An address that belongs to another run, or to another start of the same run."""


class DamagedCopy(UserError):
    """A copy whose manifest was complete and that is not as it was written; `place` is its address."""

    def __init__(self, place: str, reason: str) -> None:
        super().__init__(f"{shown(place)} is damaged: {reason}; remove it.")
        self.place, self.reason = place, reason


class RemoteCheckpoints:
    """Checkpoints at an `fsspec` address; methods raise UserError if it cannot be read or written.

    Those that write raise `AddressTaken` once the record at the address is not `owner`, unless that is None.
    """

    def __init__(self, address: str, owner: Owner | None = None) -> None:
        self.address, self._owner = address.rstrip("/"), owner
        with self._failures("be opened"):
            from fsspec.core import url_to_fs

            self._files: AbstractFileSystem
            self._files, self._root = url_to_fs(self.address)

    def steps(self) -> list[int]:
        with self._failures("be read"):
            return sorted(self._complete())

    def incomplete(self) -> dict[int, bool]:
        """Return the steps of all others, oldest first: True if damaged, False if an upload was interrupted."""
        with self._failures("be read"):
            known, found = self._complete(), self._folders()
            return {
                step: any(self._files.exists(f"{self._root}/{name}/{MANIFEST}") for name in found[step])
                for step in sorted(found.keys() - known.keys())
            }

    def owner(self) -> Owner | None:
        """Return the owner of the address; None if there is none."""
        where = shown(f"{self.address}/{OWNER_FILE}")
        with self._failures("be read"):
            self._files.invalidate_cache()
            try:
                return Owner.parse(self._files.cat_file(f"{self._root}/{OWNER_FILE}").decode("utf-8", "replace"), where)
            except FileNotFoundError:
                return None

    def require_usable(self, by: Claimant) -> Owner | None:
        """Return the owner of the address; raise `AddressTaken` if a run may not use the address because of it."""
        owner = self.owner()
        if owner is not None:
            with self._failures("be read"):
                has_copies = bool(self._folders())
            if reason := by.refusal(owner, has_copies):
                raise AddressTaken(
                    f"checkpoint.remote is {shown(self.address)}, which belongs to {owner}, {reason}; give each run an "
                    f"address of its own, or remove {shown(f'{self.address}/{OWNER_FILE}')} once that run has ended to "
                    "hand over what is there."
                )
        return owner

    def claim(self, by: Claimant) -> tuple[Owner | None, Owner]:
        """Make a run the owner of the address; from then on, what this object writes there is the run's.

        Returns the owner so far, None if there was none, and the new one.
        """
        before = self.require_usable(by)
        self._owner = owner = by.claimed(before)
        path = f"{self._root}/{OWNER_FILE}"
        with self._failures("be written"):
            self._make(self._root)
            if self._is_local:  # where a killed process would leave half a file
                self._files.pipe_file(f"{path}{_NEW}", owner.text().encode())
                os.replace(f"{path}{_NEW}", path)
            else:
                self._files.pipe_file(path, owner.text().encode())
            self._flush(self._root, [OWNER_FILE])
        return before, owner

    def upload(self, folder: Path) -> None:
        """Copy a complete checkpoint; it is listed when it is complete. One of the same step is there until then."""
        there = f"{self._root}/{folder.name}"
        self._require_owner()
        with self._failures("be written"):
            replaces = self._is_complete(folder.name)
            place = there + _NEW if replaces else there
            self._remove(place)
            self._make(place)
            sizes = {name: record.bytes for name, record in read_manifest(folder).files.items()}
            stored = FolderFiles(folder, sizes)
            for name in sizes:
                self._files.put_file(str(stored.path(name)), f"{place}/{name}")
            self._require_sizes(place, sizes)
            self._flush(place, sizes)
            self._require_owner()  # again, as copying may have taken hours
            self._files.put_file(str(stored.path(MANIFEST)), f"{place}/{MANIFEST}")
            self._flush(place, [MANIFEST])
            if replaces:
                self._replace(place, there, sizes)
            else:
                self._remove(there + _NEW)

    def prune(self, keep: int, keep_every: int | None, newest: int, best: int | None = None) -> None:
        """Delete checkpoints up to the step `newest` that `superfluous` names, and incomplete ones."""
        self._require_owner()
        with self._failures("be written"):
            known = self._complete()
            whole = sorted(step for step in known if step <= newest)
            kept = {known[step] for step in set(whole) - set(superfluous(whole, keep, keep_every, best))}
            for step, names in self._folders().items():
                for name in names:
                    if step <= newest and name not in kept:
                        self._remove(f"{self._root}/{name}")

    def remove(self, step: int) -> None:
        self._require_owner()
        with self._failures("be written"):
            for name in self._folders().get(step, ()):
                self._remove(f"{self._root}/{name}")

    def download(self, step: int, run_dir: Path) -> Path:
        """Copy a complete checkpoint into a run's folder, atomically, and return its folder.

        Raises `DamagedCopy` if it is not as it was written.
        """
        from threefold.checkpoint.save import put_in_place  # imports torch, which reading an address does not need

        path = path_of(run_dir, step)
        partial = path.with_name(path.name + PARTIAL)
        with self._failures("be read"):
            name_there = self._complete().get(step, path.name)
            there, place = f"{self._root}/{name_there}", f"{self.address}/{name_there}"
            try:
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir(parents=True)
                self._files.get_file(f"{there}/{MANIFEST}", str(partial / MANIFEST))
                manifest = read_manifest(partial)
                self._require_sizes(there, {name: record.bytes for name, record in manifest.files.items()})
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
                raise DamagedCopy(place, damage.reason) from None
            except _WrongSize as wrong:
                raise DamagedCopy(place, str(wrong)) from None
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return path

    def restore(self, run_dir: Path, here: int) -> "Restored":
        """Download the newest copy that is as it was written, if it is of a later step than `here`.

        Raises `DamagedCopy` if there are only damaged ones and the run has no checkpoint: `here` is negative.
        """
        whole, broken = self.steps(), [step for step, is_damaged in self.incomplete().items() if is_damaged]
        damaged = list[DamagedCopy]()
        for step in sorted({*whole, *broken}, reverse=True):
            if step <= here:
                break
            try:
                if step in broken:
                    name = path_of(Path(), step).name
                    raise DamagedCopy(f"{self.address}/{name}", f"its {MANIFEST} is not as it was written")
                return Restored(self.download(step, run_dir), _passed_over(damaged, path_of(run_dir, step)))
            except DamagedCopy as damage:
                damaged.append(damage)
        if len(damaged) > 1 and here < 0:
            raise UserError(f"No copy can be used: {_listed(damaged)} are damaged; remove them.")
        if damaged and here < 0:
            raise damaged[0]
        return Restored(None, _passed_over(damaged, path_of(run_dir, here)))

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
        """Raise `UserError` if the address is a folder that is, contains or lies in the run's, links resolved.

        Nor may it be the folder of another run, or lie among its checkpoints.
        """
        if not self._is_local:
            return
        there = Path(os.path.realpath(self._root))
        for folder in (run_dir, run_dir / FOLDER):
            here = Path(os.path.realpath(folder))
            if there == here or there in here.parents or here in there.parents:
                what = "is" if there == here else "contains" if there in here.parents else "lies in"
                raise UserError(
                    f"checkpoint.remote is {shown(self.address)}, which {what} the run's folder {shown(folder)}, where "
                    "copies would replace the checkpoints that they are made of; choose a folder apart from it."
                )
        among = [place.parent for place in (there, *there.parents) if place.name == FOLDER]
        for other in (there, *among):
            if all(map(FolderFiles(other).holds, (CONFIG, FOLDER))):
                raise UserError(
                    f"checkpoint.remote is {shown(self.address)}, which is the folder of the run {shown(other)} or "
                    "lies among its checkpoints, which copies would replace and delete; choose a folder apart from it."
                )

    @property
    def _first(self) -> str:
        """The bucket, or the first folder of a path."""
        return self._root[: len(self._root) - len(self._root.lstrip("/"))] + self._root.lstrip("/").partition("/")[0]

    @property
    def _is_local(self) -> bool:
        from fsspec.implementations.local import LocalFileSystem

        return isinstance(self._files, LocalFileSystem)

    def _make(self, folder: str) -> None:
        """Make a folder where there are folders; never a bucket, nor the first folder of a path."""
        self._files.invalidate_cache()
        if self._files.exists(self._first):
            self._files.makedirs(folder, exist_ok=True)

    def _folders(self) -> dict[int, list[str]]:
        """Return the names of all folders named like a checkpoint, by step; one that will replace another first."""
        self._files.invalidate_cache()
        try:
            names = {entry.rstrip("/").rpartition("/")[2] for entry in self._files.ls(self._root, detail=False)}
        except FileNotFoundError:
            return {}
        found: dict[int, list[str]] = {}
        for name in sorted(names, reverse=True):
            plain = name.removesuffix(_NEW)
            if plain[5:].isdigit() and plain == path_of(Path(), int(plain[5:])).name:
                found.setdefault(int(plain[5:]), []).append(name)
        return found

    def _complete(self) -> dict[int, str]:
        """Return the name of the complete copy of each step."""
        found = ((step, next(filter(self._is_complete, names), None)) for step, names in self._folders().items())
        return {step: name for step, name in found if name is not None}

    def _is_complete(self, name: str) -> bool:
        try:
            return is_intact(self._files.cat_file(f"{self._root}/{name}/{MANIFEST}").decode("utf-8"))
        except (FileNotFoundError, UnicodeDecodeError):
            return False

    def _require_owner(self) -> None:
        if self._owner is None:
            return
        now, record = self.owner(), f"{self.address}/{OWNER_FILE}"
        if now is None:
            raise AddressTaken(
                f"{shown(record)} is gone, so checkpoint.remote is no longer this run's; a run that resumes takes it "
                "again."
            )
        if now.claim != self._owner.claim:
            raise AddressTaken(
                f"checkpoint.remote is {shown(self.address)}, which belongs to {now}, so this process leaves what is "
                "there alone; end one of the two runs, and give each an address of its own."
            )

    def _require_sizes(self, there: str, sizes: dict[str, int]) -> None:
        self._files.invalidate_cache()
        for name, size in sizes.items():
            try:
                found = self._files.size(f"{there}/{name}")
            except FileNotFoundError:
                raise _WrongSize(f"its {shown(name)} is missing") from None
            if found != size:
                raise _WrongSize(f"its {shown(name)} has {found:,} bytes and was written with {size:,}")

    def _replace(self, new: str, there: str, names: Iterable[str]) -> None:
        """Put a complete copy in the place of another; at every moment one of the two is complete."""
        if self._is_local:
            from threefold.checkpoint.save import put_in_place

            put_in_place(Path(new), Path(there))
            return
        self._remove(there)
        for name in (*names, MANIFEST):
            self._files.cp_file(f"{new}/{name}", f"{there}/{name}")
        self._remove(new)

    def _remove(self, there: str) -> None:
        """Delete a folder, its manifest first, so that it counts as incomplete from the start."""
        self._files.invalidate_cache()
        if self._files.exists(f"{there}/{MANIFEST}"):
            self._files.rm_file(f"{there}/{MANIFEST}")
        if self._files.exists(there):
            self._files.rm(there, recursive=True)

    def _flush(self, there: str, names: Iterable[str]) -> None:
        """Flush files to disk if the address is local; object stores are durable at once."""
        if self._is_local:
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
                f"checkpoint.remote is {shown(self.address)}, which needs another package ({message_of(error)}); "
                "install it, such as s3fs for s3://."
            ) from None
        except Exception as error:
            raise UserError(
                f"checkpoint.remote is {shown(self.address)}, which cannot {verb}: {message_of(error)}."
            ) from None  # a traceback would show the address of a proxy with its password


class _WrongSize(OSError):
    """A file at an address is missing or has another size than was written."""


class Restored(NamedTuple):
    """Outcome of looking for a copy: the folder of the one that was downloaded, if any, and lines about others."""

    copy: Path | None = None
    lines: tuple[str, ...] = ()


def look_at_remote(address: str, run: Claimant, writes: bool = True, last: int | None = None) -> Restored:
    """Check a remote address before a run; when resuming, download its newest good copy if newer than the run's.

    If several processes share the folder, only one of them copies. The run's own checkpoints count if they are good as
    far as can be seen without reading their tensors; only those of the checkpoint of step `last` are read.

    Raises:
        UserError: all copies are damaged, a new run would mix its checkpoints with those at the address, the address is
            another run's or in the run's folder, or it cannot be written, which is tried if this process `writes`.
    """
    remote, run_dir = RemoteCheckpoints(address), run.run_dir
    remote.require_apart(run_dir)
    owner = remote.require_usable(run)
    there, incomplete = remote.steps(), remote.incomplete()
    where = f"checkpoint.remote is {shown(address)}"
    if not run.resumes and there:
        raise UserError(f"{where}, which already has checkpoints; resume with --resume, or choose another address.")
    if not run.resumes and incomplete:
        raise UserError(
            f"{where}, whose {path_of(Path(), max(incomplete)).name} is not a complete checkpoint, and a run that "
            "begins anew would delete it; choose another address, restore it and resume with --resume, or remove it."
        )
    if writes:
        remote.require_writable()
    if not there and not any(incomplete.values()):
        return Restored()
    try:
        (run_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        with FileLock(nofollow_file(run_dir / FOLDER / ".remote.lock")):
            if owner is not None:
                run.adopt(owner)  # before its checkpoints are here
            return remote.restore(run_dir, _newest_good(run_dir, last))
    except OSError as error:
        raise UserError(f"{shown(run_dir)} cannot be written ({error.strerror}); choose another --run-dir.") from None


def replace_damaged(address: str, run_dir: Path, damaged: Damaged) -> Restored:
    """Replace checkpoints that loading found damaged by the newest good copy of them, or of a later step than the rest.

    Returns nothing if there is none, or if the address cannot be read.
    """
    here = max((each.step for each in complete(run_dir) if each.path not in damaged), default=-1)
    with suppress(UserError):
        copy, lines = RemoteCheckpoints(address).restore(run_dir, here)
        if copy is not None and copy in damaged:
            lines = (*lines, f"{copy} was damaged ({damaged[copy]}); its copy at {shown(address)} has replaced it.")
        return Restored(copy, lines)
    return Restored()


def _newest_good(run_dir: Path, last: int | None) -> int:
    """Return the step of a run's newest checkpoint that is good, or -1."""
    for path in reversed(folders(run_dir)):
        with suppress(DamagedCheckpoint):
            checkpoint, _ = inspect_checkpoint(path)
            if checkpoint.step == last:
                check_whole(checkpoint)  # as nothing will read its tensors
            return checkpoint.step
    return -1


def _passed_over(damaged: list[DamagedCopy], used: Path) -> tuple[str, ...]:
    verb = "was" if len(damaged) == 1 else "were"
    line = f"{_listed(damaged)} {verb} passed over; {shown(used)} is used, the newest that is good."
    return (line,) if damaged else ()


def _listed(damaged: list[DamagedCopy]) -> str:
    return first_of([f"{shown(each.place)} ({each.reason})" for each in damaged], 3, separator=" and ")


def message_of(error: Exception) -> str:
    """Return the message of an error of a file system, as the end of a sentence."""
    return hide_secrets(" ".join(str(error).split()))[:300].removesuffix(".") or type(error).__name__
