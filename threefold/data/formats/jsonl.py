"""JSON lines (JSONL): each line is a text, which is cut or padded, or a conversation, which is packed."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import sha256
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from tokenizers import Tokenizer

from threefold.data.chat_template import ChatTemplate
from threefold.data.corpus import Corpus
from threefold.data.encoding import EncodedBatch, EncodingSpec, encode_documents
from threefold.data.formats.token_cache import cached, content_hash, default_roots, entry_checksums, entry_name
from threefold.data.sources import SourceReader, holds_chat
from threefold.data.stored_array import (
    DOCUMENT_DTYPE,
    DTYPES,
    LOSS_MASK_FILE,
    TOKENS_FILE,
    StoredArray,
    dtype_for,
    load_column,
)
from threefold.data.tokenizer import SpecialTokens, TextRule, find_end, id_count, load_tokenizer
from threefold.errors import UserError
from threefold.files import require_file, shown
from threefold.host import usable_cores
from threefold.output import Progress
from threefold.random.permutation import Int64Array

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

    def encoded(self, sequence_length: int, progress: Progress) -> "EncodedLines":
        """Return the lines as tokens, from the cache or encoded now, on all cores if the file is large.

        Raises:
            UserError: a line is damaged, no line has text, or the cache cannot be written.
        """
        folder = self._cached({"sequence_length": sequence_length}, sequence_length + 1, progress)
        return EncodedLines.open(folder, self)

    def conversations(self, progress: Progress) -> Corpus:
        """Return the conversations as a corpus with a loss mask, whatever their length. Otherwise like `encoded`."""
        template = self.template
        chat = {"template": template.template, "special_tokens": template.special_tokens} if template else {}
        folder = self._cached({"chat": chat}, None, progress)
        lines = EncodedLines.open(folder, self)
        mask = StoredArray(folder / LOSS_MASK_FILE, "u1", len(lines.tokens))
        return Corpus(
            path=self.path,
            files=(folder / TOKENS_FILE, folder / LINES_FILE),
            tokens=lines.tokens,
            documents=lines.lines,
            vocab_size=self.vocab_size,
            eod=self.eod,
            tokenizer_file=self.tokenizer_file,
            remedy=f"delete its cache {folder}",
            rule=self.rule,
            loss_mask=mask,
            template=template,
            checksums=lines.checksums,
        )

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
        dtype = DTYPES[dtype_for(self.vocab_size)]
        encoding = EncodingSpec(self._tokenizer.to_str(), self.eod, dtype, self.rule, self.template)
        encoded = encode_documents(reader, encoding, usable_cores() if size > _ALONE else 1)
        count = (
            _write_conversations(folder, encoded)
            if longest is None
            else _write_lines(folder, encoded, longest, 1 + len(self.rule.beginning))
        )
        if not count:
            raise UserError(f'{self.path} has no line with text under "{self.key}"; give a file that has some.')
        if reader.sha256 != content:
            raise UserError(f"{self.path} was changed while it was read; start again once it is complete.")


def _write_lines(folder: Path, encoded: Iterable[EncodedBatch], longest: int, frame: int) -> int:
    """Write at most `longest` tokens of each line that has more than `frame` (beginning and end); return the count."""
    end = count = 0
    with (folder / TOKENS_FILE).open("wb") as tokens_file, (folder / LINES_FILE).open("wb") as lines_file:
        lines_file.write(np.zeros(1, dtype=DOCUMENT_DTYPE).tobytes())
        for batch in encoded:
            starts = np.cumsum(batch.lengths) - batch.lengths
            places = np.arange(len(batch.tokens)) - np.repeat(starts, batch.lengths)
            filled = batch.lengths > frame
            tokens_file.write(batch.tokens[(places < longest) & np.repeat(filled, batch.lengths)].tobytes())
            ends = end + np.cumsum(np.minimum(batch.lengths[filled], longest))
            lines_file.write(ends.astype(DOCUMENT_DTYPE).tobytes())
            end, count = int(ends[-1]) if len(ends) else end, count + len(ends)
    return count


def _write_conversations(folder: Path, encoded: Iterable[EncodedBatch]) -> int:
    """Write every line whole, with its loss mask; return the number of lines."""
    end = count = 0
    names = (TOKENS_FILE, LINES_FILE, LOSS_MASK_FILE)
    with ExitStack() as files:
        tokens_file, lines_file, mask_file = (files.enter_context((folder / name).open("wb")) for name in names)
        lines_file.write(np.zeros(1, dtype=DOCUMENT_DTYPE).tobytes())
        for batch in encoded:
            tokens_file.write(batch.tokens.tobytes())
            mask_file.write(batch.counted.tobytes())
            ends = end + np.cumsum(batch.lengths)
            lines_file.write(ends.astype(DOCUMENT_DTYPE).tobytes())
            end, count = int(ends[-1]), count + len(ends)
    return count


@dataclass(frozen=True, eq=False)
class EncodedLines:
    """Lines of a file as tokens, each cut to one token more than a sample holds, or whole.

    Attributes:
        source: the file.
        folder: folder of the cache entry.
        tokens: [N] uint16 or int32, in a file: all lines back to back.
        lines: int64 [L + 1]: start of each line in `tokens`; the last is N.
        checksums: checksum of each file of the folder; empty if an older version made it.
    """

    lines_file: ClassVar[str] = LINES_FILE

    source: JsonLines
    folder: Path
    tokens: StoredArray
    lines: Int64Array
    checksums: Mapping[str, str]

    @classmethod
    def open(cls, folder: Path, source: JsonLines) -> "EncodedLines":
        """Open the lines in a cache folder. Raises UserError if its files do not fit each other."""
        tokens_file, lines_file = folder / TOKENS_FILE, folder / LINES_FILE
        dtype = np.dtype(DTYPES[dtype_for(source.vocab_size)])
        tokens = StoredArray(tokens_file, dtype, require_file(tokens_file) // dtype.itemsize)
        lines = load_column(lines_file, DOCUMENT_DTYPE, require_file(lines_file) // 8)
        if len(lines) < 2 or lines[0] != 0 or lines[-1] != len(tokens) or np.any(np.diff(lines) <= 0):
            raise UserError(f"{shown(lines_file)} does not fit {TOKENS_FILE}; delete that folder, which is a cache.")
        return cls(source, folder, tokens, lines, entry_checksums(folder) or {})
