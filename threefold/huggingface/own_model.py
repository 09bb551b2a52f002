"""Export of an own model: beside its weights, which keep its own names, what makes it in plain PyTorch."""

import json
import shutil
from pathlib import Path
from typing import Any, Final

from threefold.checkpoint.folder import OWN_MODEL, model_files
from threefold.config import ModelConfig
from threefold.models.source import file_source

CONSTRUCTOR: Final = "model.json"
"""Says what to call in the model's file, with which keyword arguments, and which of its parameters are stored under
the name of another."""


def write_constructor(config: ModelConfig, folder: Path) -> tuple[str, ...]:
    """Write an own model's file with the modules beside it that it imports, and how to make the model with it.

    Args:
        config: the `model` section of the checkpoint, with the file that makes the model.
        folder: to write to.

    Returns:
        the names of the files written.

    Raises:
        UserError: the file cannot be used, or there is none, as the model was given in Python.
    """
    source = file_source(config)
    name, arguments = source.constructor(config)
    _, plan = source.load_section(config)
    values = {"file": OWN_MODEL, "name": name, "arguments": _plain(arguments), "tied": dict(plan.ties)}
    files = model_files(source.path)
    for copy, path in files.items():
        shutil.copyfile(path, folder / copy)
    (folder / CONSTRUCTOR).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return *files, CONSTRUCTOR


def _plain(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.settings() if isinstance(value, ModelConfig) else value for name, value in arguments.items()}
