"""Saving a checkpoint atomically: complete or not at all."""

import errno
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from torch import Tensor

from threefold.checkpoint.folder import DIVERGED, complete, path_of, remove, remove_partial
from threefold.checkpoint.manifest import PARTIAL, REPLACED, Facts, write_manifest
from threefold.checkpoint.tensors import save_tensors
from threefold.comm.mesh import Axis
from threefold.errors import ProcessFault, UserError
from threefold.host import exchange_paths
from threefold.output.durable import sync, write_durably

_LIMITS: Final = tuple(f"[Errno {number}]" for number in (errno.EMFILE, errno.ENFILE, errno.ENOMEM))
"""What a rank's error has, as the others are told of it, where its process may have no further file or memory."""


def save_checkpoint(
    run_dir: Path, facts: Facts, tensors: Mapping[str, Tensor], texts: Mapping[str, str], world: Axis
) -> Path:
    """Write a checkpoint. Collective over the world.

    Until it is complete the checkpoint has another name, so a full disk or a killed process leaves the ones before it
    unchanged, and nothing that looks like a new one. Files that a failure left are deleted.

    The folder is not staged as `threefold.output.staging` does for one process: all ranks, on several hosts, write into
    it under a name that each derives from the step, and the lock of the run keeps other writers out.

    Args:
        run_dir: the run's folder, shared by all ranks.
        facts: the state of the run besides its tensors.
        tensors: as `save_tensors` takes them.
        texts: further files by name.
        world: all ranks.

    Returns:
        its folder.

    Raises:
        UserError: on every rank, when it cannot be written.
        ProcessFault: likewise, where a rank's process may open no further file, or has no memory.
    """
    return write_checkpoint(run_dir, facts, texts, world, lambda folder: save_tensors(tensors, folder, world))


def write_checkpoint(
    run_dir: Path, facts: Facts, texts: Mapping[str, str], world: Axis, write: Callable[[Path], None]
) -> Path:
    """As `save_checkpoint`, with `write` to write the tensors into the folder that it gets, on every rank."""
    path = path_of(run_dir, facts.step)
    partial = path.with_name(path.name + PARTIAL)

    def begin() -> None:
        remove_partial(run_dir)
        path.parent.mkdir(exist_ok=True)  # not the run's folder, which may have been deleted
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
    """Give a complete checkpoint its name, durably; one that has the name is replaced.

    At every moment one of the two is complete under a name that `folders` knows. The old one may be the only one, of a
    loop that always saves one step.

    Raises:
        OSError: it cannot be renamed.
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
    """Rename the checkpoint of `step`, of a model that has diverged, so that no run resumes from it.

    Collective over the world.

    Returns:
        its new folder and that of the next older one; None where there is no older one, and it stays.

    Raises:
        UserError: on every rank, when it cannot be renamed.
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
    """Free space of the disk of `path`, in GB."""
    folder = next((parent for parent in path.parents if parent.is_dir()), Path("."))
    return shutil.disk_usage(folder).free / 1e9


def on_first(world: Axis, work: Callable[[], None]) -> None:
    """Do `work` on the first rank; all ranks wait for it, and raise the OSError that it raised."""
    error = None
    if world.is_first:
        try:
            work()
        except OSError as failure:
            error = str(failure)
    if reason := world.gather_objects(error)[0]:
        raise OSError(reason)
