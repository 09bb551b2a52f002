"""The code of a checkpoint: nothing that a run's folder names or brings along is run unless the user asks for it.

A checkpoint from elsewhere may bring along any `model.py`, so `select_checkpoint` gives an own model no file. The file
is the one that the user names (`--model`), or the checkpoint's copy where he says that he trusts it (`--trust-code`).
Likewise the `config.yaml` that a run has stored names no code, unlike a config that the user wrote.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import CONFIG, FOLDER, OWN_MODEL, folders, stored_config
from threefold.checkpoint.manifest import MANIFEST
from threefold.checkpoint.selection import usable_config
from threefold.config import Config
from threefold.config.model import OWN
from threefold.config.optimizer import OPTIMIZERS
from threefold.data.formats.own_data import is_own_data
from threefold.errors import UserError
from threefold.files import shown
from threefold.plugins import is_import_path

_OVERRIDE: Final = "--set "
"""Beginning of the origin of a setting that the command line has."""


def with_code(config: Config, checkpoint: Path, model: str | None, trust_code: bool) -> Config:
    """The config of a checkpoint, an own model being made by the file that the user named or trusts.

    Args:
        config: of `select_checkpoint`.
        checkpoint: its folder.
        model: the file that the user named, `FILE.py` or `FILE.py:NAME`; None if he named none.
        trust_code: whether the checkpoint's copy may be used where none was named.

    Raises:
        UserError: the checkpoint brings its code along, and the user has neither named a file nor trusts it; or he
            named one, and the model is of a family of this package.
    """
    if config.model.architecture != OWN:
        if model is None:
            return config
        raise UserError(
            f"--model is {model} but the model of {checkpoint.parent.parent} is a {config.model.architecture}; leave "
            "--model out."
        )
    if model is None and (checkpoint / OWN_MODEL).is_file():
        if not trust_code:
            raise _untrusted_model(checkpoint)
        model = stored_config(checkpoint, with_code=True).model.file
    return config.model_copy(update={"model": config.model.model_copy(update={"file": model or ""})})


def remembered_model(run_dir: Path, trust_code: bool) -> str | None:
    """The file and name of the own model of a run's newest checkpoint, as `--model` takes them; None without one.

    Raises:
        UserError: there is one, and the user does not trust it.
    """
    for path in reversed(folders(run_dir)):
        if (path / OWN_MODEL).is_file() and (path / CONFIG).is_file():
            try:
                stored = usable_config(path, with_code=True)
            except DamagedCheckpoint:
                continue  # which resuming tells
            if stored.model.architecture != OWN:
                continue
            if not trust_code:
                raise _untrusted_model(path)
            return stored.model.file
    return None


def require_named_code(config: Config, path: Path) -> None:
    """Check that a config which a run has stored, in its folder or a checkpoint, names no code to run.

    Args:
        config: as loaded from `path`; what an override has set was named by the user.
        path: as the user gave it.

    Raises:
        UserError: it does.
    """
    if not _is_stored(path):
        return
    for key, code in _code_of(config):
        if not config.origin(key).startswith(_OVERRIDE):
            named = "name it with --model FILE.py:NAME" if key == "model.file" else f"name it with --set {key}=…"
            raise UserError(
                f"{config.origin(key)}{key} is {shown(code)}, code which runs only where you ask for it, and not as a "
                f"stored config has it; {named}, or give --trust-code if you trust the run that stored it."
            )


def _is_stored(path: Path) -> bool:
    """Whether a config is that of a run's folder or of a checkpoint."""
    file = path.resolve()
    folder = file.parent
    return (folder / MANIFEST).exists() or (file.name == CONFIG and (folder / FOLDER).exists())


def _code_of(config: Config) -> Iterator[tuple[str, str]]:
    """The settings of a config that name code, with what they name."""
    if config.model.file:
        yield "model.file", config.model.file
    if OPTIMIZERS.is_path(config.optimizer.name):
        yield "optimizer.name", config.optimizer.name
    for entry in config.train.callbacks or ():
        name = entry if isinstance(entry, str) else str(entry["name"])
        if is_import_path(name):
            yield "train.callbacks", name
    for name in config.data.corpora:
        if is_own_data(name):
            yield ("data.path" if config.data.path else "data.mixture"), name


def _untrusted_model(checkpoint: Path) -> UserError:
    return UserError(
        f"The model of {checkpoint} is the code in its {OWN_MODEL}, which runs only where you ask for it: name your "
        f"own copy with --model FILE.py:NAME, or give --trust-code if you trust {shown(checkpoint / OWN_MODEL)}."
    )
