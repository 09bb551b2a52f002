"""Files of other systems as configs of ours: every value arrives, and nothing of theirs is dropped in silence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.convert.foreign_configs import (
    COLOSSAL,
    EXPECTED,
    FLEET,
    FLEET_BASE,
    FLEET_FLAGS,
    LLAMA,
    LOGGED_RUN,
    MEGATRON,
)
from threefold.config import Config, load_config, resolve
from threefold.convert.conversion import Converted, convert
from threefold.convert.key_mapping import KeyMapping, count, number, switch, whole
from threefold.errors import UserError


def _settings(found: Converted, folder: Path) -> dict[str, Any]:
    """What the printed YAML says, as read back from a file, resolved."""
    file = folder / "converted.yaml"
    file.write_text(found.to_yaml())
    config: Config = resolve(load_config(file), 50257)
    return {f"{section}.{key}": value for section, values in config.sections().items() for key, value in values.items()}


def _convert(folder: Path, name: str, content: str, **options: Any) -> Converted:
    (folder / name).write_text(content)
    return convert(folder / name, **options)


def _reasons(found: Converted) -> dict[str, str]:
    return {note.key: note.reason for note in found.notes}


WORLDS = {"gpt2.py": 8}
TEXTS = dict(zip(EXPECTED, (FLEET, COLOSSAL, MEGATRON, LLAMA, FLEET_FLAGS, LOGGED_RUN), strict=True))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_file_becomes_these_settings_and_the_rest_is_noted(tmp_path: Path, name: str) -> None:
    (tmp_path / "base.yaml").write_text(FLEET_BASE)
    found, expected = _convert(tmp_path, name, TEXTS[name], world_size=WORLDS.get(name)), EXPECTED[name]
    assert (found.kind, found.invalid) == (expected["kind"], "")
    assert _settings(found, tmp_path).items() >= expected["settings"].items()
    assert _reasons(found) == expected["noted"]
    assert [note.key for note in found.unsupported] == expected["unsupported"]


def test_nothing_of_a_python_file_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "run"
    code = f"open({str(marker)!r}, 'w')\nX = __import__('pathlib').Path({str(marker)!r}).touch()\nBATCH_SIZE = 4\n"
    found = _convert(tmp_path, "evil.py", code)
    assert not marker.exists()
    assert {"line 1", "X"} <= set(_reasons(found))


@pytest.mark.parametrize(("given", "kept"), [("false", False), ("True", True), (True, True), ("FALSE", False)])
def test_a_switch_may_be_a_word(given: object, kept: bool) -> None:
    assert switch(given) is kept


@pytest.mark.parametrize(("kind", "given"), [(whole, 2.5), (whole, "x"), (count, 0), (number, "nan"), (switch, "yes")])
def test_a_value_of_another_kind_is_one_sentence(kind: Callable[[Any], Any], given: object) -> None:
    with pytest.raises(UserError, match=rf"^f\.yaml: key is {given!r} but must be "):
        KeyMapping(Path("f.yaml"), {"key": given}).take("key", kind)


def test_colossal_sequence_parallelism_is_a_ring_of_context_ranks(tmp_path: Path) -> None:
    code = "parallel = dict(pipeline=2, tensor=dict(size=4, mode='sequence'))\nBATCH_SIZE = 4\nSEQ_LEN = 64\n"
    found = _convert(tmp_path, "ring.py", code, world_size=16).sections["parallel"]
    assert found == {"dp": 2, "pp": 2, "cp": 4, "cp_method": "ring"}
