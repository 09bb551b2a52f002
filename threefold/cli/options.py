"""Parameters that several commands share, and how they warn."""

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
    """The config of a command.

    Args:
        path: of the file.
        overrides: the values of `--set`.
        model: of `--model`.
        trust_code: whether a config that a run has stored may name code to run.

    Raises:
        UserError: as `load_config`; there is no such model file, or a stored config names code.
    """
    from threefold.config import load_config

    config = load_config(path, with_model(overrides, model))
    if not trust_code:
        from threefold.checkpoint.code import require_named_code

        require_named_code(config, path)
    return config


def with_model(overrides: Sequence[str] | None, model: str | None) -> list[str]:
    """The overrides of a command, with those that `--model` stands for.

    Raises:
        UserError: there is no such file.
    """
    file = model_file(model)
    own = [] if file is None else ["model.architecture=own", f"model.file={json.dumps(file)}"]
    return [*(overrides or ()), *own]


def model_file(model: str | None) -> str | None:
    """What `--model` names, with the whole path of the file.

    Raises:
        UserError: there is no such file.
    """
    if model is None:
        return None
    from threefold.config.model import split_model_file

    file, name = split_model_file(model)
    return f"{file}:{name}" if name else str(file)


def print_warnings(warnings: Iterable[str]) -> None:
    """Print each on standard error."""
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)


_LONGEST: Final = 10**9
"""Ms of a pass, 11 days."""


def whole_number(text: str, option: str, least: int = 1, most: int = 10**7) -> int:
    """A whole number of an option.

    Raises:
        UserError: it is none, or is below `least` or above `most`.
    """
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
    """The whole number from `least` to `most` next to what a text means, such as `1e3`, `1,024` or `7.9`."""
    try:
        meant = float(text.replace(",", ""))
    except ValueError:
        return least
    return round(min(max(meant, least), most)) if isfinite(meant) else least


def times(text: str, option: str) -> list[float]:
    """One time, or several between commas.

    Raises:
        UserError: one is no number, infinite or negative.
    """
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


class Steps:
    """A bar on standard error, which is gone at the end; none where that is no terminal.

    Args:
        doing: what is done with each part, such as `Measuring`.
        shown: whether there is a bar.
    """

    def __init__(self, doing: str, shown: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn())
        # Without a thread of its own, beside which no process should be forked.
        console = Console(stderr=True)
        self._bars = Progress(
            *columns,
            console=console,
            auto_refresh=False,
            transient=True,
            disable=not (shown and console.is_terminal),
        )
        self._task = self._bars.add_task("")
        self._doing = doing

    def __enter__(self) -> "Steps":
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._bars.stop()

    def tell(self, part: str, number: int, parts: int) -> None:
        """A part begins, or so much of it is done."""
        self._bars.update(self._task, description=f"{self._doing} {part}", completed=number, total=parts, refresh=True)
