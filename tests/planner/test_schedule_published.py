"""The simulator against bubbles that others have published."""

from typing import Any

import pytest

from benchmarks.planner.schedules import LIMITS, predicted_bubble, published_rows

ROWS = published_rows()
LARGEST_ERROR = {"1f1b": 0.0001, "zb-h1": 0.0001, "zb-h2": 0.0001, "interleaved": 0.0036}


@pytest.mark.parametrize("name", LARGEST_ERROR)
def test_bubbles(name: str) -> None:
    assert len(ROWS) == 6
    assert LARGEST_ERROR[name] <= LIMITS[name]
    for row in ROWS:
        assert predicted_bubble(row, name) == pytest.approx(row["bubble"][name], abs=LARGEST_ERROR[name])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['micro_batches']}")
def test_the_chunks_of_the_interleaved_runs_are_those_that_come_closest(row: dict[str, Any]) -> None:
    """The source does not say how many: with 24 and 32 layers on 8 stages, one layer a chunk is 3 and 4 chunks."""
    errors = {
        chunks: abs(predicted_bubble(row, "interleaved", chunks) - row["bubble"]["interleaved"])
        for chunks in (2, 3, 4, 5)
    }
    assert min(errors, key=errors.__getitem__) == row["chunks"]
