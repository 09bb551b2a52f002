"""Trial of a tokenizer on fixed texts; runs in a child process of `tokenizer_check`."""

import json
import re
import time
from collections import deque
from collections.abc import Iterator
from typing import Any, Final

from tokenizers import Tokenizer

from threefold.constants import MOST_IDS
from threefold.data.tokenizer import Unreadable, beginning_of, id_count, opened
from threefold.huggingface.limited import Refused

UNREADABLE: Final = "unreadable: "
"""Prefix of the reason why a trial could not even make a tokenizer."""
_TEXTS: Final = (
    "",
    "a",
    "The quick brown fox's 2 jumps, over 12,345.67 lazy dogs (isn't it?)!\n\n\tdef f(x):\r\n\t    return x ** 2  # ok",
    "Ünïcödé, ﷺ ǆ ﬁ é e\u0301 日本語 한국어 עברית हिन्दी ไทย 👩‍👩‍👧 🌈\u200d \u00a0\u2028\ufeff\0\x1b\U0010ffff",
    "<s></s><|endoftext|>[CLS] [SEP] ▁ Ġ ## @@",
)
_LETTERS: Final = "".join(map(chr, range(32, 127))) + "\t\n\r\0é日🌈▁"
_RUN: Final = 64
"""Length of the run of each letter, on which a regular expression that tries each way to divide it does not end."""
_LONG: Final = 16_384
"""Length of the longest texts, in which work that grows with the square of the length is seen."""
_SLOW: Final = 2.0
"""Seconds of processor time that the longest text may take; usual tokenizers take some milliseconds."""
_GROWTH: Final = 100
"""Characters and tokens that may come of one character, at most 18 by a normalization of Unicode."""
_UNKNOWN: Final = re.compile(r"(?i)\bunk|unknown token|out of vocabulary")
"""Errors of tokenizers for texts of few letters, which know no others and are fit for their purpose."""
_MOST_STRINGS: Final = 256  # of a tokenizer's rules that are tried as texts
_LONGEST_STRING: Final = 256


class Trial:
    """Raises Refused for the text of a tokenizer.json that cannot be used, or fails in one of the ways of its kind."""

    def __init__(self, _: None) -> None:
        pass

    def __call__(self, stored: str) -> None:
        try:
            tokenizer = opened(stored)
        except Unreadable as reason:
            raise Refused(UNREADABLE + str(reason)) from None
        if not tokenizer.get_vocab_size(with_added_tokens=True):
            return  # it gives no token
        count = id_count(tokenizer)
        if count > MOST_IDS:
            raise Refused(f"it has a token with id {count - 1:,} and ids go up to {MOST_IDS - 1:,}")
        if outside := [token for token in beginning_of(tokenizer) if token >= count]:
            raise Refused(
                f"its post_processor puts token {outside[0]:,} before texts and its ids go up to {count - 1:,}"
            )
        for is_parsed, texts in ((True, _texts(tokenizer)), (False, _TEXTS)):
            tokenizer.encode_special_tokens = not is_parsed
            for text in texts:
                try:
                    _try(tokenizer, text, count)
                except Exception as error:
                    if not _UNKNOWN.search(str(error)):
                        raise
        every = range(0, count, max(1, count // 256))
        _decode(tokenizer, [token for token in every if tokenizer.id_to_token(token) is not None])


def _try(tokenizer: Tokenizer, text: str, count: int) -> None:
    """Encode a text and decode its tokens."""
    begun, most = time.process_time(), _GROWTH * (len(text) + 1)
    if tokenizer.normalizer is not None and len(tokenizer.normalizer.normalize_str(text)) > most:
        raise Refused(f"its normalizer makes more than {most:,} characters of {len(text):,}")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    if len(ids) > most:
        raise Refused(f"it makes more than {most:,} tokens of {len(text):,} characters")
    if ids and max(ids) >= count:
        raise Refused(f"it gives token {max(ids):,} and its ids go up to {count - 1:,}")
    _decode(tokenizer, ids)
    if time.process_time() - begun > _SLOW:
        raise Refused(f"it takes more than {_SLOW:g} seconds for a text of {len(text):,} characters")


def _decode(tokenizer: Tokenizer, ids: list[int]) -> None:
    most = _GROWTH * (sum(len(tokenizer.id_to_token(token) or "") for token in ids) + 1)
    if len(tokenizer.decode(ids, skip_special_tokens=False)) > most:
        raise Refused(f"its decoder makes more than {most:,} characters of {len(ids):,} tokens")


def _texts(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield texts of several lengths: usual ones, runs of each letter, and those that the tokenizer's rules name."""
    yield from _TEXTS
    named = list(dict.fromkeys(_strings(tokenizer)))
    letters = dict.fromkeys(_LETTERS + "".join(named))
    for letter in letters:
        yield f"{letter * _RUN}!{letter * _RUN}\n{letter} {letter}"
    for text in named:
        yield text
        yield text * (1 + 4 * _RUN // len(text)) + "!"
    for text in ("a", "7", " ", "\n", ".", "日", "🌈", "a ", "aB", "a1", *_TEXTS[2:]):
        yield (text * (_LONG // len(text) + 1))[:_LONG]


def _strings(tokenizer: Tokenizer) -> Iterator[str]:
    """Yield the strings in a tokenizer's rules, which are the patterns that it replaces or cuts at, and its tokens."""
    rules = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.post_processor, tokenizer.decoder)
    waiting: deque[Any] = deque(json.loads(rule.__getstate__()) for rule in rules if rule is not None)
    waiting += [token.content for token in tokenizer.get_added_tokens_decoder().values()]
    found = 0
    while waiting and found < _MOST_STRINGS:
        value = waiting.popleft()
        if isinstance(value, str) and value:
            found += 1
            yield value[:_LONGEST_STRING]
        elif isinstance(value, dict | list):
            waiting += value.values() if isinstance(value, dict) else value
