"""Files that go with a model of Hugging Face and mean nothing to training: carried along from import to export.

They lie in a checkpoint beside its tensors as `huggingface-NAME`, and each later checkpoint of a run that started from
them has them too.
"""

from pathlib import Path
from typing import Any, Final

from tokenizers import Tokenizer

from threefold.checkpoint.folder import TOKENIZER
from threefold.checkpoint.huggingface.files import read_json
from threefold.errors import UserError

CONFIG: Final = "config.json"
GENERATION: Final = "generation_config.json"
WITH_TOKENIZER: Final = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
"""What says of a tokenizer how it is used, its chat template above all."""
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
    """What a checkpoint of the model in `source` has beside its tensors, by file name.

    Raises:
        UserError: a file cannot be read, or the tokenizer is none.
    """
    kept = {TOKENIZER: source / TOKENIZER, **{PREFIX + name: source / name for name in CARRIED}}
    texts = {name: _text_of(path) for name, path in kept.items() if path.is_file()}
    if TOKENIZER in texts:
        try:
            Tokenizer.from_str(texts[TOKENIZER])
        except Exception as error:  # the library raises a bare Exception
            raise UserError(f"{source / TOKENIZER} cannot be read ({error}); fetch it again.") from None
    return texts


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); fetch it again.") from None


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
        named = read_json(path).get("eos_token_id") if path.is_file() else None
        found += named if isinstance(named, list) else [named]
    return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def carried_by(checkpoint: Path) -> dict[str, str]:
    """The tokenizer and those of a checkpoint's files, by their names in it."""
    paths = [*checkpoint.glob(TOKENIZER), *sorted(checkpoint.glob(f"{PREFIX}*"))]
    return {path.name: path.read_text(encoding="utf-8") for path in paths}


def write_texts(checkpoint: Path, folder: Path) -> list[str]:
    """Write a checkpoint's tokenizer and what it carries, but for config.json, to a folder, and return the names."""
    texts = {name.removeprefix(PREFIX): text for name, text in carried_by(checkpoint).items()}
    texts.pop(CONFIG, None)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return sorted(texts)


def imported_config(checkpoint: Path) -> dict[str, Any]:
    """The config.json that a checkpoint's model came from; empty if from none."""
    path = checkpoint / (PREFIX + CONFIG)
    return read_json(path) if path.is_file() else {}
