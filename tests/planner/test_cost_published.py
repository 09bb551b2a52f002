"""Published training steps: the cost model is as near to them as is promised."""

from statistics import median

import pytest

from benchmarks.planner.rows import published_rows
from benchmarks.planner.steps import Predicted, predictions


@pytest.fixture(scope="module")
def predicted() -> list[Predicted]:
    return predictions()


def test_steps_given_in_full(predicted: list[Predicted]) -> None:
    errors = [abs(each.error) for each in predicted if each.row.given]
    by_default = [abs(each.default_error) for each in predicted if each.row.given]
    assert len(errors) == 19
    assert median(errors) <= 0.05
    assert max(errors) <= 0.15
    assert max(by_default) <= 0.15


def test_all_steps(predicted: list[Predicted]) -> None:
    assert len(predicted) > 400
    assert median(abs(each.error) for each in predicted) <= 0.05
    assert median(abs(each.default_error) for each in predicted) <= 0.06


@pytest.mark.parametrize(("hardware", "most"), [("a100-80", 0.06), ("a100-40", 0.04), ("h100", 0.04)])
def test_each_type_of_gpu(predicted: list[Predicted], hardware: str, most: float) -> None:
    rows = [each for each in predicted if each.row.hardware == hardware]
    assert median(abs(each.default_error) for each in rows) <= most
    assert abs(median(each.default_error for each in rows)) <= 0.05  # neither side


def test_the_order_of_layouts_is_the_published_one(predicted: list[Predicted]) -> None:
    """Of two layouts of a model on the same GPUs of which one is a tenth faster, the same is predicted to be."""
    tables: dict[tuple[str, str], list[Predicted]] = {}
    for each in predicted:
        if each.row.file == "hagemann":
            tables.setdefault((each.row.title, each.row.system), []).append(each)
    agreed = [
        (one.by_default < other.by_default) == (_seconds(one) < _seconds(other))
        for rows in tables.values()
        for number, one in enumerate(rows)
        for other in rows[:number]
        if max(_seconds(one), _seconds(other)) > 1.1 * min(_seconds(one), _seconds(other))
    ]
    assert len(agreed) > 500
    assert sum(agreed) / len(agreed) > 0.85


def _seconds(each: Predicted) -> float:
    assert each.row.seconds is not None
    return each.row.seconds


def test_error_bands_hold(predicted: list[Predicted]) -> None:
    """Nine of ten published steps are inside the band of an estimate, outside of one congested network."""
    from threefold.planner.hardware import find_hardware

    for name in ("a100-80", "a100-40", "h100"):
        band = find_hardware(name).uncertainty
        rows = [each for each in predicted if each.row.hardware == name and "256 GPUs" not in each.row.title]
        inside = [1 / (1 + band) <= _seconds(each) / each.by_default <= 1 + band for each in rows]
        assert sum(inside) / len(inside) >= 0.85


def test_every_row_is_a_config() -> None:
    rows = published_rows()
    assert sum(row.seconds is None for row in rows) > 200  # out of memory
    assert all(row.source and row.config().parallel.dp for row in rows[::20])
