"""Examples, presets and features mean what they meant when their resolved settings were recorded."""

from typing import get_args

import pytest

from tests.support.golden_configs import EXAMPLES, Settings, configs, read
from threefold.config.presets import PresetName

RECORDED = read()


@pytest.fixture(scope="module")
def found() -> dict[str, Settings]:
    return configs()


@pytest.mark.parametrize("name", RECORDED)
def test_a_config_resolves_to_the_recorded_settings(found: dict[str, Settings], name: str) -> None:
    assert found[name] == RECORDED[name], "see tests/support/golden_configs.py for how to record anew"
    assert list(found[name]) == list(RECORDED[name]), "the order of the settings in a stored config has changed"


def test_every_example_and_preset_is_recorded() -> None:
    """New features may be added; `docs/compatibility.md` is where they are kept."""
    wanted = {f"examples/{path.name}" for path in EXAMPLES.glob("*.yaml")}
    wanted |= {f"preset {preset}" for preset in get_args(PresetName)}
    assert wanted <= set(RECORDED)
    assert len(RECORDED) >= 70
