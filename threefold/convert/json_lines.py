"""JSON lines (JSONL) as data of a run, encoded once, into a cache whose entries are named by a hash of their inputs."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from platformdirs import user_cache_path
from tokenizers import Tokenizer

from threefold.checksums import checksum_of
from threefold.constants import IGNORE_INDEX
from threefold.convert.token_cache import CACHE_ENDING, cached, content_hash, entry_checksums
from threefold.data.conversations import ChatTemplate, template_of
from threefold.data.corpus import (
    DOCUMENT_DTYPE,
    LOSS_MASK_FILE,
    TOKEN_DTYPES,
    TOKENS_FILE,
    Content,
    Corpus,
    DocumentWriter,
    StoredArray,
    dtype_for,
    load_column,
)
from threefold.data.encoding import EncodingSpec, encode_documents
from threefold.data.packed import Runs, ends_document
from threefold.data.samples import Samples, document_runs
from threefold.data.sources import SourceReader, holds_chat, holds_preferences
from threefold.data.tokenizer import SpecialTokens, TextRule, find_end, id_count, load_tokenizer
from threefold.errors import UserError
from threefold.files import of_user, require_file, shown
from threefold.host import usable_cores
from threefold.output import Progress
from threefold.random import Int64Array

LINES_FILE: Final = "lines.bin"


@dataclass(frozen=True)
class JsonLines:
    """File with one JSON object per line: its text or its messages under `key`."""

    path: Path
    tokenizer_file: Path
    key: str = "text"
    given_eod: int | None = None  # put after each text; None uses the tokenizer's usual one
    cache: Path | None = None  # None uses one next to the file, or the user's cache if that is not writable
    special_tokens: SpecialTokens = "parse"
    chat_template: Path | None = None  # None finds it next to the tokenizer

    @cached_property
    def holds_chat(self) -> bool:
        return holds_chat(self.path, self.key)

    @cached_property
    def holds_pairs(self) -> bool:
        return holds_preferences(self.path, self.key)

    @cached_property
    def rule(self) -> TextRule:
        return TextRule.of(self._tokenizer, self.special_tokens)

    @cached_property
    def template(self) -> ChatTemplate | None:
        return template_of(self.chat_template, self.tokenizer_file) if self.holds_chat else None

    @cached_property
    def vocab_size(self) -> int:
        return id_count(self._tokenizer)

    @cached_property
    def eod(self) -> int:
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
        try:
            if self.tokenizer_file.exists():
                require_file(self.tokenizer_file, "data.tokenizer ")
            return hashlib.sha256(self.tokenizer_file.read_bytes()).hexdigest()
        except OSError as error:
            raise UserError(
                f"data.tokenizer is {self.tokenizer_file}, which cannot be read ({error.strerror}); "
                "give a tokenizer.json."
            ) from None

    def corpus(self, sequence_length: int, progress: Progress) -> Corpus:
        """Return the lines as tokens, from the cache or encoded now: texts cut (`encoded`), conversations whole."""
        if not self.holds_chat:
            return self.encoded(sequence_length, progress)
        template = self.template
        chat = {"template": template.template, "special_tokens": template.special_tokens} if template else {}
        folder = self._cached({"chat": chat}, None, progress)
        stored = self._stored(folder)
        mask = StoredArray(folder / LOSS_MASK_FILE, "u1", len(stored["tokens"]))
        stored |= {"template": template, "holds_pairs": self.holds_pairs}
        return Corpus(**stored, remedy=f"delete its cache {folder}", loss_mask=mask)

    def encoded(self, sequence_length: int, progress: Progress) -> "EncodedLines":
        """Return texts, each cut to one token more than a sample holds; see `corpus`."""
        folder = self._cached({"sequence_length": sequence_length}, sequence_length + 1, progress)
        return EncodedLines(**self._stored(folder), remedy="delete that folder, which is a cache")

    def samples(self, corpus: Corpus, name: str, split: str, sequence_length: int) -> Samples:
        """Return the samples of a split of `encoded` texts."""
        return PaddedSamples.open(corpus, name, split, sequence_length)

    def _stored(self, folder: Path) -> dict[str, Any]:
        """Return the content of a cache folder for a `Corpus`. Raises UserError if its files do not fit each other."""
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
        if self.cache is not None:  # without a look at the home directory, which a container's user may not have
            roots = [self.cache]
        else:  # to the first that is writable
            beside = self.path.with_name(self.path.name + CACHE_ENDING)
            home = of_user(lambda: user_cache_path("threefold", appauthor=False))
            roots = [beside] if home is None else [beside, home]
        content = content_hash(self.path, roots)
        version = 1  # incremented when the same file, tokenizer and length give another cache
        given = {"key": self.key, "tokenizer": self.tokenizer_sha256, "eod": self.eod}
        rule = {"special_tokens": self.special_tokens, "beginning": self.rule.beginning}
        facts = {"version": version, "content": content, **given, **rule, **further}
        name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]
        return cached(roots, name, partial(self._encode, content, longest, progress))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.tokenizer_file, "data.tokenizer")

    def _encode(self, content: str, longest: int | None, progress: Progress, folder: Path) -> None:
        size = self.path.stat().st_size
        progress.phase(f"Encoding {self.path.name}", size)
        reader = SourceReader(self.path, self.key, progress.advance, key_given_by="data.key")
        dtype = TOKEN_DTYPES[dtype_for(self.vocab_size)]
        encoding = EncodingSpec(self._tokenizer.to_str(), self.eod, dtype, self.rule, self.template)
        with DocumentWriter(folder, LINES_FILE, with_mask=longest is None) as writer:
            # Of a smaller file, encoding takes less time than starting processes.
            for batch in encode_documents(reader, encoding, usable_cores() if size > 32_000_000 else 1):
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

    def document_of(self, place: int) -> str:
        return super().document_of(place).replace("document", "line") + " with text"

    @cached_property
    def content(self) -> Content:
        """Checksums that the cache keeps; the one for the document starts covers all its files except the tokens."""
        known = dict(self.checksums)
        tokens = known.pop(TOKENS_FILE, None)
        rest = "".join(f"{name} {known[name]}\n" for name in sorted(known))
        dtype: Any = self.tokens.dtype.name
        return Content(dtype, checksum_of(rest.encode()) if known else "", tokens)


@dataclass(frozen=True, eq=False)
class PaddedSamples(Samples):
    """Samples of one split, one per line, in file order.

    A sample is the line's tokens and the end-of-document token, cut to S + 1; a shorter one is padded with
    end-of-document tokens whose labels are ignored. Attention is causal, so padding does not affect the tokens before
    it. The corpus must be encoded for this length.
    """

    encoded: Corpus
    sequence_length: int
    lines: Runs
    name: str

    @classmethod
    def open(cls, encoded: Corpus, name: str, split: str, sequence_length: int) -> "PaddedSamples":
        """Open the samples of a split, as in `PackedSamples.open`."""
        runs = document_runs(encoded.document_count, split, name)
        if not len(runs):
            raise UserError(f'data.split "{split}" gives the {name} split no lines; give it a weight above 0')
        return cls(encoded, sequence_length, Runs(runs), name)

    def __len__(self) -> int:
        return self.lines.length

    def labelled(self, indices: Int64Array, keys: Int64Array | None = None) -> tuple[Int64Array, Int64Array]:
        lines = self.lines(indices)
        starts, ends = self.encoded.documents[lines], self.encoded.documents[lines + 1]
        places = starts[:, None] + np.arange(self.sequence_length + 1)
        held = places < ends[:, None]
        windows = np.full(places.shape, self.encoded.eod, dtype=np.int64)
        windows[held] = self.encoded.tokens[places[held]]
        self.encoded.check_samples(windows, places, indices, self.name)
        tokens = windows[:, :-1]
        has_label = held[:, 1:] & ~ends_document(tokens, self.encoded.eod)
        return tokens, np.where(has_label, windows[:, 1:], IGNORE_INDEX)

    def documents(self, indices: Int64Array) -> Int64Array:
        return np.repeat(self.lines(indices)[:, None], self.sequence_length, axis=1)

    def padding(self, indices: Int64Array) -> Int64Array:
        lines = self.lines(indices)
        held = self.encoded.documents[lines + 1] - self.encoded.documents[lines]
        return np.maximum(0, self.sequence_length - held)
