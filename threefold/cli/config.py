"""`threefold config`: show, compare, size and convert configs."""

from pathlib import Path

import typer
from typer import Argument

from threefold.command_line import CommandLine
from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import FolderFiles
from threefold.terminal import (
    ConfigFile,
    Overrides,
    TrustCode,
    print_table,
    read_without_data,
    setting_text,
)

app = CommandLine(help="Show, compare, size and convert configs.")


@app.command()
def show(config: ConfigFile, trust_code: TrustCode = False, overrides: Overrides = None) -> None:
    """Check CONFIG against its data and this machine, and print it with every setting resolved.

    The config of a run that names code, such as a custom model, is printed as it is stored, and no code runs.

    Examples:
      threefold config show run.yaml --set parallel.tp=2
    """
    from threefold.checkpoint.code import stored_code
    from threefold.config import load_config

    given = load_config(config, overrides or ())
    if not trust_code and (named := stored_code(given, config)):
        typer.echo(given.to_yaml_as_given(), nl=False)
        typer.echo(f"Printed as it is stored: {_unresolved(named)}; --trust-code runs it.", err=True)
        return
    from threefold.launch.checks import resolve_run

    typer.echo(resolve_run(given).to_yaml_as_given(), nl=False)


@app.command()
def diff(
    first: Path = Argument(..., metavar="A", help="YAML file, or the folder of a run."),
    second: Path = Argument(..., metavar="B", help="YAML file, or the folder of a run."),
) -> None:
    """Print the settings in which two configs differ, including derived settings.

    Where the config of a run names code, such as a custom model, no code runs, and both are compared as they are
    stored.

    Exit status: 0 if all settings are equal; 1 if any differs; 2 if one of the configs is invalid.

    Examples:
      threefold config diff run.yaml runs/run
    """
    from threefold.checkpoint.code import stored_code
    from threefold.config import load_config
    from threefold.config.loading import differing_settings

    files = [_stored(path) if path.is_dir() else path for path in (first, second)]
    configs = [load_config(file) for file in files]
    named = [each for config, file in zip(configs, files, strict=True) for each in stored_code(config, file)]
    if named:
        typer.echo(f"Compared as they are stored: {_unresolved(named)}.", err=True)
    else:
        configs = [read_without_data(file, None) for file in files]
    found = differing_settings([config.sections() for config in configs])
    rows = [(name, *map(setting_text, values)) for name, values in found.items()]
    if not rows:
        typer.echo("All settings are equal.")
        return
    print_table(("setting", str(first), str(second)), rows)
    raise typer.Exit(1)


def _unresolved(named: list[tuple[str, str]]) -> str:
    """Return why settings that follow from others are not computed, as a clause."""
    return f"other settings follow from {named[0][0]} {shown(named[0][1])}, code of a run, which is not run"


def _stored(folder: Path) -> Path:
    """Return the path of the config in the folder of a run or a checkpoint."""
    try:
        return FolderFiles(folder).path("config.yaml")
    except OSError as error:
        raise UserError(f"Cannot read the config {shown(folder / 'config.yaml')}: {error.strerror}.") from None
