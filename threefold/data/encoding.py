"""Encoding of documents as tokens, with a loss mask, in this process or in several workers."""

import multiprocessing
import os
import queue
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from threefold.data.conversations import ChatTemplate, Completion, Document
from threefold.data.tokenizer import TextEncoder, TextRule, loaded
from threefold.doors import needed
from threefold.errors import UserError


class EncodedDocument(NamedTuple):
    """A document's token ids, and for each whether it counts for the loss."""

    ids: list[int]
    counted: list[bool]


class DocumentEncoder:
    """Encoder of documents of every kind.

    A text becomes its tokens and the end-of-document token, which all count for the loss. For conversations and pairs
    see `chats`.
    """

    def __init__(self, text: TextEncoder, eod: int | None, template: ChatTemplate | None = None) -> None:
        self.text, self.eod, self._template = text, eod, template

    @cached_property
    def chats(self) -> Any:
        """Encoder of conversations and pairs of an attached room, with `encode`, `prompt` and `end_of_turn`."""
        return needed("chat_encoder", "A conversation", "huggingface")(self.text, self._template, self.eod)

    def encode(self, document: Document) -> EncodedDocument:
        """Encode a document. Raises UserError if a conversation has no template or its answers cannot be located."""
        if not isinstance(document, str):
            found: EncodedDocument = self.chats.encode(document)
            return found
        ids = self.text.encode(document) + ([] if self.eod is None else [self.eod])
        return EncodedDocument(ids, [True] * len(ids))


@dataclass(frozen=True)
class EncodingSpec:
    """Settings of encoding, with the tokenizer as JSON, as they are sent to workers."""

    tokenizer: str
    eod: int
    dtype: str
    rule: TextRule
    template: ChatTemplate | None = None


@dataclass(frozen=True)
class EncodedBatch:
    """A batch of encoded documents, back to back, each text with its end-of-document token."""

    tokens: NDArray[np.integer]  # [sum of lengths]
    lengths: NDArray[np.int64]  # [documents]
    counted: NDArray[np.uint8]  # [sum of lengths], 1 where the token counts for the loss
    text_bytes: int  # of the text (for conversations, of the messages) as UTF-8


def encode_documents(documents: Iterable[Document], encoding: EncodingSpec, workers: int) -> Iterator[EncodedBatch]:
    """Encode documents in batches, in order; with one worker in this process, otherwise in worker processes."""
    batches = _batches(documents)
    if workers == 1:
        yield from map(_batch_encoder(encoding), batches)
        return
    # Spawned, because this process may have run the tokenizer's own threads, which do not survive a fork.
    context = multiprocessing.get_context("spawn")
    pipes: list[Connection] = []
    processes: list[SpawnProcess] = []
    waiting: deque[Connection] = deque()

    def receive() -> EncodedBatch:
        answer: EncodedBatch | BaseException = waiting.popleft().recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, encoding), daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        for number, batch in enumerate(batches):
            if len(waiting) >= 2 * workers:  # each encodes one batch while the next waits
                yield receive()
            waiting.append(pipes[number % workers])
            waiting[-1].send(batch)
        while waiting:
            yield receive()
    except (EOFError, ConnectionError, BrokenPipeError):
        raise UserError(f"a worker was killed, perhaps for want of memory; try --workers {workers // 2}") from None
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()


def _batch_encoder(encoding: EncodingSpec) -> Callable[[list[Document]], EncodedBatch]:
    text = TextEncoder(loaded(encoding.tokenizer, "the tokenizer", is_tried=True), encoding.rule)
    encoder = DocumentEncoder(text, encoding.eod, encoding.template)

    def encode(batch: list[Document]) -> EncodedBatch:
        documents = [encoder.encode(document) for document in batch]
        return EncodedBatch(
            tokens=np.concatenate([np.array(ids, encoding.dtype) for ids, _ in documents]),
            lengths=np.array([len(ids) for ids, _ in documents], dtype=np.int64),
            counted=np.concatenate([np.array(counted, np.uint8) for _, counted in documents]),
            text_bytes=sum(len(text.encode()) for document in batch for text in _texts_in(document)),
        )

    return encode


def _serve(pipe: Connection, encoding: EncodingSpec) -> None:
    """Encode what comes through a pipe, in a worker's process, until the main process closes it or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C and closes the pipe
    inbox: queue.SimpleQueue[list[Document]] = queue.SimpleQueue()

    def receive_all() -> None:
        try:
            while True:
                inbox.put(pipe.recv())
        finally:
            os._exit(0)

    # A thread receives, so that neither side can block in `send` while the other one does too.
    threading.Thread(target=receive_all, daemon=True).start()
    encode = _batch_encoder(encoding)
    while True:
        batch = inbox.get()
        try:
            answer: EncodedBatch | Exception = encode(batch)
        except Exception as error:
            answer = error
        try:
            pipe.send(answer)
        except OSError:
            os._exit(0)


def _texts_in(document: Document) -> list[str]:
    match document:
        case str():
            return [document]
        case Completion():
            return [document.prompt, document.completion]
    return [content for one in document.messages if isinstance(content := one.get("content"), str)]


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for document in documents:
        batch.append(document)
        characters += sum(map(len, _texts_in(document)))
        if characters >= 1 << 18 or len(batch) >= 1024:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
