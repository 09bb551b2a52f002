"""Paths of a run's checkpoints, which of them are complete, and pruning of old ones.

RUN/checkpoints/step_00000100/
    tensors-00000.bin, …  the tensors' bytes, a file for each rank that wrote
    tensors.json          their index
    config.yaml           the resolved config of the run
    tokenizer.json        the tokenizer of its data, if that is known
    model.py              the file of an own model, where the run's model is one
    blocks.py, …          the modules beside it that it imports, under their own names
    loop.json             in the place of config.yaml: the state of a loop of the user's own (`threefold.save`)
    checkpoint.json       the manifest, written last: the `Facts` below and every other file's size and checksum

Version 1 had `*.distcp` and `.metadata`, as torch.distributed.checkpoint stores tensors, and no checksums.

A checkpoint is written as `step_00000100.partial` and renamed when it is complete, so a folder without that ending and
with a manifest that matches its files is valid whatever happened to the process that wrote it.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.manifest import PARTIAL, REPLACED, Facts, read_manifest
from threefold.config import Config, load_config, resolve
from threefold.config.model import OWN
from threefold.config.schedules import is_schedule_file
from threefold.errors import UserError
from threefold.files import shown
from threefold.plugins import modules_beside

FOLDER: Final = "checkpoints"
CONFIG: Final = "config.yaml"
TOKENIZER: Final = "tokenizer.json"
OWN_MODEL: Final = "model.py"
LOOP: Final = "loop.json"
DIVERGED: Final = ".diverged"
"""Ending of a checkpoint after which the loss was not finite; kept, and never resumed from."""

_NAME = re.compile(rf"step_(\d{{8,}})({re.escape(REPLACED)})?")
_ANY = re.compile(rf"step_(\d{{8,}})(\.old)?({'|'.join(map(re.escape, (PARTIAL, REPLACED, DIVERGED)))})?")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: its folder and its facts."""

    path: Path
    facts: Facts

    @property
    def step(self) -> int:
        return self.facts.step

    @property
    def run_dir(self) -> Path:
        return self.path.parent.parent


def path_of(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` updates."""
    return run_dir / FOLDER / f"step_{step:08d}"


def folders(run_dir: Path) -> list[Path]:
    """All folders of a run that are named like a checkpoint, oldest first, valid or not."""
    parent = run_dir / FOLDER
    names = [name for path in parent.iterdir() if (name := _NAME.fullmatch(path.name))] if parent.is_dir() else []
    # One that was being replaced when its process was killed counts where none has its name.
    found = {int(name[1]): parent / name[0] for name in sorted(names, key=lambda name: name[2] is None)}
    return [found[step] for step in sorted(found)]


def complete(run_dir: Path) -> list[Checkpoint]:
    """The checkpoints of a run that have all their files, oldest first; incomplete ones are left out.

    Raises:
        UserError: a later version of Threefold wrote one.
    """
    found = []
    for path in folders(run_dir):
        try:
            manifest = read_manifest(path)
            manifest.check_sizes()
        except DamagedCheckpoint:
            continue
        found.append(Checkpoint(path, manifest.facts))
    return found


def stored_config(path: Path, *, with_code: bool = False) -> Config:
    """The config in a checkpoint's folder, resolved: what its file leaves out follows from the rest.

    A pipeline schedule of a CSV file, which may be gone by now, is left out: a checkpoint has no layout.

    Args:
        path: the folder.
        with_code: whether `model.file` of an own model is the checkpoint's copy of the file; otherwise it is empty, so
            that nothing which a checkpoint from elsewhere brings along can be imported (`threefold.checkpoint.code`).

    Raises:
        UserError: it cannot be read.
    """
    config = load_config(path / CONFIG)
    if is_schedule_file(config.parallel.schedule):
        config = load_config(path / CONFIG, ("parallel.schedule=null", "parallel.stage_chunks=null"))
    if config.model.architecture == OWN:
        file = _copied_model(config, path) if with_code else ""
        config = config.model_copy(update={"model": config.model.model_copy(update={"file": file})})
    return resolve(config, 1)  # the data's vocabulary was checked when it was stored


def _copied_model(config: Config, path: Path) -> str:
    """The checkpoint's copy of an own model's file, with the name in it; empty where there is none."""
    copy, name = path / OWN_MODEL, config.model.file.partition(":")[2]
    return (f"{copy}:{name}" if name else str(copy)) if copy.is_file() else ""


def model_files(file: Path) -> dict[str, Path]:
    """The files of an own model by their names in a checkpoint: the model's, and the modules beside it that it imports.

    Args:
        file: the model's; the run's, or a checkpoint's copy.

    Raises:
        UserError: one of the modules has the name under which the model's file is kept.
    """
    files = {OWN_MODEL: file}
    for path in modules_beside(file):
        if path.name == OWN_MODEL and path != file:
            raise UserError(
                f"{shown(file)} imports {OWN_MODEL} beside it, the name under which checkpoints keep {file.name} "
                f"itself; rename {OWN_MODEL}, as to own_{OWN_MODEL}."
            )
        files[path.name] = path
    return files


def newest(run_dir: Path) -> Checkpoint | None:
    """The checkpoint with most steps that has all its files; None if there is none. No checksum is
    compared: `select_checkpoint` does that."""
    found = complete(run_dir)
    return found[-1] if found else None


def remains(run_dir: Path) -> list[Path]:
    """All that has the name of a checkpoint in any state: complete or not, partial, replaced or diverged; oldest first,
    those with the shortest name first."""
    parent = run_dir / FOLDER
    paths = list(parent.iterdir()) if parent.is_dir() else []
    found = {path: int(name[1]) for path in paths if (name := _ANY.fullmatch(path.name))}
    return sorted(found, key=lambda path: (found[path], len(path.name)))


def remove_partial(run_dir: Path) -> None:
    """Delete the incomplete checkpoints that interrupted saving left, and what complete ones have replaced."""
    for path in remains(run_dir):
        is_replaced = path.name.endswith(REPLACED) and path.with_name(path.name.removesuffix(REPLACED)).exists()
        if is_replaced or path.name.endswith(PARTIAL):
            remove(path)


def remove(path: Path) -> None:
    """Delete a folder, as far as that is possible; of a link the link alone."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def superfluous(steps: Sequence[int], keep: int, keep_every: int | None = None) -> list[int]:
    """Of the steps of complete checkpoints, oldest first, those that need not stay.

    Args:
        steps: of all of them.
        keep: how many of the newest stay; 0 for all.
        keep_every: those whose step is a multiple of it stay, too; None for none.
    """
    return [step for step in steps[:-keep] if keep_every is None or step % keep_every] if keep else []


def prune(
    run_dir: Path,
    keep: int,
    step: int | None = None,
    passed: Collection[Path] = (),
    keep_every: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Delete the whole checkpoints that need not stay, and incomplete ones.

    Args:
        run_dir: the run's folder.
        keep, keep_every: which stay, as `superfluous` takes them.
        step: of the checkpoint that was just written. Those after it were passed over when the run was resumed, so they
            are neither deleted nor counted; None counts all.
        passed: folders of others that were passed over then, to be treated likewise.
        progress: called for each file that is deleted.
    """
    remove_partial(run_dir)
    counted = {
        each.step: each.path
        for each in complete(run_dir)
        if (step is None or each.step <= step) and each.path not in passed
    }
    for old in superfluous(list(counted), keep, keep_every):
        path = counted[old]
        # Renamed to a partial one first, so that an interrupted deletion leaves nothing that looks complete.
        partial = path.rename(path.with_name(path.name + PARTIAL))
        if partial.is_symlink():  # to where the user keeps it
            partial.unlink()
            continue
        for name in os.listdir(str(partial)):
            file = partial / name
            if not file.is_dir() or file.is_symlink():
                file.unlink()
                progress()
        shutil.rmtree(partial)
