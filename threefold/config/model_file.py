"""How a model's Python file is named: `FILE.py`, or `FILE.py:NAME`."""

import ast
from pathlib import Path

from threefold.errors import UserError
from threefold.files import shown


def split_model_file(text: str, setting: str = "--model") -> tuple[Path, str]:
    """The file, and the name in it, which may be empty.

    Args:
        text: as given.
        setting: what it was given as.

    Raises:
        UserError: there is no such file.
    """
    file, _, name = text.partition(":")
    if not Path(file).is_file():
        raise UserError(
            f"{setting} is {shown(text)} but {shown(file)} is not a file; name a Python file, as in model.py:MyModel."
        )
    return Path(file).resolve(), name


def is_made_from_section(file: Path, name: str) -> bool:
    """Whether a file's function `make_model` makes the model from the `model` section of the config, of whatever
    architecture it is, and not a class or function of that name.

    Args:
        file: is read and not executed; it may be no valid Python.
        name: in it, which may be empty.
    """
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):  # importing it says what is wrong
        return False
    functions = {node.name for node in body if isinstance(node, ast.FunctionDef)}
    return "make_model" in functions and not any(isinstance(node, ast.ClassDef) and node.name == name for node in body)
