"""`threefold config convert`: configs of other systems."""

from pathlib import Path
from typing import Literal

import typer
from typer import Argument, Option

from threefold.errors import UserError
from threefold.files import first_of


def command(
    file: Path = Argument(
        ..., metavar="FILE", help="Fleet YAML, Colossal-AI config.py, or shell script with Megatron-LM flags."
    ),
    kind: Literal["fleet", "colossal", "megatron"] | None = Option(
        None, "--from", help="System that FILE is for. Default: detected from its content."
    ),
    world_size: int | None = Option(
        None, min=1, help="Ranks of the run, where FILE does not set the number of replicas."
    ),
    allow_unsupported: bool = Option(
        False, "--allow-unsupported", help="Leave out settings that have no counterpart, after listing them."
    ),
) -> None:
    """Convert FILE of another system: print the config and, on stderr, the settings that have no counterpart.

    Exit status: 0 if the config can run; 1 if settings such as data.path still have to be set (see its
    first comments); 2 if settings that change the training are unsupported, or the config is invalid.

    Examples:
      threefold config convert pretrain_gpt.sh > run.yaml
    """
    from threefold.convert.conversion import convert, unmapped_lines

    converted = convert(file, kind, world_size)
    typer.echo(converted.to_yaml(), nl=False)
    for line in unmapped_lines(converted, file):
        typer.echo(line, err=True)
    if converted.invalid:
        raise UserError(f"The converted config is invalid: {converted.invalid}")
    if converted.unsupported and not allow_unsupported:
        keys = list(dict.fromkeys(note.key for note in converted.unsupported))
        raise UserError(
            f"{file}: {first_of(keys, 8)} change the training and are unsupported, or are unknown; "
            "give --allow-unsupported to accept the config without them."
        )
    if converted.unset:
        typer.echo(f"The config cannot run as it is: set {' and '.join(converted.unset)}.", err=True)
        raise typer.Exit(1)
