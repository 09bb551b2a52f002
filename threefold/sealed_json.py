"""JSON files that keep a checksum of themselves, so that a damaged one is found when it is read.

There are two forms. In checkpoints the checksum is of the text before it, its last member (`seal_text`). In token
folders and caches it is of the values, independent of white space (`seal`).
"""

import json
from collections.abc import Mapping
from typing import Any, Final

from threefold.checksums import checksum_of

_KEY: Final = "checksum"
_MARK: Final = f'  "{_KEY}": "'


def seal(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The members of a JSON object and, as the last, their checksum, which the order of the members does not change."""
    return {**facts, _KEY: _checksum(facts)}


def unseal(facts: Mapping[str, Any]) -> dict[str, Any] | None:
    """The members without their checksum; None where that is missing or wrong."""
    members = {name: value for name, value in facts.items() if name != _KEY}
    return members if facts.get(_KEY) == _checksum(members) else None


def seal_text(document: str) -> str:
    """Add its checksum to the text of a JSON object with members, as the last of them, on a line of its own."""
    body = document.rstrip().removesuffix("}").rstrip() + ",\n"
    return f'{body}{_MARK}{checksum_of(body.encode())}"\n}}\n'


def is_intact(text: str) -> bool:
    """Whether a text is what `seal_text` returned."""
    body, mark, end = text.rpartition(_MARK)
    return bool(mark) and end == f'{checksum_of(body.encode())}"\n}}\n'


def _checksum(facts: Mapping[str, Any]) -> str:
    return checksum_of(json.dumps(facts, sort_keys=True).encode())
