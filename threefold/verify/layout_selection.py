"""The layouts that verify compares, and which of them make the second run; without torch."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from threefold.comm.layout import SCHEDULES, Layout, LayoutSpec
from threefold.config import Config
from threefold.errors import UserError
from threefold.verify.shrunk_config import compose

_SECOND_EVERY = 3
"""Interval of second runs in the quick default selection: a second run takes as long as the first."""
Check = Callable[[Config], None]
"""Check that raises a `UserError` if a layout's resolved config does not suit the model."""


def suits(config: Config) -> None:
    """Accept every config, for models described by the config alone, whose rules its resolution has checked."""


@dataclass(frozen=True)
class UnsupportedLayout:
    """Unsupported layout, with the error of the config checks."""

    spec: LayoutSpec
    reason: str


@dataclass(frozen=True)
class Selection:
    """Layouts to verify, and the unsupported ones.

    Attributes:
        unsupported: layouts that were left out.
        second_every: every n-th of `specs` makes the second run too.
    """

    specs: tuple[LayoutSpec, ...]
    unsupported: tuple[UnsupportedLayout, ...] = ()
    second_every: int = 1

    def has_second_run(self, spec: LayoutSpec) -> bool:
        """Return whether a layout makes the second run."""
        return self.specs.index(spec) % self.second_every == 0


def products(ranks: int) -> list[Layout]:
    """Return all factorizations of `ranks` into dp · tp · pp · cp."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [Layout(dp, tp, pp, cp) for dp, tp, pp, cp in product(sizes, repeat=4) if dp * tp * pp * cp == ranks]


def candidates(layout: Layout, experts: int) -> Iterator[LayoutSpec]:
    """Yield the layout with each schedule, ZeRO stage, expert-parallel size and sequence parallelism with an effect.

    Expert-parallel sizes divide the number of the model's `experts`.
    """
    shares = [ep for ep in range(1, layout.dp + 1) if layout.dp % ep == 0 == experts % ep and (experts or ep == 1)]
    schedules = SCHEDULES if layout.pp > 1 else ("1f1b",)
    stages = range(4) if layout.dp > 1 else (0,)
    shared = (False, True) if layout.tp > 1 else (False,)
    for ep, schedule, zero, sequence in product(shares, schedules, stages, shared):
        given = {"parallel.schedule": schedule, "parallel.zero": zero, "parallel.sequence_parallel": sequence}
        settings = tuple((key, value) for key, value in given.items() if value not in ("1f1b", 0, False))
        yield LayoutSpec(replace(layout, ep=ep), settings)


def possible(ranks: int, experts: int = 0) -> list[LayoutSpec]:
    """Return all candidates of all factorizations of `ranks`, valid or not."""
    return [spec for layout in products(ranks) for spec in candidates(layout, experts)]


def every(base: Config, ranks: int, check: Check = suits) -> Selection:
    """Select all valid candidates of all factorizations of `ranks`."""
    taken, unsupported = [], []
    for spec in possible(ranks, base.model.num_experts):
        reason = unsupported_because(base, spec, check)
        if reason is None:
            taken.append(spec)
        else:
            unsupported.append(UnsupportedLayout(spec, reason))
    return Selection(tuple(taken), tuple(unsupported))


def covering(base: Config, ranks: int, check: Check = suits) -> Selection:
    """Select each factorization of `ranks` once, with features that cover most pairs (greedy pairwise testing).

    For each one, take the candidate that adds most new pairs of features and single features, so that each schedule,
    ZeRO stage, sequence parallelism and recompute mode is covered, and most of their pairs.
    """
    taken: list[LayoutSpec] = []
    seen: set[frozenset[Any]] = set()
    for number, layout in enumerate(products(ranks)):
        tried = candidates(layout, base.model.num_experts)
        found = [spec for spec in tried if unsupported_because(base, spec, check) is None]
        if not found:
            continue
        best = max(found, key=lambda spec: sum(1 if len(each) == 2 else 10 for each in _meetings(spec) - seen))
        seen |= _meetings(best)
        taken.append(_with_extras(base, best, number, check))
    return Selection(tuple(taken), second_every=_SECOND_EVERY)


def asked_for(base: Config, specs: list[LayoutSpec], check: Check = suits) -> Selection:
    """Select the given layouts; raise a `UserError` if one is unsupported."""
    for spec in specs:
        reason = unsupported_because(base, spec, check)
        if reason is not None:
            raise UserError(f"Unsupported layout {spec}: {reason}")
    return Selection(tuple(specs))


def unsupported_because(base: Config, spec: LayoutSpec, check: Check = suits) -> str | None:
    """Return the error of the config checks or the model's check for a layout; None if it is valid."""
    try:
        check(compose(base, spec))
    except UserError as error:
        return str(error)
    return None


def _meetings(spec: LayoutSpec) -> set[frozenset[Any]]:
    layout = spec.layout
    chosen: list[Any] = [*spec.settings, *([("ep", layout.ep)] if layout.ep > 1 else [])]
    facts = [*chosen, *(axis for axis in ("dp", "tp", "pp", "cp") if layout.size(axis) > 1)]
    return {frozenset(pair) for pair in combinations(facts, 2)} | {frozenset([fact]) for fact in chosen}


def _with_extras(base: Config, spec: LayoutSpec, number: int, check: Check) -> LayoutSpec:
    """Return the layout with valid features that `candidates` leaves out: ring attention, recompute, hybrid ZeRO."""
    extras: list[tuple[str, Any]] = []
    if spec.layout.cp > 1 and number % 2:
        extras.append(("parallel.cp_method", "ring"))
    if mode := (None, "selective", "full")[number % 3]:
        extras.append(("train.recompute", mode))
    if spec.setting("parallel.zero") and spec.layout.dp > 2:
        extras.append(("parallel.zero_shards", 2))
    for extra in extras:
        more = replace(spec, settings=(*spec.settings, extra))
        spec = spec if unsupported_because(base, more, check) else more
    return spec
