"""The config of a layout that was found, ready to train, with what was predicted as comments."""

from pathlib import Path
from typing import Final

from threefold.config.schema import Config, to_yaml
from threefold.errors import UserError
from threefold.files import shown
from threefold.plan.search.choice import KEYS, LayoutChoice
from threefold.plan.search.in_layout import without_layout

_FOLLOWS: Final = "accumulation"
"""The part of a layout that a config leaves out, as it follows from the batch sizes."""
_HEAD: Final = "# Written by threefold plan"
"""How the files begin that may be written again."""


def config_text(
    config: Config, choice: LayoutChoice, request: str, comments: list[str], steps: int | None = None
) -> str:
    """A config as YAML: what was given, in the layout that was found.

    Args:
        config: as loaded.
        choice: the layout.
        request: what `threefold plan` was asked, as on the command line.
        comments: further lines at its head.
        steps: of the run, where the request says how many tokens; None for as many as the config says.
    """
    sections = {name: dict(values) for name, values in without_layout(config).items()}
    for name, key in KEYS.items():
        section, setting = key.split(".")
        if name != _FOLLOWS:
            sections[section][setting] = getattr(choice, name)
    if steps is not None:
        sections["train"].pop("epochs", None)
        sections["train"]["max_steps"] = steps
    header = "".join(f"# {line}\n" for line in comments)
    return f"{_HEAD} {request}.\n{header}" + to_yaml({name: values for name, values in sections.items() if values})


def require_writable(path: Path) -> None:
    """Check that a file can be written before the search, and that nothing of the user's is lost by that.

    Raises:
        UserError: it is a folder, is in none, or is a file that `threefold plan` has not written.
    """
    if path.is_dir():
        raise UserError(f"{shown(path)} is a folder; name a file in it, such as {shown(path / 'best.yaml')}.")
    if not path.parent.is_dir():
        raise UserError(f"{shown(path)} cannot be written as {shown(path.parent)} is no folder; make it first.")
    if path.is_file() and not _is_ours(path):
        raise UserError(
            f"{shown(path)} is there already and threefold plan has not written it; name another file, such as "
            f"{shown(_free(path))}."
        )


def write_config(path: Path, text: str) -> None:
    """Write a config.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be written ({error.strerror}).") from None


def _is_ours(path: Path) -> bool:
    """Whether a file begins as `config_text` does."""
    try:
        with path.open("rb") as file:
            return file.read(len(_HEAD)) == _HEAD.encode()
    except OSError:
        return False


def _free(path: Path) -> Path:
    """A path beside another that no file has."""
    names = (path.with_name(f"{path.stem}-planned{number}{path.suffix}") for number in ("", *range(2, 10**6)))
    return next(name for name in names if not name.exists())
