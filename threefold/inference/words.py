"""How a trained model reads texts."""

from dataclasses import dataclass
from typing import Self

from tokenizers import Tokenizer


@dataclass(frozen=True)
class Words:
    """A tokenizer, and what every text begins with.

    Attributes:
        tokenizer: of the model.
        beginning: tokens before the first of each text; most models have none, Llama's has one.
    """

    tokenizer: Tokenizer
    beginning: tuple[int, ...] = ()

    @classmethod
    def of_import(cls, tokenizer: Tokenizer) -> Self:
        """Those of a model that was trained on texts as its tokenizer gives them with special tokens."""
        plain, full = (tokenizer.encode("a", add_special_tokens=special).ids for special in (False, True))
        starts = (start for start in range(len(full)) if full[start : start + len(plain)] == plain)
        return cls(tokenizer, tuple(full[: next(starts, 0)]))

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, the beginning among them."""
        return [*self.beginning, *self.tokenizer.encode(text, add_special_tokens=False).ids]
