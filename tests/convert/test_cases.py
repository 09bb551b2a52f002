"""Short files of other systems: the settings, notes and sentences that `data/cases.toml` says become of each."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from threefold.config import load_config
from threefold.convert.conversion import convert
from threefold.errors import UserError

_GIVEN = tomllib.loads((Path(__file__).parent / "data" / "cases.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", _GIVEN["cases"])
def test_a_file_becomes_what_its_case_says(tmp_path: Path, name: str) -> None:
    case: dict[str, Any] = _GIVEN["cases"][name]
    base = _GIVEN["bases"].get(case.get("base"), {"file": case.get("file"), "text": "{}"})
    file = tmp_path / base["file"]
    file.write_text(base["text"].replace("{}", case["text"]))
    if "sentence" in case:
        with pytest.raises(UserError) as error:
            convert(file)
        assert case["sentence"] in str(error.value)
        assert "\n" not in str(error.value)
        return
    found = convert(file, world_size=case.get("world"))
    (tmp_path / "converted.yaml").write_text(found.to_yaml())
    settings = _flat(load_config(tmp_path / "converted.yaml").sections())
    assert {key: settings[key] for key in case.get("settings", {})} == case.get("settings", {})
    assert not _flat(found.sections).keys() & set(case.get("absent", ()))
    reasons = {note.key: note.reason for note in found.notes}
    for key, reason in case.get("notes", {}).items():
        assert reason in reasons[key] if reason else key not in reasons
    if "unsupported" in case:
        assert ({note.key for note in found.unsupported}, found.invalid) == (set(case["unsupported"]), "")


def _flat(sections: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}
