"""Which tokens of a text are to be predicted from what, and what their losses say of a model."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import Literal

import numpy as np

from threefold.data.chat.messages import Document
from threefold.data.text.document_encoding import DocumentEncoder, EncodedDocument
from threefold.data.text.text_encoding import TextEncoder
from threefold.errors import UserError
from threefold.inference.log_likelihood import Scores, Window


@dataclass(frozen=True)
class EncodedTexts:
    """Texts as the model reads them.

    Attributes:
        texts: int64 token ids of each.
        windows: what runs through the model.
        masks: bool, for each token of each text whether it counts; None where all in the windows do.
    """

    texts: list[np.ndarray]
    windows: list[Window]
    masks: list[np.ndarray] | None = None

    @property
    def counted(self) -> list[int]:
        """How many tokens count in each window."""
        return [window.counted if self.masks is None else int(window.mask(self.masks).sum()) for window in self.windows]


@dataclass(frozen=True)
class Metric:
    """A number that a task gives.

    Attributes:
        name: in the JSON document.
        title: in the table.
        value: the number.
        unit: of it; empty for a pure number.
    """

    name: str
    title: str
    value: float | int
    unit: str = ""


class EvalTask(ABC):
    """A way to measure a model on texts."""

    @property
    def settings(self) -> dict[str, int | str]:
        """What the figures depend on beside model and texts."""
        return dict(vars(self))

    @abstractmethod
    def prepare(
        self, documents: DocumentEncoder, texts: Sequence[Document], advance: Callable[[], None]
    ) -> EncodedTexts:
        """Which tokens count.

        Args:
            documents: the model's encoder.
            texts: none is empty.
            advance: told of each text that is done.

        Raises:
            UserError: there is nothing to measure.
        """

    @abstractmethod
    def figures(self, work: EncodedTexts, scores: Scores) -> list[Metric]:
        """What came out."""


@dataclass(frozen=True)
class Perplexity(EvalTask):
    """Perplexity by strided windows: each token of a text but its first counts exactly once.

    Where each text begins with a token of its own (an imported Llama's), that is the one that does not count.

    A window is `context` tokens that the model reads; windows start every `stride` tokens. All predictions of a text's
    first window count, and of the others those that no window before them made. So a token is predicted from all that
    is before it in its text, or from at least context − stride + 1 tokens.

    As in Hugging Face's "Perplexity of fixed-length models", but that no token is left out where a window begins, and
    that the mean is over tokens, not over windows.

    Attributes:
        context: tokens that the model reads at once.
        stride: 1 to `context`; the smaller, the more each token sees, and the longer it takes.
        loss_tokens: of conversations and of prompts with completions, whether answers alone count, as in training.

    Raises:
        UserError: a value out of range.
    """

    context: int
    stride: int
    loss_tokens: Literal["answers", "all"] = "answers"

    def __post_init__(self) -> None:
        if not 1 <= self.stride <= self.context:
            nearest = min(max(1, self.stride), self.context)
            raise UserError(
                f"--stride is {self.stride} but must be between 1 and the context, {self.context}, as tokens between "
                f"windows would not count; use {nearest}."
            )

    def prepare(
        self, documents: DocumentEncoder, texts: Sequence[Document], advance: Callable[[], None]
    ) -> EncodedTexts:
        encoded, masks = [], []
        for text in texts:
            ids, counted = self._read(documents, text)
            encoded.append(np.array(ids, np.int64))
            masks.append(np.array(counted, np.bool_))
            advance()
        windows = [window for number, tokens in enumerate(encoded) for window in self.windows(number, len(tokens))]
        if not windows:
            raise UserError("No text of --data has more than one token, so there is none to predict; give longer ones.")
        if all(isinstance(text, str) for text in texts):
            return EncodedTexts(encoded, windows)
        return EncodedTexts(encoded, [window for window in windows if window.mask(masks).any()], masks)

    def _read(self, documents: DocumentEncoder, text: Document) -> EncodedDocument:
        """Tokens of a text without the end of the document, or of a conversation, and which of them count."""
        if isinstance(text, str):
            ids = documents.text.encode(text)
            return EncodedDocument(ids, [True] * len(ids))
        tokens = documents.encode(text)
        return EncodedDocument(tokens.ids, [True] * len(tokens.ids)) if self.loss_tokens == "all" else tokens

    def windows(self, text: int, tokens: int) -> list[Window]:
        """The windows of a text of so many tokens; none where there is nothing to predict."""
        found: list[Window] = []
        end = 0
        for begin in range(0, tokens, self.stride):
            if end >= tokens - 1:
                break
            first, end = end + 1, min(begin + self.context, tokens - 1)
            found.append(Window(text, begin, end, first))
        return found

    def figures(self, work: EncodedTexts, scores: Scores) -> list[Metric]:
        count = sum(work.counted)
        loss = float(scores.losses.sum()) / count
        title = "texts" if work.masks is None else "conversations"
        return [
            Metric("texts", title, len(work.texts)),
            Metric("tokens", "tokens that count", count),
            Metric("loss", "loss", loss, "nats per token"),
            Metric("perplexity", "perplexity", _exp(loss), "per token"),
            Metric("accuracy", "likeliest token is right", int(scores.hits.sum()) / count, "of tokens"),
        ]


@dataclass(frozen=True)
class LastWord(EvalTask):
    """Accuracy on the last word of each text (LAMBADA; Paperno et al., arXiv 1606.06031).

    The text without its last word is what the model is given; the word counts as known when each of its tokens is the
    likeliest after those before it, which is when greedy generation writes it. Its tokens are those that the whole text
    has beyond those of the text without it, as in the Language Model Evaluation Harness.

    Attributes:
        context: tokens that the model reads at once; of a longer text, the last ones.
    """

    context: int

    def prepare(
        self, documents: DocumentEncoder, texts: Sequence[Document], advance: Callable[[], None]
    ) -> EncodedTexts:
        encoded, windows = [], []
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise UserError(f"{text.where} is no text, which --task lambada needs; use --task perplexity.")
            tokens, first = self._split(documents.text, text, number)
            encoded.append(np.array(tokens, np.int64))
            windows.append(Window(number, max(0, len(tokens) - 1 - self.context), len(tokens) - 1, first))
            advance()
        if not windows:
            raise UserError("--data holds no text, so there is no last word to predict; give one text a line.")
        return EncodedTexts(encoded, windows)

    def _split(self, words: TextEncoder, text: str, number: int) -> tuple[list[int], int]:
        """Tokens of the whole text, and the place of the first of its last word."""
        before = text.rstrip().rpartition(text.split()[-1])[0].rstrip()
        if not before:
            raise UserError(f"Text {number + 1} of --data is one word, with nothing before it; give longer texts.")
        tokens, first = words.encode(text.rstrip()), len(words.encode(before))
        if not 0 < len(tokens) - first <= self.context:
            raise UserError(
                f"The last word of text {number + 1} of --data is {len(tokens) - first} tokens but must be between 1 "
                f"and the context, {self.context}; leave the text out."
            )
        return tokens, first

    def figures(self, work: EncodedTexts, scores: Scores) -> list[Metric]:
        words = len(work.windows)
        known = sum(hits == window.counted for hits, window in zip(scores.hits.tolist(), work.windows, strict=True))
        loss = float(scores.losses.sum()) / words
        return [
            Metric("texts", "texts", words),
            Metric("tokens", "tokens of last words", sum(window.counted for window in work.windows)),
            Metric("accuracy", "last word is right", known / words, "of texts"),
            Metric("loss", "loss", loss, "nats per word"),
            Metric("perplexity", "perplexity", _exp(loss), "per last word"),
        ]


def _exp(loss: float) -> float:
    return exp(loss) if loss < 700 else inf
