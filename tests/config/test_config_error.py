"""The names that other projects give to settings."""

import pytest

from threefold.config.loading import _ELSEWHERE, known_keys, nearest_setting
from threefold.config.schema import Config


@pytest.mark.parametrize("ours", _ELSEWHERE)
def test_a_name_of_another_project_leads_to_the_setting(ours: str) -> None:
    known = known_keys()
    for theirs in _ELSEWHERE[ours].split():
        assert theirs not in [key.split(".")[1] for key in known]
        assert nearest_setting(f"train.{theirs}", known, list(Config.model_fields)).split(".")[1] == ours
