"""Encoding of documents as tokens, with a loss mask, in this process or in several workers."""

import multiprocessing
import os
import queue
import re
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from threefold.data.conversations import ASSISTANT, Chat, ChatTemplate, Completion, Document, Message
from threefold.data.tokenizer import TextEncoder, TextRule
from threefold.errors import UserError

if TYPE_CHECKING:
    from threefold.data.chat_renderer import ChatRenderer

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
    token added; what the assistant would generate counts. That is what the template puts into `{% generation %}`
    blocks. Without such blocks it is, for each answer, the difference between the conversation including the answer and
    the conversation before it with the generation prompt, up to the token that ends the turn.

    If special tokens are taken as text, those that the template writes still become tokens, and those that a message
    spells are text.

    Args:
        text: encoder of texts.
        eod: end-of-document token.
        template: chat template for conversations.
    """

    def __init__(self, text: TextEncoder, eod: int | None, template: ChatTemplate | None = None) -> None:
        self.text, self._eod = text, eod
        self._renderer: ChatRenderer | None = None
        if template is not None:
            from threefold.data import chat_renderer  # imports Jinja, which few runs need

            self._renderer = chat_renderer.ChatRenderer(template)
        self._specials = text.special_ids()
        self._spelled = re.compile("|".join(map(re.escape, sorted(self._specials.values(), key=len, reverse=True))))

    def encode(self, document: Document) -> EncodedDocument:
        """Encode a document. Raises UserError if a conversation has no template or its answers cannot be located."""
        if isinstance(document, str):
            ids = self._ended(self.text.encode(document))
            return EncodedDocument(ids, [True] * len(ids))
        if isinstance(document, Chat):
            return self._encode_chat(document)
        prompt, whole = len(document.prompt), document.prompt + document.completion
        ids, spans = self.text.encode_spans(whole)
        ended = self._ended(ids)
        return EncodedDocument(ended, _within(spans, [(prompt, len(whole))]) + [True] * (len(ended) - len(ids)))

    def prompt(self, messages: Sequence[Message], where: str) -> list[int]:
        """Encode a conversation that the assistant is to continue. Raises like `encode`."""
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
        first = counted.index(True)
        return next((token for token in ids[first + 1 :] if token in self._specials), None)

    def _ended(self, ids: list[int]) -> list[int]:
        return ids if self._eod is None else [*ids, self._eod]

    def _encode_chat(self, chat: Chat) -> EncodedDocument:
        chat = replace(chat, messages=tuple(self._marked(chat.messages)))
        renderer = self._required(chat.where)
        rendered = renderer.render(chat.messages, chat.where, chat.tools)
        ids, spans = self._tokens(rendered.text)
        if renderer.template.marks_answers:
            given = len(self._before(chat, chat.first, rendered.text)) if chat.first else 0
            counted = _within(spans, [(start, end) for start, end in rendered.generated if given <= start < end])
        else:
            counted = [False] * len(ids)
            for start, end in self._differences(chat, rendered.text):
                for place in self._turn(ids, spans, start, end):
                    counted[place] = True
        if not any(counted):
            raise UserError(
                f"{chat.where} has no token of an answer, so there is nothing to learn; leave the line out."
            )
        return EncodedDocument(ids, counted)

    def _differences(self, chat: Chat, rendered: str) -> Iterator[Span]:
        """Yield the span of each answer, from the conversation rendered before and after it."""
        for number, message in enumerate(chat.messages):
            if number < chat.first or message["role"] != ASSISTANT:
                continue
            start = len(self._before(chat, number, rendered))
            renderer, so_far = self._required(chat.where), chat.messages[: number + 1]
            texts = [renderer.render(so_far, chat.where, chat.tools, prompted).text for prompted in (False, True)]
            # A template may close a complete conversation (Phi's <|endoftext|>) but not one that continues.
            after = os.path.commonprefix(texts)  # noqa: RUF071 (of characters)
            if not rendered.startswith(after) or len(after) <= start:
                raise self._unstable(chat, number)
            yield start, len(after)

    def _before(self, chat: Chat, number: int, rendered: str) -> str:
        before = self._required(chat.where).render(chat.messages[:number], chat.where, chat.tools, prompted=True).text
        if not rendered.startswith(before):
            raise self._unstable(chat, number)
        return before

    def _unstable(self, chat: Chat, number: int) -> UserError:
        origin = self._required(chat.where).template.origin
        return UserError(
            f"{chat.where}: message {number + 1} is rendered differently by {origin} when the conversation continues, "
            "so its answer cannot be located in it; mark what the assistant writes with {% generation %} and "
            "{% endgeneration %} in the template."
        )

    def _turn(self, ids: list[int], spans: list[Span], start: int, end: int) -> list[int]:
        """Return the tokens that overlap an answer and end in it, without whitespace after its last special token."""
        inside = [place for place, (first, last) in enumerate(spans) if start < last <= end and first < last]
        special = [place for place in inside if ids[place] in self._specials]
        if not special:
            return inside
        after = [ids[place] for place in inside if place > special[-1]]
        is_space = not self.text.tokenizer.decode(after, skip_special_tokens=False).strip() if after else True
        return [place for place in inside if place <= special[-1]] if is_space else inside

    def _required(self, where: str) -> "ChatRenderer":
        if self._renderer is None:
            raise UserError(
                f"{where} is a conversation, which needs a chat template, and the tokenizer has none; put its "
                "tokenizer_config.json or chat_template.jinja there, or name one with data.chat_template "
                "(--chat-template)."
            )
        return self._renderer

    def _marked(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Return the messages with special tokens enclosed in marks, if they are to be text."""
        if self.text.rule.special_tokens == "parse" or not self._specials:
            return [dict(message) for message in messages]
        return [_map_texts(message, self._mark) for message in messages]

    def _mark(self, text: str) -> str:
        bare = text.replace(_OPEN, "").replace(_CLOSE, "")
        return self._spelled.sub(lambda found: f"{_OPEN}{found.group()}{_CLOSE}", bare)

    def _tokens(self, rendered: str) -> tuple[list[int], list[Span]]:
        """Return the tokens of rendered text, and the span of each in it; marks count as characters."""
        ids: list[int] = []
        spans: list[Span] = []
        for piece, start, is_text in _pieces(rendered):
            with self.text.specials_as("text" if is_text else "parse") as tokenizer:
                encoding = tokenizer.encode(piece, add_special_tokens=False)
            ids += encoding.ids
            spans += [(first + start, last + start) for first, last in encoding.offsets]
        return ids, spans


def _pieces(rendered: str) -> Iterator[tuple[str, int, bool]]:
    """Yield the text between and outside of marks: the text, where it starts, and whether it is between marks."""
    end = 0
    for found in _MARKED.finditer(rendered):
        if found.start() > end:
            yield rendered[end : found.start()], end, False
        if found.group(1):
            yield found.group(1), found.start(1), True
        end = found.end()
    if end < len(rendered):
        yield rendered[end:], end, False


def _within(spans: list[Span], wanted: list[Span]) -> list[bool]:
    """Return for each token whether it overlaps one of the `wanted` spans, or lies between two that do."""
    counted = [False] * len(spans)
    for start, end in wanted:
        inside = [place for place, (first, last) in enumerate(spans) if first < end and start < last]
        for place in range(inside[0], inside[-1] + 1) if inside else ():
            counted[place] = True
    return counted


def _map_texts(value: Any, change: Any) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {key: _map_texts(one, change) if key != "role" else one for key, one in value.items()}
    return [_map_texts(one, change) for one in value] if isinstance(value, list) else value


_BATCH_CHARACTERS: Final = 1 << 18
_BATCH_DOCUMENTS: Final = 1024
# Batches per worker: one is being encoded while the next waits in its inbox.
_AHEAD: Final = 2


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
    """A batch of encoded documents.

    Attributes:
        tokens: [sum of lengths], the documents back to back, each text with its end-of-document token.
        lengths: int64 [documents], tokens of each document, including its end.
        counted: uint8 [sum of lengths], 1 where the token counts for the loss.
        text_bytes: bytes of the text (for conversations, of the messages) as UTF-8.
    """

    tokens: NDArray[np.integer]
    lengths: NDArray[np.int64]
    counted: NDArray[np.uint8]
    text_bytes: int


def encode_documents(documents: Iterable[Document], encoding: EncodingSpec, workers: int) -> Iterator[EncodedBatch]:
    """Encode documents in batches, in order; with one worker in this process, else in processes of their own.

    Raises:
        UserError: a worker was killed, or a conversation cannot be encoded.
    """
    batches = _batches(documents)
    if workers == 1:
        yield from map(_batch_encoder(encoding), batches)
    else:
        with closing(_in_workers(batches, encoding, workers)) as encoded:
            yield from encoded


def _batch_encoder(encoding: EncodingSpec) -> Callable[[list[Document]], EncodedBatch]:
    text = TextEncoder(Tokenizer.from_str(encoding.tokenizer), encoding.rule)
    encoder = DocumentEncoder(text, encoding.eod, encoding.template)

    def encode(batch: list[Document]) -> EncodedBatch:
        documents: list[EncodedDocument] = [encoder.encode(document) for document in batch]
        return EncodedBatch(
            tokens=np.concatenate([np.array(document.ids, encoding.dtype) for document in documents]),
            lengths=np.array([len(document.ids) for document in documents], dtype=np.int64),
            counted=np.concatenate([np.array(document.counted, np.uint8) for document in documents]),
            text_bytes=sum(len(text.encode()) for document in batch for text in _texts_in(document)),
        )

    return encode


def _texts_in(document: Document) -> Iterator[str]:
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
        characters += sum(map(len, _texts_in(document)))
        if characters >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _in_workers(
    batches: Iterable[list[Document]], encoding: EncodingSpec, workers: int
) -> Generator[EncodedBatch, None, None]:
    # Spawned, because this process may have run the tokenizer's own threads, which do not survive a fork.
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
        raise UserError(f"a worker was killed, perhaps for want of memory; try --workers {workers // 2}") from None
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join()


def _in_order(batches: Iterable[list[Document]], pipes: list[Connection]) -> Iterator[EncodedBatch]:
    waiting: deque[Connection] = deque()

    def receive() -> EncodedBatch:
        answer: EncodedBatch | BaseException = waiting.popleft().recv()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    for number, batch in enumerate(batches):
        if len(waiting) >= _AHEAD * len(pipes):
            yield receive()
        pipe = pipes[number % len(pipes)]
        pipe.send(batch)
        waiting.append(pipe)
    while waiting:
        yield receive()


def _serve(pipe: Connection, encoding: EncodingSpec) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C and closes the pipe
    inbox: queue.SimpleQueue[list[Document]] = queue.SimpleQueue()
    # A thread receives, so that neither side can block in `send` while the other one does too.
    threading.Thread(target=_receive_all, args=(pipe, inbox), daemon=True).start()
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


def _receive_all(pipe: Connection, inbox: "queue.SimpleQueue[list[Document]]") -> None:
    try:
        while True:
            inbox.put(pipe.recv())
    finally:
        os._exit(0)  # the main process closed the pipe or is gone
