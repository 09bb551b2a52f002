"""Pictures: areas of a timeline are shares of time, bars of memory name every cause, and wrong paths are refused."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from threefold.errors import UserError
from threefold.planner.pictures import CAUSES, KINDS, OF_ACTIVATIONS, TimeSpan, draw_memory, draw_timeline, spans_of
from threefold.planner.schedule import Timeline, find_planned, program_of, share_of_ranks, simulate
from threefold.planner.stage_memory import StageMemory
from threefold.report import figures as style


def simulated(name: str, pp: int, chunks: int, count: int) -> Timeline:
    ranks = find_planned(name).stage_ranks(pp, chunks)
    times = share_of_ranks(ranks, [18.0] * pp, [17.0] * pp, [9.0] * pp)
    return simulate(program_of(name, pp, chunks, count), times, 0.6)


def areas(path: Path) -> dict[str, int]:
    """Pixels of each colour of a picture."""
    pixels = np.rint(imread(path)[..., :3] * 255).astype(np.int64) @ np.array([65536, 256, 1])
    colors = {**KINDS, "wait": style.FAINT}
    return {kind: int((pixels == int(color[1:], 16)).sum()) for kind, color in colors.items()}


@pytest.mark.parametrize(("name", "kinds"), [("zb-h2", 3)])
def test_areas_are_shares_of_the_time(name: str, kinds: int, tmp_path: Path) -> None:
    timeline = simulated(name, 4, 1, 12)
    spans = spans_of(timeline)
    draw_timeline(tmp_path / "a.png", spans, "a title")
    found = areas(tmp_path / "a.png")
    total = 4 * timeline.length
    expected = {kind: sum(span.end - span.start for span in spans if span.kind == kind) / total for kind in KINDS}
    expected["wait"] = timeline.idle
    assert sum(share > 0 for share in expected.values()) == kinds + 1
    everything = sum(found.values())
    for kind, share in expected.items():  # but for numbers and edges
        assert found[kind] / everything == pytest.approx(share, abs=0.04), kind


def test_spans_of_a_real_run(tmp_path: Path) -> None:
    """By a clock, with kinds and labels of any text, and ranks of which one does nothing."""
    spans = [
        TimeSpan(0, "forward", "0", 1e9, 1e9 + 0.25),
        TimeSpan(2, "optimizer", "", 1e9 + 0.25, 1e9 + 0.5),
        TimeSpan(2, "data loading", "a long label $that$ does not fit", 1e9 + 0.5, 1e9 + 0.51),
    ]
    draw_timeline(tmp_path / "run.png", spans, "rank 2 waits", called="rank")
    found = areas(tmp_path / "run.png")
    assert found["forward"] == pytest.approx(found["optimizer"], rel=0.1)
    assert found["other"] > 0
    assert found["wait"] > 3 * found["forward"]
    draw_timeline(tmp_path / "empty.png", [], "no spans")


def test_later_stages_of_a_rank_are_lighter(tmp_path: Path) -> None:
    draw_timeline(tmp_path / "a.png", spans_of(simulated("interleaved", 2, 2, 4)), "two stages a rank")
    pixels = imread(tmp_path / "a.png")[..., :3]
    first, second = (style.lighter(KINDS["forward"], share) for share in (0.0, 0.25))
    counts = [int((np.abs(pixels - color).max(axis=-1) < 0.004).sum()) for color in (first, second)]
    assert counts[0] == pytest.approx(counts[1], rel=0.1)


def test_labels_leave_room_beside_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two digits too; a label that does not fit is left out, so that neighbours never touch."""
    drawn: list[Figure] = []
    monkeypatch.setattr("threefold.report.figures.save", lambda figure, path: drawn.append(figure))
    for count, labelled in ((12, True), (40, False)):
        timeline = simulated("zbv", 4, 2, count)
        draw_timeline(tmp_path / "a.png", spans_of(timeline), "a title")
        figure = drawn.pop()
        figure.draw_without_rendering()
        axes = figure.axes[0]
        per_ms = axes.bbox.width / timeline.length
        times = {"forward": 18 / 2, "backward input": 17 / 2, "backward weight": 9 / 2}
        narrowest, widest = (each(times.values()) * per_ms for each in (min, max))
        boxes = [text.get_window_extent() for text in axes.texts if text.get_text().isdigit()]
        assert bool(boxes) == labelled
        assert all(box.width < widest - 2 for box in boxes)
        by_row: dict[int, list[tuple[float, float]]] = {}
        for box in boxes:
            by_row.setdefault(round(box.y0 / 20), []).append((box.x0, box.x1))
        for row in by_row.values():
            row.sort()
            assert all(after - end > 0.25 * narrowest for (_, end), (after, _) in pairwise(row))


def test_svg_and_a_large_pipeline(tmp_path: Path) -> None:
    draw_timeline(tmp_path / "small.svg", spans_of(simulated("1f1b", 2, 1, 4)), "small")
    assert "<svg" in (tmp_path / "small.svg").read_text()
    draw_timeline(tmp_path / "large.svg", spans_of(simulated("1f1b", 16, 1, 130)), "4,160 spans as an image")
    assert "<image" in (tmp_path / "large.svg").read_text()
    assert (tmp_path / "large.svg").stat().st_size < 2_000_000


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("a.jpg", "must end in .png or .svg; use {folder}/a.png."),
        ("a", "must end in .png or .svg; use {folder}/a.png."),
        ("nowhere/a.png", "there is no folder {folder}/nowhere."),
        ("folder.png", "cannot be written: that is a folder."),
    ],
)
def test_paths_that_are_refused(name: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UserError) as refused:
        draw_timeline(tmp_path / name, [], "title")
    assert str(refused.value).endswith(sentence.format(folder=tmp_path))


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
