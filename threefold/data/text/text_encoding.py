"""Text to token ids, by one rule for training, evaluation and generation: special tokens, BOS, truncation off."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, Self

from tokenizers import Tokenizer

SpecialTokens = Literal["parse", "text"]
"""`parse`: text that spells a special token is that token, as in transformers. `text`: it is text like any other."""


@dataclass(frozen=True)
class TextRule:
    """How a text is encoded, beside the tokenizer.

    Attributes:
        special_tokens: what becomes of text that spells a special token.
        beginning: tokens before the first of each text (Llama's `<|begin_of_text|>`); most tokenizers have none.
        is_assumed: whether nothing says that it is so, as for token files of other systems.
    """

    special_tokens: SpecialTokens = "parse"
    beginning: tuple[int, ...] = ()
    is_assumed: bool = False

    @classmethod
    def of(cls, tokenizer: Tokenizer, special_tokens: SpecialTokens | None = None) -> Self:
        """The rule for a tokenizer: its texts begin with what its post-processor puts before them."""
        return cls(special_tokens or "parse", beginning_of(tokenizer))


BEFORE_RULES: Final = TextRule("text", ())
"""What held for token files, caches and trained checkpoints that say nothing of a rule."""


def beginning_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """The tokens that a tokenizer's post-processor puts before each text."""
    tokenizer.no_truncation()
    plain, full = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
    starts = (start for start in range(len(full)) if full[start : start + len(plain)] == plain)
    return tuple(full[: next(starts, 0)])


class TextEncoder:
    """A tokenizer and a rule. The tokenizer becomes the encoder's own: its truncation and padding are switched off.

    Attributes:
        tokenizer: the tokenizer.
        rule: the rule.
    """

    def __init__(self, tokenizer: Tokenizer, rule: TextRule) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.encode_special_tokens = rule.special_tokens == "text"
        self.tokenizer, self.rule = tokenizer, rule

    @property
    def beginning(self) -> tuple[int, ...]:
        return self.rule.beginning

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, the beginning among them once: a text that spells it itself does not get it again."""
        # One text at a time, as a batch would be spread over threads; "fast" leaves out the offsets.
        return self._begun(self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids)

    def encode_spans(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The same tokens, and the position of each in `text`: first character and the one after the last.

        The beginning has the span (0, 0).
        """
        encoding = self.tokenizer.encode(text, add_special_tokens=False)
        ids = self._begun(encoding.ids)
        return ids, [(0, 0)] * (len(ids) - len(encoding.ids)) + encoding.offsets

    @contextmanager
    def specials_as(self, special_tokens: SpecialTokens) -> Iterator[Tokenizer]:
        """The tokenizer with another treatment of special tokens, for the time of the block."""
        before = self.tokenizer.encode_special_tokens
        self.tokenizer.encode_special_tokens = special_tokens == "text"
        try:
            yield self.tokenizer
        finally:
            self.tokenizer.encode_special_tokens = before

    def special_ids(self) -> dict[int, str]:
        """The special tokens, by id."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {token: one.content for token, one in added.items() if one.special}

    def _begun(self, ids: list[int]) -> list[int]:
        beginning = list(self.rule.beginning)
        return ids if ids[: len(beginning)] == beginning else beginning + ids
