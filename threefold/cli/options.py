"""Parameters that several commands share, and how they warn."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

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
    from threefold.config.model_file import split_model_file

    file, name = split_model_file(model)
    return f"{file}:{name}" if name else str(file)


def print_warnings(warnings: Iterable[str]) -> None:
    """Print each on standard error."""
    for warning in warnings:
        typer.echo(f"Warning: {warning}", err=True)
