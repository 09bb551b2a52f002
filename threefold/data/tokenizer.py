"""Text: reads sources, trains and opens tokenizers, and encodes documents as tokens."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from threefold.errors import UserError

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


END_OF_DOCUMENT: Final = "<|endoftext|>"
# Names of the end-of-document token in public tokenizers, most telling first.
_END_NAMES: Final = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")
_MIN_VOCAB: Final = 256 + 1


def check_vocab_size(vocab_size: int) -> None:
    """Raises UserError if a byte-level BPE cannot have so few tokens."""
    if vocab_size < _MIN_VOCAB:
        raise UserError(
            f"--vocab-size is {vocab_size} but a byte-level vocabulary holds 256 bytes and {END_OF_DOCUMENT}; "
            f"the smallest that works is {_MIN_VOCAB}"
        )


def train_tokenizer(documents: Iterator[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE (GPT-2's pre-tokenization) of at most `vocab_size` tokens; `<|endoftext|>` is token 0.

    A small corpus may give fewer tokens, when no pair is left that occurs twice.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    _interruptible(lambda: tokenizer.train_from_iterator(documents, trainer))
    return tokenizer


def load_tokenizer(path: Path, named: str = "--tokenizer") -> Tokenizer:
    """The tokenizer stored at `path` (a tokenizer.json), which the option or setting `named` gave.

    Raises:
        UserError: it does not exist or is none.
    """
    if not path.is_file():
        raise UserError(f"{named} {path} does not exist; give a tokenizer.json")
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises a bare Exception
        raise UserError(f"{named} {path} is not a tokenizer.json that can be read ({error})") from None


def end_of_document(tokenizer: Tokenizer, name: str | None) -> int:
    """Id of the token that ends a document: `name`, or the first usual name in the tokenizer's vocabulary.

    Raises:
        UserError: the tokenizer does not have it.
    """
    token = find_end(tokenizer) if name is None else tokenizer.token_to_id(name)
    if token is not None:
        return token
    if name is not None:
        raise UserError(f"the tokenizer has no token {name}; give --eod one that it has")
    names = ", ".join(_END_NAMES)
    raise UserError(f"the tokenizer has none of the end-of-document tokens {names}; name its own with --eod")


def find_end(tokenizer: Tokenizer) -> int | None:
    """Id of the token that ends a document, by the usual names; None if its vocabulary has none of them."""
    ids = (tokenizer.token_to_id(name) for name in _END_NAMES)
    return next((token for token in ids if token is not None), None)


def id_count(tokenizer: Tokenizer) -> int:
    """One more than the highest token id: the rows an embedding needs, also where ids have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1


def _interruptible(work: Callable[[], object]) -> None:
    """Run `work` in a thread, so that Ctrl-C ends the wait at once: the library looks at no signal while it trains."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
