"""Tokenizing of text files into token files (`threefold data prepare`)."""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Final

from tokenizers import Tokenizer

from threefold.data.conversations import template_of
from threefold.data.corpus import META_FILE, TOKEN_DTYPES, TOKENIZER_FILE, DocumentWriter, dtype_for
from threefold.data.encoding import EncodingSpec, encode_documents
from threefold.data.formats.threefold_folder import Meta, SourceFile, TokenFiles, file_checksums, list_token_files
from threefold.data.sources import SourceReader, find_inputs, holds_chat, holds_preferences
from threefold.data.tokenizer import (
    END_OF_DOCUMENT,
    SpecialTokens,
    TextRule,
    byte_tokenizer,
    character_tokenizer,
    end_of_document,
    id_count,
    load_tokenizer,
    train_tokenizer,
)
from threefold.errors import UserError
from threefold.output import SILENT, Progress, check_replaceable, staged_directory

BPE, CHARACTERS, BYTES = "gpt2-like", "char", "byte"
"""Names of tokenizers that `prepare` makes itself; the first two from the text."""

_DEFAULT_VOCAB: Final = 8192
_BYTE_VOCAB: Final = 256 + 1
# Larger corpora are sampled to learn the vocabulary: more text changes it little and costs memory.
_LEARN_FROM_BYTES: Final = 256_000_000


def prepare(
    inputs: Sequence[Path],
    out: Path,
    vocab_size: int | None = None,
    tokenizer: Path | None = None,
    eod: str | None = None,
    key: str = "text",
    workers: int = 1,
    overwrite: bool = False,
    special_tokens: SpecialTokens = "parse",
    chat_template: Path | None = None,
    progress: Progress = SILENT,
) -> TokenFiles:
    """Create token files of the text in files and folders at `out` atomically, and open them.

    A `tokenizer` is a tokenizer.json or the name of one to make: `gpt2-like` (as None), a byte-level BPE of at most
    `vocab_size` tokens (8192); `char`, the characters of the text, at most `vocab_size` of them; `byte`, the bytes.
    `eod` is the name of the tokenizer's end-of-document token; None finds a usual one. `key` is the key of the text in
    JSON objects. A `chat_template` of None is found next to the tokenizer.

    With more than one worker the calling script needs the usual `if __name__ == "__main__":`, because workers are
    spawned.
    """
    made_here = BPE if tokenizer is None else str(tokenizer)
    if made_here in (BPE, CHARACTERS, BYTES):
        tokenizer = None
        _check_vocab_size(made_here, vocab_size)
    if workers < 1:
        raise UserError(f"--workers is {workers} but must be at least 1")
    read_from = inputs if tokenizer is None else (*inputs, tokenizer)
    check_replaceable(out, read_from, overwrite, listing=list_token_files)
    files = find_inputs(inputs)
    chats = [path for path in files if holds_chat(path, key)]
    if chats and tokenizer is None:
        raise UserError(
            f"{chats[0]} holds conversations or prompts, whose special tokens no vocabulary learned here would have; "
            "give the model's tokenizer.json with --tokenizer."
        )
    preferences = [path for path in chats if holds_preferences(path, key)]
    if preferences and len(preferences) < len(files):
        other = next(path for path in files if path not in preferences)
        raise UserError(
            f"{preferences[0]} holds chosen and rejected answers and {other} does not; prepare them into two folders"
        )
    # A pair of texts needs no template, which the encoder checks.
    template = template_of(chat_template, tokenizer) if chats and tokenizer is not None else None
    with staged_directory(out, inputs=read_from, overwrite=overwrite, listing=list_token_files, marked=False) as folder:
        size = sum(path.stat().st_size for path in files)
        if tokenizer is None:
            if made_here != BYTES:
                progress.phase("Learning the vocabulary", size)
            made = _make_tokenizer(made_here, vocab_size, files, key, progress.advance)
            stored = made.to_str(pretty=True).encode("utf-8")
        else:
            made = load_tokenizer(tokenizer)
            stored = tokenizer.read_bytes()  # byte for byte, so that its hash is the one its maker published
        progress.phase("Encoding", size)
        end, rule = end_of_document(made, eod), TextRule.of(made, special_tokens)
        dtype = TOKEN_DTYPES[dtype_for(id_count(made))]
        encoding = EncodingSpec(stored.decode("utf-8"), end, dtype, rule, template)
        sources = [SourceReader(path, key, progress.advance) for path in files]
        documents = (document for source in sources for document in (source if chats else source.texts()))
        text_bytes = 0
        with DocumentWriter(folder, with_mask=bool(chats)) as writer:
            for encoded in encode_documents(documents, encoding, workers):
                writer.write(encoded.tokens, encoded.lengths, encoded.counted)
                text_bytes += encoded.text_bytes
        _require_documents(writer.documents, files)
        for name, text in template.files().items() if template else ():
            (folder / name).write_text(text, encoding="utf-8")
        read = [SourceFile(os.fspath(each.path), each.bytes, each.documents, each.sha256) for each in sources]
        complete_folder(
            folder, writer, stored, id_count(made), end, rule, read, text_bytes, bool(chats), bool(preferences)
        )
    return TokenFiles.open(out)


def _check_vocab_size(tokenizer: str, size: int | None) -> None:
    if size is None:
        return
    if tokenizer == BYTES and size != _BYTE_VOCAB:
        raise UserError(
            f"--vocab-size is {size} but --tokenizer {BYTES} has {_BYTE_VOCAB} tokens, 256 bytes and "
            f"{END_OF_DOCUMENT}; leave --vocab-size out"
        )
    if tokenizer == BPE and size < _BYTE_VOCAB:
        raise UserError(
            f"--vocab-size is {size} but a byte-level vocabulary holds 256 bytes and {END_OF_DOCUMENT}; "
            f"the smallest that works is {_BYTE_VOCAB}, or give --tokenizer {CHARACTERS} for a token for each character"
        )
    if size < 1:
        raise UserError(f"--vocab-size is {size} but must be at least 1")


def _make_tokenizer(
    name: str, vocab_size: int | None, files: list[Path], key: str, on_read: Callable[[int], None]
) -> Tokenizer:
    if name == BYTES:
        return byte_tokenizer()
    if name == CHARACTERS:
        return character_tokenizer(_texts(files, key, on_read), vocab_size)
    # A text is assumed to be four times as large as its compressed file.
    sizes = (path.stat().st_size * (4 if path.suffix.lower() in (".gz", ".zst") else 1) for path in files)
    stride = 1 + sum(sizes) // _LEARN_FROM_BYTES
    return train_tokenizer(islice(_texts(files, key, on_read), 0, None, stride), vocab_size or _DEFAULT_VOCAB)


def _texts(inputs: list[Path], key: str, on_read: Callable[[int], None]) -> Iterator[str]:
    """Yield the texts of files, of which there must be one."""
    readers = [SourceReader(path, key, on_read) for path in inputs]
    for reader in readers:
        yield from reader.texts()
    _require_documents(sum(reader.documents for reader in readers), inputs)


def _require_documents(count: int, inputs: list[Path]) -> None:
    if not count:
        names = ", ".join(map(str, inputs[:3])) + (", …" if len(inputs) > 3 else "")
        raise UserError(f"{names}: there is no document with text in it, so there is nothing to prepare")


def complete_folder(
    folder: Path,
    writer: DocumentWriter,
    tokenizer: bytes,
    vocab_size: int,
    eod: int,
    rule: TextRule,
    sources: Sequence[SourceFile],
    text_bytes: int,
    loss_mask: bool,
    pairs: bool = False,
) -> None:
    """Write tokenizer.json, and meta.json last, into a folder whose other files are written."""
    (folder / TOKENIZER_FILE).write_bytes(tokenizer)
    Meta(
        dtype=dtype_for(vocab_size),
        vocab_size=vocab_size,
        eod=eod,
        tokens=writer.tokens,
        documents=writer.documents,
        text_bytes=text_bytes,
        tokenizer_sha256=hashlib.sha256(tokenizer).hexdigest(),
        sources=tuple(sources),
        special_tokens=rule.special_tokens,
        beginning=rule.beginning,
        loss_mask=loss_mask,
        pairs=pairs,
        checksums=file_checksums(folder),
    ).write(folder / META_FILE)
