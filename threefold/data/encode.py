"""Documents to tokens in several processes, in the order of the documents.

Each worker has a pipe of its own whose other end only this process holds: however this process ends, the pipe closes
and the worker goes. (A `ProcessPoolExecutor` shares its queues among the workers, which outlive a killed parent.)
"""

import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Final

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from threefold.errors import UserError

_BATCH_CHARACTERS: Final = 1 << 18
_BATCH_DOCUMENTS: Final = 1024
# A worker encodes one batch while the next one waits in its inbox.
_AHEAD: Final = 2


@dataclass(frozen=True)
class Encoding:
    """How to encode: the tokenizer (JSON), the id that ends a document, the dtype string of the tokens."""

    tokenizer: str
    eod: int
    dtype: str


@dataclass(frozen=True)
class Encoded:
    """A batch of encoded documents.

    Attributes:
        tokens: [sum of lengths], the documents back to back, each ended by the end-of-document token.
        lengths: int64 [documents], tokens of each, its end included.
        text_bytes: bytes of the text as UTF-8.
    """

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int64]
    text_bytes: int


def encode_documents(documents: Iterable[str], encoding: Encoding, workers: int) -> Iterator[Encoded]:
    """Encode documents in batches, in order; one worker is this process, more are processes of their own.

    Raises:
        UserError: a worker was killed.
    """
    batches = _batches(documents)
    if workers == 1:
        encoder = _Encoder(encoding)
        yield from map(encoder, batches)
    else:
        with closing(_in_workers(batches, encoding, workers)) as encoded:
            yield from encoded


class _Encoder:
    def __init__(self, encoding: Encoding) -> None:
        self._encoding = encoding
        self._tokenizer = Tokenizer.from_str(encoding.tokenizer)
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        # Text that happens to spell a special token is text: only a document's end is an end.
        self._tokenizer.encode_special_tokens = True

    def __call__(self, batch: list[str]) -> Encoded:
        documents = [self._encode(text) for text in batch]
        return Encoded(
            tokens=np.concatenate(documents),
            lengths=np.array([len(document) for document in documents], dtype=np.int64),
            text_bytes=sum(len(text.encode()) for text in batch),
        )

    def _encode(self, text: str) -> NDArray[np.integer]:
        # One text at a time, as a batch would be spread over threads; "fast" leaves out the offsets.
        ids = self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids
        ids.append(self._encoding.eod)
        return np.array(ids, dtype=self._encoding.dtype)


def _batches(documents: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += len(document)
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _in_workers(batches: Iterable[list[str]], encoding: Encoding, workers: int) -> Generator[Encoded, None, None]:
    # Fresh processes: this one may have run the tokenizer's own threads, which a fork does not survive.
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, encoding), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        yield from _in_order(batches, pipes)
    except (EOFError, ConnectionError, BrokenPipeError):
        fewer = workers // 2
        raise UserError(f"a worker was killed, perhaps for want of memory; try --workers {fewer}") from None
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()


def _in_order(batches: Iterable[list[str]], pipes: list[Connection]) -> Iterator[Encoded]:
    waiting: deque[Connection] = deque()
    for number, batch in enumerate(batches):
        if len(waiting) >= _AHEAD * len(pipes):
            yield _receive(waiting.popleft())
        pipe = pipes[number % len(pipes)]
        pipe.send(batch)
        waiting.append(pipe)
    while waiting:
        yield _receive(waiting.popleft())


def _receive(pipe: Connection) -> Encoded:
    answer = pipe.recv()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _serve(pipe: Connection, encoding: Encoding) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle: it closes the pipe
    inbox: queue.SimpleQueue[list[str]] = queue.SimpleQueue()
    # The inbox is emptied by a thread, so that neither side can wait in `send` for the other one's `recv`.
    threading.Thread(target=_receive_all, args=(pipe, inbox), daemon=True).start()
    encoder = _Encoder(encoding)
    while True:
        batch = inbox.get()
        try:
            answer: Encoded | Exception = encoder(batch)
        except Exception as error:
            answer = error
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)


def _receive_all(pipe: Connection, inbox: "queue.SimpleQueue[list[str]]") -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    finally:
        os._exit(0)  # the main process closed the pipe or is gone
