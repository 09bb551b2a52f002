"""Configs with every setting filled in, and the golden file that holds them.

After an intended change, rewrite the file with `python -m tests.support.golden_configs`.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from threefold.config import Config, load_config, resolve
from threefold.config.loading import config_of
from threefold.config.presets import PresetName
from threefold.config.reference import FEATURES, config_with

FILE = Path(__file__).parents[1] / "config" / "data" / "configs.json"
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


if __name__ == "__main__":
    write(configs())
