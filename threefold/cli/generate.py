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
    from threefold.train.generate import Sampling, Writer, require_text

    chosen = prompts or [sys.stdin.read().rstrip("\n")]
    require_text(chosen)
    sampling = Sampling(temperature, top_k, top_p)
    writer = Writer.load(run)
    for prompt in chosen:
        pieces = writer.stream(prompt, max_new_tokens, sampling, seed)
        typer.echo(prompt, nl=False)
        for piece in pieces:
            typer.echo(piece, nl=False)
        typer.echo()
