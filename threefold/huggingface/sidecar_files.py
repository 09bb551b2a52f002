"""Sidecar files: those of a Hugging Face model that training does not use, kept from import to export.

A checkpoint has them as `huggingface-NAME`, and so has each later checkpoint of a run that started from it.
"""

import os
from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from threefold.checkpoint.folder import TOKENIZER
from threefold.errors import UserError
from threefold.files import read_text
from threefold.huggingface.tensor_files import read_json
from threefold.models.hf.config_json import shortened

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
WITH_TOKENIZER: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""Files about the use of a tokenizer, above all its chat template."""
CARRIED: Final = (
    CONFIG,
    GENERATION,
    *WITH_TOKENIZER,
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
)
PREFIX: Final = "huggingface-"


def texts_of(source: Path) -> dict[str, str]:
    """The further files of a checkpoint of the model in `source`, by name.

    Raises:
        UserError: a file cannot be read, or the tokenizer is none.
    """
    kept = {TOKENIZER: source / TOKENIZER, **{PREFIX + name: source / name for name in CARRIED}}
    texts = {name: read_text(path) for name, path in kept.items() if os.path.lexists(path)}
    for path in (path for name, path in kept.items() if name in texts and path.suffix == ".json"):
        read_json(path)
    if TOKENIZER in texts:
        _tokenizer(texts[TOKENIZER], source / TOKENIZER)
    return texts


def _tokenizer(text: str, path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises a bare Exception
        raise UserError(f"{path} cannot be read ({shortened(str(error))}); fetch it again.") from None


def check_tokenizer(text: str, path: Path, rows: int) -> None:
    """Check that every token of a tokenizer has a row in the embedding.

    Args:
        text: of the tokenizer.
        path: names it in sentences.
        rows: of the embedding.

    Raises:
        UserError: a token has none.
    """
    ids = _tokenizer(text, path).get_vocab(with_added_tokens=True).values()
    largest = max(ids, default=-1)
    if largest >= rows:
        raise UserError(
            f"{path} has {len(ids):,} tokens with ids up to {largest:,} and the embedding has {rows:,} rows "
            f"(vocab_size in {CONFIG}); give the tokenizer that belongs to the model, with ids up to {rows - 1:,}."
        )


def end_tokens(folder: Path, prefix: str = "") -> list[int]:
    """The tokens that end a text, each once, as a model's config.json and generation_config.json say.

    Args:
        folder: of Hugging Face; or a checkpoint.
        prefix: before the files' names; `PREFIX` in a checkpoint.

    Raises:
        UserError: a file cannot be read.
    """
    found: list[Any] = []
    for path in (folder / f"{prefix}{name}" for name in (CONFIG, GENERATION)):
        named = read_json(path).get("eos_token_id") if os.path.lexists(path) else None
        named = named if isinstance(named, list) else [named]
        if not all(each is None or (type(each) is int and 0 <= each < 1 << 31) for each in named):
            shown = shortened(repr(named[0] if len(named) == 1 else named))
            raise UserError(
                f"{path}: eos_token_id is {shown} but must be a token's id or a list of them; fetch it again."
            )
        found += named
    return list(dict.fromkeys(token for token in found if token is not None))


def carried_by(checkpoint: Path) -> dict[str, str]:
    """The tokenizer and those of a checkpoint's files, by their names in it; no others, such as Python."""
    paths = [checkpoint / name for name in (TOKENIZER, *sorted(PREFIX + name for name in CARRIED))]
    return {path.name: path.read_text(encoding="utf-8") for path in paths if os.path.lexists(path)}


def write_texts(checkpoint: Path, folder: Path) -> list[str]:
    """Write a checkpoint's tokenizer and sidecar files, except config.json, to a folder, and return the names."""
    texts = {name.removeprefix(PREFIX): text for name, text in carried_by(checkpoint).items()}
    texts.pop(CONFIG, None)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(texts)


def imported_config(checkpoint: Path) -> dict[str, Any]:
    """The config.json that a checkpoint's model came from; empty if from none."""
    path = checkpoint / (PREFIX + CONFIG)
    return read_json(path) if path.is_file() else {}
