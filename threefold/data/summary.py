"""Facts about token files that only a look at all of them tells."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from threefold.data.corpus import StoredTokens
from threefold.data.prepare import Progress
from threefold.errors import UserError

_CHUNK: Final = 1 << 22
_ENDS: Final = 10_000


@dataclass(frozen=True)
class Summary:
    """What token files hold.

    Attributes:
        documents, empty: documents, and how many of them have no token.
        longest: tokens of the longest document.
        longest_document: its number, from 0.
        highest: the highest token.
        common_end: the token that most documents end with, out of 10,000 spread over the files.
        common_share: the share of these documents that end with it.
    """

    documents: int
    empty: int
    longest: int
    longest_document: int
    highest: int
    common_end: int
    common_share: float


def summarize(stored: StoredTokens, progress: Progress) -> Summary:
    """Look at every token.

    Raises:
        UserError: one is negative.
    """
    lengths = np.diff(stored.documents)
    filled = np.flatnonzero(lengths)
    some = filled[np.linspace(0, len(filled) - 1, min(len(filled), _ENDS)).astype(np.int64)]
    ends, counts = np.unique(stored.tokens[stored.documents[some + 1] - 1], return_counts=True)
    longest, common = int(np.argmax(lengths)), int(np.argmax(counts))
    return Summary(
        documents=len(lengths),
        empty=len(lengths) - len(filled),
        longest=int(lengths[longest]),
        longest_document=longest,
        highest=_highest(stored, progress),
        common_end=int(ends[common]),
        common_share=float(counts[common] / counts.sum()),
    )


def _highest(stored: StoredTokens, progress: Progress) -> int:
    highest = 0
    progress.phase("Looking at every token", stored.tokens.nbytes)
    for start in range(0, len(stored.tokens), _CHUNK):
        chunk = stored.tokens[start : start + _CHUNK]
        if chunk.min() < 0:
            place = int(np.argmax(chunk < 0))
            raise UserError(f"{stored.path} holds token {chunk[place]} at place {start + place:,}, so it is damaged.")
        highest = max(highest, int(chunk.max()))
        progress.advance(chunk.nbytes)
    return highest
