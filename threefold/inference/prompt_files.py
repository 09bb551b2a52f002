"""Prompts for generation and texts for evaluation, read from files."""

from collections.abc import Iterator
from pathlib import Path

from threefold.data.messages import MESSAGES, PROMPT, Conversation, Document, conversation_of
from threefold.data.sources import SourceReader, find_inputs
from threefold.errors import UserError


def read_prompts(path: Path) -> list[str | Conversation]:
    """Read prompts from a file: JSON lines with the key `prompt` (.jsonl or .json, also .gz or .zst), or one per line.

    A list of messages under `prompt` or `messages` is a conversation to answer. Blank lines are skipped.

    Raises:
        UserError: the file cannot be read, a line is malformed, or there is no prompt.
    """
    is_json = ".json" in _file(path, "--prompts-file").name
    prompts: list[str | Conversation] = [*(_json_prompts(path) if is_json else _text_prompts(path))]
    if not prompts:
        raise UserError(f"--prompts-file {path} has no prompt; give one per line.")
    return prompts


def read_texts(path: Path, key: str) -> list[Document]:
    """Read the non-blank texts to evaluate from a file.

    JSON lines (.jsonl or .json) hold one text per line under `key`, or conversations, or prompts with completions. A
    .txt file is divided into documents.

    Raises:
        UserError: the file cannot be read, its kind is unknown, a line is malformed, or there is no text.
    """
    (found,) = find_inputs([_file(path, "--data")])
    if not (texts := list(SourceReader(found, key, lambda _: None))):
        raise UserError(f"--data {path} has no text; give one JSON object per line, with the text under {key!r}.")
    return texts


def _file(path: Path, option: str) -> Path:
    if not path.is_file():
        raise UserError(f"{option} is {path}, which is not a file; give one that exists.")
    return path


def _json_prompts(path: Path) -> Iterator[str | Conversation]:
    reader = SourceReader(path, PROMPT, lambda _: None)
    for value, number in reader.objects():
        name = PROMPT if PROMPT in value or MESSAGES not in value else MESSAGES
        if isinstance(value.get(name), list):
            yield conversation_of(value[name], f"{path}:{number}", name)
        elif (text := reader.text_of(value, number)).strip():
            yield text


def _text_prompts(path: Path) -> list[str]:
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise UserError(f"--prompts-file {path} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise UserError(f"--prompts-file {path} is not UTF-8 text (byte {error.start}).") from None
    return [line.rstrip("\r") for line in lines if line.strip()]
