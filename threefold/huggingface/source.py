"""Checks of an import and an export before torch is imported: the folders, and a model on the Hugging Face hub."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import (
    Damaged,
    SelectedCheckpoint,
    newest,
    require_outside_checkpoints,
    select_checkpoint,
)
from threefold.errors import UserError
from threefold.files import require_local, shown
from threefold.foreign import FolderFiles
from threefold.output import check_replaceable

T = TypeVar("T")
CONFIG: Final = "config.json"
_HUB_ID: Final = re.compile(r"[\w.-]{1,96}(/[\w.-]{1,96})?")
_HUB_PAGE: Final = re.compile(rf"(?:https?://huggingface\.co/|hf://)({_HUB_ID.pattern})/?")


def check_import(name: str, out: Path, overwrite: bool) -> Path:
    """Return the folder of this path, or of the hub's model of this id, such as `gpt2`, fetched into its cache."""
    if page := _HUB_PAGE.fullmatch(name):
        raise UserError(f"{shown(name)} is a page of the Hugging Face hub; give the model's id, {page[1]}.")
    require_local(name, "The model's folder")
    folder = Path(name)
    check_replaceable(out, [folder], overwrite)
    if not folder.exists() and _HUB_ID.fullmatch(name):
        folder = _fetched(name)
    read_json(folder, CONFIG)
    return folder


def check_export(run: Path, out: Path, overwrite: bool) -> None:
    """Check the folders of an export; the checkpoint itself is checked when it is read."""
    require_outside_checkpoints(out)
    check_replaceable(out, [run], overwrite)
    if newest(run) is None:
        choose_exported(run)  # raises an error


def choose_exported(run: Path, damaged: Damaged | None = None, step: str | None = None) -> SelectedCheckpoint:
    """Return the checkpoint that an export reads, as `select_checkpoint` does."""
    return select_checkpoint(run, str(run), "; give the folder of a run", damaged, step)


def export_undamaged(run: Path, step: str | None, export: Callable[[SelectedCheckpoint], T]) -> T:
    """Export the checkpoint of `choose_exported`, or an older one where reading shows that it is damaged."""
    damaged: dict[Path, str] = {}
    while True:
        choice = choose_exported(run, damaged, step)
        try:
            return export(choice)
        except DamagedCheckpoint as damage:
            damaged[damage.path] = damage.reason


def read_json(folder: Path, name: str) -> dict[str, Any]:
    """Read the object in a JSON file of a folder. Raises UserError if there is none."""
    files = FolderFiles(folder)
    if not files.holds(name):
        raise UserError(f"{folder / name} does not exist; give a folder that holds a model of Hugging Face.")
    value = files.json(name)
    if not isinstance(value, dict):
        raise UserError(f"{folder / name} holds no JSON object; fetch it again.")
    return value


def _fetched(name: str) -> Path:
    if find_spec("huggingface_hub") is None:
        raise UserError(
            f"{name} is not a folder here, and a model is fetched from the Hugging Face hub only where the package "
            "huggingface_hub is installed; install it, or give a folder with config.json and safetensors files."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:  # whatever its network client raises
        reason = next(iter(str(error).strip().splitlines()), "").rstrip(". ") or type(error).__name__
        raise UserError(
            f"{name} is not a folder here, and cannot be fetched from the Hugging Face hub ({shown(reason)}); check "
            "the name, your access and the network, or give a folder with config.json and safetensors files."
        ) from None
