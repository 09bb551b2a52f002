"""The search: every sound layout is looked at, and those that may be among the best are evaluated exactly.

The cost model bounds the time of all options of a mesh at once, and gives their memory. Layouts are then evaluated in
the order of their bounds, until no bound is left that is below the worst of the best ones: the result is that of
evaluating all (branch and bound).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from threefold.plan.search.choice import LayoutChoice
from threefold.plan.search.costs import Array, Costs, Evaluated, Mask
from threefold.plan.search.objectives import Objective
from threefold.plan.search.sound_options import Soundness
from threefold.plan.search.soundness import Check
from threefold.plan.search.space import MeshSizes, Options, Space

BEST = 10
"""Layouts that are ranked."""
_AT_ONCE = 256
"""Layouts that are looked for at once among all, in the order of their bounds."""
_ROUNDING = 1 - 1e-9
"""A bound that is computed with other roundings may be above the exact time by as much."""


@dataclass(frozen=True)
class UnfitLayouts:
    """Sound layouts that need more memory than there is.

    Attributes:
        count: of them.
        nearest: the one that needs the least.
        peak: bytes that it needs.
        part: what takes the most of these, in words.
    """

    count: int
    nearest: LayoutChoice
    peak: int
    part: str


@dataclass(frozen=True)
class RefusedLayouts:
    """Layouts that a rule of the settings refuses.

    Attributes:
        key: the setting that the rule is about.
        count: of layouts.
        example: one of them.
        sentence: why.
    """

    key: str
    count: int
    example: str
    sentence: str


@dataclass(frozen=True)
class Fitting:
    """The layouts of a mesh that fit, as far as their bounds say.

    Attributes:
        mesh, options: of them.
        places: their indices in each dim of the options.
        seconds: that a step takes at least.
        peak: bytes that the rank with the most needs at least.
    """

    mesh: MeshSizes
    options: Options
    places: tuple[np.ndarray, ...]
    seconds: Array
    peak: Array

    def choice(self, number: int) -> LayoutChoice:
        """One of the layouts."""
        return self.options.choice(self.mesh, [int(indices[number]) for indices in self.places])


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes:
        considered: layouts looked at.
        sound: of them, those that the rules of the settings allow.
        fitting: of these, those that fit into memory, as far as the least that they need says.
        evaluated: of these, those evaluated exactly.
        ranked: the best, the best first.
        refusals: why the others are not sound, the most frequent first.
        misfit: those that do not fit; None where all do.
        nearest: the layout that needs the least memory; None where none is sound.
        meshes: with layouts that fit, for a picture.
        unfit: of the layouts of `meshes` one after the other, those that were evaluated and do not fit: all whose
            bounds are below the best.
    """

    considered: int
    sound: int
    fitting: int
    evaluated: int
    ranked: list[Evaluated]
    refusals: list[RefusedLayouts]
    misfit: UnfitLayouts | None
    nearest: LayoutChoice | None
    meshes: list[Fitting]
    unfit: list[int]


@dataclass
class _Seen:
    """What was looked at."""

    considered: int = 0
    sound: int = 0
    least: float = float("inf")
    nearest: LayoutChoice | None = None
    least_of_all: float = float("inf")
    smallest: LayoutChoice | None = None
    looked: list[Fitting] = field(default_factory=list)


def search(space: Space, checks: tuple[Check, ...], costs: Costs, counts: Sequence[int], objective: Objective) -> Found:
    """Look at every layout, and rank the best.

    Args:
        space: what there is to choose from.
        checks: the rules of a config.
        costs: the cost model.
        counts: of devices that a layout may use.
        objective: what the best has.
    """
    soundness, seen = Soundness(space, checks), _Seen()
    for count in counts:
        for mesh in space.meshes(count):
            _look(mesh, space.options(mesh), soundness, costs, seen)
    fitting = sum(len(each.seconds) for each in seen.looked)
    ranked, unfit, evaluated = _best(seen.looked, costs, objective)
    misfit = None
    if seen.sound > fitting and seen.nearest is not None:
        part = costs.largest_part(seen.nearest)
        misfit = UnfitLayouts(seen.sound - fitting, seen.nearest, int(seen.least), part)
    return Found(
        considered=seen.considered,
        sound=seen.sound,
        fitting=fitting,
        evaluated=evaluated,
        ranked=ranked,
        refusals=_refusals(soundness.refused, soundness.examples),
        misfit=misfit,
        nearest=seen.smallest,
        meshes=seen.looked,
        unfit=unfit,
    )


def _look(mesh: MeshSizes, options: Options, soundness: Soundness, costs: Costs, seen: _Seen) -> None:
    """Add the layouts of a mesh that are sound and fit."""
    if not all(options.shape):
        return
    seen.considered += int(np.prod(options.shape))
    sound = soundness.mask(mesh, options)
    if sound is None:
        return
    sound = np.broadcast_to(sound, options.shape)
    seen.sound += int(np.count_nonzero(sound))
    needed = np.broadcast_to(costs.least_bytes(mesh, options), options.shape)
    fits = sound & (needed <= costs.usable_bytes(mesh.gpus))
    least, place = _least(needed, sound & ~fits)
    if least < seen.least:
        seen.least, seen.nearest = least, options.choice(mesh, place)
    least, place = _least(needed, sound)
    if least < seen.least_of_all:
        seen.least_of_all, seen.smallest = least, options.choice(mesh, place)
    places = np.nonzero(fits)
    if len(places[0]):
        seconds = np.broadcast_to(costs.least_seconds(mesh, options, fits), options.shape)
        seen.looked.append(Fitting(mesh, options, places, seconds[places], needed[places]))


def _least(values: Array, where: Mask) -> tuple[float, tuple[int, ...]]:
    """The least of some of the values, and its indices; infinite for none."""
    those = np.where(where, values, np.inf)
    place = int(those.argmin())
    return float(those.flat[place]), tuple(int(index) for index in np.unravel_index(place, those.shape))


def _best(looked: list[Fitting], costs: Costs, objective: Objective) -> tuple[list[Evaluated], list[int], int]:
    """The best layouts, those that were evaluated and do not fit, and how many were evaluated."""
    best: list[tuple[float, int, LayoutChoice, Evaluated]] = []
    unfit: list[int] = []
    evaluated = 0
    for bound, place, choice in _ascending(looked, objective):
        if len(best) == BEST and bound * _ROUNDING > best[-1][0]:
            break
        found = costs.evaluate(choice)
        evaluated += 1
        if found.peak > costs.usable_bytes(choice.gpus):
            unfit.append(place)
            continue
        best.append((found.seconds * objective.weight(choice.gpus), found.peak, choice, found))
        best = sorted(best, key=lambda each: each[:3])[:BEST]
    return [each[-1] for each in best], unfit, evaluated


def _ascending(looked: list[Fitting], objective: Objective) -> Iterator[tuple[float, int, LayoutChoice]]:
    """All layouts in the order of the bounds of their scores: these, their places among all, and the layouts."""
    if not looked:
        return
    scores = np.concatenate([each.seconds * objective.weight(each.mesh.gpus) for each in looked])
    starts = np.cumsum([0, *(len(each.seconds) for each in looked)])
    below, count = -np.inf, _AT_ONCE
    while below < scores.max():
        limit = np.partition(scores, count - 1)[count - 1] if count < len(scores) else scores.max()
        chosen = np.flatnonzero((scores > below) & (scores <= limit))
        for place in chosen[np.argsort(scores[chosen], kind="stable")]:
            owner = int(np.searchsorted(starts, place, side="right")) - 1
            yield float(scores[place]), int(place), looked[owner].choice(int(place - starts[owner]))
        below, count = limit, count * 4


def _refusals(counts: Counter[str], examples: dict[str, tuple[str, str]]) -> list[RefusedLayouts]:
    return [RefusedLayouts(key, count, *examples[key]) for key, count in counts.most_common()]
