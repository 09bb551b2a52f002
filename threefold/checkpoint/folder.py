"""Where a run's checkpoints lie, and which of them are whole.

RUN/checkpoints/step_00000100/
    *.distcp, .metadata   the tensors, as torch.distributed.checkpoint stores them
    config.yaml           the resolved config of the run
    tokenizer.json        the tokenizer of its data, if that is known
    checkpoint.json       the manifest, written last: the `Facts` below and every other file's size

A checkpoint is written as `step_00000100.partial` and renamed when it is whole, so a folder without that ending and
with a manifest that fits its files is good whatever happened to the process that wrote it.
"""

import dataclasses
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from threefold.config import Config, load_config, resolve
from threefold.data.staging import sync
from threefold.errors import UserError

FOLDER: Final = "checkpoints"
MANIFEST: Final = "checkpoint.json"
CONFIG: Final = "config.yaml"
TOKENIZER: Final = "tokenizer.json"
PARTIAL: Final = ".partial"

FORMAT: Final = "threefold-checkpoint"
VERSION: Final = 1
_NAME = re.compile(r"step_(\d{8,})")


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says of its run besides the tensors.

    Together with the config these are the whole state of a trainer: the next batch, every dropout mask and the learning
    rate are functions of the seed and the step.

    Attributes:
        step: updates made.
        consumed_samples: training samples read for them.
        seed: the run's.
        eod: id of the token that ends a document; None if there is none.
        tokenizer_sha256: of tokenizer.json; None if there is none.
        tokens, documents: how many the data has.
        loss_scale: of the next step, where there is one.
        good_steps: for which it has held.
        corpora: tokens and documents of each corpus of a mixture; of the only one otherwise.
    """

    step: int
    consumed_samples: int
    seed: int
    eod: int | None
    tokenizer_sha256: str | None
    tokens: int
    documents: int
    loss_scale: float | None = None
    good_steps: int = 0
    corpora: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Checkpoint:
    """A whole checkpoint: its folder and its facts."""

    path: Path
    facts: Facts

    @property
    def step(self) -> int:
        return self.facts.step


def path_of(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` updates."""
    return run_dir / FOLDER / f"step_{step:08d}"


def complete(run_dir: Path) -> list[Checkpoint]:
    """The whole checkpoints of a run, oldest first; what is half-written or has lost a file is not among them."""
    parent = run_dir / FOLDER
    folders = [path for path in parent.iterdir() if _NAME.fullmatch(path.name)] if parent.is_dir() else []
    found = [Checkpoint(path, facts) for path in folders if (facts := _read_if_whole(path)) is not None]
    return sorted(found, key=lambda checkpoint: checkpoint.step)


def stored_config(path: Path) -> Config:
    """The config in a checkpoint's folder, resolved: what its file leaves out follows from the rest.

    Raises:
        UserError: it cannot be read.
    """
    return resolve(load_config(path / CONFIG), 1)  # the data's vocabulary was checked when it was stored


def newest(run_dir: Path) -> Checkpoint | None:
    """The whole checkpoint with most steps; None if there is none."""
    found = complete(run_dir)
    return found[-1] if found else None


def prune(run_dir: Path, keep: int) -> None:
    """Delete all but the `keep` newest whole checkpoints (0: none is deleted), and what interrupted saving left."""
    for path in (run_dir / FOLDER).glob(f"step_*{PARTIAL}"):
        shutil.rmtree(path, ignore_errors=True)
    for checkpoint in complete(run_dir)[:-keep] if keep else []:
        # Under the name of a partial one, so that it is taken for nothing else should deleting it be interrupted.
        shutil.rmtree(checkpoint.path.rename(checkpoint.path.with_name(checkpoint.path.name + PARTIAL)))


def write_manifest(folder: Path, facts: Facts) -> None:
    """Declare the files in `folder` to be a whole checkpoint, durably."""
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(facts), "files": sizes}
    write_durably(folder / MANIFEST, json.dumps(manifest, indent=2) + "\n")
    sync(folder)


def write_durably(path: Path, text: str) -> None:
    """Write a file that is on the disk afterwards."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _read_if_whole(path: Path) -> Facts | None:
    """The facts of a checkpoint whose files are all there; None otherwise.

    Raises:
        UserError: another version wrote it.
    """
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        if manifest.pop("format") != FORMAT:
            return None
        if (version := manifest.pop("version")) != VERSION:
            raise UserError(f"{path} has version {version} of the format and this Threefold reads version {VERSION}.")
        files: dict[str, int] = manifest.pop("files")
        whole = all((path / name).stat().st_size == size for name, size in files.items())
        corpora = tuple((tokens, documents) for tokens, documents in manifest.pop("corpora", ()))
        return Facts(**manifest, corpora=corpora) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
