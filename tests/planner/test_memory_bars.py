"""The picture of the memory of stages."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from threefold.errors import UserError
from threefold.planner.pictures import CAUSES, OF_ACTIVATIONS, draw_memory
from threefold.planner.stage_memory import StageMemory


def stages(count: int) -> list[dict[str, int]]:
    sizes = [size << 30 for size in (9, 8, 7, 6, 5, 4, 3, 2)]
    return [StageMemory(rank, *sizes).causes for rank in range(count)]


def test_every_cause_has_a_colour() -> None:
    assert list(stages(1)[0]) == list(CAUSES)


def test_it_says_every_cause_and_the_limit(tmp_path: Path) -> None:
    path = tmp_path / "memory.svg"
    draw_memory(path, stages(3), 60 * 10**9, "Memory")
    text = path.read_text()
    causes = [f"activations: {OF_ACTIVATIONS[cause]}" if cause in OF_ACTIVATIONS else cause for cause in CAUSES]
    for words in (*causes, "limit 60.0 GB", "pp rank", "47.2"):
        assert f"<!-- {words} -->" in text, words


def test_the_title_is_inside_and_one_rank_has_one_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    monkeypatch.setattr("threefold.report.figures.save", lambda figure, path: drawn.append(figure))
    title = "Memory of a model in dp 8 · tp 4 · pp 4 · cp 2 on NVIDIA H100 SXM 96 GB HBM2e, limited to 500 W\nIt fits"
    for count in (1, 4):
        draw_memory(tmp_path / "memory.png", stages(count), 60 * 10**9, title)
        figure = drawn.pop()
        figure.draw_without_rendering()
        [axes], [legend] = figure.axes, figure.legends
        assert [int(tick) if tick == int(tick) else tick for tick in axes.get_xticks()] == list(range(count))
        [written] = [text for text in figure.findobj(Text) if text.get_text().startswith("Memory of a model")]
        assert written.get_text().count("\n") == 2
        box = written.get_window_extent()
        assert box.x1 <= figure.bbox.x1
        assert not box.overlaps(legend.get_window_extent())


def test_many_stages_and_a_wrong_path(tmp_path: Path) -> None:
    path = tmp_path / "memory.png"
    draw_memory(path, stages(64), 80 * 10**9, "Memory")
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(UserError, match=r"must end in \.png or \.svg"):
        draw_memory(tmp_path / "memory.jpg", stages(1), 1, "Memory")
