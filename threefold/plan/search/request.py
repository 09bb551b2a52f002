"""A request to plan, as it is given on the command line."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from threefold.config.divisors import nearest_multiple
from threefold.config.document import parse_value
from threefold.config.loading import config_of
from threefold.config.model import OWN
from threefold.config.schedules import SCHEDULES, is_schedule_file
from threefold.config.schema import Config
from threefold.config.section import MOST_STEPS
from threefold.data.vocabulary import resolve_without_data
from threefold.errors import UserError
from threefold.files import shown
from threefold.models.registry import model_plan
from threefold.plan.cost.estimate import own_system
from threefold.plan.cost.system import System, find_system
from threefold.plan.hardware.entry import Hardware
from threefold.plan.search.budget import parse_tokens
from threefold.plan.search.choice import KEYS
from threefold.plan.search.in_layout import alone
from threefold.plan.search.objectives import Objective, find_objective
from threefold.plan.search.space import Space
from threefold.plugins import one_of


@dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
        given: the config as loaded.
        config: the same on one rank, resolved.
        gpus: devices that there are.
        hardware: of which type.
        objective: what the best layout has.
        fixed: settings that the layouts must have, `section.key` → value.
        tokens: to train on; None where neither the request nor the config says.
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
        """What there is to choose from, with these settings fixed."""
        own = self.given.parallel.schedule
        schedules = [*SCHEDULES, *([own] if is_schedule_file(own) else [])]
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
    """Read what was given for each option.

    Args:
        given: the config as loaded.
        gpus: devices that there are.
        hardware: of which type.
        objective, fix, tokens, system: as on the command line; None where an option was not given. The system is then
            this package, which the config is for.

    Raises:
        UserError: one of them is impossible, or the config in any layout.
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
    """Check that so many devices fill nodes."""
    if not hardware.fills_nodes(gpus):
        per_node = hardware.gpus_per_node
        raise UserError(
            f"--gpus is {gpus} but nodes of {hardware.name} have {per_node} and are rented whole; use "
            f"{nearest_multiple(gpus, per_node)}."
        )


def require_no_layout(overrides: Sequence[str]) -> None:
    """Check that no override is of a setting that the search chooses, which would have no effect.

    Args:
        overrides: `section.key=value` each.

    Raises:
        UserError: one is.
    """
    for override in overrides:
        if override.partition("=")[0].strip() in KEYS.values():
            raise UserError(
                f"--set {shown(override)}: threefold plan chooses this setting itself; use --fix {shown(override)} "
                "for layouts that have it."
            )


def parse_fixed(texts: Sequence[str]) -> dict[str, Any]:
    """The settings that layouts must have, from `section.key=value` each.

    Raises:
        UserError: one is no setting of a layout, or its value is not YAML or no value of the setting.
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
