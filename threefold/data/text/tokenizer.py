"""The tokenizer: a byte-level BPE trained on the documents, or a given tokenizer.json."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from threefold.errors import UserError

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
