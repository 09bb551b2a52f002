"""`threefold generate`: text from a trained model."""

import sys
from pathlib import Path
from typing import Annotated

import typer


def generate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a training run.")],
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Text to go on from; may be given many times.", show_default="standard input"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add to each prompt.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="Below 1 safer, above 1 wilder; 0: the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among this many likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Choose among the likeliest tokens of this mass.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choices.")] = 0,
) -> None:
    """Write on from each prompt with the newest checkpoint of RUN, in one process."""
    from threefold.train.generate import generate as texts

    chosen = prompts or [sys.stdin.read()]
    for text in texts(run, chosen, max_new_tokens, temperature, top_k, top_p, seed):
        typer.echo(text)
