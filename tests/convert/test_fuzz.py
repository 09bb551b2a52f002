"""Scripts and configs of other systems, damaged at random: each ends in a sentence or in a config."""

import os
import random
from pathlib import Path

import pytest

from tests.convert.foreign_configs import (
    COLOSSAL,
    FLEET_BASE,
    FLEET_FLAGS,
    HYBRID_GPT,
    LLAMA,
    LOGGED_RUN,
    MEGATRON,
    MEGATRON_EXPECTED,
    MEGATRON_SCRIPTS,
)
from threefold.config import load_config
from threefold.convert.conversion import convert, unmapped_lines
from threefold.errors import UserError

DAMAGED_OF_EACH = 16
_SEED = 10
_SOURCES = {
    **{f"{name}.sh": MEGATRON_SCRIPTS[name] for name in MEGATRON_EXPECTED},
    "megatron.sh": MEGATRON,
    "llama.txt": LLAMA,
    "fleet.sh": FLEET_FLAGS,
    "fleet.yaml": LOGGED_RUN,
    "base.yaml": FLEET_BASE,
    "colossal.py": COLOSSAL,
    "hybrid.py": HYBRID_GPT,
}
_SIGNS = "' \" $( ` (( )) ${ } ( ) [[ if <<EOF | > & \\ -- = $ # && ;; : [ { - !!python/name:os"
_VALUES = "1e999 nan -1 0 true null None"
_PIECES = (
    *_SIGNS.split(),
    *_VALUES.split(),
    *("\0", "\x1b", "é", "\n", "\r\n", "&a *a", ": ["),
    *("9" * 400, "-" * 3000, "[" * 3000, "(" * 3000, "{ " * 500),
)


def _damaged(text: str, chance: random.Random) -> str:
    for _ in range(chance.choice((1, 1, 2, 5))):
        text = text or "x"
        place = chance.randrange(len(text))
        way = chance.randrange(4)
        if way == 0:
            text = text[:place] + chance.choice(_PIECES) + text[place:]
        elif way == 1:
            text = text[:place] + text[place + chance.randrange(1, 60) :]
        elif way == 2:
            words = text.split(" ")
            words[chance.randrange(len(words))] = chance.choice(_PIECES)
            text = " ".join(words)
        else:
            text = text[: max(1, place)]
    return text or "x"


def _outcome(file: Path, folder: Path) -> str | None:
    """The sentence that a conversion ends with; None where there is a config, which can be read."""
    try:
        found = convert(file)
    except UserError as error:
        return str(error)
    assert len("\n".join(unmapped_lines(found, file))) < 200_000
    (folder / "converted.yaml").write_text(found.to_yaml())
    load_config(folder / "converted.yaml")
    return None


@pytest.mark.slow
@pytest.mark.parametrize("name", _SOURCES)
def test_damaged_files_end_in_a_sentence_or_a_config(tmp_path: Path, name: str) -> None:
    chance = random.Random(f"{_SEED} {name}")
    for number in range(DAMAGED_OF_EACH):
        text = _damaged(_SOURCES[name], chance)
        file = tmp_path / name
        file.write_bytes(text.encode("utf-8", "surrogateescape"))
        told = _outcome(file, tmp_path)
        assert told is None or "\n" not in told, (number, text)
        assert told is None or len(told) < 1500, (number, told)


@pytest.mark.slow
def test_noise_ends_in_a_sentence(tmp_path: Path) -> None:
    chance = random.Random(_SEED)
    for number in range(60):
        file = tmp_path / f"noise{chance.choice(['.sh', '.py', '.yaml', ''])}"
        file.write_bytes(chance.randbytes(chance.randrange(1, 3000)))
        told = _outcome(file, tmp_path)
        assert told is not None, number
        assert "\n" not in told


@pytest.mark.parametrize("name", ["train.sh", "config.py", "config.yaml"])
def test_what_is_no_file_is_refused_without_a_hang(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(UserError, match="no regular file"):
        convert(tmp_path / name)
    with pytest.raises(UserError, match="it is a folder"):
        convert(tmp_path)
    (tmp_path / "zero.sh").symlink_to("/dev/zero")
    with pytest.raises(UserError, match="no regular file"):
        convert(tmp_path / "zero.sh")
