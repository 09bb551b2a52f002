"""Selection of the newest valid checkpoint."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import yaml

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import CONFIG, LOOP, Checkpoint, folders, stored_config
from threefold.checkpoint.manifest import read_manifest
from threefold.config import Config
from threefold.config.model import OWN
from threefold.errors import UserError

if TYPE_CHECKING:
    from threefold.checkpoint.model_match import Shapes
    from threefold.comm.mesh import Axis


Damaged = Mapping[Path, str]
"""Reasons why checkpoints could not be loaded, by folder."""

T = TypeVar("T")


@dataclass(frozen=True)
class SelectedCheckpoint:
    """A selected checkpoint, its config, and warnings about the damaged ones that were skipped (`passed`)."""

    checkpoint: Checkpoint
    config: Config
    warnings: tuple[str, ...] = ()
    passed: tuple[Path, ...] = ()


def select_checkpoint(
    run_dir: Path, missing: Callable[[str], str], damaged: Damaged | None = None
) -> SelectedCheckpoint:
    """Return the newest valid checkpoint of a run, as far as can be seen without reading its tensors.

    Args:
        missing: makes the message if there is none, from a phrase such as "no complete checkpoint".
        damaged: checkpoints that loading found damaged.

    Raises:
        UserError: there is none, or a later version of Threefold wrote the newest.
    """
    (checkpoint, config), warnings, passed = newest_valid(run_dir, inspect_checkpoint, missing, damaged)
    return SelectedCheckpoint(checkpoint, config, warnings, passed)


def newest_valid(
    run_dir: Path, inspect: Callable[[Path], T], missing: Callable[[str], str], damaged: Damaged | None = None
) -> tuple[T, tuple[str, ...], tuple[Path, ...]]:
    """Return what `inspect` does for the newest checkpoint for which it does not raise DamagedCheckpoint.

    Args:
        missing, damaged: as in `select_checkpoint`.

    Returns:
        the result, and a warning about the newer checkpoints that were skipped, and their folders.

    Raises:
        UserError: there is none.
    """
    passed: dict[Path, str] = {}
    for path in reversed(folders(run_dir)):
        try:
            if damaged and path in damaged:
                raise DamagedCheckpoint(path, damaged[path])
            found = inspect(path)
        except DamagedCheckpoint as damage:
            passed[damage.path] = f"{damage.path} ({damage.reason})"
            continue
        warning = f"{_listed(passed)} passed over; {path} is used, the newest that is good."
        return found, (warning,) if passed else (), tuple(passed)
    raise UserError(missing("no complete checkpoint" + (f" ({_listed(passed)} passed over)" if passed else "")))


def _listed(passed: Mapping[Path, str]) -> str:
    """Return the skipped checkpoints with their reasons, followed by "was" or "were"."""
    more = f" and {len(passed) - 3} more" if len(passed) > 3 else ""
    return f"{' and '.join(list(passed.values())[:3])}{more} {'was' if len(passed) == 1 else 'were'}"


def check_whole(checkpoint: Checkpoint) -> None:
    """Compare all files with their checksums, as slow as reading them; raise DamagedCheckpoint if one was changed."""
    manifest = read_manifest(checkpoint.path)
    for name in sorted(manifest.files):
        manifest.check_content(name)


def from_first(world: "Axis", find: Callable[[], T]) -> T:
    """Run `find` on the first rank and broadcast its result or its UserError, so that all ranks agree. Collective."""
    found: T | UserError | None = None
    if world.is_first:
        try:
            found = find()
        except UserError as error:
            found = error
    found = world.gather_objects(found)[0]
    if isinstance(found, UserError):
        raise found
    return cast(T, found)


def inspect_checkpoint(path: Path) -> tuple[Checkpoint, Config]:
    """Return a checkpoint and its config after checking everything but the bytes of its tensors.

    Raises:
        DamagedCheckpoint: the checkpoint is not valid.
        UserError: a later version of Threefold wrote it.
    """
    manifest = read_manifest(path)
    manifest.check_sizes()
    # These import torch, which a run without checkpoints should not wait for.
    from threefold.checkpoint.index import read_index
    from threefold.checkpoint.model_match import model_mismatch

    index = read_index(path)
    data = {chunk.file for tensor in index.values() for chunk in tensor.chunks}
    if unknown := data - manifest.files.keys():
        raise DamagedCheckpoint(path, f"its tensors are in {min(unknown)}, which its manifest does not name")
    shapes = {name: tensor.shape for name, tensor in index.items()}
    for name in sorted(manifest.files.keys() - data - {CONFIG}):
        manifest.check_content(name)
    if LOOP in manifest.files:
        raise DamagedCheckpoint(path, f"saved by threefold.save, without a {CONFIG}: threefold.load opens it")
    if CONFIG not in manifest.files:
        raise DamagedCheckpoint(path, f"its manifest does not name {CONFIG}")
    try:
        manifest.check_content(CONFIG)
    except DamagedCheckpoint as damage:
        raise _more_exactly(damage, shapes) from None
    config = usable_config(path)
    if config.model.architecture != OWN and (reason := model_mismatch(config.model, shapes)):
        raise DamagedCheckpoint(path, reason)  # the file of a custom model may have changed: see `require_match`
    return Checkpoint(path, manifest.facts), config


def _more_exactly(damage: DamagedCheckpoint, shapes: "Shapes") -> DamagedCheckpoint:
    """Return the error for a changed config, which names the mismatch with the tensors if there is one."""
    from threefold.checkpoint.model_match import model_mismatch

    try:
        model = usable_config(damage.path).model
        reason = None if model.architecture == OWN else model_mismatch(model, shapes)
    except DamagedCheckpoint as unusable:
        reason = unusable.reason
    return DamagedCheckpoint(damage.path, f"{damage.reason}, and {reason}") if reason else damage


def usable_config(path: Path, *, with_code: bool = False) -> Config:
    """Return the config of a checkpoint (`stored_config`); raise DamagedCheckpoint if it cannot be used."""
    try:
        return stored_config(path, with_code=with_code)
    except UserError as error:
        raise DamagedCheckpoint(path, f"its {CONFIG} cannot be used ({str(error).removesuffix('.')})") from None
    except (ValueError, ArithmeticError, RecursionError, yaml.YAMLError) as error:  # values that no run writes
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DamagedCheckpoint(path, f"its {CONFIG} cannot be used ({reason})") from None
