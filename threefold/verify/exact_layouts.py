"""Layouts inside the grain of an exact run, those outside it, and the small config that they run; without torch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from math import gcd
from typing import Any

from threefold.comm.layout import Layout, LayoutSpec
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.config.rules import GRAIN, takes_context_pieces
from threefold.verify.layouts import (
    Check,
    UnsupportedLayout,
    covering,
    possible,
    prepare,
    shrink,
    suits,
    unsupported_because,
    with_further_features,
)

UNKNOWN_VOCABULARY = 8192
"""Vocabulary size if neither config nor data has one; even, so that the tensor axis can be inside the grain."""


@dataclass(frozen=True)
class ExactSelection:
    """Layouts to verify.

    Attributes:
        specs: layouts inside the grain.
        outside: layouts outside it, valid without `train.exact`, each with the error of the config checks.
    """

    specs: tuple[LayoutSpec, ...]
    outside: tuple[UnsupportedLayout, ...]


def prepare_exact(given: Config, dtype: str | None, vocab_size: int) -> Config:
    """Return the exact config of one process, like `layouts.prepare`, with its own dtype unless `dtype` is given.

    Raises:
        UserError: its settings cannot be combined with `train.exact`.
    """
    settings = given.sections()
    settings["train"]["exact"] = True
    return prepare(config_of(settings), dtype or given.precision.dtype, vocab_size)


def shrink_exact(base: Config, specs: Sequence[LayoutSpec]) -> Config:
    """Return a prepared config shrunk as by `layouts.shrink`, with sizes that its grain divides, and dropout.

    Unless the config gives them, there are as many context pieces as the largest cp needs. Leaves have two samples at
    most.
    """
    train, settings = base.train, base.sections()
    pieces = train.grain_context
    if not base.is_given("train.grain_context") and takes_context_pieces(base):
        most = gcd(1 << 30, base.data.sequence_length) // 2
        pieces = max((spec.layout.cp for spec in specs if most and most % spec.layout.cp == 0), default=1)
    # The shrunk batch has two samples for each micro-batch that a layout needs.
    leaf = min(2, train.grain_leaf) if pieces == 1 else 1
    settings["train"] |= {"grain_context": pieces, "grain_leaf": leaf}
    base = resolve(config_of(settings), vocab_size=1)
    widest = LayoutSpec(Layout(dp=train.grain_samples, cp=pieces, tp=train.grain_tensor))
    small = shrink(base, [*(spec for spec in specs if _is_valid(base, spec)), widest])
    return with_further_features(small, attention_dropout=True, documents=True)


def select(small: Config, ranks: int, everything: bool, check: Check = suits) -> ExactSelection:
    """Select layouts of `ranks` ranks: all candidates, each with another recompute mode and micro-batch size, or some.

    Args:
        everything: whether to take all, not only those that cover each factorization once.
    """
    plain = _without_exact(small)
    candidates = possible(ranks, small.model.num_experts)
    outside = tuple(_outside(small, plain, candidates, check))
    if not everything:
        return ExactSelection(covering(small, ranks, check).specs, outside)
    inside = (spec for spec in candidates if unsupported_because(small, spec, check) is None)
    specs = (_varied(small, spec, extras, check) for spec, extras in zip(inside, cycle(_EXTRAS), strict=False))
    return ExactSelection(tuple(specs), outside)


def asked_for_exact(small: Config, specs: Sequence[LayoutSpec], check: Check = suits) -> ExactSelection:
    """Select the given layouts; those that are not inside the grain, or not valid at all, are listed as outside it."""
    reasons = {spec: unsupported_because(small, spec, check) for spec in specs}
    outside = tuple(UnsupportedLayout(spec, reason) for spec, reason in reasons.items() if reason is not None)
    return ExactSelection(tuple(spec for spec, reason in reasons.items() if reason is None), outside)


_EXTRAS: tuple[dict[str, Any], ...] = (
    {},
    {"train.recompute": "selective"},
    {"train.gradient_accumulation_steps": "most"},
    {"train.recompute": "full", "train.gradient_accumulation_steps": "most"},
    {"train.recompute": "full"},
)
"""Settings that must not change a bit, given to the layouts in turn; `most` makes micro-batches of one sample."""


def _varied(base: Config, spec: LayoutSpec, extras: dict[str, Any], check: Check) -> LayoutSpec:
    share = base.train.global_batch_size // spec.layout.dp
    for key, value in extras.items():
        more = replace(spec, settings=(*spec.settings, (key, share if value == "most" else value)))
        spec = spec if unsupported_because(base, more, check) else more
    return spec


def _outside(
    small: Config, plain: Config, candidates: Sequence[LayoutSpec], check: Check
) -> Iterator[UnsupportedLayout]:
    for spec in candidates:
        reason = unsupported_because(small, spec, check)
        if reason is not None and unsupported_because(plain, spec, check) is None:
            yield UnsupportedLayout(spec, reason)


def _without_exact(config: Config) -> Config:
    settings = config.sections()
    for key in ("exact", *GRAIN, "micro_batch_size", "gradient_accumulation_steps"):
        settings["train"].pop(key, None)
    return resolve(config_of(settings), vocab_size=1)


def _is_valid(base: Config, spec: LayoutSpec) -> bool:
    """Return whether a layout's axes within a sample are inside the grain, so that the sizes may be chosen for it."""
    return base.train.grain_tensor % spec.layout.tp == 0 and base.train.grain_context % spec.layout.cp == 0
