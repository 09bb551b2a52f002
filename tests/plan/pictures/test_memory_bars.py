"""The picture of the memory of stages."""

from pathlib import Path

import pytest

from threefold.errors import UserError
from threefold.plan.memory.stages import StageMemory
from threefold.plan.pictures.memory_bars import CAUSES, draw_memory


def stages(count: int) -> list[dict[str, int]]:
    sizes = [size << 30 for size in (9, 8, 7, 6, 5, 4, 3, 2)]
    return [StageMemory(rank, *sizes).causes for rank in range(count)]


def test_every_cause_has_a_colour() -> None:
    assert list(stages(1)[0]) == list(CAUSES)


def test_it_says_every_cause_and_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "memory.svg"
    draw_memory(path, stages(3), 60 * 10**9, "Memory")
    text = path.read_text()
    for words in (*CAUSES, "usable 60 GB", "pp rank", "47.2"):
        assert f"<!-- {words} -->" in text, words


def test_many_stages_and_a_wrong_path(tmp_path: Path) -> None:
    path = tmp_path / "memory.png"
    draw_memory(path, stages(64), 80 * 10**9, "Memory")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"must end in \.png or \.svg"):
        draw_memory(tmp_path / "memory.jpg", stages(1), 1, "Memory")
