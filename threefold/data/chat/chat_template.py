"""Chat templates: from messages to text as `transformers` renders them.

The environment (trimming, loop controls, filters, globals, `{% generation %}` blocks, the sandbox) is that of
`transformers.utils.chat_template_utils`, whose rendered text this one equals.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

from threefold.errors import UserError
from threefold.files import read_json, read_text

JINJA_FILE: Final = "chat_template.jinja"
JSON_FILE: Final = "chat_template.json"
CONFIG_FILE: Final = "tokenizer_config.json"
MAP_FILE: Final = "special_tokens_map.json"
_SIDECAR: Final = "huggingface-"  # before these names in a checkpoint
_GENERATION: Final = re.compile(r"\{\%-?\s*generation\s*-?\%\}")
_REASONING: Final = ("reasoning_content", "thinking", "reasoning")

Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatTemplate:
    """A template and what it may refer to.

    Attributes:
        template: Jinja.
        special_tokens: names and texts, such as ("bos_token", "<s>").
        origin: the file it is from, for messages.
    """

    template: str
    special_tokens: tuple[tuple[str, str], ...] = ()
    origin: str = "the chat template"

    @classmethod
    def beside(cls, tokenizer_file: Path) -> Self | None:
        """The template in the folder of a tokenizer.json, as transformers finds it; None if there is none.

        That is chat_template.jinja, else the `chat_template` of tokenizer_config.json or of chat_template.json; in a
        checkpoint the same files under their names as sidecar files.

        Raises:
            UserError: a file cannot be read, or holds no template that can be chosen.
        """
        folder = tokenizer_file.parent
        for prefix in ("", _SIDECAR):
            if (jinja := folder / (prefix + JINJA_FILE)).is_file():
                return cls(read_text(jinja), _special_tokens(folder), str(jinja))
            for name in (CONFIG_FILE, JSON_FILE):
                path = folder / (prefix + name)
                if path.is_file() and (found := _named(read_json(path), path)) is not None:
                    return cls(found, _special_tokens(folder), str(path))
        return None

    @classmethod
    def read(cls, path: Path, tokenizer_file: Path) -> Self:
        """The template in a .jinja file, or under `chat_template` in a .json file such as tokenizer_config.json.

        Args:
            path: the file.
            tokenizer_file: beside which the special tokens are looked for, if `path` does not have them.

        Raises:
            UserError: there is none.
        """
        if path.suffix != ".json":
            return cls(read_text(path, "the chat template "), _special_tokens(tokenizer_file.parent), str(path))
        values = read_json(path, "the chat template ")
        if (found := _named(values, path)) is None:
            raise UserError(f"{path} has no chat_template; give a .jinja file or a tokenizer_config.json that has one.")
        tokens = _tokens_in(values) or dict(_special_tokens(tokenizer_file.parent))
        return cls(found, tuple(tokens.items()), str(path))

    @property
    def marks_answers(self) -> bool:
        """Whether it says itself what the assistant generates."""
        return _GENERATION.search(self.template) is not None

    def files(self) -> dict[str, str]:
        """The files by which `beside` finds it again: their texts by name."""
        return {
            JINJA_FILE: self.template,
            CONFIG_FILE: json.dumps(dict(self.special_tokens), indent=2, ensure_ascii=False) + "\n",
        }


class TemplateRefusal(Exception):
    """A template does not take a conversation; the message says why."""


class Rendered(NamedTuple):
    """A conversation as text, and where the template says that the assistant generates: first character and end."""

    text: str
    generated: list[tuple[int, int]]


class ChatRenderer:
    """A compiled template.

    Raises:
        UserError: its syntax is wrong.
    """

    def __init__(self, template: ChatTemplate) -> None:
        import jinja2  # here, as few runs have conversations

        from threefold.data.chat.template_environment import template_environment

        self.template = template
        try:
            self._environment = template_environment()
            self._compiled = self._environment.from_string(template.template)
        except jinja2.TemplateError as error:
            raise UserError(f"{template.origin} is no chat template that can be used ({_reason(error)}).") from None

    def render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, add_generation_prompt: bool = False
    ) -> Rendered:
        """A conversation as text.

        Raises:
            TemplateRefusal: the template does not take it.
        """
        blocks: list[str] = []
        spans: list[tuple[int, int]] = []
        values = {
            **dict(self.template.special_tokens),
            "messages": [_aliased(message) for message in messages],
            "tools": list(tools) if tools is not None else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            self._environment.begin()
            with self._environment.track_answers(blocks, spans):  # type: ignore[attr-defined]
                for block in self._compiled.generate(values):
                    blocks.append(block)
        except Exception as error:  # a template is a program: it may fail in any way
            raise TemplateRefusal(_reason(error)) from None
        return Rendered("".join(blocks), spans)


def _named(values: Any, path: Path) -> str | None:
    """The template of a tokenizer_config.json: one, or the one named `default` among several."""
    found = values.get("chat_template") if isinstance(values, dict) else None
    if isinstance(found, list):
        found = {
            one["name"]: one["template"] for one in found if isinstance(one, dict) and {"name", "template"} <= {*one}
        }
    if isinstance(found, dict):
        if "default" not in found:
            names = ", ".join(map(str, sorted(found)))
            raise UserError(
                f"{path} names the chat templates {names} and no default; save the right one as a .jinja file."
            )
        found = found["default"]
    if found is not None and not isinstance(found, str):
        raise UserError(f"{path} has a chat_template that is no text; save it as a .jinja file.")
    return found


def _special_tokens(folder: Path) -> tuple[tuple[str, str], ...]:
    found: dict[str, str] = {}
    for prefix in ("", _SIDECAR):
        for name in (MAP_FILE, CONFIG_FILE):
            if (path := folder / (prefix + name)).is_file():
                found |= _tokens_in(read_json(path))
        if found:
            break
    return tuple(found.items())


def _tokens_in(values: Any) -> dict[str, str]:
    """`bos_token` and its like, each written as a text or as an object with its text under `content`."""
    found = {}
    for name, value in values.items() if isinstance(values, dict) else ():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            found[name] = text
    return found


def _aliased(message: Message) -> dict[str, Any]:
    """A message without keys that have no value, its reasoning under the names that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    reasoning = next((message[key] for key in _REASONING if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
