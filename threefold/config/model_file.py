"""How a model's Python file is named: `FILE.py`, or `FILE.py:NAME`."""

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
