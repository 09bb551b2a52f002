"""The simulator against bubbles that others have published."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from threefold.plan.schedule.orders import find_planned, program_of
from threefold.plan.schedule.simulator import share_of_ranks, simulate

DATA = Path(__file__).parents[3] / "benchmarks" / "planner" / "zero_bubble.yaml"
ROWS = yaml.safe_load(DATA.read_text())
LARGEST_ERROR = {"1f1b": 0.0001, "zb-h1": 0.0001, "zb-h2": 0.0001, "interleaved": 0.0036}


def predicted(row: dict[str, Any], name: str, chunks: int | None = None) -> float:
    pp = row["stages"]
    *passes, transfer = row["times"]
    schedule = find_planned(name)
    chunks = chunks or schedule.stages_per_rank or row["chunks"]
    times = share_of_ranks(schedule.stage_ranks(pp, chunks), *([time] * pp for time in passes))
    return simulate(program_of(schedule, pp, chunks, row["micro_batches"]), times, transfer).bubble


@pytest.mark.parametrize("name", LARGEST_ERROR)
def test_bubbles(name: str) -> None:
    assert len(ROWS) == 6
    for row in ROWS:
        assert predicted(row, name) == pytest.approx(row["bubble"][name], abs=LARGEST_ERROR[name])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row['model']}-{row['micro_batches']}")
def test_the_chunks_of_the_interleaved_runs_are_those_that_come_closest(row: dict[str, Any]) -> None:
    """The source does not say how many: with 24 and 32 layers on 8 stages, one layer a chunk is 3 and 4 chunks."""
    errors = {
        chunks: abs(predicted(row, "interleaved", chunks) - row["bubble"]["interleaved"]) for chunks in (2, 3, 4, 5)
    }
    assert min(errors, key=errors.__getitem__) == row["chunks"]
