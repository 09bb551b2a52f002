"""Which layouts `threefold train` accepts: the rules of a config, each asked once for the settings that it reads.

Millions of layouts are made of few values, and a rule reads few settings. What a rule says of one layout, it says of
every layout with the same values of the settings that it has read on the way to its answer; so the answers are kept in
a tree that branches at these settings. No rule is written here.
"""

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any, Final, cast

from threefold.config.rules.checks import rules
from threefold.config.schema import Config
from threefold.errors import UserError
from threefold.models.sharding import ModelPlan
from threefold.parallel.pipeline.stage_map import stage_map
from threefold.plan.search.choice import KEYS

Settings = Mapping[str, Any]
"""`section.key` → value."""
Check = Callable[[Config], object]
_SECTIONS: Final = frozenset(key.split(".")[0] for key in KEYS.values())
"""Those with settings of a layout."""


def layout_rules(plan: ModelPlan) -> tuple[Check, ...]:
    """All that a resolved config must obey before its ranks start, in order; each raises a `UserError`."""

    def check_stages(config: Config) -> None:
        stage_map(plan, config)

    return (*rules(), check_stages)


class RuleAnswers:
    """What one rule says of the layouts of a config.

    Args:
        rule: raises a `UserError` where it is broken.
        config: resolved; has the settings that are not a layout's.

    Attributes:
        read: the settings of layouts that it has read so far.
    """

    def __init__(self, rule: Check, config: Config) -> None:
        self._rule, self._config = rule, config
        self._tree: _Branch | str | None = None
        self._asked = False
        self.read: set[str] = set()

    def sentence(self, settings: Settings) -> str:
        """Why a layout breaks the rule; empty where it does not.

        Args:
            settings: of the layout, in place of the config's own.
        """
        node = self._tree
        while isinstance(node, _Branch):
            value = settings[node.key]
            if value not in node.answers:
                return self._ask(settings)
            node = node.answers[value]
        return node if node is not None else self._ask(settings)

    def _ask(self, settings: Settings) -> str:
        view = _ConfigView(self._config, settings)
        try:
            self._rule(cast(Config, view))
            answer = ""
        except UserError as error:
            answer = str(error)
        self.read |= view.read.keys()
        path = list(view.read.items())
        if not path:
            self._tree = answer
            return answer
        if self._tree is None:
            self._tree = _Branch(path[0][0])
        node = self._tree
        for (key, value), following in zip(path, [*path[1:], None], strict=True):
            assert isinstance(node, _Branch)
            assert node.key == key, "what a rule reads next follows from what it has read"
            if following is None:
                node.answers[value] = answer
            else:
                node = node.answers.setdefault(value, _Branch(following[0]))
        return answer


class _Branch:
    """A setting that a rule reads next, and what follows for each of its values."""

    __slots__ = ("answers", "key")

    def __init__(self, key: str) -> None:
        self.key = key
        self.answers: dict[Any, _Branch | str] = {}


class _ConfigView:
    """A config in another layout, as rules see it; remembers which of the layout's settings they read, in order."""

    def __init__(self, config: Config, settings: Settings) -> None:
        self._config, self._settings = config, settings
        self.read: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return _SectionView(self, name, value) if name in _SECTIONS else value

    def value(self, key: str) -> Any:
        found = self.read[key] = self._settings[key]
        return found

    def has(self, key: str) -> bool:
        return key in self._settings


class _SectionView:
    """A section of a `_ConfigView`."""

    def __init__(self, config: _ConfigView, name: str, section: Any) -> None:
        self._view, self._name, self._section = config, name, section

    def __getattr__(self, name: str) -> Any:
        key = f"{self._name}.{name}"
        if self._view.has(key):
            return self._view.value(key)
        derived = getattr(type(self._section), name, None)
        if isinstance(derived, cached_property):
            return derived.func(self)
        return getattr(self._section, name)
