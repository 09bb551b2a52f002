"""Which layouts to verify: those asked for, every one that composes, or a selection that covers every feature."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.errors import UserError
from threefold.verify.layout_spec import SCHEDULES, LayoutSpec
from threefold.verify.shrunk_config import compose


@dataclass(frozen=True)
class Refused:
    """A spec that the checks of the config refuse, and their sentence."""

    spec: LayoutSpec
    reason: str


@dataclass(frozen=True)
class Selection:
    """The specs to verify, and those that do not compose."""

    specs: tuple[LayoutSpec, ...]
    refused: tuple[Refused, ...] = ()


def products(ranks: int) -> list[Layout]:
    """Every way to write `ranks` as dp · tp · pp · cp."""
    sizes = [size for size in range(1, ranks + 1) if ranks % size == 0]
    return [Layout(dp, tp, pp, cp) for dp, tp, pp, cp in product(sizes, repeat=4) if dp * tp * pp * cp == ranks]


def candidates(layout: Layout, experts: int) -> Iterator[LayoutSpec]:
    """The layout with each schedule and ZeRO stage, with and without sequence parallelism, and each way to share the
    experts, where they mean anything.

    Args:
        layout: ranks along each axis.
        experts: of the model.
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
    """Every spec of every product of `ranks`, for a model of `experts`, whether it composes or not."""
    return [spec for layout in products(ranks) for spec in candidates(layout, experts)]


def every(base: Config, ranks: int) -> Selection:
    """Every spec of every product of `ranks` that composes."""
    taken, refused = [], []
    for spec in possible(ranks, base.model.num_experts):
        reason = refusal(base, spec)
        if reason is None:
            taken.append(spec)
        else:
            refused.append(Refused(spec, reason))
    return Selection(tuple(taken), tuple(refused))


def covering(base: Config, ranks: int) -> Selection:
    """Every product of `ranks` once, each with the features that have not met yet.

    Layout by layout, the candidate is taken that brings most pairs of features (and single ones) that no layout before
    it had, so that each schedule, ZeRO stage, sequence parallelism and recomputation is there and most pairs are.
    """
    taken: list[LayoutSpec] = []
    seen: set[frozenset[Any]] = set()
    for number, layout in enumerate(products(ranks)):
        tried = candidates(layout, base.model.num_experts)
        found = [spec for spec in tried if refusal(base, spec) is None]
        if not found:
            continue
        best = max(found, key=lambda spec: _gain(spec, seen))
        seen |= _meetings(best)
        taken.append(_with_extras(base, best, number))
    return Selection(tuple(taken))


def asked_for(base: Config, specs: list[LayoutSpec]) -> Selection:
    """The given specs.

    Raises:
        UserError: one does not compose.
    """
    for spec in specs:
        reason = refusal(base, spec)
        if reason is not None:
            raise UserError(f"The layout {spec} cannot be: {reason}")
    return Selection(tuple(specs))


def refusal(base: Config, spec: LayoutSpec) -> str | None:
    """Why a spec cannot be, in the words of the config's checks; None if it can."""
    try:
        compose(base, spec)
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


def _with_extras(base: Config, spec: LayoutSpec, number: int) -> LayoutSpec:
    """The spec with what `candidates` leaves out, where it composes: in turns a ring and recomputation; hybrids."""
    extras: list[tuple[str, Any]] = []
    if spec.layout.cp > 1 and number % 2:
        extras.append(("parallel.cp_method", "ring"))
    if mode := (None, "selective", "full")[number % 3]:
        extras.append(("train.recompute", mode))
    if spec.setting("parallel.zero") and spec.layout.dp > 2:
        extras.append(("parallel.zero_shards", 2))
    for extra in extras:
        more = replace(spec, settings=(*spec.settings, extra))
        spec = spec if refusal(base, more) else more
    return spec
