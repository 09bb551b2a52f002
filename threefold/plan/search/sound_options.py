"""The sound options of a mesh as an array, and why the others are not."""

from collections import Counter
from collections.abc import Iterator
from itertools import product

import numpy as np

from threefold.plan.search.costs import Mask
from threefold.plan.search.soundness import Check, RuleAnswers, Settings
from threefold.plan.search.space import MeshSizes, Options, Space


class Soundness:
    """Finds the sound layouts of a space.

    Args:
        space: to look at.
        checks: rules of a config, in order.

    Attributes:
        refused: how many layouts each rule refused, by the setting that its sentence is about.
        examples: one layout of each of these, and the sentence.
    """

    def __init__(self, space: Space, checks: tuple[Check, ...]) -> None:
        self._rules = [RuleAnswers(check, space.config) for check in checks]
        self._masks: dict[object, tuple[Mask, str]] = {}
        self.refused: Counter[str] = Counter()
        self.examples: dict[str, tuple[str, str]] = {}

    def mask(self, mesh: MeshSizes, options: Options) -> Mask | None:
        """Which options of a mesh are sound, in the dims of `DIMS` (or 1 where all of a dim are alike); None for none
        at all."""
        sound: Mask = np.ones((1,) * len(options.shape), dtype=bool)
        for number, rule in enumerate(self._rules):
            before = sound
            allowed, sentence = self._allowed(number, rule, mesh, options)
            if not sentence:
                continue
            sound = before & allowed
            self._count(rule, mesh, options, before, sound)
            if not sound.any():
                return None
        return sound

    def _count(self, rule: RuleAnswers, mesh: MeshSizes, options: Options, before: Mask, after: Mask) -> None:
        lost = _size(before, options) - _size(after, options)
        if not lost:
            return
        place = tuple(int(index[0]) for index in np.nonzero(before & ~after))
        choice = options.choice(mesh, place)
        sentence = rule.sentence({**choice.settings(), "parallel.zero_shards": choice.dp})
        key = sentence.split(" ", 1)[0]
        self.refused[key] += lost
        self.examples.setdefault(key, (str(choice), sentence))

    def _allowed(self, number: int, rule: RuleAnswers, mesh: MeshSizes, options: Options) -> tuple[Mask, str]:
        """Where a rule holds, and a sentence of it where it does not hold everywhere."""
        while True:
            read = frozenset(rule.read)
            own = mesh.settings
            varied = [not read.isdisjoint(values[0]) for values in options.dims]
            dims = tuple(values if one else values[:1] for values, one in zip(options.dims, varied, strict=True))
            several = tuple(id(values) for values, one in zip(options.dims, varied, strict=True) if one)
            key = (number, tuple(own[name] for name in own if name in read), several, read)
            if key in self._masks:
                return self._masks[key]
            kinds = [_kinds(values, read) for values in dims]
            found = list(_sentences(rule, own, tuple(values for values, _ in kinds)))
            if rule.read <= read:
                break
        mask = np.array([not sentence for sentence in found]).reshape([len(values) for values, _ in kinds])
        mask = mask[np.ix_(*(places for _, places in kinds))]
        self._masks[key] = mask, next((sentence for sentence in found if sentence), "")
        return self._masks[key]


def _kinds(values: tuple[Settings, ...], read: frozenset[str]) -> tuple[tuple[Settings, ...], list[int]]:
    """Values of a dim that differ in what is read, and for each value which of these it is like."""
    first: dict[tuple[object, ...], int] = {}
    names = [name for name in values[0] if name in read]
    alike = [first.setdefault(tuple(value[name] for name in names), len(first)) for value in values]
    kinds = tuple(values[alike.index(number)] for number in range(len(first)))
    return kinds, alike


def _sentences(rule: RuleAnswers, own: Settings, dims: tuple[tuple[Settings, ...], ...]) -> Iterator[str]:
    for chosen in product(*dims):
        settings = dict(own)
        for values in chosen:
            settings.update(values)
        yield rule.sentence(settings)


def _size(mask: Mask, options: Options) -> int:
    """How many layouts a mask has, its dims of length 1 standing for all of them."""
    count = int(np.count_nonzero(mask))
    for length, whole in zip(mask.shape, options.shape, strict=True):
        if length == 1:
            count *= whole
    return count
