"""What every conversion does: take their settings one by one, put ours, and tell what is left."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from threefold.errors import UserError
from threefold.files import read_text

LARGEST_FILE = 4 << 20
"""Bytes of a script or config: far above what any has."""
NOT_KNOWN = "not known to this converter, so nothing stands for it"


class Same(NamedTuple):
    """A setting of theirs that is one of ours.

    Attributes:
        theirs: their key.
        ours: `section.key`.
        kind: makes our value of theirs; raises ValueError with what it must be.
        default: what it is for them where nobody sets it; None where that is ours too, or where they have none.
    """

    theirs: str
    ours: str
    kind: Callable[[Any], Any]
    default: Any = None


class Unmapped(NamedTuple):
    """What the user is to know of one of their settings: it has no counterpart, or one that is not the same.

    Attributes:
        key: theirs.
        value: theirs.
        reason: what stands for it, or why nothing does.
        unsupported: whether the training would be another without it, or it is not known what it does.
    """

    key: str
    value: Any
    reason: str
    unsupported: bool = False


class Given(NamedTuple):
    """What a file of theirs says.

    Attributes:
        settings: by their keys.
        notes: what reading it has to tell.
        spelled: how keys are written in the file, where that is otherwise.
    """

    settings: Mapping[str, Any]
    notes: Sequence[Unmapped] = ()
    spelled: Mapping[str, str] = MappingProxyType({})


class KeyMapping:
    """Their settings that are not yet dealt with, ours so far, and notes.

    Args:
        where: names their file in sentences.
        given: their settings.
        spelled: how a key is written in the file, where that is otherwise.
    """

    def __init__(self, where: str, given: Mapping[str, Any], spelled: Mapping[str, str] | None = None) -> None:
        self.where = where
        self._spelled = dict(spelled or {})
        self.given = {key: value for key, value in given.items() if value is not None}
        self.settings: dict[str, Any] = {}
        self.notes: list[Unmapped] = []

    def take(self, key: str, kind: Callable[[Any], Any], default: Any = None) -> Any:
        """Their value of `key`, which is dealt with then, or the default.

        Raises:
            UserError: it is not what `kind` makes a value of.
        """
        if key not in self.given:
            return default
        value = self.given.pop(key)
        if isinstance(value, str) and value.startswith("$") and kind not in (text, texts):
            self.note(key, value, "a variable that the file does not set; taken as not given", unsupported=True)
            return default
        try:
            return kind(value)
        except (TypeError, ValueError) as error:
            shown = shortened(repr(value))
            raise UserError(f"{self.where}: {self._spelled.get(key, key)} is {shown} but must be {error}.") from None

    def given_whole(self, key: str, default: int) -> int:
        """Their whole number of `key`, which stays to be dealt with."""
        value = self.given.get(key)
        return int(str(value)) if str(value).isdecimal() else default

    def put(self, key: str, value: Any) -> None:
        """Set ours, unless there is nothing to set."""
        if value is not None:
            self.settings[key] = value

    def move(self, table: Iterable[Same]) -> None:
        """Deal with the settings that are one of ours."""
        for theirs, ours, kind, default in table:
            self.put(ours, self.take(theirs, kind, default))

    def note(self, key: str, value: Any, reason: str, unsupported: bool = False) -> None:
        """Tell the user of one of their settings."""
        self.notes.append(Unmapped(self._spelled.get(key, key), value, reason, unsupported))

    def leave(self, reasons: Mapping[str, str], unsupported: Mapping[str, str] | None = None) -> None:
        """Tell of every setting that is left, with the reason of the first pattern that it matches.

        Args:
            reasons: of what has no counterpart and needs none.
            unsupported: of what changes the training and has no counterpart.
        """
        for key, value in self.given.items():
            changing = next((why for pattern, why in (unsupported or {}).items() if fnmatchcase(key, pattern)), None)
            harmless = next((why for pattern, why in reasons.items() if fnmatchcase(key, pattern)), None)
            self.note(key, value, changing or harmless or NOT_KNOWN, unsupported=bool(changing or not harmless))
        self.given.clear()


def foreign_text(path: Path) -> str:
    """The text of a file of another system.

    Raises:
        UserError: it cannot be read, is too large, or is not UTF-8.
    """
    return read_text(path, limit=LARGEST_FILE)


def shortened(text: str, longest: int = 200) -> str:
    """A text for a line of a message: in one line, and cut if it is long."""
    text = " ".join("".join(letter if letter.isprintable() else " " for letter in text).split())
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def whole(value: Any) -> int:
    """A whole number."""
    if isinstance(value, bool) or float(_number(value, "a whole number")) % 1:
        raise ValueError("a whole number")
    return int(float(value)) if not isinstance(value, int) else value


def count(value: Any) -> int:
    """A whole number above 0."""
    if (result := whole(value)) < 1:
        raise ValueError("at least 1")
    return result


def number(value: Any) -> float:
    """A number."""
    return _number(value, "a number")


def _number(value: Any, what: str) -> float:
    try:
        if isinstance(value, bool):
            raise ValueError
        result = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(what) from None
    if result != result or result in (float("inf"), float("-inf")):
        raise ValueError(what)
    return result


def switch(value: Any) -> bool:
    """Yes or no."""
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("true", "false"):
        return str(value).lower() == "true"
    raise ValueError("true or false")


def text(value: Any) -> str:
    """Text, or a number as text."""
    if isinstance(value, list | dict):
        raise ValueError("text")
    return str(value)


def texts(value: Any) -> list[str]:
    """One text or several."""
    return [str(part) for part in value] if isinstance(value, list) else [text(value)]


def anything(value: Any) -> Any:
    """The value as it stands."""
    return value


def dp_of(mapping: KeyMapping, world: int | None, others: int, where: str) -> int:
    """Data-parallel replicas of so many ranks, told as a note where nobody says how many ranks there are.

    Raises:
        UserError: the other axes do not divide the ranks.
    """
    if world is None:
        mapping.note(where, "not given", "parallel.dp is 1; give --world-size, the number of ranks, for another")
        return 1
    if world % others:
        rule = f"must be a multiple of {others}, the ranks of one replica"
        nearest = max(1, round(world / others)) * others
        raise UserError(
            f"{mapping.where}: the world size is {world} but {rule}; use {nearest}, as with --world-size {nearest}."
        )
    return world // others


def put_zero(mapping: KeyMapping, stage: int, key: str, value: Any) -> None:
    """Share among the replicas, if there are any to share with."""
    if mapping.settings.get("parallel.dp", 1) * mapping.settings.get("parallel.cp", 1) > 1:
        mapping.put("parallel.zero", stage)
    else:
        mapping.note(
            key, value, f"one replica has none to share with; set parallel.zero {stage} once parallel.dp is above 1"
        )


def put_chunks(mapping: KeyMapping, chunks: int, key: str) -> None:
    """Give each rank several stages, if there is a pipeline."""
    if chunks > 1 and mapping.settings["parallel.pp"] > 1:
        mapping.settings.update({"parallel.schedule": "interleaved", "parallel.stage_chunks": chunks})
    elif chunks > 1:
        mapping.note(key, chunks, "without a pipeline there are no stages")


def take_sequence_parallel(mapping: KeyMapping, key: str) -> None:
    """Split the sequence too where their `key` says so, if there is tensor parallelism."""
    if mapping.take(key, switch, False):
        if mapping.settings["parallel.tp"] > 1:
            mapping.put("parallel.sequence_parallel", True)
        else:
            mapping.note(key, True, "without tensor parallelism there is nothing to share")


MOST_SETTINGS = 20_000
"""Settings of a file: far above what any config has."""


def flat(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Nested settings by their keys with dots between; an empty section is a value.

    Raises:
        UserError: there are more than `MOST_SETTINGS`, as where sections hold each other.
    """
    found: dict[str, Any] = {}
    waiting: list[tuple[str, Any]] = [(str(key), value) for key, value in reversed(list(values.items()))]
    seen = 0
    while waiting:
        name, value = waiting.pop()
        seen += 1
        if seen > MOST_SETTINGS or name.count(".") > 100:
            raise UserError(f"{where} has more than {MOST_SETTINGS:,} settings, or sections that hold each other.")
        if isinstance(value, dict) and value:
            waiting += [(f"{name}.{key}", inner) for key, inner in reversed(list(value.items()))]
        else:
            found[name] = value
    return found
