"""Token formats of other systems: one file each, and one line in `TOKEN_FORMATS`.

An installed package adds a format by an entry point of the group `threefold.token_formats` that names a `TokenFormat`;
training and `threefold data show`, `verify` and `convert` then read its files like the built-in ones.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from threefold.data.corpus import StoredTokens
from threefold.output import Progress
from threefold.plugins import Registry

TOKEN_FORMATS: Final = Registry(
    "The token format",
    "threefold.token_formats",
    {
        "megatron": "threefold.data.formats.megatron:MEGATRON",
        "paddlefleetx": "threefold.data.formats.paddlefleetx:PADDLEFLEETX",
        "paddlefleetx-npz": "threefold.data.formats.paddlefleetx:PADDLEFLEETX_NPZ",
    },
)


@dataclass(frozen=True)
class TokenFormat:
    """Token files that share a prefix: PREFIX with each of the endings.

    Attributes:
        endings: endings of the files, which are all needed; the token file's comes first.
        read: reads the tokens at a prefix; raises UserError if a file is missing, truncated or contradictory.
        write: writes all files of a prefix and reports progress in bytes of tokens; raises UserError if the format
            cannot hold the tokens. None if `threefold data convert` cannot write the format.
    """

    endings: tuple[str, ...]
    read: Callable[[Path], StoredTokens]
    write: Callable[[StoredTokens, Path, Progress], None] | None = None


def token_formats() -> dict[str, TokenFormat]:
    """Return all formats by name, including installed packages'. Raises UserError if one cannot be imported."""
    return {name: TOKEN_FORMATS.load(name) for name in TOKEN_FORMATS.names()}


def with_ending(prefix: Path, ending: str) -> Path:
    """Append `ending` to the name of `prefix`, which may contain dots."""
    return prefix.with_name(prefix.name + ending)
