"""What the loss curve shows: each line where it belongs, and tokens by the name that the summary has for them."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from threefold.report.loss_curve import draw

STEPS = 120
SPAN = 7
"""Steps of the running mean of so many."""


@pytest.fixture
def axes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Axes:
    """Of the curve of a loss that falls by a hundredth in each step; of 10 tokens a step, every fourth is skipped."""
    saved: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *arguments: Any, **options: Any) -> None:
        save(figure, *arguments, **options)
        saved.append(figure)

    monkeypatch.setattr(Figure, "savefig", keep)
    metrics = [
        {"step": step, "loss": 5 - step / 100, "tokens": 10, "skipped": step % 4 == 0} for step in range(1, STEPS + 1)
    ]
    draw(tmp_path / "loss.png", [*metrics, {"step": 60, "valid_loss": 4.5}], 256, "title")
    assert (tmp_path / "loss.png").stat().st_size > 1000
    (figure,) = saved
    return figure.axes[0]


def test_the_running_mean_lies_on_the_curve(axes: Axes) -> None:
    """A straight line's means are the line itself, whatever the span: shifted or shrunk at an end they are not."""
    lines = {str(line.get_label()): line.get_xydata().tolist() for line in axes.get_lines()}
    assert lines["training, each step"] == [[step, 5 - step / 100] for step in range(1, STEPS + 1)]
    mean = lines[f"training, mean over {SPAN} steps"]
    assert [step for step, _ in mean] == list(range(1 + SPAN // 2, STEPS + 1 - SPAN // 2))
    assert [loss for _, loss in mean] == pytest.approx([5 - step / 100 for step, _ in mean])
    assert lines["validation"] == [[60, 4.5]]


def test_the_upper_edge_counts_the_tokens_trained_on(axes: Axes) -> None:
    (upper,) = axes.child_axes
    assert upper.get_xlabel() == "tokens trained on (counted for the loss)"
    assert axes.get_xlim() == (0, STEPS)
    assert upper.get_xlim() == pytest.approx((0, STEPS * 10 * 3 / 4))
