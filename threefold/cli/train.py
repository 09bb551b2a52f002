"""`threefold train`: a config to a trained model."""

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from threefold.cli.data_view import Bars
from threefold.cli.options import ConfigFile, Overrides
from threefold.errors import OutputLost


def train(
    config: ConfigFile,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Folder for all that the run writes.", show_default="runs/NAME of NAME.yaml"),
    ] = None,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint in RUN.")] = False,
    console_ranks: Annotated[
        str, typer.Option(metavar="RANKS", help="Ranks whose output is shown, such as 0,3; all are in RUN/logs.")
    ] = "0",
) -> None:
    """Train a model as CONFIG says, on dp · tp · pp · cp processes here, or as ranks of torchrun or srun."""
    from threefold.config import load_config
    from threefold.launch.training import prepare_training

    shown, given = _ranks(console_ranks), load_config(config, overrides or ())
    with Bars() as bars:  # whose thread has ended when the workers are forked
        run = prepare_training(given, run_dir or Path("runs") / config.stem, resume=resume, progress=bars)
    if run.speaks:
        with suppress(OutputLost):  # the run is what was asked for
            typer.echo(run.config.compact())
    run.start(shown)


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(rank) for rank in text.split(",") if rank.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of ranks such as 0,3", param_hint="--console-ranks") from None
