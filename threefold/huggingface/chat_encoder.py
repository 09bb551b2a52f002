"""Encoding of conversations as tokens, with a loss mask, by their chat template."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, Final

import numpy as np

from threefold.data.conversations import Chat, ChatTemplate, Completion, Message
from threefold.data.encoding import EncodedDocument
from threefold.data.tokenizer import TextEncoder, decoded, encoding_of
from threefold.errors import UserError
from threefold.huggingface.chat_renderer import ChatRenderer, Prefix
from threefold.huggingface.conversations import ASSISTANT

_OPEN, _CLOSE = "\uf8f0", "\uf8f1"
"""Private-use characters that enclose special tokens spelled by a message while a template renders it."""
_MARKED: Final = re.compile(f"{_OPEN}([^{_OPEN}{_CLOSE}]*){_CLOSE}|[{_OPEN}{_CLOSE}]")


Span = tuple[int, int]


class ChatEncoder:
    """Encoder of conversations and of pairs of a prompt and a completion.

    In a pair, the completion and the end-of-document token after it count for the loss.

    A conversation becomes the text that the chat template renders, with no token added; the tokens that the assistant
    would generate count for the loss. These are the tokens that the template puts into `{% generation %}` blocks.
    Without such blocks, they are the difference, for each answer, between the conversation including the answer and the
    conversation before it with the generation prompt, up to the token that ends the turn.

    If special tokens are treated as text, those that the template writes still become tokens, and those that a message
    spells are text.
    """

    def __init__(self, text: TextEncoder, template: ChatTemplate | None, eod: int | None = None) -> None:
        self.text, self.eod = text, eod
        self._renderer = None if template is None else ChatRenderer(template)
        added = text.tokenizer.get_added_tokens_decoder()
        self._specials = {token: one.content for token, one in added.items() if one.special}

    @cached_property
    def _spelled(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, sorted(self._specials.values(), key=len, reverse=True))))

    def encode(self, chat: Chat | Completion) -> EncodedDocument:
        """Encode a conversation or a pair. Raises UserError without a template, or if answers cannot be located."""
        if isinstance(chat, Completion):
            return self._pair(chat)
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
        ordered, lengths = Spans(spans), iter(rendered.lengths)

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

    def prompt(self, messages: Sequence[Message], where: str) -> list[int]:
        """Encode a conversation for the assistant to continue. Raises like `encode`."""
        return self._tokens(self._required(where).render(self._marked(messages), where, prompted=True).text)[0]

    def end_of_turn(self) -> int | None:
        """Return the special token that ends the assistant's turn; None without a template or if it has none."""
        if self._renderer is None:
            return None
        chat = Chat("", ({"role": "user", "content": "a"}, {"role": ASSISTANT, "content": "b"}))
        try:
            ids, counted = self.encode(chat)
        except UserError:
            return None
        return next((token for token in ids[counted.index(True) + 1 :] if token in self._specials), None)

    def _pair(self, pair: Completion) -> EncodedDocument:
        prompt, whole = len(pair.prompt), pair.prompt + pair.completion
        encoding = encoding_of(self.text.tokenizer, whole)
        ids, end = self.text.begun(encoding.ids), [] if self.eod is None else [self.eod]
        spans = [(0, 0)] * (len(ids) - len(encoding.ids)) + encoding.offsets
        return EncodedDocument(ids + end, Spans(spans).within([(prompt, len(whole))]) + [True] * len(end))

    def _turn(self, ids: list[int], spans: "Spans", start: int, end: int) -> list[int]:
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
                plain = value.replace(_OPEN, "").replace(_CLOSE, "")
                return self._spelled.sub(lambda found: f"{_OPEN}{found.group()}{_CLOSE}", plain)
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


class Spans:
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
