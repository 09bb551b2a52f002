"""Folders of a run's checkpoints: their layout on disk, their pruning, and the newest one that is valid.

RUN/checkpoints/step_00000100/
    tensors-00000.bin, …  bytes of the tensors, one file per writing rank
    tensors.json          index of the tensors
    config.yaml           config of the run: model and data with every setting, the others as given
    writer.json           when it was written, and by which layout and versions
    tokenizer.json        tokenizer of the data, if known
    huggingface-*         text files that came with an imported model, or the chat template of the data
    model.py              file of a custom model
    blocks.py, …          modules next to that file that it imports, under their own names
    loop.json             state of a custom training loop (`threefold.save`), instead of config.yaml
    checkpoint.json       manifest, written last: `Facts`, and size and checksum of every other file

A checkpoint is written as `step_00000100.partial` and renamed once it is complete. A folder without that suffix whose
manifest matches its files is therefore valid, whatever happened to the process that wrote it. With the suffix
`.replaced` it is valid until the new checkpoint of that step has its name; with `.diverged` it is never resumed from.
"""

import os
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, cast

import yaml

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.index import INDEX, model_mismatch, read_index, size_mismatch
from threefold.checkpoint.manifest import PARTIAL, REPLACED, Checkpoint, Facts, read_manifest
from threefold.config import Config, resolve
from threefold.config.loading import load_stored_config
from threefold.config.model import CUSTOM
from threefold.config.schedules import is_custom_schedule
from threefold.errors import UserError
from threefold.files import LARGEST_TEXT, first_of, read_text, shown
from threefold.foreign import FolderFiles
from threefold.plugins import modules_beside

if TYPE_CHECKING:
    from threefold.comm.mesh import Axis


FOLDER: Final = "checkpoints"
BEST: Final = "best"
"""Name of the checkpoint of `checkpoint.keep_best`, in place of its step."""
CONFIG: Final = "config.yaml"
TOKENIZER: Final = "tokenizer.json"
MODEL_FILE: Final = "model.py"
LOOP: Final = "loop.json"
GENERATION: Final = "generation_config.json"
WITH_TOKENIZER: Final = (
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
)
"""Files that describe the use of a tokenizer, above all its chat template."""
CARRIED: Final = ("config.json", GENERATION, *WITH_TOKENIZER, "added_tokens.json", "vocab.json", "merges.txt")
PREFIX: Final = "huggingface-"
"""Prefix of `CARRIED`, the files of an imported model that a checkpoint carries along."""
DIVERGED: Final = ".diverged"
"""Suffix of a checkpoint after which the loss was not finite; it is kept but never resumed from."""

_NAME = re.compile(rf"step_(\d{{8,}})({re.escape(REPLACED)})?")
NAMED: Final = re.compile(r"step_(\d{8,})([.].*)?")
"""Pattern of names that look like a checkpoint's, whatever follows the step."""
_ANY = re.compile(rf"step_(\d{{8,}})({'|'.join(map(re.escape, (PARTIAL, REPLACED, DIVERGED)))})?")


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
            checkpoint = read_manifest(path)
            checkpoint.check_sizes()
        except DamagedCheckpoint:
            continue
        found.append(checkpoint)
    return found


def stored_config(path: Path, *, with_code: bool = False) -> Config:
    """Return the resolved config in a checkpoint's folder; raise UserError if it cannot be read.

    A custom pipeline schedule, which may no longer exist, is left out: a checkpoint has no layout. `model.file` of a
    custom model is empty, so that no code from an untrusted checkpoint is imported, unless `with_code` asks for the
    checkpoint's copy of the file (`threefold.checkpoint.code`).
    """
    config = load_stored_config(path / CONFIG)
    if is_custom_schedule(config.parallel.schedule):
        config = load_stored_config(path / CONFIG, ("parallel.schedule=null", "parallel.stage_chunks=null"))
    if config.model.architecture == CUSTOM:
        _, colon, name = config.model.file.partition(":")
        file = f"{path / MODEL_FILE}{colon}{name}" if with_code and FolderFiles(path).holds(MODEL_FILE) else ""
        config = config.model_copy(update={"model": config.model.model_copy(update={"file": file})})
    return resolve(config, 1)  # the data's vocabulary was checked when it was stored


def model_files(file: Path) -> dict[str, Path]:
    """Return the files of a custom model, its own and the modules it imports, by their names in a checkpoint."""
    files = {MODEL_FILE: file}
    for path in modules_beside(file):
        if path.name == MODEL_FILE and path != file:
            raise UserError(
                f"{shown(file)} imports {MODEL_FILE} beside it, the name under which checkpoints keep {file.name} "
                f"itself; rename {MODEL_FILE}, as to own_{MODEL_FILE}."
            )
        files[path.name] = path
    return files


def code_text(file: Path) -> str:
    """Return the text of one of `model_files`; in a checkpoint it must be one of the files that the manifest names."""
    beside = FolderFiles(file.parent)
    return read_text(file) if beside.listed is None else beside.text(file.name)


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


def require_outside_checkpoints(out: Path, place: str = "--out") -> None:
    """Raise a `UserError` if an output is among a run's checkpoints, links resolved."""
    for parent in Path(os.path.realpath(out)).parents:
        if parent.name == FOLDER and checkpoint_folders(parent.parent):
            raise UserError(
                f"{place} {shown(out)} is among the checkpoints of the run {shown(parent.parent)}, which would take it "
                "for one of its own; choose a folder apart from the run's."
            )


def checkpoint_folders(run: Path) -> list[Path]:
    """Return all checkpoint folders of a run by step, including incomplete and diverged ones."""
    try:
        complete = folders(run)  # includes a replaced checkpoint whose replacement never got its name
        found = [path for path in remains(run) if path in complete or path.suffix in ("", PARTIAL, DIVERGED)]
    except OSError as error:
        raise UserError(f"{shown(run / FOLDER)} cannot be read ({error.strerror}); give a folder that can.") from None
    return sorted(found, key=lambda path: (step_of(path), path.name))


def step_of(path: Path) -> int:
    """Return the step in a name like a checkpoint's; 0 for a link of another name."""
    match = NAMED.fullmatch(path.name)
    return int(match[1]) if match else 0


def remove_partial(run_dir: Path) -> None:
    """Delete incomplete checkpoints that interrupted saves left, and replaced ones."""
    for path in remains(run_dir):
        is_replaced = path.name.endswith(REPLACED) and path.with_name(path.name.removesuffix(REPLACED)).exists()
        if is_replaced or path.name.endswith(PARTIAL):
            remove(path)


def remove(path: Path) -> None:
    """Delete a folder as far as possible; for a link, delete only the link."""
    if not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        path.unlink()


def best_step(checkpoints: Iterable[Facts]) -> int | None:
    """Return the step of the checkpoint with the lowest value of `checkpoint.keep_best`, the first of equal ones.

    The metric is that of the newest checkpoint for which one was measured; None without any.
    """
    measured = [(facts.step, *facts.measured) for facts in checkpoints if facts.measured is not None]
    metric = max(measured)[1] if measured else ""
    values = [(value, step) for step, name, value in measured if name == metric]
    return min(values)[1] if values else None


def superfluous(steps: Sequence[int], keep: int, keep_every: int | None = None, best: int | None = None) -> list[int]:
    """Return, in order, the `steps` not to keep: none of the `keep` newest (0: all), no multiple of `keep_every`, and
    not `best`."""
    older = steps[:-keep] if keep else ()
    return [step for step in older if (keep_every is None or step % keep_every) and step != best]


def prune(
    run_dir: Path,
    keep: int,
    step: int | None = None,
    skipped: Collection[Path] = (),
    keep_every: int | None = None,
    progress: Callable[[], None] = lambda: None,
) -> None:
    """Delete the complete checkpoints that need not be kept, and all incomplete ones.

    `keep` and `keep_every` are as in `superfluous`, and the best one is kept. Checkpoints later than `step`, the one
    just written, were skipped when the run resumed, like those in `skipped`: they are neither deleted nor counted.
    `progress` is called for each file deleted.
    """
    remove_partial(run_dir)
    counted = {
        each.step: each
        for each in complete(run_dir)
        if (step is None or each.step <= step) and each.path not in skipped
    }
    for old in superfluous(list(counted), keep, keep_every, best_step(each.facts for each in counted.values())):
        path = counted[old].path
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


Damaged = Mapping[Path, str]  # reasons why checkpoints could not be loaded, by folder

Found = TypeVar("Found")


@dataclass(frozen=True)
class SelectedCheckpoint:
    """The newest valid checkpoint of a run, and its config."""

    checkpoint: Checkpoint
    config: Config
    warnings: tuple[str, ...] = ()
    skipped: tuple[Path, ...] = ()  # folders of newer ones, which are damaged
    is_resumed: bool = False


def select_checkpoint(
    run_dir: Path,
    where: str,
    advice: str,
    damaged: Damaged | None = None,
    step: str | None = None,
    setting: str = "--step",
) -> SelectedCheckpoint:
    """Return the newest valid checkpoint of a run, as far as can be seen without reading its tensors.

    If there is none, raises UserError: `where` (such as the folder) has none, with an `advice` unless there are damaged
    ones. `damaged` are checkpoints that loading found damaged. With a `step` (of `setting`), only that one counts.
    """
    only = None if step is None else named_step(run_dir, step, setting)
    (checkpoint, config), warnings, skipped = newest_valid(run_dir, inspect_checkpoint, where, advice, damaged, only)
    return SelectedCheckpoint(checkpoint, config, warnings, skipped)


def named_step(run_dir: Path, step: str, setting: str = "--step") -> Path:
    """Return the folder of the checkpoint of a step, or of the `best` one; raise a `UserError` if there is none."""
    known = {checkpoint.step: checkpoint for checkpoint in complete(run_dir)}
    steps = first_of(sorted(known, reverse=True), 5)
    has = f"checkpoints of the steps {steps}" if known else "no complete checkpoint"
    if step == BEST:
        if (best := best_step(checkpoint.facts for checkpoint in known.values())) is None:
            raise UserError(
                f"{setting} is {BEST} but {shown(run_dir)} was not trained with checkpoint.keep_best and has {has}; "
                f"give one of these, or leave {setting} out for the newest."
            )
        return known[best].path
    if not step.isascii() or not step.isdigit() or int(step) not in known:
        raise UserError(
            f"{setting} is {shown(step)} but must be {BEST} or the step of a checkpoint, and {shown(run_dir)} has "
            f"{has}; leave {setting} out for the newest."
        )
    return known[int(step)].path


def newest_valid(
    run_dir: Path,
    inspect: Callable[[Path], Found],
    where: str,
    advice: str,
    damaged: Damaged | None = None,
    only: Path | None = None,
) -> tuple[Found, tuple[str, ...], tuple[Path, ...]]:
    """Return the result of `inspect` for the newest checkpoint for which it does not raise DamagedCheckpoint.

    With it come a warning about the newer checkpoints that were skipped, and the folders of those. Other arguments and
    the UserError are those of `select_checkpoint`; with `only`, no other checkpoint counts.
    """
    skipped: dict[Path, str] = {}
    for path in reversed(folders(run_dir)) if only is None else [only]:
        try:
            if damaged and path in damaged:
                raise DamagedCheckpoint(path, damaged[path])
            found = inspect(path)
        except DamagedCheckpoint as damage:
            skipped[damage.path] = f"{damage.path} ({damage.reason})"
            continue
        warning = f"{_listed(skipped)} passed over; {path} is used, the newest that is good."
        return found, (warning,) if skipped else (), tuple(skipped)
    if skipped:
        passed = f"no complete checkpoint ({_listed(skipped)} passed over)"
        raise UserError(f"{where} has {passed}; restore one of them from a copy, or train again in another folder.")
    if run_dir.is_dir() and NAMED.fullmatch(run_dir.name):
        try:
            if CONFIG in (given := check_files(run_dir)[0]).files:
                given.check_content(CONFIG)
        except DamagedCheckpoint as damage:
            raise UserError(
                f"{where} is a checkpoint, and damaged ({damage.reason}); restore it from a copy, or give the folder "
                "of a run that has a good one."
            ) from None
    raise UserError(f"{where} has no complete checkpoint{advice}.")


def _listed(skipped: Mapping[Path, str]) -> str:
    """Return the skipped checkpoints with their reasons, followed by "was" or "were"."""
    return f"{first_of(skipped.values(), 3, separator=' and ')} {'was' if len(skipped) == 1 else 'were'}"


def check_whole(checkpoint: Checkpoint) -> None:
    """Read all files and compare them with their checksums; raise DamagedCheckpoint if one was changed."""
    found = read_manifest(checkpoint.path)
    for name in sorted(found.files):
        found.check_content(name)


def from_first(world: "Axis", find: Callable[[], Found]) -> Found:
    """Run `find` on the first rank and broadcast its result, or its UserError or OSError, to all. Collective."""
    found: Found | UserError | OSError | None = None
    if world.is_first:
        try:
            found = find()
        except (UserError, OSError) as error:
            found = error
    found = world.gather_objects(found)[0]
    if isinstance(found, UserError | OSError):
        raise found
    return cast(Found, found)


def check_files(path: Path) -> tuple[Checkpoint, dict[str, tuple[int, ...]]]:
    """Check a checkpoint except its config and tensor bytes; return its manifest, and the shape of each tensor."""
    checkpoint = read_manifest(path)
    checkpoint.check_sizes()
    index = read_index(path)
    data = {chunk.file for tensor in index.values() for chunk in tensor.chunks}
    if unknown := data - checkpoint.files.keys():
        raise DamagedCheckpoint(path, f"its tensors are in {min(unknown)}, which its manifest does not name")
    texts = sorted(checkpoint.files.keys() - data)
    for name in texts:
        if name != INDEX and (size := checkpoint.files[name].bytes) > LARGEST_TEXT:
            raise DamagedCheckpoint(path, f"its {shown(name)} holds {size:,} bytes and {LARGEST_TEXT:,} are allowed")
    for name in texts:
        if name != CONFIG:
            checkpoint.check_content(name)
    return checkpoint, {name: tensor.shape for name, tensor in index.items()}


def inspect_checkpoint(path: Path, *, with_model: bool = True) -> tuple[Checkpoint, Config]:
    """Return a checkpoint, without its files, and its config after checking everything but the bytes of its tensors.

    Without `with_model`, only the sizes in the config are compared with the tensors, which needs no torch.
    """
    checkpoint, shapes = check_files(path)
    if LOOP in checkpoint.files:
        raise DamagedCheckpoint(path, f"saved by threefold.save, without a {CONFIG}: threefold.load opens it")
    if CONFIG not in checkpoint.files:
        raise DamagedCheckpoint(path, f"its manifest does not name {CONFIG}")
    compare = model_mismatch if with_model else size_mismatch
    reasons = []
    try:
        checkpoint.check_content(CONFIG)
    except DamagedCheckpoint as damage:
        reasons.append(damage.reason)
    try:
        config = usable_config(path)
        # The file of a custom model may have changed: see `require_match`.
        if config.model.architecture != CUSTOM and (mismatch := compare(config, shapes)):
            reasons.append(mismatch)
    except DamagedCheckpoint as unusable:
        reasons.append(unusable.reason)
    if reasons:
        raise DamagedCheckpoint(path, ", and ".join(reasons))
    return replace(checkpoint, files={}), config


def usable_config(path: Path, *, with_code: bool = False) -> Config:
    """Return the config of a checkpoint (`stored_config`); raise DamagedCheckpoint if it cannot be used."""
    try:
        return stored_config(path, with_code=with_code)
    except UserError as error:
        raise DamagedCheckpoint(path, f"its {CONFIG} cannot be used ({str(error).removesuffix('.')})") from None
    except (ValueError, ArithmeticError, RecursionError, yaml.YAMLError) as error:  # values that no run writes
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DamagedCheckpoint(path, f"its {CONFIG} cannot be used ({reason})") from None


def carried_by(checkpoint: Path) -> dict[str, str]:
    """Read a checkpoint's tokenizer and sidecar files, by name; no other files, such as Python code."""
    files, names = FolderFiles(checkpoint), (TOKENIZER, *sorted(PREFIX + name for name in CARRIED))
    return {name: files.text(name) for name in names if files.holds(name)}
