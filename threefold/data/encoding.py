"""Encoding of documents as tokens, with a loss mask, in this process or in several workers."""

import multiprocessing
import os
import queue
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from threefold.data.chat_renderer import ChatRenderer, Prefix
from threefold.data.conversations import ASSISTANT, Chat, ChatTemplate, Completion, Document, Message
from threefold.data.tokenizer import TextEncoder, TextRule, decoded, encoding_of, loaded
from threefold.errors import UserError

_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
"""Private-use characters that enclose special tokens spelled by a message while a template renders it."""
_MARKED: Final = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}|[{_OPEN}{_CLOSE}]")

Span = tuple[int, int]


class EncodedDocument(NamedTuple):
    """A document's token ids, and for each whether it counts for the loss."""

    ids: list[int]
    counted: list[bool]


class DocumentEncoder:
    """Encoder of documents of every kind.

    A text becomes its tokens and the end-of-document token, which all count for the loss. In a pair, the completion and
    the end-of-document token after it count. A conversation becomes the text that the chat template renders, with no
    token added; the tokens that the assistant would generate count. These are the tokens that the template puts into
    `{% generation %}` blocks. Without such blocks, they are the difference, for each answer, between the conversation
    including the answer and the conversation before it with the generation prompt, up to the token that ends the turn.

    If special tokens are treated as text, those that the template writes still become tokens, and those that a message
    spells are text.
    """

    def __init__(self, text: TextEncoder, eod: int | None, template: ChatTemplate | None = None) -> None:
        self.text, self.eod = text, eod
        self._renderer: ChatRenderer | None = None
        if template is not None:
            self._renderer = ChatRenderer(template)
        added = text.tokenizer.get_added_tokens_decoder()
        self._specials = {token: one.content for token, one in added.items() if one.special}

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self._specials.values(), key=len, reverse=True))))

    def encode(self, document: Document) -> EncodedDocument:
        """Encode a document. Raises UserError if a conversation has no template or its answers cannot be located."""
        if isinstance(document, Chat):
            return self._encode_chat(document)
        end = [] if self.eod is None else [self.eod]
        if isinstance(document, str):
            ids = self.text.encode(document) + end
            return EncodedDocument(ids, [True] * len(ids))
        prompt, whole = len(document.prompt), document.prompt + document.completion
        encoding = encoding_of(self.text.tokenizer, whole)
        ids = self.text.begun(encoding.ids)
        spans = [(0, 0)] * (len(ids) - len(encoding.ids)) + encoding.offsets
        return EncodedDocument(ids + end, _Spans(spans).within([(prompt, len(whole))]) + [True] * len(end))

    def prompt(self, messages: Sequence[Message], where: str) -> list[int]:
        """Encode a conversation for the assistant to continue. Raises like `encode`."""
        return self._tokens(self._required(where).render(self._marked(messages), where, prompted=True).text)[0]

    def end_of_turn(self) -> int | None:
        """Return the special token that ends the assistant's turn; None without a template or if it has none."""
        if self._renderer is None:
            return None
        chat = Chat("", ({"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}))
        try:
            ids, counted = self._encode_chat(chat)
        except UserError:
            return None
        return next((token for token in ids[counted.index(True) + 1 :] if token in self._specials), None)

    def _encode_chat(self, chat: Chat) -> EncodedDocument:
        renderer, messages = self._required(chat.where), self._marked(chat.messages)
        prefixes, answers = list[Prefix](), list[int]()
        if renderer.template.marks_answers:
            prefixes += [Prefix(chat.first, (True,))] if chat.first else []
        else:
            every = range(chat.first, len(messages))
            answers += [number for number in every if messages[number]["role"] == ASSISTANT]
            # A template may close a complete conversation (Phi's <|endoftext|>) but not one that continues.
            ends = (False, True)
            prefixes += [each for number in answers for each in (Prefix(number, (True,)), Prefix(number + 1, ends))]
        rendered = renderer.render(messages, chat.where, chat.tools, prefixes=prefixes)
        ids, spans = self._tokens(rendered.text)
        ordered, lengths = _Spans(spans), iter(rendered.lengths)

        def length(number: int, least: int = -1) -> int:
            """Return the length of the next prefix, to locate the answer in a message."""
            if (found := next(lengths)) <= least:
                raise UserError(
                    f"{chat.where}: message {number + 1} is rendered differently by {renderer.template.origin} when "
                    "the conversation continues, so its answer cannot be located in it; mark what the assistant "
                    "writes with {% generation %} and {% endgeneration %} in the template."
                )
            return found

        if renderer.template.marks_answers:
            first = length(chat.first) if chat.first else 0
            counted = ordered.within((start, end) for start, end in rendered.generated if first <= start < end)
        else:
            counted = [False] * len(ids)
            for number in answers:
                start = length(number)
                for place in self._turn(ids, ordered, start, length(number, start)):
                    counted[place] = True
        if not any(counted):
            raise UserError(
                f"{chat.where} has no token of an answer, so there is nothing to learn; leave the line out."
            )
        return EncodedDocument(ids, counted)

    def _turn(self, ids: list[int], spans: "_Spans", start: int, end: int) -> list[int]:
        """Return the tokens that overlap an answer and end in it, without whitespace after its last special token."""
        first, last = np.searchsorted(spans.ends, (start, end), side="right").tolist()
        inside = [place for place in range(first, last) if spans.starts[place] < spans.ends[place]]
        special = [place for place in inside if ids[place] in self._specials]
        if not special:
            return inside
        after = [ids[place] for place in inside if place > special[-1]]
        is_space = not decoded(self.text.tokenizer, after).strip() if after else True
        return [place for place in inside if place <= special[-1]] if is_space else inside

    def _required(self, where: str) -> ChatRenderer:
        if self._renderer is None:
            raise UserError(
                f"{where} is a conversation, which needs a chat template, and the tokenizer has none; put its "
                "tokenizer_config.json or chat_template.jinja there, or name one with data.chat_template "
                "(--chat-template)."
            )
        return self._renderer

    def _marked(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages with special tokens enclosed in marks, if special tokens are treated as text."""
        if self.text.rule.special_tokens == "parse" or not self._specials:
            return [dict(message) for message in messages]

        def marked(value: Any) -> Any:
            if isinstance(value, str):
                bare = value.replace(_OPEN, "").replace(_CLOSE, "")
                return self._spelled.sub(lambda found: f"{_OPEN}{found.group()}{_CLOSE}", bare)
            if isinstance(value, dict):
                return {key: one if key == "role" else marked(one) for key, one in value.items()}
            return [marked(one) for one in value] if isinstance(value, list) else value

        return [marked(dict(message)) for message in messages]

    def _tokens(self, rendered: str) -> tuple[list[int], list[Span]]:
        """Return the tokens of rendered text, and the span of each in it; marks count as characters."""
        pieces, end = list[tuple[str, int, bool]](), 0
        for found in _MARKED.finditer(rendered):
            pieces += [(rendered[end : found.start()], end, False), (found[1] or "", found.start(1), True)]
            end = found.end()
        ids, spans = list[int](), list[Span]()
        tokenizer, before = self.text.tokenizer, self.text.tokenizer.encode_special_tokens
        try:
            for piece, begin, is_spelled in [*pieces, (rendered[end:], end, False)]:
                if piece:
                    tokenizer.encode_special_tokens = is_spelled
                    encoding = encoding_of(tokenizer, piece)
                    ids += encoding.ids
                    spans += [(first + begin, last + begin) for first, last in encoding.offsets]
        finally:
            tokenizer.encode_special_tokens = before
        return ids, spans


class _Spans:
    """Spans of text, one per token, that are found by their place in it: starts and ends never decrease."""

    def __init__(self, spans: list[Span]) -> None:
        starts, ends = np.array(spans, dtype=np.int64).reshape(-1, 2).T
        self.starts, self.ends = np.minimum.accumulate(starts[::-1])[::-1], np.maximum.accumulate(ends)

    def within(self, wanted: Iterable[Span]) -> list[bool]:
        """Return for each token whether it overlaps one of the `wanted` spans, or lies between two that do."""
        counted = np.zeros(len(self.starts), dtype=bool)
        for start, end in wanted:
            counted[np.searchsorted(self.ends, start, side="right") : np.searchsorted(self.starts, end)] = True
        return list(counted.tolist())


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
