"""Evaluation tasks: log-likelihood (loss) and greedy accuracy of given tokens of texts, in any layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import exp, inf
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from threefold.comm.layout import shard_bounds
from threefold.data.conversations import Document
from threefold.data.encoding import DocumentEncoder
from threefold.data.packed import ends_document
from threefold.errors import UserError
from threefold.inference.inputs import check_stride
from threefold.inference.model import Model
from threefold.models.layers.rope_scaling import BY_LENGTH
from threefold.parallel.cross_entropy import ParallelCrossEntropy


@dataclass(frozen=True)
class Window:
    """Context window: the input tokens of one forward pass, each of which predicts the next one."""

    text: int  # index of the text
    begin: int  # bounds of the input tokens in the text, `end` exclusive
    end: int
    first: int  # first evaluated token; the last one is `end`

    @property
    def counted(self) -> int:
        return self.end + 1 - self.first

    def mask(self, masks: Sequence[np.ndarray]) -> Any:
        """Return which tokens from `first` to `end` are evaluated, according to the texts' masks: bool [counted]."""
        return masks[self.text][self.first : self.end + 1]


@dataclass(frozen=True)
class Scores:
    """Losses and hits of all windows, the same on every rank."""

    losses: Tensor  # fp64 [windows], summed (nats) over each window's evaluated tokens
    hits: Tensor  # int64 [windows], number of these that are the most likely one


def score(
    model: Model,
    texts: Sequence[np.ndarray],
    windows: Sequence[Window],
    batch_size: int,
    advance: Callable[[int], None] = lambda _: None,
    masks: Sequence[np.ndarray] | None = None,
) -> Scores:
    """Evaluate all windows. Collective over the mesh; each dp replica evaluates a part of the windows.

    `batch_size` is that of a replica; windows are sorted by length, which keeps padding low. `advance` is called with
    the number of windows that are done (over all replicas, estimated by this rank). `masks` say whether each token of
    each text is evaluated; without them, all tokens of the windows are.
    """
    mesh = model.mesh
    batches = _batches(model, windows, batch_size)
    totals = torch.zeros(2, len(windows), dtype=torch.float64, device=mesh.device)
    for place, batch in enumerate(batches):
        if place % mesh.dp.size == mesh.dp.index:
            found = _score_batch(model, texts, [windows[number] for number in batch], masks)
            if found is not None and mesh.tp.is_first:
                totals[:, batch] = found
        advance(len(batch))
    losses, hits = mesh.world.all_reduce_(totals).cpu()
    if not bool(losses.isfinite().all()):
        window = windows[int(losses.isfinite().logical_not().nonzero()[0])]
        reason = "the weights hold values that are not finite, or the dtype is too narrow for them"
        raise UserError(f"The loss of text {window.text + 1} is not finite: {reason}; try --dtype fp32.")
    return Scores(losses, hits.round().to(torch.int64))


def _batches(model: Model, windows: Sequence[Window], size: int) -> list[list[int]]:
    """Group the windows into batches of indices; of equal lengths if the model's RoPE angles depend on the length."""
    by_length: dict[int, list[int]] = {}
    alike = model.trained.config.model.rope_scaling in BY_LENGTH
    for number in sorted(range(len(windows)), key=lambda number: windows[number].begin - windows[number].end):
        by_length.setdefault(windows[number].end - windows[number].begin if alike else 0, []).append(number)
    return [held[first : first + size] for held in by_length.values() for first in range(0, len(held), size)]


def _score_batch(
    model: Model, texts: Sequence[np.ndarray], windows: list[Window], masks: Sequence[np.ndarray] | None
) -> Tensor | None:
    """Return the summed loss and hits of each window, fp64 [2, B], on the last stage; None elsewhere."""
    # padded on the right, which causal attention ignores
    tokens = np.zeros((len(windows), max(window.end - window.begin for window in windows)), np.int64)
    for row, window in enumerate(windows):
        tokens[row, : window.end - window.begin] = texts[window.text][window.begin : window.end]
    hidden = model.hidden(torch.from_numpy(tokens))
    if hidden is None:
        return None
    labels = np.concatenate([texts[window.text][window.first : window.end + 1] for window in windows])
    rows = np.repeat(np.arange(len(windows)), [window.counted for window in windows])
    places = np.concatenate([np.arange(w.first - 1 - w.begin, w.end - w.begin) for w in windows])
    if masks is not None:
        counted = np.concatenate([window.mask(masks) for window in windows])
        labels, rows, places = labels[counted], rows[counted], places[counted]
    flat = torch.from_numpy(labels.astype(np.int64)).to(hidden.device)
    losses, hits = _score_tokens(model, hidden[torch.from_numpy(rows), torch.from_numpy(places)], flat)
    found = torch.zeros(2, len(windows), dtype=torch.float64, device=hidden.device)
    return found.index_add_(1, torch.from_numpy(rows).to(hidden.device), torch.stack([losses, hits.to(losses)]))


def _score_tokens(model: Model, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return each label's loss given `hidden` [N, H], fp64 [N], and whether it is the most likely token, bool [N]."""
    rows, tp = model.trained.config.model.vocab_size, model.mesh.tp
    loss, (start, _) = ParallelCrossEntropy(rows, tp), shard_bounds(rows, tp.size, tp.index)
    at_once = max(1, (1 << 25) // max(1, rows))  # all logits would take many times the model's memory
    losses, hits = [], []
    with torch.no_grad():
        for some, given in zip(hidden.split(at_once), labels.split(at_once), strict=True):
            logits = model.logits(some)
            losses.append(loss(logits, given).double())
            # The most likely of this rank's columns, then of all; the embedding may have more rows than tokens.
            known = logits[:, : max(0, model.tokens - start)]
            best = torch.full((2, len(logits)), -torch.inf, dtype=torch.float64, device=logits.device)
            if known.shape[1]:
                top, column = known.max(-1)
                best = torch.stack([top.double(), (column + start).double()])
            tops, columns = tp.all_gather_equal(best.unsqueeze(0), 0).unbind(1)
            hits.append(columns.gather(0, tops.argmax(0, keepdim=True))[0].to(torch.int64) == given)
    return torch.cat(losses), torch.cat(hits)


@dataclass(frozen=True)
class EncodedTexts:
    """Texts as int64 token ids, divided into context windows."""

    texts: list[np.ndarray]
    windows: list[Window]
    masks: list[np.ndarray] | None = None  # which tokens are evaluated, one bool mask per text; None for all
    title: str = "texts"

    @property
    def counted(self) -> list[int]:
        return [window.counted if self.masks is None else int(window.mask(self.masks).sum()) for window in self.windows]


@dataclass(frozen=True)
class Metric:
    """A number computed by an evaluation task: its key in the JSON document, label in the table, value and unit."""

    name: str
    title: str
    value: float | int
    unit: str = ""


@dataclass(frozen=True)
class Perplexity:
    """Perplexity by strided windows: each token of a text except the first is evaluated exactly once.

    If the tokenizer puts a special token first (as an imported Llama's does), that token is the one that is not
    evaluated.

    A window has `context` input tokens, and windows start every `stride` tokens. All predictions of a text's first
    window are evaluated; each later window evaluates the predictions that no earlier window made. So a token is
    predicted from all tokens before it in its text, or from at least context − stride + 1 of them: a smaller stride
    gives each token more context and takes longer. As in training, only the answers of conversations may be evaluated,
    and a token after an end of document that the text spells is not.

    This follows Hugging Face's "Perplexity of fixed-length models", except that no token is left out at the start of a
    window and that the mean is over tokens, not over windows.
    """

    context: int
    stride: int
    loss_tokens: Literal["answers", "all"] = "answers"

    def __post_init__(self) -> None:
        check_stride(self.stride, self.context)

    def prepare(
        self, documents: DocumentEncoder, texts: Sequence[Document], advance: Callable[[], None]
    ) -> EncodedTexts:
        """Encode non-empty texts and divide them into windows; `advance` is called after each text."""
        encoded, masks = [], []
        for text in texts:
            if isinstance(text, str):  # without an end-of-document token
                ids, counted = documents.text.encode(text), None
            else:
                ids, counted = documents.encode(text)
            all_counted = counted is None or self.loss_tokens == "all"
            encoded.append(tokens := np.array(ids, np.int64))
            masks.append(mask := np.array([True] * len(ids) if all_counted else counted, np.bool_))
            mask[1:] &= ~ends_document(tokens[:-1], documents.eod)
            advance()
        windows = [window for number, tokens in enumerate(encoded) for window in self.windows(number, len(tokens))]
        windows = [window for window in windows if window.mask(masks).any()]
        if not windows:
            raise UserError(
                "No text of --data has more than one token, so there is nothing to predict; give longer texts."
            )
        title = "texts" if all(isinstance(text, str) for text in texts) else "conversations"
        return EncodedTexts(encoded, windows, None if all(mask[1:].all() for mask in masks) else masks, title)

    def windows(self, text: int, tokens: int) -> list[Window]:
        found: list[Window] = []
        begin = end = 0
        while end < tokens - 1:
            first, end = end + 1, min(begin + self.context, tokens - 1)
            found.append(Window(text, begin, end, first))
            begin += self.stride
        return found

    def metrics(self, encoded: EncodedTexts, scores: Scores) -> list[Metric]:
        count = sum(encoded.counted)
        loss = float(scores.losses.sum()) / count
        return [
            Metric("texts", encoded.title, len(encoded.texts)),
            Metric("tokens", "evaluated tokens", count),
            Metric("loss", "loss", loss, "nats per token"),
            Metric("perplexity", "perplexity", _exp(loss), "per token"),
            Metric("accuracy", "top-1 accuracy", int(scores.hits.sum()) / count, "of tokens"),
        ]


@dataclass(frozen=True)
class LastWord:
    """Accuracy on the last word of each text (LAMBADA; Paperno et al., arXiv 1606.06031).

    The input is the text without its last word, truncated on the left to `context` tokens. The word is predicted if
    each of its tokens is the most likely one given the tokens before it, so that greedy decoding generates the word.
    Its tokens are those of the whole text beyond the tokens of the text without it, as in the Language Model Evaluation
    Harness.
    """

    context: int

    def prepare(
        self, documents: DocumentEncoder, texts: Sequence[Document], advance: Callable[[], None]
    ) -> EncodedTexts:
        encoded, windows = [], []
        for number, text in enumerate(texts):
            if not isinstance(text, str):
                raise UserError(f"{text.where} is not a text, which --task lambada needs; use --task perplexity.")
            before = text.rstrip().rpartition(text.split()[-1])[0].rstrip()
            if not before:
                raise UserError(
                    f"Text {number + 1} of --data is one word, with no context before it; give longer texts."
                )
            # The tokens of the whole text, and the index of its last word's first token.
            tokens, first = documents.text.encode(text.rstrip()), len(documents.text.encode(before))
            if not 0 < len(tokens) - first <= self.context:
                raise UserError(
                    f"The last word of text {number + 1} of --data is {len(tokens) - first} tokens but must be between "
                    f"1 and the context, {self.context}; leave the text out."
                )
            encoded.append(np.array(tokens, np.int64))
            windows.append(Window(number, max(0, len(tokens) - 1 - self.context), len(tokens) - 1, first))
            advance()
        if not windows:
            raise UserError("--data has no text, so there is no last word to predict; give one text per line.")
        return EncodedTexts(encoded, windows)

    def metrics(self, encoded: EncodedTexts, scores: Scores) -> list[Metric]:
        words = len(encoded.windows)
        known = sum(hits == window.counted for hits, window in zip(scores.hits.tolist(), encoded.windows, strict=True))
        loss = float(scores.losses.sum()) / words
        return [
            Metric("texts", "texts", words),
            Metric("tokens", "tokens of last words", sum(window.counted for window in encoded.windows)),
            Metric("accuracy", "last-word accuracy", known / words, "of texts"),
            Metric("loss", "loss", loss, "nats per word"),
            Metric("perplexity", "perplexity", _exp(loss), "per last word"),
        ]


EvalTask = Perplexity | LastWord  # their fields are what the metrics depend on, besides the model and the texts


def _exp(loss: float) -> float:
    return exp(loss) if loss < 700 else inf
