"""The names that other projects give to settings."""

import pytest

from threefold.config.loading import known_keys, nearest_setting
from threefold.config.schema import Config
from threefold.convert.setting_names import SETTING_NAMES


@pytest.mark.parametrize("ours", SETTING_NAMES)
def test_a_name_of_another_project_leads_to_the_setting(ours: str) -> None:
    known = known_keys()
    for theirs in SETTING_NAMES[ours].split():
        assert theirs not in [key.split(".")[1] for key in known]
        assert nearest_setting(f"train.{theirs}", known, list(Config.model_fields)).split(".")[1] == ours
