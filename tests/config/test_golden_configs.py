"""Examples, presets and features mean what they meant when their resolved settings were recorded.

After an intended change, record anew with `python -m tests.config.test_golden_configs`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest

from threefold.config import Config, load_config, resolve
from threefold.config.loading import config_of
from threefold.config.presets import PresetName
from threefold.planner.reference import FEATURES, config_with

FILE = Path(__file__).parent / "data" / "configs.json"
EXAMPLES = Path(__file__).parents[2] / "examples"
Settings = dict[str, Any]
"""Values by `section.key`, in the order of a stored config."""


def configs() -> dict[str, Settings]:
    """Resolve all examples, presets and features."""
    made = {f"examples/{path.name}": resolve(load_config(path), 8192) for path in sorted(EXAMPLES.glob("*.yaml"))}
    for preset in get_args(PresetName):
        sections = {"model": {"preset": preset}, "data": {"path": "tokens", "sequence_length": 512}}
        made[f"preset {preset}"] = resolve(config_of(sections), 1000)
    for feature in FEATURES:
        made[f"feature {feature.name}"] = config_with((feature,))
    return {name: _flat(config) for name, config in made.items()}


def read() -> dict[str, Settings]:
    kept = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: {key: {**kept["base"], **changes}[key] for key in kept["orders"][order]}
        for name, (order, changes) in kept["configs"].items()
    }


def write(found: Mapping[str, Settings]) -> None:
    """Write the golden file: settings of one config, differences of the others from it, and their orders."""
    base = next(iter(found.values()))
    orders = list(dict.fromkeys(tuple(settings) for settings in found.values()))
    lines = []
    for name, settings in found.items():
        changes = {key: value for key, value in settings.items() if key not in base or value != base[key]}
        lines.append(f"{json.dumps(name)}: {json.dumps([orders.index(tuple(settings)), changes])}")
    text = ",\n".join(lines)
    FILE.write_text(
        f'{{"base": {json.dumps(base)},\n"orders": {json.dumps(orders)},\n"configs": {{\n{text}\n}}}}\n',
        encoding="utf-8",
    )


def _flat(config: Config) -> Settings:
    plain = json.loads(json.dumps(config.sections()))
    return {f"{section}.{key}": value for section, values in plain.items() for key, value in values.items()}


RECORDED = read()


@pytest.fixture(scope="module")
def found() -> dict[str, Settings]:
    return configs()


@pytest.mark.parametrize("name", RECORDED)
def test_a_config_resolves_to_the_recorded_settings(found: dict[str, Settings], name: str) -> None:
    assert found[name] == RECORDED[name], "python -m tests.config.test_golden_configs records anew"
    assert list(found[name]) == list(RECORDED[name]), "the order of the settings in a stored config has changed"


def test_every_example_and_preset_is_recorded() -> None:
    """New features may be added; `docs/compatibility.md` is where they are kept."""
    wanted = {f"examples/{path.name}" for path in EXAMPLES.glob("*.yaml")}
    wanted |= {f"preset {preset}" for preset in get_args(PresetName)}
    assert wanted <= set(RECORDED)
    assert len(RECORDED) >= 70


def test_demo_runs_on_eight_processes_in_all_three_directions() -> None:
    parallel = load_config(EXAMPLES / "demo.yaml").parallel
    assert (parallel.dp, parallel.tp, parallel.pp) == (2, 2, 2)


if __name__ == "__main__":
    write(configs())
