"""A checkpoint is converted tensor by tensor: memory holds the largest of them, never all."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.support.command import Silent
from threefold.checkpoint.folder import LOOP, path_of
from threefold.checkpoint.manifest import Facts, write_manifest
from threefold.checkpoint.tensors import ReadableChunk, ReadableTensor, save_tensors_alone
from threefold.convert.checkpoints import Conversion, Format, convert_checkpoint
from threefold.host import return_freed_memory
from threefold.verify.worker_pool import WorkerPool

TENSORS, ROWS = 48, 1 << 11
ONE = ROWS * 1024 * 4
"""Bytes of a tensor: 8 MiB of 384."""


def write_large(run: Path) -> None:
    """A checkpoint of many tensors, each of two chunks."""

    def rows(number: int, first: int) -> Tensor:
        return torch.full((ROWS // 2, 1024), number + first / ROWS)

    folder = path_of(run, 1)
    folder.mkdir(parents=True)
    tensors: dict[str, Tensor] = {}
    for number in range(TENSORS):
        chunks = [
            ReadableChunk((first, 0), (ROWS // 2, 1024), lambda number=number, first=first: rows(number, first))  # type: ignore[misc]
            for first in (0, ROWS // 2)
        ]
        name = f"model.{number}" if number % 3 else f"optimizer.{number}.exp_avg"
        tensors[name] = ReadableTensor((ROWS, 1024), torch.float32, chunks)
    save_tensors_alone(tensors, folder)
    (folder / LOOP).write_text("{}")
    write_manifest(folder, Facts(1, 0, 0, eod=None, tokenizer_sha256=None, tokens=0, documents=0))


def anonymous() -> int:
    """Return the bytes that this process holds outside files, as Linux counts them."""
    status = Path("/proc/self/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0]) * 1024


@contextmanager
def anonymous_growth() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the largest growth of memory outside files, in bytes, sampled by a thread.

    A mapped file is not counted: the system reclaims its pages when needed.
    """
    before, most, ended = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not ended.wait(0.001):
            most = max(most, anonymous() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield lambda: most
    finally:
        ended.set()
        thread.join()


def convert_large(run: Path, out: Path, kind: Format) -> int:
    """Convert in this process, and return by how much its memory grew at most."""
    write_large(run)
    return_freed_memory()
    convert_checkpoint(Conversion(run, out / "first", kind, weights_only=True), Silent())  # for what is made only once
    with anonymous_growth() as most:
        convert_checkpoint(Conversion(run, out / "second", kind), Silent())
        return most()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["threefold", "safetensors", "torch", "dcp"])
def test_memory_holds_a_tensor_at_a_time(pool: WorkerPool, tmp_path: Path, kind: Format) -> None:
    (grown,) = pool.run(1, convert_large, tmp_path / "run", tmp_path, kind)
    assert 0 < grown < 8 * ONE < TENSORS * ONE / 4
