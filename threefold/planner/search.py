"""Search over the layouts of a space: which are sound, which fit, the best of them, and why others are refused."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from threefold.planner.bounds import Array, Evaluated, Mask, ModelCosts
from threefold.planner.space import Check, LayoutChoice, MeshSizes, Options, RuleAnswers, Settings, Space

Weight = Callable[[int], float]


class Soundness:
    """Filter that finds the sound layouts of a space.

    `refused` counts the layouts that rules refused, by the setting that the message is about; `examples` has one
    refused layout for each such setting, with its message.
    """

    def __init__(self, space: Space, checks: tuple[Check, ...]) -> None:
        self._rules = [RuleAnswers(check, space.config) for check in checks]
        self._masks: dict[object, tuple[Mask, str]] = {}
        self.refused: Counter[str] = Counter()
        self.examples: dict[str, tuple[str, str]] = {}

    def mask(self, mesh: MeshSizes, options: Options) -> Mask | None:
        """Return a mask of a mesh's sound options (length 1 where all are equal); None if none is sound."""
        sound: Mask = np.ones((1,) * len(options.shape), dtype=bool)
        for number, rule in enumerate(self._rules):
            allowed, sentence = self._allowed(number, rule, mesh, options)
            if not sentence:
                continue
            before, sound = sound, sound & allowed
            refused = before & ~sound
            if lost := int(np.count_nonzero(np.broadcast_to(refused, options.shape))):
                place = tuple(int(index[0]) for index in np.nonzero(refused))
                choice = options.choice(mesh, place)
                sentence = rule.sentence({**choice.settings(), "parallel.zero_shards": choice.dp})
                key = sentence.split(" ", 1)[0]
                self.refused[key] += lost
                self.examples.setdefault(key, (str(choice), sentence))
            if not sound.any():
                return None
        return sound

    def _allowed(self, number: int, rule: RuleAnswers, mesh: MeshSizes, options: Options) -> tuple[Mask, str]:
        """Return a mask of where a rule holds, and one of its messages if it does not hold everywhere."""
        while True:
            read = frozenset(rule.read)
            sizes = mesh.settings
            varied = [not read.isdisjoint(values[0]) for values in options]
            dims = tuple(values if one else values[:1] for values, one in zip(options, varied, strict=True))
            several = tuple(id(values) for values, one in zip(options, varied, strict=True) if one)
            key = (number, tuple(sizes[name] for name in sizes if name in read), several, read)
            if key in self._masks:
                return self._masks[key]
            kinds = [_kinds(values, read) for values in dims]
            found = []
            for chosen in product(*(values for values, _ in kinds)):
                found.append(rule.sentence({**sizes, **{key: value for each in chosen for key, value in each.items()}}))
            if rule.read <= read:
                break
        mask = np.array([not sentence for sentence in found]).reshape([len(values) for values, _ in kinds])
        mask = mask[np.ix_(*(places for _, places in kinds))]
        self._masks[key] = mask, next((sentence for sentence in found if sentence), "")
        return self._masks[key]


def _kinds(values: tuple[Settings, ...], read: frozenset[str]) -> tuple[tuple[Settings, ...], list[int]]:
    """Return values of a dim that differ in the settings read, and for each value the index of the one it equals."""
    first: dict[tuple[object, ...], int] = {}
    names = [name for name in values[0] if name in read]
    alike = [first.setdefault(tuple(value[name] for name in names), len(first)) for value in values]
    kinds = tuple(values[alike.index(number)] for number in range(len(first)))
    return kinds, alike


BEST = 10
"""Number of layouts to rank."""
_AT_ONCE = 256
"""Number of layouts to sort at a time, in the order of their bounds."""
_ROUNDING = 1 - 1e-9
"""Factor on a bound, since different rounding may put it above the exact time."""


@dataclass(frozen=True)
class UnfitLayouts:
    """Sound layouts that do not fit; the one of them that needs the least memory, its bytes and their largest part."""

    count: int
    nearest: LayoutChoice
    peak: int
    part: str


@dataclass(frozen=True)
class RefusedLayouts:
    """Layouts refused by the rule about a setting (`key`): their number, an example, and the rule's message."""

    key: str
    count: int
    example: str
    sentence: str


class Fitting(NamedTuple):
    """Layouts of a mesh that fit by their bounds: their indices in each dim, and lower bounds of seconds and bytes."""

    mesh: MeshSizes
    options: Options
    places: tuple[np.ndarray, ...]
    seconds: Array
    peak: Array


@dataclass(frozen=True)
class Found:
    """Result of a search: counts, the best layouts in order, and the reasons why others are not sound, the most
    frequent first.

    Layouts are `fitting` by their bounds, and some of these evaluated exactly. The misfit is None if all sound ones
    fit, `nearest` needs the least memory of the sound ones, and `meshes` has those that fit by mesh, for a picture.
    `unfit` are the indices into the joined layouts of `meshes` of those evaluated that do not fit; it has all such
    layouts whose bound is below the best.
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


def search(space: Space, checks: tuple[Check, ...], costs: ModelCosts, counts: Sequence[int], weight: Weight) -> Found:
    """Search every layout of a space on some counts of devices, and rank the best: the least seconds times weight."""
    soundness = Soundness(space, checks)
    considered = sound_count = 0
    misfit: tuple[float, LayoutChoice | None] = np.inf, None  # the least bytes, and the layout that needs them
    nearest = misfit
    looked: list[Fitting] = []
    for mesh in (mesh for count in counts for mesh in space.meshes(count)):
        options = space.options(mesh)
        considered += int(np.prod(options.shape))
        mask = soundness.mask(mesh, options) if all(options.shape) else None
        if mask is None:
            continue
        sound = np.broadcast_to(mask, options.shape)
        sound_count += int(np.count_nonzero(sound))
        needed = np.broadcast_to(costs.least_bytes(mesh, options), options.shape)
        fits = sound & (needed <= costs.usable_bytes(mesh.gpus))
        least, place = _least(needed, sound & ~fits)
        misfit = min(misfit, (least, options.choice(mesh, place)), key=itemgetter(0))
        least, place = _least(needed, sound)
        nearest = min(nearest, (least, options.choice(mesh, place)), key=itemgetter(0))
        places = np.nonzero(fits)
        if len(places[0]):
            seconds = np.broadcast_to(costs.least_seconds(mesh, options, fits), options.shape)
            looked.append(Fitting(mesh, options, places, seconds[places], needed[places]))
    fitting = sum(len(each.seconds) for each in looked)
    ranked, unfit, evaluated = _best(looked, costs, weight)
    misfits = None
    if (layout := misfit[1]) is not None:
        misfits = UnfitLayouts(sound_count - fitting, layout, int(misfit[0]), costs.largest_part(layout))
    refusals = [RefusedLayouts(key, n, *soundness.examples[key]) for key, n in soundness.refused.most_common()]
    return Found(considered, sound_count, fitting, evaluated, ranked, refusals, misfits, nearest[1], looked, unfit)


def _least(values: Array, where: Mask) -> tuple[float, tuple[int, ...]]:
    """Return the least of the selected values and its indices; infinite if none is selected."""
    those = np.where(where, values, np.inf)
    place = int(those.argmin())
    return float(those.flat[place]), tuple(int(index) for index in np.unravel_index(place, those.shape))


def _best(looked: list[Fitting], costs: ModelCosts, weight: Weight) -> tuple[list[Evaluated], list[int], int]:
    """Return the best layouts, the indices of evaluated ones that do not fit, and the number evaluated."""
    best: list[tuple[float, int, LayoutChoice, Evaluated]] = []
    unfit: list[int] = []
    evaluated = 0
    for bound, place, choice in _ascending(looked, weight):
        if len(best) == BEST and bound * _ROUNDING > best[-1][0]:
            break
        found = costs.evaluate(choice)
        evaluated += 1
        if found.peak > costs.usable_bytes(choice.gpus):
            unfit.append(place)
            continue
        best.append((found.seconds * weight(choice.gpus), found.peak, choice, found))
        best = sorted(best, key=lambda each: each[:3])[:BEST]
    return [each[-1] for each in best], unfit, evaluated


def _ascending(looked: list[Fitting], weight: Weight) -> Iterator[tuple[float, int, LayoutChoice]]:
    """Yield all layouts in the order of their scores' bounds: the bound, the index among all, and the layout."""
    if not looked:
        return
    scores = np.concatenate([each.seconds * weight(each.mesh.gpus) for each in looked])
    below, count = -np.inf, _AT_ONCE
    while below < scores.max():
        limit = np.partition(scores, count - 1)[count - 1] if count < len(scores) else scores.max()
        chosen = np.flatnonzero((scores > below) & (scores <= limit))
        for place in chosen[np.argsort(scores[chosen], kind="stable")].tolist():
            yield float(scores[place]), place, _choice(looked, place)
        below, count = limit, count * 4


def _choice(looked: list[Fitting], place: int) -> LayoutChoice:
    """Return the layout of an index among those of all meshes."""
    for each in looked:
        if place < len(each.seconds):
            break
        place -= len(each.seconds)
    return each.options.choice(each.mesh, [int(indices[place]) for indices in each.places])


class Points(NamedTuple):
    """Layouts that fit, as points of a picture, and the exact front of the fastest for their memory, the least memory
    first."""

    seconds: Array
    peak: Array
    front: list[Evaluated]


def points_of(found: Found, costs: ModelCosts, step: float = 0.9, most: int = 120) -> Points:
    """Return a sample of a search's layouts, without those known not to fit, and their Pareto front, each of whose
    layouts has at most `step` of the next one's memory; at most `most` layouts are evaluated."""
    seconds = np.concatenate([each.seconds for each in found.meshes])
    peak = np.concatenate([each.peak for each in found.meshes])
    fits = np.ones(len(seconds), dtype=bool)
    fits[found.unfit] = False
    front = [min(found.ranked, key=lambda each: (each.seconds, each.peak))]
    evaluated: dict[int, Evaluated] = {}
    while len(evaluated) < most:
        limit = front[-1].peak * step
        left = np.where(fits & (peak <= limit), seconds, np.inf)
        fastest: Evaluated | None = None
        while len(evaluated) < most:
            place = int(left.argmin())
            if left[place] >= (np.inf if fastest is None else fastest.seconds):
                break
            left[place] = np.inf
            if place not in evaluated:
                evaluated[place] = costs.evaluate(_choice(found.meshes, place))
            layout = evaluated[place]
            peak[place] = layout.peak
            if layout.peak <= limit and (fastest is None or layout.seconds < fastest.seconds):
                fastest = layout
        if fastest is None:
            break
        front.append(fastest)
    shown = np.flatnonzero(fits)
    some = np.random.default_rng(0).choice(shown, min(4000, len(shown)), replace=False)
    return Points(seconds[some], peak[some], front[::-1])
