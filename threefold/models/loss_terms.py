"""A custom loss: one mean over the samples, or several named terms, each a sum with a count.

To be equal in every layout, a loss is computed from sums over each micro-batch, which are added up over micro-batches
and replicas and divided by the counts of the global batch. Since a count has to be known before the first backward
pass, it is computed from the batch alone.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from threefold.errors import UserError

LOSS = "loss"  # name of the only term of a scalar loss


class LossTerm(NamedTuple):
    """A term of a loss on a micro-batch.

    Attributes:
        sum: scalar tensor, the sum over the items that the term counts.
        weight: weight of the term's mean in the minimized loss.
    """

    sum: Tensor
    weight: float = 1.0


LossValue = Tensor | Mapping[str, Tensor | LossTerm]
LossFunction = Callable[[Any, Any], LossValue]
"""A user's function `loss(output, batch)`, called with the model's output for a micro-batch.

It returns a scalar, the mean over the micro-batch's samples; or terms by name, each a `LossTerm` or its sum. In the
latter case it has a method `counts(batch)` that returns, for each term, the number by which the sum over the global
batch is divided: the loss is the weighted sum of these means.
"""


@dataclass(frozen=True)
class CountedLoss:
    """A loss of terms whose counts depend on the data.

    Example:
        >>> def terms(output, batch):
        ...     labels = batch["labels"].flatten()
        ...     return {"tokens": F.cross_entropy(output.flatten(0, 1), labels, ignore_index=-100, reduction="sum")}
        >>> loss = threefold.CountedLoss(terms, lambda batch: {"tokens": (batch["labels"] != -100).sum()})

    Attributes:
        terms: (output, batch) → term by name.
        counts: batch → count by name, the same names.
    """

    terms: Callable[[Any, Any], Mapping[str, Tensor | LossTerm]]
    counts: Callable[[Any], Mapping[str, Tensor | float]]

    def __call__(self, output: Any, batch: Any) -> Mapping[str, Tensor | LossTerm]:
        return self.terms(output, batch)


def count_terms(loss: LossFunction, batch: Any, samples: int) -> dict[str, float]:
    """Return the count of each term of a loss in a replica's batch; without `counts(batch)`, that of the samples."""
    counts = getattr(loss, "counts", None)
    if counts is None:
        return {LOSS: float(samples)}
    found = counts(batch)
    if not isinstance(found, Mapping) or not found:
        raise UserError(
            f"counts(batch) of the loss returns a {type(found).__name__} but must return a dict from the name of each "
            "term to what it counts in the batch."
        )
    for name, count in found.items():
        if not (count.numel() == 1 if isinstance(count, Tensor) else isinstance(count, int | float)):
            raise UserError(f"counts(batch) of the loss returns {count!r} for {name!r} but must return a number.")
    return {str(name): float(count) for name, count in found.items()}


@dataclass(frozen=True)
class LossSums:
    """Terms of a loss over one global batch, or added up over several; equal on every rank.

    Attributes:
        sums: sum of each term.
        weighted: sum of each term, times the term's weight.
        counts: count of each term.
        samples: number of samples in the batches.
    """

    sums: Mapping[str, float] = field(default_factory=dict)
    weighted: Mapping[str, float] = field(default_factory=dict)
    counts: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0

    @property
    def loss(self) -> float:
        """Mean loss: the weighted sum of the terms' means."""
        return sum(weighted / self.counts[name] for name, weighted in self.weighted.items() if self.counts[name])

    @property
    def terms(self) -> dict[str, float]:
        """Unweighted mean of each term; NaN if its count is 0."""
        return {name: self.sums[name] / count if count else float("nan") for name, count in self.counts.items()}

    def __add__(self, other: "LossSums") -> "LossSums":
        return LossSums(
            _added(self.sums, other.sums),
            _added(self.weighted, other.weighted),
            _added(self.counts, other.counts),
            self.samples + other.samples,
        )


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in {**one, **other}}


class TermSums:
    """Each term of a loss and micro-batch of one pass, plain and weighted, given the counts in the global batch."""

    def __init__(self, loss: LossFunction | None, counts: Mapping[str, float]) -> None:
        self.loss, self.counts = loss, counts
        self.terms: dict[str, list[Tensor]] = {}
        self.weighted: dict[str, list[Tensor]] = {}

    def __call__(self, output: Any, batch: Any, samples: int) -> Tensor:
        """Return this micro-batch's part of the mean loss of the global batch: a scalar of fp32 at least."""
        assert self.loss is not None  # otherwise the terms are added by `add`
        parts = []
        for name, term in self._terms(self.loss(output, batch), samples).items():
            weighted, count = term.sum * term.weight, self.counts[name]
            # A term that counts nothing, such as a label that no sample has, adds nothing.
            parts.append(weighted * (1 / count if count else 0.0))
            self.add(name, term)
        return torch.stack(parts).sum() if len(parts) > 1 else parts[0]

    def add(self, name: str, term: LossTerm) -> None:
        """Add a term of a micro-batch, without gradients."""
        for into, value in ((self.terms, term.sum), (self.weighted, term.sum * term.weight)):
            into.setdefault(name, []).append(value.detach().double())

    def values(self, device: torch.device) -> list[Tensor]:
        """Return the summands of each term and of each weighted one, in the order of `counts`: fp64 [micro-batches]."""
        none = torch.zeros(0, dtype=torch.float64, device=device)
        found = [terms.get(name) for terms in (self.terms, self.weighted) for name in self.counts]
        return [none if each is None else torch.stack(each) for each in found]

    def over_all(self, values: Sequence[float], samples: int) -> LossSums:
        """Return the terms of all ranks, given the sum of their `values` and the samples of the global batch."""
        names, count = list(self.counts), len(self.counts)
        sums, weighted = (dict(zip(names, part, strict=True)) for part in (values[:count], values[count:]))
        return LossSums(sums, weighted, dict(self.counts), samples)

    def _terms(self, value: LossValue, samples: int) -> dict[str, LossTerm]:
        if isinstance(value, Tensor):
            if value.dim() or not value.is_floating_point():
                raise UserError(
                    f"The loss returns a tensor {list(value.shape)} of {value.dtype} but must return a scalar, the "
                    "mean over the samples of the micro-batch, or a dict of terms."
                )
            value = {LOSS: value * samples}
        if not isinstance(value, Mapping):
            raise UserError(f"The loss returns a {type(value).__name__} but must return a scalar or a dict of terms.")
        terms = {
            str(name): LossTerm(*term) if isinstance(term, tuple) else LossTerm(term) for name, term in value.items()
        }
        if terms.keys() == self.counts.keys():
            return {name: LossTerm(_wide(name, term.sum), term.weight) for name, term in terms.items()}
        given = ", ".join(map(repr, terms))
        if getattr(self.loss, "counts", None) is None:
            raise UserError(
                f"The loss returns the terms {given} but has no counts(batch): what a term is divided by must be known "
                "before the backward pass, so give it a method counts(batch) that computes it from the batch alone, or "
                "use CountedLoss(terms, counts)."
            )
        raise UserError(
            f"The loss returns {given} but its counts(batch) has {', '.join(map(repr, self.counts))}; use the same "
            "names for both."
        )


def _wide(name: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor) or value.dim():
        kind = f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise UserError(f"The loss returns {kind} for the term {name!r} but must return a scalar tensor, its sum.")
    return value if value.itemsize >= 4 else value.float()
