"""Code in checkpoints and stored configs, which runs only when the user names it or trusts the checkpoint.

A checkpoint from elsewhere may contain any `model.py`, so `select_checkpoint` gives a custom model no file.
"""

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import CONFIG, FOLDER, MODEL_FILE, folders, stored_config, usable_config
from threefold.checkpoint.manifest import MANIFEST
from threefold.checksums import checksum_of_blocks, short
from threefold.comm.layout import parse
from threefold.config import Config
from threefold.config.model import CUSTOM
from threefold.config.optimizer import OPTIMIZERS
from threefold.config.schedules import is_python_schedule
from threefold.data.formats.custom_data import is_custom_data
from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import FolderFiles
from threefold.plugins import is_import_path, modules_beside


def with_code(config: Config, checkpoint: Path, model: str | None, trust_code: bool) -> Config:
    """Return a checkpoint's config with the file of a custom model, `FILE.py[:NAME]`, that the user named or trusts."""
    if config.model.architecture != CUSTOM:
        if model is None:
            return config
        raise UserError(
            f"--model is {model} but the model of {checkpoint.parent.parent} is a {config.model.architecture}; leave "
            "--model out."
        )
    if model is None and FolderFiles(checkpoint).holds(MODEL_FILE):
        if not trust_code:
            raise _untrusted_model(checkpoint)
        model = stored_config(checkpoint, with_code=True).model.file
    return config.model_copy(update={"model": config.model.model_copy(update={"file": model or ""})})


def remembered_model(run_dir: Path, trust_code: bool) -> str | None:
    """Return the custom model of a run's newest checkpoint as `--model` takes it, or None; it must be trusted."""
    for path in reversed(folders(run_dir)):
        files = FolderFiles(path)
        if files.holds(MODEL_FILE) and files.holds(CONFIG):
            try:
                stored = usable_config(path, with_code=True)
            except DamagedCheckpoint:
                continue  # resuming reports it
            if stored.model.architecture != CUSTOM:
                continue
            if not trust_code:
                raise _untrusted_model(path)
            return stored.model.file
    return None


def require_named_code(config: Config, path: Path) -> None:
    """Raise UserError if a stored config, in a run's folder or a checkpoint, names code that no override named."""
    for key, code in stored_code(config, path):
        named = "name it with --model FILE.py:NAME" if key == "model.file" else f"name it with --set {key}=…"
        raise UserError(
            f"{config.origin(key)}{key} is {shown(code)}, code which runs only where you ask for it, and not as a "
            f"stored config has it; {named}, or give --trust-code if you trust the run that stored it."
        )


def stored_code(config: Config, path: Path) -> list[tuple[str, str]]:
    """Return the settings of a stored config, with their values, that name code that no override named."""
    file = path.resolve()
    beside = FolderFiles(file.parent)
    is_stored = beside.holds(MANIFEST) or (file.name == CONFIG and beside.holds(FOLDER))
    every = code_of(config) if is_stored else ()
    return [(key, code) for key, code in every if not config.origin(key).startswith("--set ")]


def code_of(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the settings of a config that name code, with their values."""
    if config.model.file:
        yield "model.file", config.model.file
    if OPTIMIZERS.is_path(config.optimizer.name):
        yield "optimizer.name", config.optimizer.name
    for group in config.optimizer.groups or ():
        if OPTIMIZERS.is_path(group.get("name", "")):
            yield "optimizer.groups", group["name"]
    for key, policy in (("train.on_nan", config.train.on_nan), ("train.on_spike", config.train.on_spike)):
        if is_import_path(policy):
            yield key, policy
    if is_python_schedule(config.parallel.schedule):
        yield "parallel.schedule", config.parallel.schedule
    for layout in config.parallel.fallbacks or ():
        if is_python_schedule(parse(layout).setting("parallel.schedule", "")):
            yield "parallel.fallbacks", layout
    for entry in config.train.callbacks or ():
        name = entry if isinstance(entry, str) else str(entry["name"])
        if is_import_path(name):
            yield "train.callbacks", name
    for name in config.data.corpora:
        if is_custom_data(name):
            yield ("data.path" if config.data.path else "data.mixture"), name


def checksum_of_code(files: Iterable[Path]) -> str:
    """Return a checksum of Python files and of the modules beside them that they import."""
    blocks = list[bytes]()
    for file in files:
        for each in (file, *(modules_beside(file) if file.suffix == ".py" else ())):
            with suppress(OSError):  # using it says so
                blocks += [each.name.encode(), each.read_bytes()]
    return short(checksum_of_blocks(blocks))


def _untrusted_model(checkpoint: Path) -> UserError:
    return UserError(
        f"The model of {checkpoint} is the code in its {MODEL_FILE}, which runs only where you ask for it: name your "
        f"own copy with --model FILE.py:NAME, or give --trust-code if you trust {shown(checkpoint / MODEL_FILE)}."
    )
