"""Atomic saving of a checkpoint, and writer.json: when, by which layout and by which versions it was written.

writer.json is not needed to open a checkpoint. It is a separate file because earlier releases refuse a manifest with
unknown fields. Older checkpoints lack it; their layout is read from `config.yaml`.
"""

import errno
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from math import prod
from pathlib import Path
from typing import Any, Final

import yaml
from torch import Tensor

from threefold.checkpoint.folder import DIVERGED, complete, path_of, remove, remove_partial
from threefold.checkpoint.manifest import PARTIAL, REPLACED, Facts, write_manifest
from threefold.checkpoint.tensors import save_tensors
from threefold.comm.axis import Axis
from threefold.comm.layout import AXES, Layout
from threefold.config.schema import ParallelConfig
from threefold.errors import ProcessFault, UserError
from threefold.files import read_json, read_text
from threefold.host import exchange_paths
from threefold.output import sync, write_durably

WRITER: Final = "writer.json"
_FORMAT: Final = "threefold-writer"
_CONFIG: Final = "config.yaml"


@dataclass(frozen=True)
class WriterRecord:
    """Record of the run that wrote a checkpoint.

    Attributes:
        layout: `parallel` settings that describe the run's layout, by name; None if unknown.
        saved: time of saving; None if unknown.
        versions: versions of the package and of torch, by name.
        weights_only: whether the optimizer state was left out on purpose.
    """

    layout: Mapping[str, Any] | None = None
    saved: datetime | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    weights_only: bool = False

    @property
    def ranks(self) -> int | None:
        """Number of processes that wrote the checkpoint; None if unknown."""
        return None if self.layout is None else prod(int(self.layout.get(axis, 1)) for axis in AXES)

    @property
    def text(self) -> str:
        """Content of writer.json."""
        document = {
            "format": _FORMAT,
            "version": 1,
            "saved": self.saved.isoformat(timespec="seconds") if self.saved else None,
            "layout": None if self.layout is None else dict(self.layout),
            "versions": dict(self.versions),
            "weights_only": self.weights_only,
        }
        return json.dumps(document, indent=2) + "\n"

    def __str__(self) -> str:
        """Return the layout on one line, such as `dp 2 · tp 2 · pp 2, zero 1`."""
        if self.layout is None:
            return "unknown"
        sizes = {axis: int(self.layout.get(axis, 1)) for axis in (*AXES, "ep")}
        zero, schedule = self.layout.get("zero", 0), self.layout.get("schedule")
        more = [f"zero {zero}"] if zero else []
        more += [str(schedule)] if schedule and sizes["pp"] > 1 else []
        return ", ".join((str(Layout(**sizes)), *more))


def record_of(parallel: ParallelConfig) -> WriterRecord:
    """Return the record for a checkpoint written now by a run with these settings."""
    settings = parallel.settings()
    kept = ("dp", "tp", "pp", "cp", "ep", "zero", "zero_shards", "schedule", "stage_chunks", "sequence_parallel")
    return WriterRecord({name: settings[name] for name in kept if name in settings}, _now(), _versions())


def record_of_layout(layout: Layout) -> WriterRecord:
    """Return the record for a checkpoint written now by a custom training loop."""
    return WriterRecord({axis: layout.size(axis) for axis in ("dp", "tp", "pp", "cp", "ep")}, _now(), _versions())


def read_writer(folder: Path) -> WriterRecord:
    """Return the record of a checkpoint's writer, for older checkpoints from the config; unreadable facts are None."""
    try:
        document = read_json(folder / WRITER)
    except UserError:
        return WriterRecord(_layout_of_config(folder))
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        return WriterRecord(_layout_of_config(folder))
    versions = document.get("versions")
    return WriterRecord(
        _usable(document.get("layout")),
        _time(document.get("saved")),
        {str(name): str(value) for name, value in versions.items()} if isinstance(versions, dict) else {},
        document.get("weights_only") is True,
    )


def _layout_of_config(folder: Path) -> dict[str, Any] | None:
    """Return the layout in the stored config.yaml, or None if unreadable."""
    try:
        document = yaml.safe_load(read_text(folder / _CONFIG))
    except (UserError, yaml.YAMLError, ValueError, RecursionError):
        return None
    return _usable(document.get("parallel", {})) if isinstance(document, dict) else None


def _usable(layout: Any) -> dict[str, Any] | None:
    if not isinstance(layout, dict):
        return None
    known = {axis: layout.get(axis, 1) for axis in (*AXES, "ep")}
    if not all(type(size) is int and 1 <= size < 1 << 31 for size in known.values()):
        return None
    return layout if known["dp"] % known["ep"] == 0 else None


def _time(text: Any) -> datetime | None:
    try:
        found = datetime.fromisoformat(text)
    except (TypeError, ValueError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def _now() -> datetime:
    return datetime.now(UTC)


def _versions() -> dict[str, str]:
    found = {}
    for package in ("threefold", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a folder of sources
            continue
    return found


_LIMITS: Final = tuple(f"[Errno {number}]" for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""Text in a rank's error if its process ran out of open files or memory; ranks exchange errors as text."""


def save_checkpoint(
    run_dir: Path, facts: Facts, tensors: Mapping[str, Tensor], texts: Mapping[str, str], world: Axis
) -> Path:
    """Write a checkpoint atomically, and return its folder. Collective over the world.

    It has a temporary name until it is complete, so a full disk or a killed process leaves the earlier ones unchanged
    and nothing that looks like a new one. Files of a failed save are deleted.

    The folder is not staged with `threefold.output`, which serves one process: all ranks, on several hosts, write into
    it under a name derived from the step, and the run's lock keeps other writers out.

    Args:
        run_dir: folder of the run, shared by all ranks.
        facts: state of the run besides its tensors.
        tensors: tensors by name, as in `save_tensors`.
        texts: further files by name.
        world: all ranks.

    Raises:
        UserError: on every rank, if the checkpoint cannot be written.
        ProcessFault: on every rank, if a rank's process ran out of open files or memory.
    """
    return write_checkpoint(run_dir, facts, texts, world, lambda folder: save_tensors(tensors, folder, world))


def write_checkpoint(
    run_dir: Path, facts: Facts, texts: Mapping[str, str], world: Axis, write: Callable[[Path], None]
) -> Path:
    """Write a checkpoint like `save_checkpoint`; every rank calls `write` to put the tensors into a folder."""
    path = path_of(run_dir, facts.step)
    partial = path.with_name(path.name + PARTIAL)

    def begin() -> None:
        remove_partial(run_dir)
        path.parent.mkdir(exist_ok=True)  # without parents: the run's folder may have been deleted
        partial.mkdir()

    def finish() -> None:
        for name, text in texts.items():
            write_durably(partial / name, text)
        write_manifest(partial, facts)
        put_in_place(partial, path)

    try:
        on_first(world, begin)
        write(partial)
        on_first(world, finish)
    except BaseException as error:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        limited = any(limit in str(error) for limit in _LIMITS)
        raise (ProcessFault if limited else UserError)(
            f"The checkpoint {path} cannot be written ({error}); {_free(path):.1f} GB of its disk are free, and "
            "those before it are as they were."
        ) from error
    return path


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a complete checkpoint durably to its final name, replacing a checkpoint of that name.

    At every moment one of the two is complete under a name that `folders` recognizes; the old one may be the only one,
    of a loop that always saves the same step.
    """
    replaced = path.with_name(path.name + REPLACED)
    if path.exists():
        if exchange_paths(partial, path):  # now the partial one is the old one
            replaced = partial
        else:
            remove(replaced)
            path.rename(replaced)
            partial.rename(path)
    else:
        partial.rename(path)
    sync(path.parent)
    remove(replaced)


def set_aside_checkpoint(run_dir: Path, step: int, world: Axis) -> tuple[Path, Path] | None:
    """Rename the checkpoint of a diverged model, so that no run resumes from it. Collective over the world.

    Returns:
        the new folder and that of the next older checkpoint; None if there is no older one, and nothing is renamed.

    Raises:
        UserError: on every rank, if the checkpoint cannot be renamed.
    """
    path = path_of(run_dir, step)
    aside = path.with_name(path.name + DIVERGED)
    older = max((checkpoint.path for checkpoint in complete(run_dir) if checkpoint.step < step), default=None)

    def rename() -> None:
        if aside.exists():
            shutil.rmtree(aside)
        path.rename(aside)
        sync(path.parent)

    if older is None:
        return None
    try:
        on_first(world, rename)
    except OSError as error:
        raise UserError(f"{path}, of a model that diverged, cannot be renamed ({error}); remove it.") from error
    return aside, older


def _free(path: Path) -> float:
    """Return the free space on the disk of `path` in GB."""
    folder = next((parent for parent in path.parents if parent.is_dir()), Path("."))
    return shutil.disk_usage(folder).free / 1e9


def on_first(world: Axis, work: Callable[[], None]) -> None:
    """Run `work` on the first rank while all ranks wait; its OSError is raised on every rank."""
    error = None
    if world.is_first:
        try:
            work()
        except OSError as failure:
            error = str(failure)
    if reason := world.gather_objects(error)[0]:
        raise OSError(reason)
