"""Reading of conversations and prompt/completion pairs from JSON lines, and of chat templates beside a tokenizer."""

import json
from pathlib import Path
from typing import Any, Final

from threefold.data.conversations import (
    COMPLETION,
    CONFIG_FILE,
    JINJA_FILE,
    MESSAGES,
    PROMPT,
    Chat,
    ChatTemplate,
    Completion,
    utf8,
)
from threefold.errors import UserError
from threefold.files import read_json, read_text
from threefold.foreign import FolderFiles

ASSISTANT: Final = "assistant"
ROLES: Final = ("system", "developer", "user", ASSISTANT, "tool")
_SIDECAR: Final = "huggingface-"  # before these names in a checkpoint


def conversation_of(value: Any, where: str, name: str = MESSAGES) -> Chat:
    """Parse a list of messages to answer. Raises UserError if it is malformed or ends with the assistant's message."""
    messages = messages_of(value, where, name)
    if messages[-1]["role"] == ASSISTANT:
        raise UserError(
            f"{where} ends with a turn of the assistant, which leaves nothing to answer; leave that turn out."
        )
    return Chat(where, messages)


def chat_of(value: dict[str, Any], key: str, where: str) -> Chat | Completion:
    """Parse the conversation or the pair of a line for which `is_chat` is true. Raises UserError if it is malformed."""
    tools = value.get("tools")
    if not isinstance(tools, list | None):
        raise UserError(f"{where} has tools that are not a list; leave them out, or give a list of JSON schemas.")
    given = None if tools is None else tuple(tools)
    name = key if key in value else MESSAGES
    if name in value:
        chat = Chat(where, messages_of(value[name], where, name), 0, given)
    else:
        prompt, completion = value[PROMPT], value[COMPLETION]
        if isinstance(prompt, str) and isinstance(completion, str):
            if not completion:
                raise UserError(f"{where} has an empty completion, so there is nothing to learn; leave the line out.")
            return Completion(where, utf8(prompt), utf8(completion))
        if not isinstance(prompt, list) or not isinstance(completion, list):
            raise UserError(f"{where} has a prompt and a completion that are not both texts or both lists of messages.")
        before, after = messages_of(prompt, where, PROMPT), messages_of(completion, where, COMPLETION)
        chat = Chat(where, before + after, len(before), given)
    if not any(message["role"] == ASSISTANT for message in chat.messages[chat.first :]):
        raise UserError(f"{where} has no turn of the assistant, so there is nothing to learn; leave the line out.")
    return chat


def messages_of(value: Any, where: str, name: str) -> tuple[dict[str, Any], ...]:
    """Parse a list of messages, each with a known role and content. Raises UserError if it is malformed."""
    if not isinstance(value, list):
        raise UserError(f"{where} has {_shown(value)} under {name!r}; it must be a list of messages.")
    if not value:
        raise UserError(f"{where} has no message under {name!r}; leave the line out.")
    messages = []
    for number, one in enumerate(value, start=1):
        if not isinstance(one, dict):
            raise UserError(
                f'{where} has {_shown(one)} as message {number}; it must be {{"role": ..., "content": ...}}.'
            )
        role, content = one.get("role"), one.get("content")
        if role not in ROLES:
            roles = ", ".join(ROLES)
            raise UserError(f"{where} has the role {_shown(role)} in message {number}; the roles are {roles}.")
        is_parts = isinstance(content, list) and all(isinstance(part, dict) for part in content)
        if not isinstance(content, str) and not is_parts and not (content is None and one.get("tool_calls")):
            found = "no content" if content is None else f"the content {_shown(content)}"
            raise UserError(f"{where} has {found} in message {number}; it must be a text.")
        known = {key: each for key, each in one.items() if each is not None}
        messages.append({key: utf8(each) if isinstance(each, str) else each for key, each in known.items()})
    return tuple(messages)


def _shown(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)[:40]


def beside(tokenizer_file: Path) -> ChatTemplate | None:
    """Find the template in the folder of a tokenizer.json or of a checkpoint, as transformers does, if any."""
    folder = tokenizer_file.parent
    files = FolderFiles(folder)
    for prefix in ("", _SIDECAR):
        if files.holds(jinja := prefix + JINJA_FILE):
            return ChatTemplate(files.text(jinja), _special_tokens(folder), str(folder / jinja))
        for name in (prefix + CONFIG_FILE, f"{prefix}chat_template.json"):
            if files.holds(name) and (found := _named(files.json(name), folder / name)) is not None:
                return ChatTemplate(found, _special_tokens(folder), str(folder / name))
    return None


def read_template(path: Path | None, tokenizer_file: Path) -> ChatTemplate | None:
    """Read the template from a .jinja or .json file; with None for `path`, the one `beside` the tokenizer."""
    if path is None:
        return beside(tokenizer_file)
    if path.suffix != ".json":
        return ChatTemplate(read_text(path, "the chat template "), _special_tokens(tokenizer_file.parent), str(path))
    values = read_json(path, "the chat template ")
    if (found := _named(values, path)) is None:
        raise UserError(f"{path} has no chat_template; give a .jinja file or a tokenizer_config.json that has one.")
    tokens = tuple(_tokens_in(values).items()) or _special_tokens(tokenizer_file.parent)
    return ChatTemplate(found, tokens, str(path))


def _named(values: Any, path: Path) -> str | None:
    """Return the template in a tokenizer_config.json: the only one, or the one named `default`."""
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
        raise UserError(f"{path} has a chat_template that is not text; save it as a .jinja file.")
    return found


def _special_tokens(folder: Path) -> tuple[tuple[str, str], ...]:
    files = FolderFiles(folder)
    for prefix in ("", _SIDECAR):
        found: dict[str, str] = {}
        for name in ("special_tokens_map.json", CONFIG_FILE):
            if files.holds(prefix + name):
                found |= _tokens_in(files.json(prefix + name))
        if found:
            return tuple(found.items())
    return ()


def _tokens_in(values: Any) -> dict[str, str]:
    """Return `bos_token` and similar entries, each given as a string or as an object with a `content`."""
    given = (
        {name: value for name, value in values.items() if name.endswith("_token")} if isinstance(values, dict) else {}
    )
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in given.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
