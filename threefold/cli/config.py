"""`threefold config`: what a run would be."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from threefold.cli.options import ConfigFile, Overrides
from threefold.errors import UserError

app = typer.Typer(help="Look into configs.", no_args_is_help=True)


@app.command()
def show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check CONFIG against its data and this machine and print it with every setting filled."""
    from threefold.config import load_config

    given = load_config(config, overrides or ())
    from threefold.launch.training import resolve_run

    typer.echo(resolve_run(given).to_yaml_as_given(), nl=False)


@app.command()
def size(config: ConfigFile, overrides: Overrides = None) -> None:
    """Count the parameters of CONFIG's model, and what each rank of its layout holds; nothing is started."""
    from threefold.cli.size_view import print_size
    from threefold.config import load_config
    from threefold.config.resolve import check_settings

    given = load_config(config, overrides or ())
    check_settings(given)
    from threefold.data.vocabulary import resolve_without_data

    resolved = resolve_without_data(given)
    from threefold.train.size import ModelSize  # imports torch, which errors do not wait for

    print_size(ModelSize(resolved), resolved)


ForeignFile = Annotated[
    Path, typer.Argument(metavar="FILE", help="Fleet YAML, Colossal-AI config.py, or script with Megatron-LM flags.")
]
KindName = Annotated[
    Literal["fleet", "colossal", "megatron"] | None,
    typer.Option("--from", help="Whose file it is. Default: .yaml is Fleet's, .py Colossal-AI's, else Megatron-LM's."),
]
WorldSize = Annotated[
    int | None,
    typer.Option("--world-size", min=1, help="Ranks of the run, where FILE does not say how many replicas there are."),
]


@app.command()
def convert(file: ForeignFile, kind: KindName = None, world_size: WorldSize = None) -> None:
    """Print the config equal to FILE of another system and, on stderr, what of FILE has no counterpart."""
    from threefold.config.convert import convert as converted_from

    converted = converted_from(file, kind, world_size)
    typer.echo(converted.to_yaml(), nl=False)
    if converted.notes:
        typer.echo(f"\nWithout an equal counterpart, of {file} ({converted.kind}):", err=True)
    for note in converted.notes:
        value = f"({note.value})" if note.value == "not given" else f"= {note.value}"
        typer.echo(f"  {note.key} {value}: {note.reason}", err=True)
    if converted.refusal:
        raise UserError(f"This config cannot run before it is mended: {converted.refusal}")


@app.command()
def reference() -> None:
    """Print what every setting means, as Markdown."""
    from threefold.config.reference import markdown

    typer.echo(markdown(), nl=False)


@app.command()
def compatibility() -> None:
    """Print which features go together, as Markdown."""
    from threefold.config.features import markdown

    typer.echo(markdown(), nl=False)
