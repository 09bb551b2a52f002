"""Requests to the search: objective, fixed settings and number of tokens, and the budget of training on these."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from threefold.config.document import parse_value
from threefold.config.loading import config_of
from threefold.config.model import OWN
from threefold.config.schedules import SCHEDULES, is_own_schedule
from threefold.config.schema import Config
from threefold.config.section import MOST_STEPS, divisors, nearest_multiple
from threefold.data.dataset import resolve_without_data
from threefold.errors import UserError
from threefold.files import shown
from threefold.models.family import model_plan
from threefold.planner.estimate import own_system
from threefold.planner.hardware import Hardware
from threefold.planner.search.space import KEYS, Space, alone
from threefold.planner.systems import System, find_system
from threefold.plugins import one_of

_SCALES: Final = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_TOKENS: Final = re.compile(r"(\d+(?:\.\d+)?(?:E\d{1,2})?)([KMBT]?)")
_HOUR, _DAY = 3600, 86400


@dataclass(frozen=True)
class Budget:
    """Whole steps of the global batch for a number of tokens, and their seconds; the price is per GPU, if known."""

    tokens: int
    steps: int
    seconds: float
    gpus: int
    dollars_per_hour: float | None

    @property
    def days(self) -> float:
        return self.seconds / _DAY

    @property
    def gpu_hours(self) -> float:
        return self.seconds * self.gpus / _HOUR

    @property
    def dollars(self) -> float | None:
        return None if self.dollars_per_hour is None else self.gpu_hours * self.dollars_per_hour


def parse_tokens(text: str) -> int:
    """Parse a number of tokens such as `300B`, `1.4T`, `20e9` or `5000000`.

    Raises:
        UserError: the text is not a number of tokens above 0.
    """
    match = _TOKENS.fullmatch(text.strip().upper().replace("_", "").replace(",", ""))
    count = round(float(match[1]) * _SCALES[match[2]]) if match else 0
    if not match or not 0 < count <= 10**18:
        raise UserError(f"--tokens is {shown(text)} but must be a number of tokens above 0; write it as 300B or 1.4T.")
    return count


def budget_of(tokens: int, tokens_per_step: int, step_seconds: float, gpus: int, dollars: float | None) -> Budget:
    """Return the budget of training in whole steps.

    Args:
        tokens: tokens to train on.
        tokens_per_step: tokens of the global batch.
        step_seconds: seconds of a step.
        gpus: GPUs that compute it.
        dollars: price per hour and GPU; None if unknown.
    """
    steps = -(-tokens // tokens_per_step)
    return Budget(tokens, steps, steps * step_seconds, gpus, dollars)


@dataclass(frozen=True)
class Objective:
    """Criterion by which layouts are ranked.

    Attributes:
        name, title: name on the command line, and description of the best layout.
        counts: function from the available GPUs to the numbers of GPUs that a layout may use.
        weight: function from the GPUs used to a factor of the seconds of a step; the smallest product ranks first.
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


def find_objective(name: str) -> Objective:
    """Return the objective of a name.

    Raises:
        UserError: no objective has this name.
    """
    if name not in OBJECTIVES:
        raise UserError(f"--objective is {shown(name)} but must be {one_of(name, list(OBJECTIVES))}.")
    return OBJECTIVES[name]


@dataclass(frozen=True)
class Request:
    """Request to search the layouts of a config.

    Attributes:
        given, config: config as loaded, and resolved on one rank.
        gpus, hardware: number of available devices, and their type.
        objective: criterion of the best layout.
        fixed: values of settings that the layouts must have, by `section.key`.
        tokens: tokens to train on; None if neither the request nor the config says.
        system: training system whose kernels and memory are assumed.
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
        """Return the search space with these settings fixed."""
        own = self.given.parallel.schedule
        schedules = [*SCHEDULES, *([own] if is_own_schedule(own) else [])]
        layers = model_plan(self.config.model, self.config.data.sequence_length).layers
        return Space(self.config, len(layers), fixed, schedules)


def read_request(
    given: Config,
    gpus: int,
    hardware: Hardware,
    objective: str,
    fix: Sequence[str],
    tokens: str | None = None,
    system: str | None = None,
) -> Request:
    """Read the options of a request.

    Args:
        given: config as loaded.
        gpus: available devices.
        hardware: type of the devices.
        objective, fix, tokens, system: values on the command line; None for an option that was not given. The default
            system is this package, which the config is for.

    Raises:
        UserError: an option is invalid, or the config is invalid in every layout.
    """
    row, fixed = find_objective(objective), parse_fixed(fix)
    wanted = None if tokens is None else parse_tokens(tokens)
    _require_nodes(gpus, hardware)
    if given.model.architecture == OWN:
        raise UserError(
            "model.architecture is own, whose operations no formula knows; plan with gpt or llama of the same sizes."
        )
    config = resolve_without_data(alone(given))
    hardware.matrix_rate(config.precision.dtype)
    most = MOST_STEPS * config.train.global_batch_size * config.data.sequence_length
    if tokens is not None and wanted is not None and wanted > most:
        raise UserError(f"--tokens is {shown(tokens)} but train.max_steps can read {most:,} at most; use {most}.")
    kernels = own_system(config, hardware) if system is None else find_system(system)
    if wanted is None and config.train.max_steps < MOST_STEPS:
        wanted = config.train.max_steps * config.train.global_batch_size * config.data.sequence_length
    return Request(given, config, gpus, hardware, row, fixed, wanted, kernels)


def _require_nodes(gpus: int, hardware: Hardware) -> None:
    if not hardware.fills_nodes(gpus):
        per_node = hardware.gpus_per_node
        raise UserError(
            f"--gpus is {gpus} but nodes of {hardware.name} have {per_node} and are rented whole; use "
            f"{nearest_multiple(gpus, per_node)}."
        )


def require_no_layout(overrides: Sequence[str]) -> None:
    """Raise an error if an override sets what the search chooses, since it would have no effect.

    Args:
        overrides: overrides as `section.key=value`.

    Raises:
        UserError: an override is such a setting.
    """
    for override in overrides:
        if override.partition("=")[0].strip() in KEYS.values():
            raise UserError(
                f"--set {shown(override)}: threefold plan chooses this setting itself; use --fix {shown(override)} "
                "for layouts that have it."
            )


def parse_fixed(texts: Sequence[str]) -> dict[str, Any]:
    """Parse the settings that layouts must have, each as `section.key=value`.

    Raises:
        UserError: a key is no setting of a layout, or its value is not YAML or invalid for the setting.
    """
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
