"""`threefold data`: prepare token files; other rooms add further subcommands."""

from pathlib import Path
from typing import Literal

import typer
from typer import Argument, Option

from threefold.command_line import CommandLine
from threefold.doors import call_hook
from threefold.host import usable_cores
from threefold.terminal import Bars, print_table

app = CommandLine(help="Prepare token files from text; show, verify and convert them.")


@app.command()
def prepare(
    inputs: list[Path] = Argument(
        ..., metavar="INPUT", help="Files or folders: .jsonl, .json, .txt, also as .gz or .zst, and .parquet."
    ),
    out: Path = Option(..., help="Folder to make.", metavar="DIR"),
    vocab_size: int | None = Option(
        None,
        max=2**21,
        help="Vocabulary size of the byte-level BPE that is learned from the text; with --tokenizer char, the largest "
        "number of characters.",
        show_default="8192; all characters",
    ),
    tokenizer: Path | None = Option(
        None,
        metavar="FILE|char|byte|gpt2-like",
        help="A tokenizer.json to use, or the tokenizer to make: of the text's characters, of bytes, or a byte-level "
        "BPE.",
        show_default="gpt2-like",
    ),
    eod: str | None = Option(None, help="End-of-document token of --tokenizer, if its name is unusual."),
    key: str = Option(
        "text", help="Key of a JSON line, or column of a parquet file, that holds the text, or messages."
    ),
    workers: int | None = Option(None, max=256, help="Number of encoding processes.", show_default="one per core"),
    special_tokens: Literal["parse", "text"] = Option(
        "parse",
        help="Whether text that spells a special token becomes that token (parse) or stays text "
        "(text), as untrusted text should.",
    ),
    chat_template: Path | None = Option(
        None, help="Chat template of conversations: .jinja or tokenizer_config.json.", show_default="beside --tokenizer"
    ),
    overwrite: bool = Option(False, "--overwrite", help="Overwrite token files at --out."),
) -> None:
    """Encode text into token files for `data.path` of a run.

    Examples:
      threefold data prepare text --out tokens --vocab-size 4096
      threefold data prepare text --out tokens --tokenizer char
      threefold data prepare chats.jsonl --out tokens --tokenizer tokenizer.json
    """
    from threefold.data.preparation import prepare as prepare_files

    workers = usable_cores() if workers is None else workers
    choices = (vocab_size, tokenizer, eod, key, workers, overwrite, special_tokens, chat_template)
    with Bars() as bars:
        files = prepare_files(inputs, out, *choices, bars)
        facts = call_hook("token_facts", files, bars)
    if facts is None:
        typer.echo(f"Wrote {files.document_count:,} documents, {len(files.tokens):,} tokens, to {out}.")
    else:
        print_table(*facts)
