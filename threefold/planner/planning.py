"""Search requests (objective, fixed settings, budget of tokens) and their answers: the ranked layouts, or why there is
none."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from threefold.config.by_step import entries_of
from threefold.config.loading import config_of, parse_value, problem
from threefold.config.model import CUSTOM
from threefold.config.resolve import on_device
from threefold.config.schedules import SCHEDULES, is_custom_schedule
from threefold.config.schema import Config, to_yaml
from threefold.config.section import MOST_STEPS, divisors, nearest_multiple
from threefold.data.dataset import resolve_without_data
from threefold.errors import UserError
from threefold.files import first_bytes, format_bytes, shown
from threefold.models.family import model_plan
from threefold.planner.bounds import Evaluated, ModelCosts
from threefold.planner.estimate import built_in_system
from threefold.planner.hardware import Hardware
from threefold.planner.model_size import described_blocks
from threefold.planner.search import Found, search
from threefold.planner.space import KEYS, LayoutChoice, Space, alone, layout_rules, without_layout
from threefold.planner.systems import System, find_system
from threefold.plugins import one_of

_SCALES: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_TOKENS: Final = re.compile(r"(\d+(?:\.\d+)?(?:E\d{1,2})?)([KMBT]?)")


@dataclass(frozen=True)
class Budget:
    """Tokens to train on, in whole steps of `tokens_per_step`; the price is per GPU, None if unknown."""

    tokens: int
    tokens_per_step: int
    step_seconds: float
    gpus: int
    dollars_per_hour: float | None

    @property
    def steps(self) -> int:
        return -(-self.tokens // self.tokens_per_step)

    @property
    def seconds(self) -> float:
        return self.steps * self.step_seconds

    @property
    def days(self) -> float:
        return self.seconds / 86400

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.gpus / 3600

    @property
    def dollars(self) -> float | None:
        return None if self.dollars_per_hour is None else self.gpu_hours * self.dollars_per_hour


def parse_tokens(text: str) -> int:
    """Parse a number of tokens such as `300B`, `1.4T`, `20e9` or `5000000`."""
    match = _TOKENS.fullmatch(text.strip().upper().replace("_", "").replace(",", ""))
    count = round(float(match[1]) * _SCALES[match[2]]) if match else 0
    if not match or not 0 < count <= 10**18:
        raise UserError(f"--tokens is {shown(text)} but must be a number of tokens above 0; write it as 300B or 1.4T.")
    return count


@dataclass(frozen=True)
class Objective:
    """Criterion by which layouts are ranked.

    `counts` maps the available GPUs to the numbers of GPUs that a layout may use, and `weight` the GPUs used to a
    factor of the seconds of a step; the smallest product ranks first. The title describes the best layout.
    """

    name: str
    title: str
    counts: Callable[[int], list[int]]
    weight: Callable[[int], float]


_ROWS: Final = (
    # The batch is fixed, so the shortest step has the most tokens per second.
    Objective("throughput", "most tokens per second on all GPUs", lambda gpus: [gpus], lambda used: 1.0),
    Objective("cost", "fewest GPU-hours per token, on as many GPUs or a part of them", divisors, float),
    Objective("latency", "shortest step, on as many GPUs or a part of them", divisors, lambda used: 1.0),
)
OBJECTIVES: Final = {row.name: row for row in _ROWS}
"""Objectives by name; the first is the default."""


@dataclass(frozen=True)
class Request:
    """Request to search the layouts of a config, which is given as loaded and as resolved on one rank.

    `fixed` are settings that the layouts must have, by `section.key`. The tokens are None if neither the request nor
    the config gives them.
    """

    given: Config
    config: Config
    gpus: int
    hardware: Hardware
    objective: Objective
    fixed: Mapping[str, Any]
    tokens: int | None
    system: System

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch_size * self.config.data.sequence_length

    def space(self, fixed: Mapping[str, Any]) -> Space:
        custom = self.given.parallel.schedule
        schedules = [*SCHEDULES, *([custom] if is_custom_schedule(custom) else [])]
        layers = model_plan(self.config.model, self.config.data.sequence_length).layers
        return Space(self.config, len(layers), fixed, schedules)


def _require_one_step(config: Config) -> None:
    """Refuse settings that change by step: a plan compares times of one step."""
    batch = ("train.global_batch_size", config.train.global_batch_size)
    for key, value in (batch, ("data.sequence_length", config.data.sequence_length)):
        if len(entries_of(value)) > 1:
            largest = f"--set {key}={value:d}"
            raise problem(config, key, f"a plan is for steps of one size; use {largest}, and try others with estimate")


def read_request(
    given: Config,
    gpus: int,
    hardware: Hardware,
    objective: str,
    fix: Sequence[str],
    tokens: str | None = None,
    system: str | None = None,
) -> Request:
    """Read the options of a request, None for those not given on the command line, for a config as loaded. The default
    system is this package, which the config is for."""
    if objective not in OBJECTIVES:
        raise UserError(f"--objective is {shown(objective)} but must be {one_of(objective, list(OBJECTIVES))}.")
    row, fixed = OBJECTIVES[objective], parse_fixed(fix)
    wanted = None if tokens is None else parse_tokens(tokens)
    if not hardware.fills_nodes(gpus):
        per_node = hardware.gpus_per_node
        raise UserError(
            f"--gpus is {gpus} but nodes of {hardware.name} have {per_node} and are rented whole; use "
            f"{nearest_multiple(gpus, per_node)}."
        )
    config = given
    _require_one_step(given)
    if given.model.architecture != CUSTOM:
        config = on_device(resolve_without_data(alone(given)), hardware.device)
    described_blocks(config)  # refuses blocks without formulas, and a model of a file
    hardware.matrix_rate(config.precision.dtype)
    per_step = config.train.global_batch_size * config.data.sequence_length
    most = MOST_STEPS * per_step
    if tokens is not None and wanted is not None and wanted > most:
        raise UserError(f"--tokens is {shown(tokens)} but train.max_steps can read {most:,} at most; use {most}.")
    if wanted is None and config.train.max_steps < MOST_STEPS:
        wanted = config.train.max_steps * per_step
    kernels = built_in_system(config, hardware) if system is None else find_system(system)
    return Request(given, config, gpus, hardware, row, fixed, wanted, kernels)


def require_no_layout(overrides: Sequence[str]) -> None:
    """Raise a `UserError` if an override sets a setting that the search chooses, as it would have no effect."""
    for override in overrides:
        if override.partition("=")[0].strip() in KEYS.values():
            raise UserError(
                f"--set {shown(override)}: threefold plan chooses this setting itself; use --fix {shown(override)} "
                "for layouts that have it."
            )


def parse_fixed(texts: Sequence[str]) -> dict[str, Any]:
    """Parse the settings that layouts must have, each as `section.key=value`."""
    fixed: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        key, where = key.strip(), f"--fix {shown(text)}"
        if not equals:
            raise UserError(f"{where}: write it as section.key=value, such as parallel.tp=8.")
        if key not in KEYS.values():
            raise UserError(f"{where}: the setting must be {one_of(key, list(KEYS.values()))}.")
        fixed[key] = parse_value(value, where)
        section, name = key.split(".")
        try:
            config_of({"data": {"path": "any"}, section: {name: fixed[key]}})
        except UserError as error:
            raise UserError(f"{where}: {str(error).removeprefix('config: ')}") from None
    return fixed


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
        return Budget(request.tokens, request.tokens_per_step, layout.seconds, layout.choice.gpus, dollars)


def plan_layouts(request: Request, clock: Callable[[], float]) -> SearchAnswer:
    """Search the layouts of a request, with a clock of the seconds since it.

    The `UserError` if no layout is valid, or none fits, names a change that would make one possible.
    """
    costs, objective = ModelCosts(request.config, request.hardware, request.system), request.objective
    checks = layout_rules(model_plan(request.config.model, request.config.data.sequence_length))

    def run(gpus: int, fixed: Mapping[str, Any]) -> Found:
        counts = [count for count in objective.counts(gpus) if request.hardware.fills_nodes(count)]
        return search(request.space(fixed), checks, costs, counts, objective.weight)

    found = run(request.gpus, request.fixed)
    if not found.sound:
        raise no_layout(request.gpus, request.fixed, found, run)
    answer = SearchAnswer(request, found, costs, costs.usable_bytes(request.gpus), clock())
    if not found.ranked:
        raise none_fits(answer, run)
    return answer


Run = Callable[[int, Mapping[str, Any]], Found]
"""Function that searches a number of GPUs with some fixed settings."""
_NEAR: Final = 64
"""Distance up to which other numbers of GPUs are tried for a sound layout."""
_MOST: Final = 16384
"""Largest number of GPUs that is tried: searching it takes seconds."""


def no_layout(gpus: int, fixed: Mapping[str, Any], found: Found, run: Run) -> UserError:
    """Return the error for GPUs of which no layout is valid; `run` searches other numbers of GPUs."""
    having = " with " + " and ".join(f"{key} {_word(value)}" for key, value in fixed.items()) if fixed else ""
    head = f"--gpus is {gpus} but no layout of so many GPUs{having} is sound"
    why = f" ({found.refusals[0].example}: {found.refusals[0].sentence.rstrip('.')})" if found.refusals else ""
    for key, value in fixed.items():
        if run(gpus, _without(fixed, key)).sound:
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


def none_fits(answer: SearchAnswer, run: Run) -> UserError:
    gpus, fixed, found = answer.request.gpus, answer.request.fixed, answer.found
    hardware, usable = answer.request.hardware, answer.usable_bytes
    assert found.nearest is not None
    nearest = answer.costs.evaluate(found.nearest)
    short = nearest.peak - usable
    head = (
        f"None of the {found.sound:,} sound layouts of {gpus:,} × {hardware.name} fits into {format_bytes(usable)}: "
        f"the nearest, {nearest.choice}, needs {format_bytes(nearest.peak)}, {format_bytes(short)} too much "
        f"({answer.costs.largest_part(nearest.choice)})"
    )
    ways = [f"devices of {format_bytes(hardware.memory_bytes + short)}"]
    for key in fixed:
        if run(gpus, _without(fixed, key)).ranked:
            ways.insert(0, f"no --fix {key}={_word(fixed[key])}")
    for larger in (gpus << power for power in range(1, 11)):
        if larger > max(_MOST, 2 * gpus):
            break
        if run(larger, fixed).ranked:
            between = [int(larger * part) for part in (0.625, 0.75, 0.875) if larger * part % 1 == 0]
            enough = next((count for count in between if run(count, fixed).ranked), larger)
            ways.insert(0, f"{enough:,} of them (--gpus {enough})")
            break
    return UserError(f"{head}; it takes {' or '.join(ways)}.")


def _without(fixed: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {other: value for other, value in fixed.items() if other != key}


def _around(gpus: int) -> Iterator[int]:
    """Yield the nearest numbers, the larger of two first."""
    for distance in range(1, _NEAR + 1):
        yield gpus + distance
        if gpus > distance:
            yield gpus - distance


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


_HEAD: Final = "# Written by threefold plan"
"""First line of files that may be overwritten."""


def config_text(
    config: Config, choice: LayoutChoice, request: str, comments: list[str], steps: int | None = None
) -> str:
    """Return a config as YAML: its given settings in the layout that was found, with the options of `threefold plan`
    and other comments above. `steps` are those of the requested number of tokens; None keeps the config's."""
    sections = without_layout(config)
    for name, key in KEYS.items():
        section, setting = key.split(".")
        if name != "accumulation":  # follows from the batch sizes
            sections[section][setting] = getattr(choice, name)
    if steps is not None:
        sections["train"].pop("epochs", None)
        sections["train"]["max_steps"] = steps
    header = "".join(f"# {line}\n" for line in comments)
    return f"{_HEAD} {request}.\n{header}" + to_yaml({name: values for name, values in sections.items() if values})


def require_plan_file(path: Path) -> None:
    """Check, before the search, that a file can be written without overwriting one of the user's."""
    if path.is_dir():
        raise UserError(f"{shown(path)} is a folder; name a file in it, such as {shown(path / 'best.yaml')}.")
    if not path.parent.is_dir():
        raise UserError(f"{shown(path)} cannot be written as {shown(path.parent)} is not a folder; make it first.")
    if path.is_file() and first_bytes(path, len(_HEAD)) != _HEAD.encode():
        names = (path.with_name(f"{path.stem}-planned{number}{path.suffix}") for number in ("", *range(2, 10**6)))
        free = next(name for name in names if not name.exists())
        raise UserError(
            f"{shown(path)} exists already and threefold plan has not written it; name another file, such as "
            f"{shown(free)}."
        )
