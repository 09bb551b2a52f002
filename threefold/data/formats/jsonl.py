"""JSON lines (JSONL): each line is a text, which is cut or padded, or a conversation, which is packed."""

from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np
from tokenizers import Tokenizer

from threefold.data.chat_template import ChatTemplate
from threefold.data.corpus import Corpus
from threefold.data.encoding import EncodingSpec, encode_documents
from threefold.data.formats.token_cache import cached, content_hash, default_roots, entry_checksums, entry_name
from threefold.data.sources import SourceReader, holds_chat
from threefold.data.stored_array import (
    DOCUMENT_DTYPE,
    LOSS_MASK_FILE,
    TOKEN_DTYPES,
    TOKENS_FILE,
    DocumentWriter,
    StoredArray,
    dtype_for,
    load_column,
)
from threefold.data.tokenizer import SpecialTokens, TextRule, find_end, id_count, load_tokenizer
from threefold.errors import UserError
from threefold.files import require_file, shown
from threefold.host import usable_cores
from threefold.output import Progress

LINES_FILE: Final = "lines.bin"
# Incremented when the same file, tokenizer and length give another cache.
_VERSION: Final = 2
# Bytes up to which encoding takes less time than starting processes.
_ALONE: Final = 32_000_000


@dataclass(frozen=True)
class JsonLines:
    """File with one JSON object per line.

    Attributes:
        tokenizer_file: tokenizer.json for its text.
        key: key of the text or the messages in an object.
        given_eod: token put after each text; None uses the tokenizer's usual one.
        cache: folder for encoded text; None uses one next to the file, or the user's cache if that is not writable.
        special_tokens: how text that spells a special token is encoded.
        chat_template: file with the chat template of conversations; None looks next to the tokenizer.
    """

    path: Path
    tokenizer_file: Path
    key: str = "text"
    given_eod: int | None = None
    cache: Path | None = None
    special_tokens: SpecialTokens = "parse"
    chat_template: Path | None = None

    @cached_property
    def holds_chat(self) -> bool:
        return holds_chat(self.path, self.key)

    @cached_property
    def rule(self) -> TextRule:
        return TextRule.of(self._tokenizer, self.special_tokens)

    @cached_property
    def template(self) -> ChatTemplate | None:
        """Chat template of the conversations. Raises UserError if the one that is named or found is not valid."""
        if not self.holds_chat:
            return None
        if self.chat_template is not None:
            return ChatTemplate.read(self.chat_template, self.tokenizer_file)
        return ChatTemplate.beside(self.tokenizer_file)

    @cached_property
    def vocab_size(self) -> int:
        return id_count(self._tokenizer)

    @cached_property
    def eod(self) -> int:
        """Id of the token put after each text. Raises UserError if there is none, or it is outside the vocabulary."""
        eod = find_end(self._tokenizer) if self.given_eod is None else self.given_eod
        if eod is None:
            raise UserError(
                f"data.tokenizer {self.tokenizer_file} has no usual end-of-document token; set data.eod to its id."
            )
        if eod >= self.vocab_size:
            raise UserError(
                f"data.eod is {eod} but the vocabulary has {self.vocab_size} tokens; use at most {self.vocab_size - 1}."
            )
        return eod

    @cached_property
    def tokenizer_sha256(self) -> str:
        """SHA-256 of the tokenizer.json. Raises UserError if it cannot be read."""
        try:
            if self.tokenizer_file.exists():
                require_file(self.tokenizer_file, "data.tokenizer ")
            return sha256(self.tokenizer_file.read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(
                f"data.tokenizer is {self.tokenizer_file}, which cannot be read ({error.strerror}); "
                "give a tokenizer.json."
            ) from None

    def corpus(self, sequence_length: int, progress: Progress) -> Corpus:
        """Return the lines as tokens, from the cache or encoded now, on all cores if the file is large.

        Raises:
            UserError: a line is damaged, no line has text, or the cache cannot be written.
        """
        return self.conversations(progress) if self.holds_chat else self.encoded(sequence_length, progress)

    def encoded(self, sequence_length: int, progress: Progress) -> "EncodedLines":
        """Return texts, each cut to one token more than a sample holds; see `corpus`."""
        folder = self._cached({"sequence_length": sequence_length}, sequence_length + 1, progress)
        return EncodedLines(**self._stored(folder), remedy="delete that folder, which is a cache")

    def conversations(self, progress: Progress) -> Corpus:
        """Return conversations with a loss mask, whatever their length; see `corpus`."""
        template = self.template
        chat = {"template": template.template, "special_tokens": template.special_tokens} if template else {}
        folder = self._cached({"chat": chat}, None, progress)
        stored = self._stored(folder)
        mask = StoredArray(folder / LOSS_MASK_FILE, "u1", len(stored["tokens"]))
        return Corpus(**stored, remedy=f"delete its cache {folder}", loss_mask=mask, template=template)

    def _stored(self, folder: Path) -> dict[str, Any]:
        """Return what is in a cache folder for a `Corpus`. Raises UserError if its files do not fit each other."""
        files = folder / TOKENS_FILE, folder / LINES_FILE
        dtype = np.dtype(TOKEN_DTYPES[dtype_for(self.vocab_size)])
        tokens = StoredArray(files[0], dtype, require_file(files[0]) // dtype.itemsize)
        lines = load_column(files[1], DOCUMENT_DTYPE, require_file(files[1]) // 8)
        if len(lines) < 2 or lines[0] != 0 or lines[-1] != len(tokens) or np.any(np.diff(lines) <= 0):
            raise UserError(f"{shown(files[1])} does not fit {TOKENS_FILE}; delete that folder, which is a cache.")
        return {
            "path": self.path,
            "files": files,
            "tokens": tokens,
            "documents": lines,
            "vocab_size": self.vocab_size,
            "eod": self.eod,
            "tokenizer_file": self.tokenizer_file,
            "rule": self.rule,
            "checksums": entry_checksums(folder) or {},
        }

    def _cached(self, further: dict[str, Any], longest: int | None, progress: Progress) -> Path:
        """Return the cache folder with the lines as tokens, cut to `longest`; `further` are inputs of the cache key."""
        roots = default_roots(self.path) if self.cache is None else [self.cache]
        content = content_hash(self.path, roots)
        follows_from = {
            "version": _VERSION,
            "content": content,
            "key": self.key,
            "tokenizer": self.tokenizer_sha256,
            "eod": self.eod,
            "special_tokens": self.special_tokens,
            **further,
        }
        return cached(roots, entry_name(follows_from), partial(self._encode, content, longest, progress))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_file, "data.tokenizer")

    def _encode(self, content: str, longest: int | None, progress: Progress, folder: Path) -> None:
        size = self.path.stat().st_size
        progress.phase(f"Encoding {self.path.name}", size)
        reader = SourceReader(self.path, self.key, progress.advance, key_given_by="data.key")
        dtype = TOKEN_DTYPES[dtype_for(self.vocab_size)]
        encoding = EncodingSpec(self._tokenizer.to_str(), self.eod, dtype, self.rule, self.template)
        encoded = encode_documents(reader, encoding, usable_cores() if size > _ALONE else 1)
        with DocumentWriter(folder, LINES_FILE, with_mask=longest is None) as writer:
            for batch in encoded:
                if longest is None:
                    writer.write(batch.tokens, batch.lengths, batch.counted)
                    continue
                filled = batch.lengths > 1 + len(self.rule.beginning)  # more than the beginning and the end
                starts = np.cumsum(batch.lengths) - batch.lengths
                places = np.arange(len(batch.tokens)) - np.repeat(starts, batch.lengths)
                tokens = batch.tokens[(places < longest) & np.repeat(filled, batch.lengths)]
                writer.write(tokens, np.minimum(batch.lengths[filled], longest))
        if not writer.documents:
            raise UserError(f'{self.path} has no line with text under "{self.key}"; give a file that has some.')
        if reader.sha256 != content:
            raise UserError(f"{self.path} was changed while it was read; start again once it is complete.")


@dataclass(frozen=True, eq=False, kw_only=True)
class EncodedLines(Corpus):
    """Lines of text as tokens, in a folder of the cache, each cut to one token more than a sample holds."""

    @property
    def folder(self) -> Path:
        return self.files[0].parent

    def document_of(self, place: int) -> str:
        return super().document_of(place).replace("document", "line") + " with text"
