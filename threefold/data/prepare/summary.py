"""Statistics of token files that need a pass over all tokens."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from threefold.data.corpus import StoredTokens
from threefold.data.progress import Progress
from threefold.errors import UserError
from threefold.files import shown

_CHUNK: Final = 1 << 22
_ENDS: Final = 10_000


@dataclass(frozen=True)
class TokenSummary:
    """What token files hold.

    Attributes:
        documents, empty: documents, and how many of them have no token.
        longest: tokens of the longest document.
        longest_document: its number, from 0.
        highest: the highest token.
        highest_place: the position of the first such token.
        common_end: the token that most documents end with, out of 10,000 spread over the files.
        common_share: the share of these documents that end with it.
    """

    documents: int
    empty: int
    longest: int
    longest_document: int
    highest: int
    highest_place: int
    common_end: int
    common_share: float


def summarize(stored: StoredTokens, progress: Progress) -> TokenSummary:
    """Compute the statistics in one pass over the tokens.

    Raises:
        UserError: one is negative.
    """
    lengths = np.diff(stored.documents)
    filled = np.flatnonzero(lengths)
    some = filled[np.linspace(0, len(filled) - 1, min(len(filled), _ENDS)).astype(np.int64)]
    ends, counts = np.unique(stored.tokens[stored.documents[some + 1] - 1], return_counts=True)
    highest, place = _highest(stored, progress)
    longest, common = int(np.argmax(lengths)), int(np.argmax(counts))
    return TokenSummary(
        documents=len(lengths),
        empty=len(lengths) - len(filled),
        longest=int(lengths[longest]),
        longest_document=longest,
        highest=highest,
        highest_place=place,
        common_end=int(ends[common]),
        common_share=float(counts[common] / counts.sum()),
    )


def _highest(stored: StoredTokens, progress: Progress) -> tuple[int, int]:
    highest = highest_place = -1
    progress.phase("Looking at every token", stored.tokens.nbytes)
    for start in range(0, len(stored.tokens), _CHUNK):
        chunk = stored.tokens[start : start + _CHUNK]
        if chunk.min() < 0:
            place = int(np.argmax(chunk < 0))
            document = int(np.searchsorted(stored.documents, start + place, side="right")) - 1
            raise UserError(
                f"{shown(stored.files[0])} holds token {chunk[place]} at position {start + place:,} (document "
                f"{document:,}), so it is damaged."
            )
        place = int(np.argmax(chunk))
        if chunk[place] > highest:
            highest, highest_place = int(chunk[place]), start + place
        progress.advance(chunk.nbytes)
    return highest, highest_place
