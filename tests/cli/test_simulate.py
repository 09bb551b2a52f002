"""`threefold simulate`: its numbers as JSON and as a table, its files, and what it refuses."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from threefold.cli.main import app
from threefold.config.schedules import find_schedule

PASSES = ("--forward", "18.522", "--backward-input", "18.086", "--backward-weight", "9.337", "--transfer", "0.601")
PAPER = ("--stages", "8", "--microbatches", "24", *PASSES)


def facts(threefold, *arguments: str | Path) -> dict:
    status, output, error = threefold("simulate", *arguments, "--json")
    assert (status, error) == (0, "")
    return json.loads(output)


@pytest.mark.parametrize(
    ("schedule", "bubble", "held"),
    [
        (("1f1b",), 0.2431, [8, 7, 6, 5, 4, 3, 2, 1]),
        (("zb-h1",), 0.1585, [8] * 8),
        (("zb-h2",), 0.1083, [15] * 8),
        (("interleaved", "--chunks", "3"), 0.1090, [(16 + 2 * (7 - rank) + 1) / 3 for rank in range(8)]),
    ],
)
def test_published_bubbles(threefold, schedule: tuple[str, ...], bubble: float, held: list[float]) -> None:
    found = facts(threefold, "--schedule", *schedule, *PAPER)
    assert found["bubble"] == pytest.approx(bubble, abs=1e-4)
    assert found["peak_microbatches"] == pytest.approx(held)
    work = 24 * (18.522 + 18.086 + 9.337)
    assert found["longest_stage_time"] == pytest.approx(work / (1 - found["bubble"]))
    assert found["step_time"] >= found["longest_stage_time"]
    assert found["busy_time"] == pytest.approx([work] * 8)


def test_times_of_each_stage_and_defaults(threefold) -> None:
    """Without times every pass takes 1 ms; a list is of stages; --chunks divides what a rank takes."""
    assert facts(threefold, "--stages", "4", "--microbatches", "8")["step_time"] == 3 * (8 + 3)
    unequal = facts(threefold, "--stages", "2", "--microbatches", "8", "--forward", "1,3", "--transfer", "0.5")
    assert unequal["busy_time"] == [8 * 3, 8 * 9]
    assert unequal["step_time"] == 1 + 0.5 + 8 * 9 + 0.5 + 2
    whole, halves = (
        facts(threefold, "--schedule", name, "--stages", "2", "--microbatches", "4", "--forward", "2,4")["busy_time"]
        for name in ("1f1b", "interleaved")
    )
    assert whole == halves == [4 * 6, 4 * 12]
    of_stages = ("--schedule", "interleaved", "--stages", "2", "--microbatches", "4", "--forward", "1,2,3,4")
    assert facts(threefold, *of_stages)["busy_time"] == [4 * 3 * (1 + 3), 4 * 3 * (2 + 4)]


def test_table(threefold) -> None:
    status, output, error = threefold("simulate", "--schedule", "zb-h1", *PAPER)
    assert (status, error) == (0, "")
    assert output.startswith("zb-h1: 8 stages, 24 micro-batches.\n")
    bubble, step = output.splitlines()[-2:]
    assert bubble == (
        "Bubble 15.9%: time waited within the 1,310.4 ms from the first to the last action of the longest stage."
    )
    assert step.startswith("The step takes 1,310.4 ms, in 84.1% of which a stage is busy on average; stage 0 holds the")
    status, output, _ = threefold("simulate", "--schedule", "zbv", "--stages", "4", "--microbatches", "12")
    bubble, step = output.splitlines()[-2:]
    assert bubble.startswith("Bubble 0.0%: time waited within the 36.0 ms ")
    assert step.startswith("The step takes 37.5 ms, in 96.0% of which a rank is busy ")
    status, output, _ = threefold("simulate", "--schedule", "zbv", "--stages", "40", "--microbatches", "3")
    assert "zbv: 80 stages on 40 ranks, 3 micro-batches." in output
    assert "…" in output


def test_files(threefold, tmp_path: Path) -> None:
    """The CSV file is a schedule that a run takes, and simulates as what it was made from."""
    file, picture = tmp_path / "h2.csv", tmp_path / "h2.png"
    given = facts(threefold, "--schedule", "zb-h2", *PAPER, "--csv", file, "--png", picture)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert find_schedule(str(file)).accepts(8, 24)
    again = facts(threefold, "--schedule", file, *PASSES, "--csv", file)
    assert {key: value for key, value in again.items() if key != "schedule"} == {
        key: value for key, value in given.items() if key != "schedule"
    }
    status, _, error = threefold("simulate", "--schedule", "zb-h1", *PAPER, "--csv", file)
    assert (status, error.count("\n")) == (2, 1)
    assert "exists already and has other actions; remove it first." in error


def test_the_title_of_the_picture(threefold, tmp_path: Path) -> None:
    """With all stages of a rank, and without an exponent in a long time."""
    picture = tmp_path / "line.svg"
    options = ("--schedule", "interleaved", "--chunks", "4", "--forward", "1000", "--png", picture)
    facts(threefold, "--stages", "2", "--microbatches", "4", *options)
    text = picture.read_text()
    assert "interleaved: 8 stages on 2 ranks, 4 micro-batches" in text
    assert "A step of 12,750 ms. Bubble 5.9%: time waited between the first and the last action of a rank." in text


@pytest.mark.parametrize("columns", [60, 80, 200])
def test_no_letter_of_a_table_is_cut_off(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    given = ("--schedule", "zb-h2", "--stages", "4", "--microbatches", "8", "--forward", "12345.6")
    told = CliRunner().invoke(app, ["simulate", *given]).stdout
    assert "…" not in told
    if columns > 60:
        assert "333,331.2 296,294.4" in " ".join(told.split())


FOUR = ("--stages", "4", "--microbatches", "4")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("--stages", "0", "--microbatches", "4"), "--stages 0 must be at least 1; use 1."),
        (("--stages", "x", "--microbatches", "4"), "--stages x must be a whole number; use 1."),
        (("--stages", "2", "--microbatches", "-4"), "--microbatches -4 must be at least 1; use 1."),
        (("--stages", "4"), "--microbatches is missing, which the schedule needs; give it, such as --microbatches 8."),
        ((*FOUR, "--forward", "-1"), "--forward -1 must be a time of 0 ms or more; use 0."),
        ((*FOUR, "--transfer", "nan"), "--transfer nan must be a time of 0 ms or more; use 0."),
        (
            (*FOUR, "--backward-weight", "1,,2"),
            "--backward-weight 1,,2 must be a time in ms, or several",
        ),
        (
            (*FOUR, "--forward", "1,2"),
            "--forward has 2 times and needs one for all or 4, one for each stage;",
        ),
        (
            (*FOUR, "--forward", "0"),
            "All passes take 0 ms, so that there is nothing to simulate; give --forward",
        ),
        ((*FOUR, "--transfer", "1,1"), "--transfer has 2 times and needs one for all or 3 of them, one from"),
        (
            (*FOUR, "--schedule", "1f2b"),
            "The schedule '1f2b' must be the path of a .csv file of actions, or one of",
        ),
        ((*FOUR, "--schedule", "none.csv"), "Cannot read the pipeline schedule none.csv: No such file or directory."),
        (
            (*FOUR, "--chunks", "2"),
            "--chunks is 2 but the schedule 1f1b has 1 stage on each rank; use 1, or --schedule interleaved.",
        ),
        ((*FOUR, "--forward", "1e300"), "--forward 1e300 must be a time of at most 1,000,000,000 ms; use 1000000000."),
        (("--stages", "7.6", "--microbatches", "4"), "--stages 7.6 must be a whole number; use 8."),
        (("--stages", "1,024", "--microbatches", "4"), "--stages 1,024 must be a whole number; use 1024."),
        (
            ("--schedule", "interleaved", "--stages", "4", "--microbatches", "9"),
            "The schedule interleaved cannot",
        ),
        ((*FOUR, "--png", "a.jpg"), "The picture a.jpg must end in .png or .svg; use a.png."),
        (
            (*FOUR, "--csv", "a.txt"),
            "The pipeline schedule a.txt must end in .csv, as parallel.schedule names it; use",
        ),
        ((*FOUR, "--csv", "no/a.csv"), "The pipeline schedule no/a.csv cannot be written: there is no folder no."),
        (
            ("--stages", "100000", "--microbatches", "100000"),
            "The schedule 1f1b with 100,000 stages and",
        ),
    ],
)
def test_what_is_refused(threefold, arguments: tuple[str, ...], sentence: str) -> None:
    status, output, error = threefold("simulate", *arguments)
    assert (status, output) == (2, "")
    assert error.startswith(f"Error: {sentence}")
    assert error.count("\n") == 1
