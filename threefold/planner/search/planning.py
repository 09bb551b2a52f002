"""Answers to a search request: the ranked layouts, the budget, and the config of the best layout."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from threefold.byte_sizes import format_bytes
from threefold.config.schema import Config, to_yaml
from threefold.errors import UserError
from threefold.files import shown
from threefold.models.family import model_plan
from threefold.planner.hardware import Hardware
from threefold.planner.search.bounds import Evaluated
from threefold.planner.search.least_seconds import ModelCosts
from threefold.planner.search.request import Budget, Request, budget_of
from threefold.planner.search.search import Found, search
from threefold.planner.search.space import KEYS, LayoutChoice, layout_rules, without_layout


@dataclass(frozen=True)
class SearchAnswer:
    """Result of a search for a request, with the memory that a rank may use and the seconds that the search took."""

    request: Request
    found: Found
    costs: ModelCosts
    usable_bytes: int
    seconds: float

    @property
    def best(self) -> Evaluated:
        return self.found.ranked[0]

    @property
    def unfit_bytes(self) -> int:
        """Exact bytes of the nearest layout that does not fit, where the search has a bound; 0 if all fit."""
        misfit = self.found.misfit
        return self.costs.evaluate(misfit.nearest).peak if misfit is not None else 0

    def budget(self, layout: Evaluated) -> Budget | None:
        """Return the budget of the tokens in a layout; None if their number is unknown."""
        request = self.request
        if request.tokens is None:
            return None
        dollars = request.hardware.dollars_per_hour
        return budget_of(request.tokens, request.tokens_per_step, layout.seconds, layout.choice.gpus, dollars)


def plan_layouts(request: Request, clock: Callable[[], float]) -> SearchAnswer:
    """Search the layouts of a request.

    Args:
        request: request to search.
        clock: function that returns the seconds since the request.

    Raises:
        UserError: no layout is sound, or none fits; the message says what would make one possible.
    """
    costs = ModelCosts(request)
    checks = layout_rules(model_plan(request.config.model, request.config.data.sequence_length))

    def run(gpus: int, fixed: Mapping[str, Any]) -> Found:
        counts = [count for count in request.objective.counts(gpus) if request.hardware.fills_nodes(count)]
        return search(request.space(fixed), checks, costs, counts, request.objective)

    found = run(request.gpus, request.fixed)
    if not found.sound:
        raise no_layout(request.gpus, request.fixed, found, run)
    if not found.ranked:
        usable = costs.usable_bytes(request.gpus)
        raise none_fits(request.gpus, request.fixed, request.hardware, usable, found, costs, run)
    return SearchAnswer(request, found, costs, costs.usable_bytes(request.gpus), clock())


Run = Callable[[int, Mapping[str, Any]], Found]
"""Function that searches a number of GPUs with some fixed settings."""
_NEAR: Final = 64
"""Distance up to which other numbers of GPUs are tried for a sound layout."""
_LARGER: Final = (2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
_MOST: Final = 16384
"""Largest number of GPUs that is tried: searching it takes seconds."""
_BETWEEN: Final = (0.625, 0.75, 0.875)
"""Fractions of the smallest larger number that fits, which are tried too."""


def no_layout(gpus: int, fixed: Mapping[str, Any], found: Found, run: Run) -> UserError:
    """Return the error that no layout of these GPUs is sound.

    Args:
        gpus: available devices.
        fixed: settings that layouts must have.
        found: result of the search.
        run: function that searches another number of GPUs.
    """
    having = f" with {_words(fixed)}" if fixed else ""
    head = f"--gpus is {gpus} but no layout of so many GPUs{having} is sound"
    why = f" ({found.refusals[0].example}: {found.refusals[0].sentence.rstrip('.')})" if found.refusals else ""
    for key, value in fixed.items():
        if run(gpus, {other: given for other, given in fixed.items() if other != key}).sound:
            near = _around(value) if isinstance(value, int) and not isinstance(value, bool) else ()
            better = next((count for count in near if run(gpus, {**fixed, key: count}).sound), None)
            use = f"use --fix {key}={better}, or " if better is not None else ""
            return UserError(f"{head}{why}; {use}leave out --fix {key}={_word(value)}.")
    for count in _around(gpus):
        if run(count, fixed).sound:
            return UserError(f"{head}{why}; use {count}.")
    powers = (1 << power for power in range(gpus.bit_length() - 1, -1, -1))
    below = next((count for count in powers if count < gpus - _NEAR and run(count, fixed).sound), None)
    if below is not None:
        return UserError(f"{head}{why}; use {below}.")
    return UserError(f"{head}{why}; use a number that divides the global batch and the model's heads and layers.")


def none_fits(
    gpus: int,
    fixed: Mapping[str, Any],
    hardware: Hardware,
    usable: int,
    found: Found,
    costs: ModelCosts,
    run: Run,
) -> UserError:
    """Return the error that no sound layout fits into memory.

    Args:
        gpus, fixed, found, run: see `no_layout`.
        hardware: type of the GPUs.
        usable: bytes that a rank may use.
        costs: cost model of the search.
    """
    assert found.nearest is not None
    nearest = costs.evaluate(found.nearest)
    short = nearest.peak - usable
    head = (
        f"None of the {found.sound:,} sound layouts of {gpus:,} × {hardware.name} fits into {format_bytes(usable)}: "
        f"the nearest, {nearest.choice}, needs {format_bytes(nearest.peak)}, {format_bytes(short)} too much "
        f"({costs.largest_part(nearest.choice)})"
    )
    ways = [f"devices of {format_bytes(hardware.memory_bytes + short)}"]
    for key in fixed:
        if run(gpus, {other: value for other, value in fixed.items() if other != key}).ranked:
            ways.insert(0, f"no --fix {key}={_word(fixed[key])}")
    if (enough := _enough(gpus, fixed, run)) is not None:
        ways.insert(0, f"{enough:,} of them (--gpus {enough})")
    return UserError(f"{head}; it takes {' or '.join(ways)}.")


def _enough(gpus: int, fixed: Mapping[str, Any], run: Run) -> int | None:
    """Return the smallest of some larger numbers of GPUs for which a layout fits; None if none does."""
    for times in _LARGER:
        if times > _LARGER[0] and gpus * times > _MOST:
            return None
        if run(gpus * times, fixed).ranked:
            between = [int(gpus * times * part) for part in _BETWEEN if gpus * times * part % 1 == 0]
            return next((count for count in between if run(count, fixed).ranked), gpus * times)
    return None


def _around(gpus: int) -> Iterator[int]:
    """Yield the nearest numbers, the larger of two first."""
    for distance in range(1, _NEAR + 1):
        yield gpus + distance
        if gpus > distance:
            yield gpus - distance


def _words(fixed: Mapping[str, Any]) -> str:
    return " and ".join(f"{key} {_word(value)}" for key, value in fixed.items())


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_FOLLOWS: Final = "accumulation"
"""Part of a layout that a config leaves out, since it follows from the batch sizes."""
_HEAD: Final = "# Written by threefold plan"
"""First line of files that may be overwritten."""


def config_text(
    config: Config, choice: LayoutChoice, request: str, comments: list[str], steps: int | None = None
) -> str:
    """Return a config as YAML: its given settings in the layout that was found.

    Args:
        config: config as loaded.
        choice: layout to write.
        request: options of `threefold plan`, as on the command line.
        comments: further comment lines at the top.
        steps: steps of the run, if the request gives a number of tokens; None for those of the config.
    """
    sections = {name: dict(values) for name, values in without_layout(config).items()}
    for name, key in KEYS.items():
        section, setting = key.split(".")
        if name != _FOLLOWS:
            sections[section][setting] = getattr(choice, name)
    if steps is not None:
        sections["train"].pop("epochs", None)
        sections["train"]["max_steps"] = steps
    header = "".join(f"# {line}\n" for line in comments)
    return f"{_HEAD} {request}.\n{header}" + to_yaml({name: values for name, values in sections.items() if values})


def require_writable(path: Path) -> None:
    """Check before the search that a file can be written without overwriting anything of the user's.

    Raises:
        UserError: the path is a folder, its folder does not exist, or it is a file that `threefold plan` did not write.
    """
    if path.is_dir():
        raise UserError(f"{shown(path)} is a folder; name a file in it, such as {shown(path / 'best.yaml')}.")
    if not path.parent.is_dir():
        raise UserError(f"{shown(path)} cannot be written as {shown(path.parent)} is no folder; make it first.")
    if path.is_file() and not _is_ours(path):
        raise UserError(
            f"{shown(path)} is there already and threefold plan has not written it; name another file, such as "
            f"{shown(_free(path))}."
        )


def write_config(path: Path, text: str) -> None:
    """Write a config.

    Raises:
        UserError: the file cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{shown(path)} cannot be written ({error.strerror}).") from None


def _is_ours(path: Path) -> bool:
    """Return whether a file begins as `config_text` does."""
    try:
        with path.open("rb") as file:
            return file.read(len(_HEAD)) == _HEAD.encode()
    except OSError:
        return False


def _free(path: Path) -> Path:
    """Return the path of a new file beside another."""
    names = (path.with_name(f"{path.stem}-planned{number}{path.suffix}") for number in ("", *range(2, 10**6)))
    return next(name for name in names if not name.exists())
