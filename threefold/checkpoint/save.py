"""Atomic saving of a checkpoint.

Each rank writes its tensors-*.bin. Then the first rank writes tensors.json (`checkpoint.tensors.Writer`), the text
files and finally the manifest checkpoint.json, and gives the folder its name.
"""

import errno
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from threefold.checkpoint.folder import DIVERGED, complete, from_first, path_of, remove, remove_partial
from threefold.checkpoint.manifest import PARTIAL, REPLACED, Facts, write_manifest
from threefold.checkpoint.tensors import save_tensors
from threefold.comm.axis import Axis
from threefold.errors import ProcessFault, UserError
from threefold.host import exchange_paths
from threefold.output import sync, write_durably


def save_checkpoint(
    run_dir: Path, facts: Facts, tensors: Mapping[str, Tensor], texts: Mapping[str, str], world: Axis
) -> Path:
    """Write a checkpoint atomically, and return its folder. Collective over the world.

    It has a temporary name until it is complete, so a full disk or a killed process leaves the earlier ones unchanged
    and nothing that looks like a new one. Files of a failed save are deleted. `texts` are further files by name.

    The folder is not staged with `threefold.output`, which serves one process: all ranks, on several hosts, write into
    it under a name derived from the step, and the run's lock keeps other writers out.

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
        path.parent.mkdir(exist_ok=True)  # no `parents=True`: if the run's folder was deleted, fail rather than make it
        partial.mkdir()

    def finish() -> None:
        for name, text in texts.items():
            write_durably(partial / name, text)
        write_manifest(partial, facts)
        put_in_place(partial, path)

    try:
        from_first(world, begin)
        write(partial)
        from_first(world, finish)
    except BaseException as error:
        if world.is_first:
            shutil.rmtree(partial, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        # A process ran out of open files or memory; ranks exchange errors as text.
        limited = any(f"[Errno {limit}]" in str(error) for limit in (errno.EMFILE, errno.ENFILE, errno.ENOMEM))
        disk = shutil.disk_usage(next((parent for parent in path.parents if parent.is_dir()), Path(".")))
        raise (ProcessFault if limited else UserError)(
            f"The checkpoint {path} cannot be written ({error}); {disk.free / 1e9:.1f} GB of its disk are free, and "
            "those before it are as they were."
        ) from error
    return path


def put_in_place(partial: Path, path: Path) -> None:
    """Rename a complete checkpoint durably to its final name, replacing a checkpoint of that name.

    At every moment one of the two is complete under a name that `folders` recognizes. The old one may be the only
    checkpoint: a custom loop may save the same step again and again.
    """
    replaced = path.with_name(path.name + REPLACED)
    if path.exists() and exchange_paths(partial, path):
        replaced = partial  # now the old one
    else:
        if path.exists():
            remove(replaced)
            path.rename(replaced)
        partial.rename(path)
    sync(path.parent)
    remove(replaced)


def set_aside_checkpoint(run_dir: Path, step: int, world: Axis) -> tuple[Path, Path] | None:
    """Rename the checkpoint of a diverged model, so that no run resumes from it. Collective over the world.

    Returns the new folder and that of the next older checkpoint; None, and nothing is renamed, if there is none.
    UserError, on every rank, if it cannot be renamed.
    """
    path = path_of(run_dir, step)
    aside = path.with_name(path.name + DIVERGED)
    older = max((checkpoint.path for checkpoint in complete(run_dir) if checkpoint.step < step), default=None)

    def rename() -> None:
        # Under a name that no run resumes from before anything else, such as deleting an earlier one of this step.
        hidden = path.with_name(path.name + PARTIAL) if aside.exists() else aside
        path.rename(hidden)
        if hidden != aside:
            shutil.rmtree(aside)
            hidden.rename(aside)
        sync(path.parent)

    if older is None:
        return None
    try:
        from_first(world, rename)
    except OSError as error:
        raise UserError(f"{path}, of a model that diverged, cannot be renamed ({error}); remove it.") from error
    return aside, older


@dataclass(frozen=True)
class Written:
    """Outcome of a background save, the same on every rank; `failure` is None if the checkpoint is complete."""

    step: int
    path: Path
    seconds: float
    failure: UserError | None
