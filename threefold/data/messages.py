"""Conversations (messages) and prompt/completion pairs from JSON lines, validated."""

import json
from dataclasses import dataclass
from typing import Any, Final

from threefold.errors import UserError

MESSAGES: Final = "messages"
PROMPT: Final = "prompt"
COMPLETION: Final = "completion"
ASSISTANT: Final = "assistant"
ROLES: Final = ("system", "developer", "user", ASSISTANT, "tool")


@dataclass(frozen=True)
class Chat:
    """A conversation to learn from.

    Attributes:
        where: file and line.
        messages: messages, each with a role and content.
        first: index of the first message from which the assistant's turns are learned.
        tools: the line's description of tools, for the template.
    """

    where: str
    messages: tuple[dict[str, Any], ...]
    first: int = 0
    tools: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Completion:
    """A prompt and the completion to learn; `where` is its file and line."""

    where: str
    prompt: str
    completion: str


Document = str | Chat | Completion


@dataclass(frozen=True)
class Conversation:
    """Messages that the assistant is to answer; `where` names them in error messages."""

    where: str
    messages: tuple[dict[str, Any], ...]


def conversation_of(value: Any, where: str, name: str = MESSAGES) -> Conversation:
    """Parse a list of messages to answer. Raises UserError if it is malformed or ends with the assistant's message."""
    messages = messages_of(value, where, name)
    if messages[-1]["role"] == ASSISTANT:
        raise UserError(
            f"{where} ends with a turn of the assistant, which leaves nothing to answer; leave that turn out."
        )
    return Conversation(where, messages)


def is_chat(value: Any, key: str) -> bool:
    """Return whether a line's object is a conversation or a pair; a text under `key` takes precedence."""
    if not isinstance(value, dict):
        return False
    if key in value:
        found = value[key]
        return isinstance(found, list) and (key == MESSAGES or (bool(found) and isinstance(found[0], dict)))
    return MESSAGES in value or {PROMPT, COMPLETION} <= value.keys()


def chat_of(value: dict[str, Any], key: str, where: str) -> Chat | Completion:
    """Parse the conversation or the pair of a line. Raises UserError if it is malformed.

    Args:
        value: object for which `is_chat` is true.
        key: key of the messages, if the object has it.
        where: file and line.
    """
    tools = value.get("tools")
    if tools is not None and not isinstance(tools, list):
        raise UserError(f"{where} has tools that are no list; leave them out, or give a list of JSON schemas.")
    given = None if tools is None else tuple(tools)
    name = key if key in value else MESSAGES
    if name in value:
        return _answered(Chat(where, messages_of(value[name], where, name), 0, given))
    prompt, completion = value[PROMPT], value[COMPLETION]
    if isinstance(prompt, str) and isinstance(completion, str):
        if not completion:
            raise UserError(f"{where} has an empty completion, so there is nothing to learn; leave the line out.")
        return Completion(where, utf8(prompt), utf8(completion))
    if isinstance(prompt, list) and isinstance(completion, list):
        before, after = messages_of(prompt, where, PROMPT), messages_of(completion, where, COMPLETION)
        return _answered(Chat(where, before + after, len(before), given))
    raise UserError(f"{where} has a prompt and a completion that are not both texts or both lists of messages.")


def messages_of(value: Any, where: str, name: str) -> tuple[dict[str, Any], ...]:
    """Parse a list of messages, each with a known role and content. Raises UserError if it is malformed."""
    if not isinstance(value, list):
        raise UserError(f"{where} has {_shown(value)} under {name!r}; it must be a list of messages.")
    if not value:
        raise UserError(f"{where} has no message under {name!r}; leave the line out.")
    return tuple(_message(one, where, number) for number, one in enumerate(value, start=1))


def _message(value: Any, where: str, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f'{where} has {_shown(value)} as message {number}; it must be {{"role": ..., "content": ...}}.')
    role, content = value.get("role"), value.get("content")
    if role not in ROLES:
        raise UserError(f"{where} has the role {_shown(role)} in message {number}; the roles are {', '.join(ROLES)}.")
    is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
    if not isinstance(content, str) and not is_parts and not (content is None and value.get("tool_calls")):
        raise UserError(
            f"{where} has {'no content' if content is None else f'the content {_shown(content)}'} in message {number}; "
            "it must be a text."
        )
    return {key: utf8(one) if isinstance(one, str) else one for key, one in value.items() if one is not None}


def _answered(chat: Chat) -> Chat:
    if not any(message["role"] == ASSISTANT for message in chat.messages[chat.first :]):
        raise UserError(f"{chat.where} has no turn of the assistant, so there is nothing to learn; leave the line out.")
    return chat


def utf8(text: str) -> str:
    """Replace what UTF-8 cannot encode: JSON can spell half of a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:40]
