"""Tokenizers: training, loading, and encoding text as tokens.

A tokenizer.json may hold the state of the program that wrote it: padding and truncation, which `transformers` stores
after a padded call and ignores when it reads, and dropout of merges. `loaded` is the one door through which a
tokenizer comes in, without this state, so that the tokens of a text depend on the text alone. A child process tries it
first (`huggingface/tokenizer_check.py`), because a tokenizer of somebody else may never end, take all memory or end its
process.
"""

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, Self

from tokenizers import Encoding, Tokenizer, decoders, models, pre_tokenizers, trainers

from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.files import read_text, shown

SpecialTokens = Literal["parse", "text"]
"""`parse`: text that spells a special token becomes that token, as in transformers. `text`: it is ordinary text."""


@dataclass(frozen=True)
class TextRule:
    """Rule for encoding text, beyond the tokenizer itself."""

    special_tokens: SpecialTokens = "parse"
    beginning: tuple[int, ...] = ()  # put before each text (Llama's `<|begin_of_text|>`); most tokenizers have none
    is_assumed: bool = False  # because nothing records it, as for token files of other systems

    @classmethod
    def of(cls, tokenizer: Tokenizer, special_tokens: SpecialTokens | None = None) -> Self:
        """Return a tokenizer's rule: texts begin with the tokens that its post-processor puts before them."""
        return cls(special_tokens or "parse", beginning_of(tokenizer))


_TEXT: Final = (1 << 32) - 1
"""Id of the only token of the text that a post-processor is asked about; no vocabulary is large enough to have it."""


def beginning_of(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that a tokenizer's post-processor puts before each text."""
    if tokenizer.post_processor is None:
        return ()
    text = Tokenizer(models.WordLevel({"text": _TEXT}, unk_token="text")).encode("text")
    ids = tokenizer.post_processor.process(text, None, True).ids
    return tuple(ids[: ids.index(_TEXT)]) if _TEXT in ids else ()


class TextEncoder:
    """Tokenizer with a rule. It takes ownership of the tokenizer, which sets how special tokens in text are read."""

    def __init__(self, tokenizer: Tokenizer, rule: TextRule) -> None:
        tokenizer.encode_special_tokens = rule.special_tokens == "text"
        self.tokenizer, self.rule = tokenizer, rule

    def encode(self, text: str) -> list[int]:
        """Encode a text; the beginning is added unless the text itself spells it."""
        # A single text, because a batch would be spread over threads; "fast" skips the offsets.
        with _explained():
            ids = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        return self.begun(ids)

    def begun(self, ids: list[int]) -> list[int]:
        """Return the tokens of a text with the beginning, unless they have it."""
        beginning = list(self.rule.beginning)
        return ids if ids[: len(beginning)] == beginning else beginning + ids


END_OF_DOCUMENT: Final = "<|endoftext|>"
UNKNOWN: Final = "<|unknown|>"
"""Token of every character that a vocabulary of characters does not have."""
# Names of the end-of-document token in public tokenizers, the least ambiguous first.
_END_NAMES: Final = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "[EOS]", "[SEP]")


def train_tokenizer(documents: Iterator[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE (GPT-2's pre-tokenization) of at most `vocab_size` tokens, the first `<|endoftext|>`."""
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
    # In a thread, so that Ctrl-C interrupts the wait: the library ignores signals while it trains.
    failures: list[BaseException] = []

    def train() -> None:
        try:
            tokenizer.train_from_iterator(documents, trainer)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=train, daemon=True)
    thread.start()
    thread.join()
    if failures:
        raise failures[0]
    return tokenizer


def byte_tokenizer() -> Tokenizer:
    """Return the tokenizer whose tokens are the bytes of UTF-8, with their values as ids, and `<|endoftext|>`, 256."""
    # The letters that the library writes in place of bytes, as GPT-2 did: visible ones stand for themselves.
    letters = {byte: chr(byte) for byte in (*range(33, 127), *range(161, 173), *range(174, 256))}
    others = (byte for byte in range(256) if byte not in letters)
    letters |= {byte: chr(256 + place) for place, byte in enumerate(others)}
    tokenizer = Tokenizer(models.BPE({letter: byte for byte, letter in letters.items()}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END_OF_DOCUMENT])
    return tokenizer


def character_tokenizer(documents: Iterable[str], most: int | None = None) -> Tokenizer:
    """Return a tokenizer with a token for each character of the documents, or for the `most` frequent of them.

    Token 0 is `<|endoftext|>` and 1 `<|unknown|>`, any other character; the others are in the order of Unicode.
    """
    counts: Counter[str] = Counter()
    for document in documents:
        counts.update(document)
    frequent = sorted(counts, key=lambda character: (-counts[character], character))[:most]
    vocabulary = {token: place for place, token in enumerate((END_OF_DOCUMENT, UNKNOWN, *sorted(frequent)))}
    # Without merges, and with nothing that splits a text first, each character is looked up by itself.
    tokenizer = Tokenizer(models.BPE(vocabulary, [], unk_token=UNKNOWN, fuse_unk=False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([END_OF_DOCUMENT, UNKNOWN])
    return tokenizer


def load_tokenizer(path: Path, named: str = "--tokenizer") -> Tokenizer:
    """Load the tokenizer.json at `path`. Raises UserError, naming the option `named`, if it is missing or invalid."""
    if not path.is_file():
        raise UserError(f"{named} {path} does not exist; give a tokenizer.json")
    return loaded(read_text(path, f"{named} "), f"{named} {path}")


def loaded(stored: str, named: str, remedy: str = "", is_tried: bool = False) -> Tokenizer:
    """Load the text of a tokenizer.json, without what it stores beyond the tokens of a text.

    What a child process has not tried before within limits, on this machine or, if `is_tried`, for this process, it
    tries first. Raises UserError, which begins with `named`, if the tokenizer is invalid or fails.
    """
    if not is_tried:
        call_hook("try_tokenizer", stored, named, remedy)
    try:
        return opened(stored)
    except Unreadable as reason:
        raise UserError(f"{named} is not a tokenizer.json that can be read ({reason}){remedy}") from None


class Unreadable(Exception):
    """A text is no tokenizer.json, for the reason that is the message."""


def opened(stored: str) -> Tokenizer:
    """Make the tokenizer as `loaded` does, without a trial. Raises `Unreadable` if it is invalid."""
    try:
        tokenizer = Tokenizer.from_str(stored)
    except Exception as error:  # the library raises a plain Exception
        raise Unreadable(shown(str(error))) from None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if isinstance(tokenizer.model, models.BPE):
        tokenizer.model.dropout = None
    return tokenizer


@contextmanager
def _explained() -> Iterator[None]:
    """Raise UserError for a failure of a tokenizer that its trial has not found."""
    try:
        yield
    except BaseException as error:  # a panic of the library is no Exception
        is_failure = isinstance(error, Exception) and not isinstance(error, MemoryError)
        if not is_failure and type(error).__name__ != "PanicException":
            raise
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise UserError(
            f"The tokenizer fails on a text ({reason}); fetch its tokenizer.json again, or use another one."
        ) from None


def encoding_of(tokenizer: Tokenizer, text: str) -> Encoding:
    """Encode a text, without special tokens around it, as tokens and their offsets."""
    with _explained():
        return tokenizer.encode(text, add_special_tokens=False)


def decoded(tokenizer: Tokenizer, tokens: Sequence[int], skip_special_tokens: bool = False) -> str:
    """Return the text of tokens."""
    with _explained():
        return str(tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens))


def end_of_document(tokenizer: Tokenizer, name: str | None) -> int:
    """Return the id of the end-of-document token: `name`, or the first usual one. Raises UserError if there is none."""
    token = find_end(tokenizer) if name is None else tokenizer.token_to_id(name)
    if token is not None:
        return token
    if name is not None:
        raise UserError(f"the tokenizer has no token {name}; give --eod one that it has")
    names = ", ".join(_END_NAMES)
    raise UserError(f"the tokenizer has none of the end-of-document tokens {names}; name its own with --eod")


def find_end(tokenizer: Tokenizer) -> int | None:
    """Return the id of the end-of-document token by its usual names; None if the vocabulary has none of them."""
    ids = (tokenizer.token_to_id(name) for name in _END_NAMES)
    return next((token for token in ids if token is not None), None)


def id_count(tokenizer: Tokenizer) -> int:
    """Return the highest token id plus one: the rows that an embedding needs, even if ids have gaps."""
    return max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1
