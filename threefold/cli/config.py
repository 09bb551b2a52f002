"""`threefold config`: what a run would be."""

import typer

from threefold.cli.options import ConfigFile, Overrides

app = typer.Typer(help="Look into configs.", no_args_is_help=True)


@app.command()
def show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check CONFIG against its data and this machine and print it with every setting filled."""
    from threefold.config import load_config
    from threefold.launch.training import resolve_run

    typer.echo(resolve_run(load_config(config, overrides or ())).to_yaml(), nl=False)


@app.command()
def size(config: ConfigFile, overrides: Overrides = None) -> None:
    """Count the parameters of CONFIG's model, and what each rank of its layout holds; nothing is started."""
    from threefold.cli.size_view import print_size
    from threefold.config import load_config
    from threefold.train.size import ModelSize, resolve_without_data

    resolved = resolve_without_data(load_config(config, overrides or ()))
    print_size(ModelSize(resolved), resolved)


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
