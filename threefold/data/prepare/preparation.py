"""Tokenizing text files into token files: `threefold data prepare`.

The corpus is read twice, once to learn the vocabulary and once to encode, and is never held in memory.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from tokenizers import Tokenizer

from threefold.data.chat.chat_template import ChatTemplate
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.data.formats.threefold_meta import Meta, SourceFile, file_checksums, list_token_files
from threefold.data.progress import Progress
from threefold.data.text.parallel_encoding import EncodingSpec, encode_documents
from threefold.data.text.sources import SourceReader, find_inputs, holds_chat
from threefold.data.text.text_encoding import SpecialTokens, TextRule
from threefold.data.text.tokenizer import check_vocab_size, end_of_document, id_count, load_tokenizer, train_tokenizer
from threefold.data.token_storage import (
    DOCUMENT_DTYPE,
    DOCUMENTS_FILE,
    DTYPES,
    LOSS_MASK_FILE,
    META_FILE,
    TOKENIZER_FILE,
    TOKENS_FILE,
    dtype_for,
)
from threefold.errors import UserError
from threefold.output.overwrite import check_replaceable
from threefold.output.staging import staged_directory

# The vocabulary of a larger corpus is learned from every n-th document: more text changes it little and costs memory.
_LEARN_FROM_BYTES: Final = 256_000_000
# Text in a compressed file is about this many times the file.
_COMPRESSION: Final = 4


@dataclass(frozen=True)
class PrepareRequest:
    """What to prepare.

    Attributes:
        inputs: files and folders of text.
        out: the folder to make.
        vocab_size: size of the vocabulary to learn, if no tokenizer is given.
        tokenizer: a tokenizer.json to use.
        eod: name of the given tokenizer's end-of-document token; None finds a usual one.
        key: which key of a JSON object holds the text.
        workers: processes that encode.
        overwrite: whether token files at `out` may be replaced.
        special_tokens: how text that spells a special token is encoded.
        chat_template: a file with the template of conversations; None looks beside the tokenizer.
    """

    inputs: tuple[Path, ...]
    out: Path
    vocab_size: int = 8192
    tokenizer: Path | None = None
    eod: str | None = None
    key: str = "text"
    workers: int = 1
    overwrite: bool = False
    special_tokens: SpecialTokens = "parse"
    chat_template: Path | None = None

    @property
    def read(self) -> tuple[Path, ...]:
        """All files and folders that are read."""
        return self.inputs if self.tokenizer is None else (*self.inputs, self.tokenizer)


def prepare(request: PrepareRequest, progress: Progress) -> TokenFiles:
    """Make token files at `request.out`, whole or not at all, and open them.

    With more than one worker the calling script needs the usual `if __name__ == "__main__":`, as the workers are fresh
    processes.

    Raises:
        UserError: an input, the tokenizer or `out` cannot be used, or there is no document.
    """
    _check(request)
    inputs = find_inputs(request.inputs)
    chats = [path for path in inputs if holds_chat(path, request.key)]
    template = _template(request, chats)
    with staged_directory(
        request.out, inputs=request.read, overwrite=request.overwrite, listing=list_token_files, marked=False
    ) as folder:
        tokenizer = _tokenizer(request, inputs, progress)
        progress.phase("Encoding", sum(path.stat().st_size for path in inputs))
        sources = [SourceReader(path, request.key, progress.advance) for path in inputs]
        _write(folder, tokenizer, sources, request, bool(chats), template)
    return TokenFiles.open(request.out)


def _template(request: PrepareRequest, chats: list[Path]) -> ChatTemplate | None:
    """The template for conversations; a pair of texts needs none, which the encoder checks."""
    if not chats:
        return None
    if request.tokenizer is None:
        raise UserError(
            f"{chats[0]} holds conversations or prompts, whose special tokens no vocabulary learned here would have; "
            "give the model's tokenizer.json with --tokenizer."
        )
    if request.chat_template is not None:
        return ChatTemplate.read(request.chat_template, request.tokenizer)
    return ChatTemplate.beside(request.tokenizer)


def _check(request: PrepareRequest) -> None:
    if request.tokenizer is None:
        check_vocab_size(request.vocab_size)
    if request.workers < 1:
        raise UserError(f"--workers is {request.workers} but must be at least 1")
    check_replaceable(request.out, request.read, request.overwrite, listing=list_token_files)


def _tokenizer(request: PrepareRequest, inputs: list[Path], progress: Progress) -> Tokenizer:
    if request.tokenizer is not None:
        return load_tokenizer(request.tokenizer)
    progress.phase("Learning the vocabulary", sum(path.stat().st_size for path in inputs))
    stride = 1 + sum(map(_text_bytes, inputs)) // _LEARN_FROM_BYTES
    return train_tokenizer(_every(stride, inputs, request.key, progress.advance), request.vocab_size)


def _text_bytes(path: Path) -> int:
    return path.stat().st_size * (_COMPRESSION if path.suffix.lower() in (".gz", ".zst") else 1)


def _every(stride: int, inputs: list[Path], key: str, on_read: Callable[[int], None]) -> Iterator[str]:
    number = 0
    for path in inputs:
        for document in SourceReader(path, key, on_read).texts():
            if number % stride == 0:
                yield document
            number += 1
    if number == 0:
        raise _no_documents(inputs)


def _write(
    folder: Path,
    tokenizer: Tokenizer,
    sources: list[SourceReader],
    request: PrepareRequest,
    holds_chat: bool,
    template: ChatTemplate | None,
) -> None:
    stored = _stored_tokenizer(tokenizer, request)
    vocab_size = id_count(tokenizer)
    dtype = dtype_for(vocab_size)
    eod = end_of_document(tokenizer, request.eod)
    rule = TextRule.of(tokenizer, request.special_tokens)
    encoding = EncodingSpec(stored.decode("utf-8"), eod, DTYPES[dtype], rule, template)
    documents = (document for source in sources for document in (source if holds_chat else source.texts()))

    end = count = text_bytes = 0
    with ExitStack() as files:
        tokens_file, documents_file = (
            files.enter_context((folder / name).open("wb")) for name in (TOKENS_FILE, DOCUMENTS_FILE)
        )
        mask_file = files.enter_context((folder / LOSS_MASK_FILE).open("wb")) if holds_chat else None
        documents_file.write(np.zeros(1, dtype=DOCUMENT_DTYPE).tobytes())
        for encoded in encode_documents(documents, encoding, request.workers):
            ends = end + np.cumsum(encoded.lengths)
            tokens_file.write(encoded.tokens.tobytes())
            documents_file.write(ends.astype(DOCUMENT_DTYPE).tobytes())
            if mask_file is not None:
                mask_file.write(encoded.counted.tobytes())
            end = int(ends[-1])
            count += len(ends)
            text_bytes += encoded.text_bytes
    if count == 0:
        raise _no_documents([source.path for source in sources])
    (folder / TOKENIZER_FILE).write_bytes(stored)
    for name, text in template.files().items() if template else ():
        (folder / name).write_text(text, encoding="utf-8")
    Meta(
        dtype=dtype,
        vocab_size=vocab_size,
        eod=eod,
        tokens=end,
        documents=count,
        text_bytes=text_bytes,
        tokenizer_sha256=hashlib.sha256(stored).hexdigest(),
        sources=tuple(
            SourceFile(os.fspath(source.path), source.bytes, source.documents, source.sha256) for source in sources
        ),
        special_tokens=rule.special_tokens,
        beginning=rule.beginning,
        loss_mask=holds_chat,
        checksums=file_checksums(folder),
    ).write(folder / META_FILE)


def _stored_tokenizer(tokenizer: Tokenizer, request: PrepareRequest) -> bytes:
    """A given tokenizer is kept byte for byte, so that its hash is the one its maker published."""
    if request.tokenizer is not None:
        return request.tokenizer.read_bytes()
    return tokenizer.to_str(pretty=True).encode("utf-8")


def _no_documents(inputs: list[Path]) -> UserError:
    names = ", ".join(map(str, inputs[:3])) + (", …" if len(inputs) > 3 else "")
    return UserError(f"{names}: there is no document with text in it, so there is nothing to prepare")
