"""`threefold plan`: its table, its config, its picture, and one sentence for every mistake."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from threefold.cli.main import app
from threefold.config import load_config
from threefold.config.resolve import check_settings
from threefold.data.dataset import resolve_without_data
from threefold.errors import UserError
from threefold.planner.estimate import estimate
from threefold.planner.hardware import find_hardware

CONFIG = """\
data: {path: tokens, sequence_length: 2048}
model: {preset: gpt3-6.7b}
parallel: {tp: 8, fallbacks: [tp4]}
train: {global_batch_size: 64, max_steps: 1000, micro_batch_size: 1}
precision: {dtype: bf16}
"""
FEW = ("--fix", "parallel.tp=8", "--fix", "train.micro_batch_size=4")
Run = Callable[..., Result]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)
    Path("gpt.yaml").write_text(CONFIG)

    def plan(*arguments: str) -> Result:
        return CliRunner().invoke(app, ["plan", "gpt.yaml", *arguments])

    return plan


def test_the_table_the_config_and_the_picture(run: Run) -> None:
    told = run("--gpus", "16", "--hardware", "a100-80", "--write", "best.yaml", "--png", "layouts.png")
    assert told.exit_code == 0, told.output
    assert "sound" in told.stdout
    assert "limited by" in told.stdout
    assert "GPU-hours" in told.stdout
    assert "64 sequences of 2,048 tokens" in told.stdout
    assert Path("layouts.png").read_bytes().startswith(b"\x89PNG")
    drawn = run("--gpus", "16", "--hardware", "a100-80", "--png", "layouts.svg", "--json")
    best, picture = json.loads(drawn.stdout)["best"], Path("layouts.svg").read_text()
    assert f"<!-- best: {best[0]['layout']} micro-batch " in picture
    named = re.findall(r"<!-- (\d+)% of the speed in (\d+)% of the memory: dp\S+ .*? in [\d.]+ GB -->", picture)
    assert len(named) == 1  # on the plot without the layout
    assert int(named[0][0]) >= 90
    assert int(named[0][1]) < 100
    assert "<!-- limit " in picture
    text = Path("best.yaml").read_text()
    assert text.startswith("# Written by threefold plan gpt.yaml --gpus 16 --hardware a100-80.\n# Predicted on 16 ×")
    given = load_config("best.yaml")
    check_settings(given)
    resolved = resolve_without_data(given)
    parallel = resolved.parallel
    assert parallel.dp * parallel.tp * parallel.pp * parallel.cp == 16
    assert resolved.train.global_batch_size == 64
    assert resolved.parallel.fallbacks is None
    predicted = f"{estimate(resolved, find_hardware('a100-80'), 'own').step_seconds:.3f} s a step"
    assert predicted in text


def test_json(run: Run) -> None:
    told = run("--gpus", "8", "--hardware", "h100", "--json", "--tokens", "2B", "--fix", "parallel.pp=2")
    assert told.exit_code == 0, told.output
    document = json.loads(told.stdout)
    assert document["gpus"] == 8
    assert document["layouts"] >= document["sound"] >= document["fitting"] >= len(document["best"]) == 10
    best = document["best"][0]
    assert best["settings"]["parallel.pp"] == 2
    assert best["budget"]["tokens"] == 2 * 10**9
    assert best["budget"]["gpu_hours"] == pytest.approx(best["budget"]["steps"] * best["step_seconds"] * 8 / 3600)
    seconds = [each["step_seconds"] for each in document["best"]]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize("more", [(), ("--set", "train.epochs=3")])
def test_the_steps_of_the_tokens_are_written(run: Run, more: tuple[str, ...]) -> None:
    asked = ("--gpus", "8", "--hardware", "h100", *FEW, "--json", "--write", "best.yaml")
    best = json.loads(run(*asked, "--tokens", "2B", *more).stdout)["best"][0]
    written = load_config("best.yaml").train
    assert best["budget"]["steps"] == -(-2 * 10**9 // (64 * 2048)) == written.max_steps
    assert "epochs" not in written.model_fields_set
    assert " --tokens 2B.\n" in Path("best.yaml").read_text()
    assert run(*asked).exit_code == 0
    assert load_config("best.yaml").train.max_steps == 1000  # as the config says


def test_bytes_are_those_of_an_estimate(run: Run) -> None:
    """Of a system whose allocator gives some back where memory runs out, too."""
    asked = ("--gpus", "8", "--hardware", "h100", *FEW, "--fix", "parallel.zero=0", "--system", "fsdp")
    best = json.loads(run(*asked, "--json", "--write", "best.yaml").stdout)["best"][0]
    found = estimate(resolve_without_data(load_config("best.yaml")), find_hardware("h100"), "fsdp").as_json()
    assert [best[key] for key in ("peak_bytes", "needed_bytes")] == [found["peak_bytes"], found["needed_bytes"]]
    assert found["peak_bytes"] > found["needed_bytes"]


def test_an_estimate_of_the_written_config_is_the_row(run: Run) -> None:
    """Neither names a system: both are of this package."""
    asked = ("--gpus", "8", "--hardware", "h100", *FEW, "--json", "--write", "best.yaml")
    document = json.loads(run(*asked).stdout)
    told = CliRunner().invoke(app, ["estimate", "best.yaml", "--hardware", "h100", "--json"])
    found, best = json.loads(told.stdout), document["best"][0]
    assert document["system"] == found["system"] == "own"
    assert [best["step_seconds"], best["peak_bytes"]] == [pytest.approx(found["step_seconds"]), found["peak_bytes"]]


def test_cost_may_use_fewer_gpus(run: Run) -> None:
    best = json.loads(run("--gpus", "16", "--hardware", "h100", "--json", "--objective", "cost").stdout)["best"][0]
    whole = json.loads(run("--gpus", "16", "--hardware", "h100", "--json").stdout)["best"][0]
    assert best["gpus"] <= 16
    assert best["gpus"] * best["step_seconds"] <= 16 * whole["step_seconds"]


def test_a_file_of_the_users_is_not_written_over(run: Run) -> None:
    asked = ("--gpus", "8", "--hardware", "h100", *FEW)
    Path("best.yaml").write_text("mine")
    for name, free in (("gpt.yaml", "gpt-planned.yaml"), ("best.yaml", "best-planned.yaml")):
        told = str(run(*asked, "--write", name).exception)
        assert told == (
            f"{name} exists already and threefold plan has not written it; name another file, such as {free}."
        )
    assert (Path("gpt.yaml").read_text(), Path("best.yaml").read_text()) == (CONFIG, "mine")
    for _ in range(2):
        assert run(*asked, "--write", "new.yaml").exit_code == 0


def test_why_a_layout_is_dropped_is_not_said_of_a_line_of_the_config(run: Run) -> None:
    Path("gpt.yaml").write_text(CONFIG.replace("{tp: 8", "{zero: 1, stage_chunks: 2, schedule: interleaved, tp: 8"))
    told = json.loads(run("--gpus", "8", "--hardware", "h100", "--json", "--fix", "parallel.pp=2").stdout)
    assert told["refused"]
    assert not [each for each in told["refused"] if "gpt.yaml" in each["reason"]]


@pytest.mark.parametrize(
    ("columns", "without"), [(60, ["limited by", "MFU", "tokens/s"]), (80, ["limited by"]), (200, [])]
)
def test_no_number_of_the_table_is_cut_off(
    run: Run, monkeypatch: pytest.MonkeyPatch, columns: int, without: list[str]
) -> None:
    """A narrow console has fewer columns in place of narrow ones."""
    monkeypatch.setattr("threefold.planner.commands.plan._WIDTH_OF_A_FILE", columns)
    asked = ("--gpus", "8", "--hardware", "h100", *FEW)
    told, best = run(*asked).stdout, json.loads(run(*asked, "--json").stdout)["best"]
    assert "…" not in told
    assert max(map(len, told.splitlines())) <= columns
    table = told[told.index("micro-batch   ") :]
    for name in ("limited by", "MFU", "tokens/s"):
        assert (name in table.splitlines()[0]) is (name not in without)
    for each in best:
        assert f"{each['step_seconds']:,.3f} s" in table
    assert "limited by" in table


def test_the_example_of_what_does_not_fit_has_its_own_memory(run: Run) -> None:
    asked = ("--gpus", "16", "--hardware", "a100-40", "--fix", "parallel.pp=4", "--fix", "parallel.tp=4")
    unfit = json.loads(run(*asked, "--json").stdout)["too_large"]
    name, size = unfit["largest_part"].split(" ", 1)
    assert unfit["bytes"] > float(size.split()[0]) * 1e9
    assert f"the example needs {unfit['bytes'] / 1e9:.1f} GB, of which {name} {size}" in run(*asked).stdout


def test_the_answer_comes_before_what_is_left_out(run: Run) -> None:
    asked = ("--gpus", "16", "--hardware", "a100-40")
    short, long = (run(*asked, *more).stdout for more in ((), ("--why",)))
    assert short.index("memory") < short.index("are not valid; --why lists the rules")
    assert "left out" not in short
    assert 0 < long.index("memory") < long.index("left out") < long.index("such as", long.index("left out"))


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--hardware", "h100"], "--gpus is missing; say how many there are, such as --gpus 8."),
        (["--gpus", "8"], "--hardware is missing; give the path of a YAML file or one of v100"),
        (["--gpus", "0", "--hardware", "h100"], "--gpus 0 must be at least 1; use 1."),
        (["--gpus", "-8", "--hardware", "h100"], "--gpus -8 must be at least 1; use 1."),
        (["--gpus", "many", "--hardware", "h100"], "--gpus many must be a whole number; use 1."),
        (["--gpus", "12", "--hardware", "h100"], "nodes of h100 have 8 and are rented whole; use 16."),
        (["--gpus", "1000", "--hardware", "h100"], "--gpus is 1000 but no layout of so many GPUs is sound"),
        (["--gpus", "8", "--hardware", "h10"], "The hardware h10 is unknown"),
        (
            ["--gpus", "8", "--hardware", "h100", "--objective", "speed"],
            "--objective is speed but must be one of throughput, cost, latency",
        ),
        (
            ["--gpus", "8", "--hardware", "h100", "--tokens", "0"],
            "--tokens is 0 but must be a number of tokens above 0",
        ),
        (["--gpus", "8", "--hardware", "h100", "--fix", "tp"], "--fix tp: write it as section.key=value"),
        (["--gpus", "8", "--hardware", "h100", "--fix", "parallel.tq=2"], "the nearest is parallel.tp."),
        (
            ["--gpus", "8", "--hardware", "h100", "--fix", "parallel.tp=3"],
            "with parallel.tp 3 is sound; use --fix parallel.tp=4, or leave out --fix parallel.tp=3.",
        ),
        (
            ["--gpus", "8", "--hardware", "h100", "--fix", "parallel.zero=9"],
            "--fix parallel.zero=9: parallel.zero is 9 but must be at most 3.",
        ),
        (["--gpus", "1e3", "--hardware", "h100"], "--gpus 1e3 must be a whole number; use 1000."),
        pytest.param(["--gpus", "100000", "--hardware", "h100"], "; use 65536.", marks=pytest.mark.slow),
        (
            ["--gpus", "8", "--hardware", "h100", "--fix", "parallel.schedule=2f2b"],
            "parallel.schedule is '2f2b' but must be a function as in my_file.py:schedule, the path of a .csv file",
        ),
        (
            ["--gpus", "8", "--hardware", "h100", "--set", "parallel.tp=3"],
            "--set parallel.tp=3: threefold plan chooses this setting itself; use --fix parallel.tp=3 for layouts that",
        ),
        (["--gpus", "8", "--hardware", "h100", "--png", "layouts.txt"], "must end in .png or .svg"),
        (["--gpus", "8", "--hardware", "h100", "--write", "no/best.yaml"], "no is not a folder; make it first."),
    ],
)
def test_a_mistake_is_one_sentence(run: Run, arguments: list[str], sentence: str) -> None:
    told = run(*arguments)
    assert isinstance(told.exception, UserError)
    assert sentence in str(told.exception)
    assert str(told.exception).count("\n") == 0


def test_a_model_that_fits_nowhere_is_told_what_would_fit(run: Run) -> None:
    told = run("--gpus", "1", "--hardware", "a100-40")
    sentence = str(told.exception)
    assert "sound layouts of 1 × a100-40 fits into" in sentence
    assert "too much" in sentence
    more = int(sentence.split("--gpus ")[1].split(")")[0])
    assert run("--gpus", str(more), "--hardware", "a100-40").exit_code == 0
    fixes = [part for key in ("zero=0", "tp=1", "pp=1") for part in ("--fix", f"parallel.{key}")]
    fixed = run("--gpus", "8", "--hardware", "a100-40", *fixes)
    assert "no --fix parallel.zero=0" in str(fixed.exception)
