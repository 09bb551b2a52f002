"""Log-likelihood (loss) of given tokens of texts, and whether greedy decoding predicts them, in any layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from threefold.comm.shards import shard_bounds
from threefold.errors import UserError
from threefold.inference.model import Model
from threefold.parallel.tensor.loss import ParallelCrossEntropy

_LOGITS_AT_ONCE = 1 << 25
"""Elements per chunk; the logits of a whole batch would need many times the memory of the model."""


@dataclass(frozen=True)
class Window:
    """A context window: input tokens of one forward pass, and the labels that are evaluated.

    Attributes:
        text: number of the text.
        begin, end: the input is its tokens `begin` up to, not including, `end`; each predicts the next one.
        first: the first evaluated token; the last is `end`.
    """

    text: int
    begin: int
    end: int
    first: int

    @property
    def counted(self) -> int:
        """Number of evaluated tokens, without a mask."""
        return self.end + 1 - self.first

    def mask(self, masks: Sequence[np.ndarray]) -> np.ndarray:
        """Which of the tokens from `first` to `end` are evaluated, by the masks of the texts: bool [counted]."""
        mask: np.ndarray = masks[self.text][self.first : self.end + 1]
        return mask


@dataclass(frozen=True)
class Scores:
    """Results of the windows, the same on every rank.

    Attributes:
        losses: fp64 [windows], the summed loss (nats) of each window's evaluated tokens.
        hits: int64 [windows], how many of them are the most likely token.
    """

    losses: Tensor
    hits: Tensor


def score(
    model: Model,
    texts: Sequence[np.ndarray],
    windows: Sequence[Window],
    batch_size: int,
    advance: Callable[[int], None] = lambda _: None,
    masks: Sequence[np.ndarray] | None = None,
) -> Scores:
    """Evaluate all windows. Collective over the mesh; each dp replica evaluates a part of the windows.

    Args:
        model: this rank's shards.
        texts: token ids of each.
        windows: of these texts.
        batch_size: windows per batch of a replica; sorted by length, so that there is little padding.
        advance: called with the number of windows that are done (of all replicas, as estimated by this rank).
        masks: bool, whether each token of each text is evaluated; None where all in the windows are.

    Raises:
        UserError: a loss is not finite; on every rank.
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
    """Numbers of the windows that run together; of one length where a model's angles follow the length."""
    by_length: dict[int, list[int]] = {}
    alike = model.trained.config.model.rope_scaling == "dynamic"
    for number in sorted(range(len(windows)), key=lambda number: windows[number].begin - windows[number].end):
        by_length.setdefault(windows[number].end - windows[number].begin if alike else 0, []).append(number)
    return [held[first : first + size] for held in by_length.values() for first in range(0, len(held), size)]


def _score_batch(
    model: Model, texts: Sequence[np.ndarray], windows: list[Window], masks: Sequence[np.ndarray] | None
) -> Tensor | None:
    """Summed loss and hits, fp64 [2, B], of each window, on the last stage; None elsewhere.

    Windows are padded on the right, which causal attention hides.
    """
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
    """The loss fp64 [N] of each label [N] given its `hidden` [N, H], and whether it is the most likely, bool [N]."""
    loss = ParallelCrossEntropy(model.trained.config.model.vocab_size, model.mesh.tp)
    at_once = max(1, _LOGITS_AT_ONCE // max(1, model.trained.config.model.vocab_size))
    losses, hits = [], []
    with torch.no_grad():
        for some, given in zip(hidden.split(at_once), labels.split(at_once), strict=True):
            logits = model.logits(some)
            losses.append(loss(logits, given).double())
            hits.append(_most_likely(model, logits) == given)
    return torch.cat(losses), torch.cat(hits)


def _most_likely(model: Model, logits: Tensor) -> Tensor:
    """The most likely token, int64 [N], from this tp rank's columns of the logits [N, columns]."""
    tp = model.mesh.tp
    start, _ = shard_bounds(model.trained.config.model.vocab_size, tp.size, tp.index)
    known = logits[:, : max(0, model.tokens - start)]  # the embedding may have more rows than there are tokens
    best = torch.full((2, len(logits)), -torch.inf, dtype=torch.float64, device=logits.device)
    if known.shape[1]:
        top, column = known.max(-1)
        best = torch.stack([top.double(), (column + start).double()])
    tops, columns = tp.all_gather_equal(best.unsqueeze(0), 0).unbind(1)
    return columns.gather(0, tops.argmax(0, keepdim=True))[0].to(torch.int64)
