"""What the program understands of a folder, as a digest: one reader for each kind of file that it opens."""

import hashlib
import json
import struct
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.support.command import Silent
from threefold.checkpoint.folder import select_checkpoint
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.config import load_config, resolve
from threefold.convert.json_lines import JsonLines, PaddedSamples
from threefold.data.corpus import Corpus
from threefold.data.formats.registry import open_corpus
from threefold.data.packed import PackedSamples
from threefold.errors import UserError
from threefold.huggingface.import_hf import Import, import_model
from threefold.output import SILENT
from threefold.report.tokens import audit

LENGTH = 16
VOCABULARY = 300


def digest(*parts: Any) -> str:
    """A digest of texts, bytes, arrays and tensors."""
    whole = hashlib.sha256()
    for part in parts:
        if isinstance(part, torch.Tensor):
            part = part.contiguous().view(torch.uint8).numpy() if part.dim() else part.numpy()
        content = part if isinstance(part, bytes) else np.ascontiguousarray(part).tobytes()
        if isinstance(part, str):
            content = part.encode()
        whole.update(len(content).to_bytes(8) + content)
    return whole.hexdigest()


def checkpoint(run: Path) -> str:
    """A run's checkpoint: its facts, its config and all of its tensors."""
    choice = select_checkpoint(run, str(run), "")
    found = stored_tensors(choice.checkpoint.path)
    tensors = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in sorted(found.items())}
    load_tensors(tensors, choice.checkpoint.path, alone=True)
    names = [f"{name} {tensor.dtype} {tuple(tensor.shape)}" for name, tensor in tensors.items()]
    return digest(repr(choice.checkpoint.facts), choice.config.to_yaml(), *names, *tensors.values())


def tokens(folder: Path) -> str:
    """A folder of `data prepare`, as a run reads it and checks it in the background."""
    corpus = open_corpus(folder)
    found = _packed(corpus)
    _refuse(audit(folder, None, SILENT))
    return found


def cache(folder: Path, lines: Path, tokenizer: Path) -> str:
    """The cache of a file of JSON lines, as a run reads it and checks it in the background."""
    encoded = JsonLines(lines, tokenizer, cache=folder).encoded(LENGTH, SILENT)
    _refuse(audit(encoded.files[0].parent, None, SILENT))
    samples = PaddedSamples.open(encoded, "train", "1,0,0", LENGTH)
    return digest(*samples.labelled(np.arange(len(samples))))


def megatron(folder: Path) -> str:
    """PREFIX.bin and PREFIX.idx; what is read is what plain Python reads."""
    corpus = open_corpus(folder / "text", vocab_size=VOCABULARY)
    found = _packed(corpus)
    _compare(corpus, _megatron_documents((folder / "text.idx").read_bytes(), (folder / "text.bin").read_bytes()))
    return found


def fleet(folder: Path) -> str:
    """PREFIX_ids.npy and PREFIX_idx.npz, or PREFIX_ids.npz; what is read is what numpy reads."""
    corpus = open_corpus(folder / "text", vocab_size=VOCABULARY)
    found = _packed(corpus)
    if (folder / "text_ids.npy").exists():
        ids = np.load(folder / "text_ids.npy", allow_pickle=False)
        lengths = np.load(folder / "text_idx.npz", allow_pickle=False)
        ends = np.cumsum(lengths["lens"])
        bounds = [0, *ends.tolist()]
        documents = [
            ids[bounds[first] : bounds[end]] for first, end in zip(lengths["docs"], lengths["docs"][1:], strict=False)
        ]
    else:
        arrays = np.load(folder / "text_ids.npz", allow_pickle=False)
        documents = np.split(arrays["ids"], np.cumsum(arrays["lens"])[:-1])
    _compare(corpus, documents)
    return found


def huggingface(folder: Path) -> str:
    """A model of Hugging Face, imported: finite weights in the shapes that its config says."""
    run = folder.with_name("imported")
    import_model(Import(folder, run, (), overwrite=True), Silent())
    return checkpoint(run)


def config(folder: Path) -> str:
    """A config, resolved and checked."""
    return resolve(load_config(folder / "run.yaml"), VOCABULARY).to_yaml()


def text_lines(folder: Path, tokenizer: Path) -> str:
    """JSON lines as text; what is read is what plain Python reads."""
    lines = folder / "lines.jsonl"
    encoded = JsonLines(lines, tokenizer, cache=folder / "cache").encoded(LENGTH, SILENT)
    texts = [json.loads(line)["text"] for line in lines.read_text(encoding="utf-8-sig").split("\n") if line.strip()]
    _same(len([text for text in texts if text]), len(encoded.documents) - 1, "lines")
    return digest(encoded.tokens[: len(encoded.tokens)])


def chat_lines(folder: Path, tokenizer: Path) -> str:
    """JSON lines with conversations: as many as there are, each token of which counts or does not."""
    lines = folder / "lines.jsonl"
    corpus = JsonLines(lines, tokenizer, key="messages", cache=folder / "cache").corpus(64, SILENT)
    count = sum(1 for line in lines.read_text(encoding="utf-8-sig").split("\n") if line.strip())
    _same(count, len(corpus.documents) - 1, "conversations")
    assert corpus.loss_mask is not None
    mask = corpus.loss_mask[: len(corpus.tokens)]
    assert set(np.unique(mask)) <= {0, 1}
    return digest(corpus.tokens[: len(corpus.tokens)], mask)


def _packed(corpus: Corpus) -> str:
    samples = PackedSamples.open(corpus, "train", "1,0,0", LENGTH)
    return digest(f"{corpus.vocab_size} {corpus.eod}", *samples.labelled(np.arange(len(samples))))


def _refuse(audits: Iterable[Any]) -> None:
    for one in audits:
        if one.problem:
            raise UserError(one.problem)


def _compare(corpus: Corpus, documents: Iterable[Any]) -> None:
    starts = corpus.documents
    expected = [list(map(int, document)) for document in documents]
    read = [corpus.tokens[start:end].tolist() for start, end in pairwise(starts)]
    _same(expected, read, "documents")


def _same(expected: Any, read: Any, what: str) -> None:
    if expected != read:
        raise AssertionError(f"{what} read as other ones than there are")


def _megatron_documents(idx: bytes, content: bytes) -> list[list[int]]:
    letter = {1: "B", 2: "b", 3: "h", 4: "i", 5: "q", 8: "H"}[idx[17]]
    sequences, bounds = struct.unpack_from("<QQ", idx, 18)
    lengths = struct.unpack_from(f"<{sequences}i", idx, 34)
    offsets = struct.unpack_from(f"<{sequences}q", idx, 34 + 4 * sequences)
    documents = struct.unpack_from(f"<{bounds}q", idx, 34 + 12 * sequences)
    read = [
        struct.unpack_from(f"<{length}{letter}", content, offset)
        for length, offset in zip(lengths, offsets, strict=True)
    ]
    return [[token for sequence in read[first:end] for token in sequence] for first, end in pairwise(documents)]
