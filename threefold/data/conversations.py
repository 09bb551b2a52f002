"""Conversations and prompt/completion pairs, which an attached room reads, and the chat templates that render them."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from threefold.doors import call_hook, needed

MESSAGES: Final = "messages"
PROMPT: Final = "prompt"
COMPLETION: Final = "completion"
CHOSEN: Final = "chosen"
REJECTED: Final = "rejected"


@dataclass(frozen=True)
class Chat:
    """A conversation to learn from, or to answer."""

    where: str  # file and line, or an option, for messages about it
    messages: tuple[dict[str, Any], ...]
    first: int = 0  # message from which on the assistant's turns are learned
    tools: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Completion:
    """A prompt and the completion to learn; `where` is its file and line."""

    where: str
    prompt: str
    completion: str


Document = str | Chat | Completion


def is_preference(value: Any, key: str) -> bool:
    """Return whether a line's object has a chosen and a rejected answer; other documents take precedence."""
    return (
        isinstance(value, dict) and {CHOSEN, REJECTED} <= value.keys() and not is_chat(value, key) and key not in value
    )


def preference_of(value: dict[str, Any], where: str) -> tuple[Chat | Completion, Chat | Completion]:
    """Parse the chosen and the rejected document of a line. Raises UserError if it is malformed."""
    found: tuple[Chat | Completion, Chat | Completion]
    found = needed("preference_of", "A preference", "preference")(value, where)
    return found


def is_chat(value: Any, key: str) -> bool:
    """Return whether a line's object is a conversation or a pair; a text under `key` takes precedence."""
    if not isinstance(value, dict):
        return False
    if key in value:
        found = value[key]
        return isinstance(found, list) and (key == MESSAGES or (bool(found) and isinstance(found[0], dict)))
    return MESSAGES in value or {PROMPT, COMPLETION} <= value.keys()


def chat_of(value: dict[str, Any], key: str, where: str) -> Chat | Completion:
    """Parse the conversation or the pair of a line for which `is_chat` is true. Raises UserError if it is malformed."""
    found: Chat | Completion = needed("chat_of", "A conversation", "huggingface")(value, key, where)
    return found


def utf8(text: str) -> str:
    """Replace what UTF-8 cannot encode: JSON can spell half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


JINJA_FILE: Final = "chat_template.jinja"
CONFIG_FILE: Final = "tokenizer_config.json"
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """Chat template in Jinja, and the special tokens, such as ("bos_token", "<s>"), that it may refer to."""

    template: str
    special_tokens: tuple[tuple[str, str], ...] = ()
    origin: str = "the chat template"  # its file, for messages

    @property
    def marks_answers(self) -> bool:
        """Whether the template itself marks the text that the assistant generates."""
        return re.search(r"\{\%-?\s*generation\s*-?\%\}", self.template) is not None

    def files(self) -> dict[str, str]:
        """Return the files from which `beside` finds the template again: their contents by name."""
        return {
            JINJA_FILE: self.template,
            CONFIG_FILE: json.dumps(dict(self.special_tokens), indent=2, ensure_ascii=False) + "\n",
        }


def template_of(path: Path | None, tokenizer_file: Path) -> ChatTemplate | None:
    """Read the chat template of a .jinja or .json file; with None for `path`, the one beside the tokenizer, if any."""
    found: ChatTemplate | None = call_hook("chat_template", path, tokenizer_file)
    return found
