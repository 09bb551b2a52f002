"""Encoding documents as tokens in several processes, in the order of the documents.

Each worker has its own pipe whose other end only this process holds: however this process ends, the pipe closes and the
worker exits. (A `ProcessPoolExecutor` shares its queues among the workers, which outlive a killed parent.)
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

from threefold.data.chat.chat_template import ChatTemplate
from threefold.data.chat.messages import Chat, Completion, Document
from threefold.data.text.document_encoding import DocumentEncoder, EncodedDocument
from threefold.data.text.text_encoding import TextEncoder, TextRule
from threefold.errors import UserError

_BATCH_CHARACTERS: Final = 1 << 18
_BATCH_DOCUMENTS: Final = 1024
# A worker encodes one batch while the next one waits in its inbox.
_AHEAD: Final = 2


@dataclass(frozen=True)
class EncodingSpec:
    """How to encode.

    Attributes:
        tokenizer: as JSON.
        eod: the id that ends a document.
        dtype: of the tokens, as a string.
        rule: how text becomes tokens.
        template: for conversations.
    """

    tokenizer: str
    eod: int
    dtype: str
    rule: TextRule
    template: ChatTemplate | None = None


@dataclass(frozen=True)
class EncodedBatch:
    """A batch of encoded documents.

    Attributes:
        tokens: [sum of lengths], the documents back to back, each text ended by the end-of-document token.
        lengths: int64 [documents], tokens of each, its end included.
        counted: uint8 [sum of lengths], 1 where the token's label is not ignored.
        text_bytes: bytes of the text as UTF-8; of conversations, of the messages.
    """

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int64]
    counted: NDArray[np.uint8]
    text_bytes: int


def encode_documents(documents: Iterable[Document], encoding: EncodingSpec, workers: int) -> Iterator[EncodedBatch]:
    """Encode documents in batches, in order; one worker is this process, more are processes of their own.

    Raises:
        UserError: a worker was killed, or a conversation cannot be encoded.
    """
    batches = _batches(documents)
    if workers == 1:
        encoder = _Encoder(encoding)
        yield from map(encoder, batches)
    else:
        with closing(_in_workers(batches, encoding, workers)) as encoded:
            yield from encoded


class _Encoder:
    def __init__(self, encoding: EncodingSpec) -> None:
        text = TextEncoder(Tokenizer.from_str(encoding.tokenizer), encoding.rule)
        self._documents, self._dtype = DocumentEncoder(text, encoding.eod, encoding.template), encoding.dtype

    def __call__(self, batch: list[Document]) -> EncodedBatch:
        documents: list[EncodedDocument] = [self._documents.encode(document) for document in batch]
        return EncodedBatch(
            tokens=np.concatenate([np.array(document.ids, self._dtype) for document in documents]),
            lengths=np.array([len(document.ids) for document in documents], dtype=np.int64),
            counted=np.concatenate([np.array(document.counted, np.uint8) for document in documents]),
            text_bytes=sum(len(text.encode()) for document in batch for text in texts_in(document)),
        )


def texts_in(document: Document) -> Iterator[str]:
    """The texts that a document is made of."""
    match document:
        case str():
            yield document
        case Completion():
            yield from (document.prompt, document.completion)
        case Chat():
            yield from (content for one in document.messages if isinstance(content := one.get("content"), str))


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += sum(map(len, texts_in(document)))
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _in_workers(
    batches: Iterable[list[Document]], encoding: EncodingSpec, workers: int
) -> Generator[EncodedBatch, None, None]:
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


def _in_order(batches: Iterable[list[Document]], pipes: list[Connection]) -> Iterator[EncodedBatch]:
    waiting: deque[Connection] = deque()
    for number, batch in enumerate(batches):
        if len(waiting) >= _AHEAD * len(pipes):
            yield _receive(waiting.popleft())
        pipe = pipes[number % len(pipes)]
        pipe.send(batch)
        waiting.append(pipe)
    while waiting:
        yield _receive(waiting.popleft())


def _receive(pipe: Connection) -> EncodedBatch:
    answer = pipe.recv()
    if isinstance(answer, BaseException):
        raise answer
    return answer


def _serve(pipe: Connection, encoding: EncodingSpec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the main process's to handle: it closes the pipe
    inbox: queue.SimpleQueue[list[Document]] = queue.SimpleQueue()
    # The inbox is emptied by a thread, so that neither side can wait in `send` for the other one's `recv`.
    threading.Thread(target=_receive_all, args=(pipe, inbox), daemon=True).start()
    encoder = _Encoder(encoding)
    while True:
        batch = inbox.get()
        try:
            answer: EncodedBatch | Exception = encoder(batch)
        except Exception as error:
            answer = error
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)


def _receive_all(pipe: Connection, inbox: "queue.SimpleQueue[list[Document]]") -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    finally:
        os._exit(0)  # the main process closed the pipe or is gone
