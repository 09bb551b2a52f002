"""Folders of a run's checkpoints: their layout on disk, completeness and pruning.

RUN/checkpoints/step_00000100/
    tensors-00000.bin, …  bytes of the tensors, one file per writing rank
    tensors.json          index of the tensors
    config.yaml           config of the run: model and data with every setting, the others as given
    writer.json           when it was written, and by which layout and versions
    tokenizer.json        tokenizer of the data, if known
    huggingface-*         text files that came with an imported model, or the chat template of the data
    model.py              file of a custom model
    blocks.py, …          modules beside that file that it imports, under their own names
    loop.json             state of a custom training loop (`threefold.save`), in place of config.yaml
    checkpoint.json       manifest, written last: `Facts`, and size and checksum of every other file

A checkpoint is written as `step_00000100.partial` and renamed once it is complete. A folder without that suffix whose
manifest matches its files is therefore valid, whatever happened to the process that wrote it. With the suffix
`.replaced` it is valid until the new checkpoint of that step has its name; with `.diverged` it is never resumed from.
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
from threefold.config.schedules import is_own_schedule
from threefold.errors import UserError
from threefold.files import shown
from threefold.plugins import modules_beside

FOLDER: Final = "checkpoints"
CONFIG: Final = "config.yaml"
TOKENIZER: Final = "tokenizer.json"
OWN_MODEL: Final = "model.py"
LOOP: Final = "loop.json"
DIVERGED: Final = ".diverged"
"""Suffix of a checkpoint after which the loss was not finite; it is kept but never resumed from."""

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
    """Return the folder of the checkpoint after `step` updates."""
    return run_dir / FOLDER / f"step_{step:08d}"


def folders(run_dir: Path) -> list[Path]:
    """Return all folders of a run named like a checkpoint, oldest first, valid or not."""
    parent = run_dir / FOLDER
    names = [name for path in parent.iterdir() if (name := _NAME.fullmatch(path.name))] if parent.is_dir() else []
    # A checkpoint that was being replaced when its process was killed counts if no other has its step.
    found = {int(name[1]): parent / name[0] for name in sorted(names, key=lambda name: name[2] is None)}
    return [found[step] for step in sorted(found)]


def complete(run_dir: Path) -> list[Checkpoint]:
    """Return the checkpoints with all their files, oldest first; raise UserError if a later version wrote one."""
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
    """Return the resolved config in a checkpoint's folder; raise UserError if it cannot be read.

    A pipeline schedule of the user's own, which may be gone by now, is left out: a checkpoint has no layout.

    Args:
        with_code: whether `model.file` of a custom model names the checkpoint's copy of the file. Otherwise it is
            empty, so no code from an untrusted checkpoint is imported (`threefold.checkpoint.code`).
    """
    config = load_config(path / CONFIG)
    if is_own_schedule(config.parallel.schedule):
        config = load_config(path / CONFIG, ("parallel.schedule=null", "parallel.stage_chunks=null"))
    if config.model.architecture == OWN:
        _, colon, name = config.model.file.partition(":")
        file = f"{path / OWN_MODEL}{colon}{name}" if with_code and (path / OWN_MODEL).is_file() else ""
        config = config.model_copy(update={"model": config.model.model_copy(update={"file": file})})
    return resolve(config, 1)  # the data's vocabulary was checked when it was stored


def model_files(file: Path) -> dict[str, Path]:
    """Return the files of a custom model, its own and the modules it imports, by their names in a checkpoint.

    Raises:
        UserError: an imported module has the name under which checkpoints keep the model's file.
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
    """Return the newest checkpoint with all its files, or None; unlike `select_checkpoint`, ignore checksums."""
    found = complete(run_dir)
    return found[-1] if found else None


def remains(run_dir: Path) -> list[Path]:
    """Return all folders named like a checkpoint in any state, by step and then by length of the name."""
    parent = run_dir / FOLDER
    paths = list(parent.iterdir()) if parent.is_dir() else []
    found = {path: int(name[1]) for path in paths if (name := _ANY.fullmatch(path.name))}
    return sorted(found, key=lambda path: (found[path], len(path.name)))


def remove_partial(run_dir: Path) -> None:
    """Delete incomplete checkpoints that interrupted saves left, and replaced ones."""
    for path in remains(run_dir):
        is_replaced = path.name.endswith(REPLACED) and path.with_name(path.name.removesuffix(REPLACED)).exists()
        if is_replaced or path.name.endswith(PARTIAL):
            remove(path)


def remove(path: Path) -> None:
    """Delete a folder as far as possible; for a link, delete only the link."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def superfluous(steps: Sequence[int], keep: int, keep_every: int | None = None) -> list[int]:
    """Return the steps of complete checkpoints that may be deleted.

    Args:
        steps: steps of all of them, oldest first.
        keep: number of newest checkpoints to keep; 0 keeps all.
        keep_every: also keep steps that are a multiple of this number; None for no such rule.
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
    """Delete the complete checkpoints that need not be kept, and all incomplete ones.

    Args:
        keep, keep_every: as in `superfluous`.
        step: step of the checkpoint just written. Later ones were skipped when the run resumed, so they are neither
            deleted nor counted; None counts all.
        passed: folders of other checkpoints that were skipped then, treated likewise.
        progress: called for each file deleted.
    """
    remove_partial(run_dir)
    counted = {
        each.step: each.path
        for each in complete(run_dir)
        if (step is None or each.step <= step) and each.path not in passed
    }
    for old in superfluous(list(counted), keep, keep_every):
        path = counted[old]
        # Renamed first, so that an interrupted deletion leaves nothing that looks complete.
        partial = path.rename(path.with_name(path.name + PARTIAL))
        if partial.is_symlink():  # the user keeps the checkpoint elsewhere
            partial.unlink()
            continue
        for name in os.listdir(str(partial)):
            file = partial / name
            if not file.is_dir() or file.is_symlink():
                file.unlink()
                progress()
        shutil.rmtree(partial)
