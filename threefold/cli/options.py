"""Options shared by several commands, and their parsing."""

import json
from collections.abc import Iterable, Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from threefold.errors import UserError
from threefold.files import shown

if TYPE_CHECKING:
    from threefold.config import Config


ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; docs/config.md lists the settings.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting; may be repeated."),
]
ModelFile = Annotated[
    str | None,
    typer.Option("--model", metavar="FILE.py[:NAME]", help="A model of your own, from a Python file."),
]
TrustCode = Annotated[
    bool,
    typer.Option("--trust-code", help="Run the code that a checkpoint brings along, or that a stored config names."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
TensorRanks = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size.")]
PipelineRanks = Annotated[int, typer.Option("--pp", min=1, help="Pipeline-parallel size.")]
DtypeName = Annotated[
    Literal["fp32", "bf16", "fp16", "fp64"],
    typer.Option("--dtype", help="Data type of the weights and the computation."),
]
SpecialTokensName = Annotated[
    Literal["parse", "text"] | None,
    typer.Option(
        "--special-tokens",
        help="Text that spells a special token becomes that token (parse), or stays text (text), as for untrusted "
        "input.",
        show_default="as the model was trained",
    ),
]
DeviceName = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option("--device", help="auto: GPUs if there is one per rank.")
]


def read_config(
    path: Path, overrides: Sequence[str] | None = None, model: str | None = None, trust_code: bool = False
) -> "Config":
    """Read the config of a command; raises as `load_config`, or if a stored config names code that is not trusted.

    Args:
        path: path of the YAML file.
        overrides: values of `--set`.
        model: value of `--model`.
        trust_code: whether a config stored by a run may name code to execute.
    """
    from threefold.config import load_config

    config = load_config(path, with_model(overrides, model))
    if not trust_code:
        from threefold.checkpoint.code import require_named_code

        require_named_code(config, path)
    return config


def with_model(overrides: Sequence[str] | None, model: str | None) -> list[str]:
    """Return a command's overrides and those that `--model` implies; raises as `model_file`."""
    file = model_file(model)
    own = [] if file is None else ["model.architecture=own", f"model.file={json.dumps(file)}"]
    return [*(overrides or ()), *own]


def model_file(model: str | None) -> str | None:
    """Return the value of `--model` with an absolute path, or None; raise a `UserError` if there is no such file."""
    if model is None:
        return None
    from threefold.config.model import split_model_file

    file, name = split_model_file(model)
    return f"{file}:{name}" if name else str(file)


def read_without_data(
    path: Path, overrides: Sequence[str] | None, model: str | None = None, trust_code: bool = False
) -> "Config":
    """Read and check a config as `read_config`, and resolve it without its data, which need not exist."""
    from threefold.config.resolve import check_settings

    given = read_config(path, overrides, model, trust_code)
    check_settings(given)
    from threefold.data.dataset import resolve_without_data

    return resolve_without_data(given)


def require_ranks(ranks: tuple[int, ...], config: "Config", option: str) -> None:
    """Raise a `UserError` unless the layout of a config has the ranks of an option, such as `--rank is`."""
    from threefold.comm.layout import Layout

    last = Layout.from_config(config.parallel).world_size - 1
    if absent := [rank for rank in ranks if not 0 <= rank <= last]:
        exist = f"the layout has ranks 0 to {last}" if last else "the layout has rank 0 alone"
        raise UserError(f"{option} {shown(str(absent[0]))} but {exist}; use {0 if absent[0] < 0 else last}.")


def check_picture_file(path: Path | None) -> None:
    """Raise a `UserError` if a picture cannot be drawn into the file of an option, before anything is computed."""
    if path is not None:
        from threefold.planner.timeline import check_picture

        check_picture(path)


def print_warnings(warnings: Iterable[str]) -> None:
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)


_LONGEST: Final = 10**9
"""Limit in ms for the time of a pass: 11 days."""


def whole_number(text: str, option: str, least: int = 1, most: int = 10**7) -> int:
    """Parse an option as a whole number; raise a `UserError` if it is none, or not from `least` to `most`."""
    try:
        number = int(text.replace("_", ""))
    except ValueError:
        nearest = _nearest(text, least, most)
        raise UserError(f"{option} {shown(text) or repr(text)} must be a whole number; use {nearest}.") from None
    if number < least:
        raise UserError(f"{option} {number} must be at least {least}; use {least}.")
    if number > most:
        raise UserError(f"{option} {number} must be at most {most:,}; use {most}.")
    return number


def _nearest(text: str, least: int, most: int) -> int:
    """Return the number from `least` to `most` nearest to a text such as `1e3`, `1,024` or `7.9`."""
    try:
        meant = float(text.replace(",", ""))
    except ValueError:
        return least
    return round(min(max(meant, least), most)) if isfinite(meant) else least


def times(text: str, option: str) -> list[float]:
    """Parse an option as times in ms, separated by commas; raise a `UserError` for an invalid one."""
    found = []
    for part in text.split(","):
        try:
            time = float(part)
        except ValueError:
            rule = "must be a time in ms, or several between commas, such as 18.5 or 18.5,20,18.5"
            raise UserError(f"{option} {shown(text)} {rule}.") from None
        if not isfinite(time) or time < 0:
            raise UserError(f"{option} {part.strip()} must be a time of 0 ms or more; use 0.")
        if time > _LONGEST:
            raise UserError(f"{option} {part.strip()} must be a time of at most {_LONGEST:,} ms; use {_LONGEST}.")
        found.append(time)
    return found
