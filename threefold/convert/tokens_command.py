"""`threefold data convert`: token files in other formats."""

from pathlib import Path

import typer
from typer import Argument, Option

from threefold.terminal import Bars


def convert(
    source: Path = Argument(
        ..., metavar="SOURCE", help="Token files of any system: a folder, a prefix or one of the files."
    ),
    to: str = Option(
        ..., metavar="FORMAT", help="Format to write: megatron or threefold, or one that an installed package adds."
    ),
    out: Path = Option(..., help="Prefix of the .bin and .idx files to make, or the folder.", metavar="OUT"),
    tokenizer: Path | None = Option(
        None, help="With --to threefold: a tokenizer.json for files that have none of their own."
    ),
    eod: str | None = Option(
        None, help="With --to threefold: end-of-document token of the tokenizer, if its name is unusual."
    ),
    overwrite: bool = Option(False, "--overwrite", help="Overwrite --out."),
) -> None:
    """Convert token files to the format of another system, token for token.

    Examples:
      threefold data convert tokens --to megatron --out corpus_text_document
    """
    from threefold.convert.tokens import convert as convert_tokens

    with Bars() as bars:
        converted = convert_tokens(source, to, out, tokenizer, eod, overwrite, bars)
    typer.echo(f"Wrote {converted.documents:,} documents, {converted.tokens:,} tokens, from {source} to {out}.")
    if converted.left_out:
        typer.echo(f"Left out {converted.left_out:,} empty documents, which this format does not have.")
    if converted.ended:
        typer.echo(f"Gave {converted.ended:,} documents the end-of-document token that this format requires.")
