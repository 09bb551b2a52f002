"""The token formats of other systems: one file each, and one line in `TOKEN_FORMATS`.

An installed package adds one with an entry point of the group `threefold.token_formats` that names a `TokenFormat`;
training and `threefold data show`, `verify` and `convert` then read its files like those below.
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
        endings: of the files, all of which are needed; that of the tokens first.
        read: from the prefix to the tokens; raises UserError where a file is missing, truncated or contradictory.
        write: writes all files of a prefix and reports the progress in bytes of tokens; raises UserError where the
            format cannot hold the tokens. None if `threefold data convert` cannot write the format.
    """

    endings: tuple[str, ...]
    read: Callable[[Path], StoredTokens]
    write: Callable[[StoredTokens, Path, Progress], None] | None = None


def token_formats() -> dict[str, TokenFormat]:
    """All formats by name, those of installed packages included.

    Raises:
        UserError: an installed package declares one that cannot be imported.
    """
    return {name: TOKEN_FORMATS.load(name) for name in TOKEN_FORMATS.names()}


def with_ending(prefix: Path, ending: str) -> Path:
    """`prefix` with `ending` after its name, which may have dots of its own."""
    return prefix.with_name(prefix.name + ending)
