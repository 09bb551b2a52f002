"""Layouts to verify: those given, all valid ones, or a selection that covers every feature."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from threefold.comm.layout import Layout
from threefold.comm.layout_spec import SCHEDULES, LayoutSpec
from threefold.config import Config
from threefold.errors import UserError
from threefold.verify.shrunk_config import compose

_SECOND_EVERY = 3
"""In the default selection, which is to be quick: a second run takes as long as the first."""
Check = Callable[[Config], None]
"""Raises a `UserError` where a layout's resolved config does not suit the model."""


def suits(config: Config) -> None:
    """The check of a model that the config alone describes, whose rules its resolution has checked."""


@dataclass(frozen=True)
class UnsupportedLayout:
    """An unsupported layout, and the error of the config checks."""

    spec: LayoutSpec
    reason: str


@dataclass(frozen=True)
class Selection:
    """The layouts to verify, and the unsupported ones.

    Attributes:
        specs: the layouts.
        unsupported: those that were left out.
        second_every: every so many-th of `specs` makes the second run too.
    """

    specs: tuple[LayoutSpec, ...]
    unsupported: tuple[UnsupportedLayout, ...] = ()
    second_every: int = 1

    def has_second_run(self, spec: LayoutSpec) -> bool:
        """Whether a layout makes the second run."""
        return self.specs.index(spec) % self.second_every == 0


def products(ranks: int) -> list[Layout]:
    """All factorisations of `ranks` into dp · tp · pp · cp."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [Layout(dp, tp, pp, cp) for dp, tp, pp, cp in product(sizes, repeat=4) if dp * tp * pp * cp == ranks]


def candidates(layout: Layout, experts: int) -> Iterator[LayoutSpec]:
    """The layout with each schedule, ZeRO stage and expert-parallel size, with and without sequence parallelism, where
    they have an effect.

    Args:
        layout: ranks along each axis.
        experts: number of the model's experts.
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
    """All candidates of all factorisations of `ranks`, valid or not."""
    return [spec for layout in products(ranks) for spec in candidates(layout, experts)]


def every(base: Config, ranks: int, check: Check = suits) -> Selection:
    """All valid candidates of all factorisations of `ranks`."""
    taken, unsupported = [], []
    for spec in possible(ranks, base.model.num_experts):
        reason = unsupported_because(base, spec, check)
        if reason is None:
            taken.append(spec)
        else:
            unsupported.append(UnsupportedLayout(spec, reason))
    return Selection(tuple(taken), tuple(unsupported))


def covering(base: Config, ranks: int, check: Check = suits) -> Selection:
    """Each factorisation of `ranks` once, with features that together cover most pairs (greedy pairwise testing).

    For each one the candidate is taken that adds most new pairs of features (and single features), so that each
    schedule, ZeRO stage, sequence parallelism and recompute mode is covered, and most pairs are.
    """
    taken: list[LayoutSpec] = []
    seen: set[frozenset[Any]] = set()
    for number, layout in enumerate(products(ranks)):
        tried = candidates(layout, base.model.num_experts)
        found = [spec for spec in tried if unsupported_because(base, spec, check) is None]
        if not found:
            continue
        best = max(found, key=lambda spec: _gain(spec, seen))
        seen |= _meetings(best)
        taken.append(_with_extras(base, best, number, check))
    return Selection(tuple(taken), second_every=_SECOND_EVERY)


def asked_for(base: Config, specs: list[LayoutSpec], check: Check = suits) -> Selection:
    """The given layouts.

    Raises:
        UserError: one is unsupported.
    """
    for spec in specs:
        reason = unsupported_because(base, spec, check)
        if reason is not None:
            raise UserError(f"Unsupported layout {spec}: {reason}")
    return Selection(tuple(specs))


def unsupported_because(base: Config, spec: LayoutSpec, check: Check = suits) -> str | None:
    """The error of the config checks for a layout, or of the model's; None if it is valid."""
    try:
        check(compose(base, spec))
    except UserError as error:
        return str(error)
    return None


def _gain(spec: LayoutSpec, seen: set[frozenset[Any]]) -> float:
    return sum(1.0 if len(meeting) == 2 else 10.0 for meeting in _meetings(spec) - seen)


def _meetings(spec: LayoutSpec) -> set[frozenset[Any]]:
    layout = spec.layout
    chosen: list[Any] = [*spec.settings, *([("ep", layout.ep)] if layout.ep > 1 else [])]
    facts = [*chosen, *(axis for axis in ("dp", "tp", "pp", "cp") if layout.size(axis) > 1)]
    return {frozenset(pair) for pair in combinations(facts, 2)} | {frozenset([fact]) for fact in chosen}


def _with_extras(base: Config, spec: LayoutSpec, number: int, check: Check) -> LayoutSpec:
    """The layout with features that `candidates` leaves out, where valid: ring attention, recompute, hybrid ZeRO."""
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
