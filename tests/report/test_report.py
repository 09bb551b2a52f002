"""The document of a report: what the folder of a real run says, whole, resumed, damaged, or of several runs."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.support.command import Command
from threefold.checkpoint.manifest import MANIFEST
from threefold.checkpoint.tensors import load_tensors, stored_tensors
from threefold.exact.tensor_hash import PartHash, fingerprint_of
from threefold.report.document import LEDGER, PHASES, RunReport, make_page, report_of
from threefold.report.goodput import Goodput
from threefold.report.metrics import read_metrics_file
from threefold.report.record import RunRecord, number
from threefold.train.callbacks.records import Performance, StepRecord

Copied = Callable[[str], Path]
STEPS = 6


def report(*folders: Path) -> dict[str, Any]:
    """Of runs, as JSON holds it."""
    records = [RunRecord(folder) for folder in folders]
    for record in records:
        record.update()
    found: dict[str, Any] = json.loads(json.dumps(report_of(records), allow_nan=False))
    return found


def rounded(value: float) -> float:
    return float(f"{value:.6g}")


def lines_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write_lines(folder: Path, lines: list[dict[str, Any]]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_names_are_those_of_the_records() -> None:
    assert set(LEDGER) == set(Goodput().seconds()) - {"total"}
    assert {"data", "callbacks", "forward_backward", "update"} == set(PHASES)


def test_it_has_what_the_run_recorded(recorded: Path) -> None:
    (run,) = report(recorded)["runs"]
    metrics = read_metrics_file(recorded / "metrics.jsonl")
    steps = [line for line in metrics.lines if "loss" in line]
    evaluations = [line for line in metrics.lines if "valid_loss" in line]
    assert len(steps) == STEPS
    curves = run["curves"]
    assert (curves["width"], curves["first"], curves["last"]) == (1, [*range(1, 7)], [*range(1, 7)])
    for name in ("loss", "grad_norm", "lr", "tokens_per_second", "seconds", "waited"):
        assert curves["values"][name] == {"mean": [rounded(line[name]) for line in steps]}, name
    assert curves["values"]["memory"]["mean"] == [rounded(line["largest_memory"]) for line in steps]
    assert curves["values"]["tokens_so_far"]["mean"][-1] == sum(line["tokens"] for line in steps)
    assert run["evaluations"]["first"] == [2, 4, 6]
    assert run["evaluations"]["values"]["valid_loss"]["mean"] == [rounded(line["valid_loss"]) for line in evaluations]
    for name in PHASES:
        assert run["phases"][name] == pytest.approx(sum(line["phases"][name] for line in steps), abs=1e-5)
    assert run["seconds"] == pytest.approx(sum(line["seconds"] for line in steps))
    assert run["waited"] == pytest.approx(sum(line["waited"] for line in steps))
    ledger = Goodput.read(recorded / "goodput.json")
    assert ledger is not None
    assert run["goodput"]["now"] == {"seconds": ledger.seconds(), "restarts": 0}
    assert [each["step"] for each in run["goodput"]["ledgers"]] == [3, 6]
    assert (run["state"], run["steps"], run["attempts"], run["events"], run["warnings"]) == ("finished", 6, [], [], [])


def test_it_says_what_ran(recorded: Path) -> None:
    (run,) = report(recorded)["runs"]
    summary = run["summary"]
    assert summary["state"] == "finished, 6 steps"
    assert summary["layout"] == "dp 2 · tp 2 · pp 1, 4 ranks"
    assert summary["precision"] == "fp32 on cpu"
    assert summary["model"].startswith("gpt, 3 layers × 24 wide × 4 heads, ")
    assert "torch " in summary["versions"]
    assert run["layout"]["sizes"] == {"dp": 2, "pp": 1, "cp": 1, "tp": 2, "ep": 1}
    assert run["layout"]["ranks"] == [[0, 0, 0, 0], [0, 0, 0, 1], [1, 0, 0, 0], [1, 0, 0, 1]]
    assert run["settings"]["model"]["ffn_hidden_size"] == 96, "derived, and a comment in the file"
    lines = lines_of(recorded)
    last = next(line for line in reversed(lines) if "loss" in line)
    assert summary["loss"] == f"{last['loss']:.4f} at step 6"


def test_it_says_from_which_step_a_setting_has_another_value(copied: Copied) -> None:
    folder = copied("changing")
    path = folder / "config.yaml"
    settings = yaml.safe_load(path.read_text())
    settings["train"]["global_batch_size"] = {0: 8, 2: 12, 4: 16}
    settings["data"]["sequence_length"] = {0: 8, 3: 16}
    path.write_text(yaml.safe_dump(settings))
    (run,) = report(folder)["runs"]
    changing = "8 (12 after step 2, 16 after step 4) samples of 8 (16 after step 3) tokens a step"
    assert run["summary"]["data"].endswith(f", {changing}")


def test_the_summary_is_of_what_the_steps_did(copied: Copied) -> None:
    """Speed counts the tokens that were read, and MFU compares the work with what was possible in that time."""
    folder = copied("summed")
    steps = [line for line in lines_of(folder) if "loss" in line]
    made = [
        line | {"tokens": 100, "tokens_per_second": 75.0, "seconds": 2.0, "tflops": 3.0, "mfu": 0.25} for line in steps
    ]
    for line, rate in zip(made, (0.5e-3, 2e-3, 1e-3, 1e-3, 0.25e-3), strict=False):
        line["lr"] = rate
    skipped = made[3] | {"skipped": True, "reason": "a spike"}
    evaluations = [{"step": step, "valid_loss": loss} for step, loss in ((2, 4.5), (4, 2.5), (6, 3.0))]
    write_lines(folder, [*made[:3], skipped, *made[4:5], *evaluations])
    (run,) = report(folder)["runs"]
    summary = run["summary"]
    assert summary["speed"] == "75 tokens/s, 2,000 ms a step"
    assert summary["MFU"] == "25.0%"
    assert summary["learning rate"] == "2.000e-03 at its peak, 2.500e-04 at step 5"
    assert summary["validation"] == "3.0000 at step 6, lowest 2.5000"
    assert run["curves"]["values"]["tokens_so_far"]["mean"] == [100, 200, 300, 300, 400]
    assert (run["state"], summary["state"]) == ("ended", "ended after step 5 of 6")


def test_the_newest_checkpoint_is_one_that_is_complete(copied: Copied) -> None:
    folder = copied("cut")
    _, last = sorted((folder / "checkpoints").iterdir())
    (last / MANIFEST).unlink()
    (run,) = report(folder)["runs"]
    assert run["checkpoints"]["listed"][0]["state"] == "complete"
    assert "the newest after step 3: " in run["summary"]["checkpoints"]


def test_restarts_are_no_resumptions(copied: Copied) -> None:
    folder = copied("again")
    ledger = Goodput.read(folder / "goodput.json")
    assert ledger is not None
    (folder / "goodput.json").write_bytes(replace(ledger, attempts=4, restarts=2).text())
    (run,) = report(folder)["runs"]
    assert run["summary"]["goodput"].endswith(", 2 restarts, resumed once")


def test_goodput_of_steps_that_are_made_again_replaces_the_earlier(copied: Copied) -> None:
    folder = copied("repeated")
    lines = lines_of(folder)
    ledgers = [line for line in lines if "goodput" in line]
    write_lines(folder, [*lines, ledgers[0] | {"goodput": 0.5}])
    (run,) = report(folder)["runs"]
    assert [(each["step"], each["goodput"]) for each in run["goodput"]["ledgers"]] == [(3, 0.5)]


def test_only_numbers_are_numbers() -> None:
    line = {"a": 1, "b": 2.5, "c": True, "d": "3", "e": float("inf"), "f": 10**400}
    assert [number(line, name) for name in "abcdefg"] == [1.0, 2.5, None, None, None, None, None]


def test_checkpoints_have_the_fingerprints_of_their_weights(recorded: Path) -> None:
    """Of whole tensors, though four ranks wrote parts of them."""
    (run,) = report(recorded)["runs"]
    assert run["checkpoints"]["count"] == 2
    assert [(each["step"], each["state"]) for each in run["checkpoints"]["listed"]] == [
        (3, "complete"),
        (6, "complete"),
    ]
    for each in run["checkpoints"]["listed"]:
        folder = recorded / "checkpoints" / each["name"]
        weights = {name: torch.empty(shape) for name, (shape, _) in stored_tensors(folder).items() if name[0] == "m"}
        load_tensors(weights, folder, alone=True)
        hashes = {
            name.removeprefix("model."): int(PartHash(weight.shape, [0] * weight.dim(), weight.shape)(weight))
            for name, weight in weights.items()
        }
        assert each["weights"] == fingerprint_of(hashes)
        assert each["layout"] == "dp 2 · tp 2 · pp 1"
    assert run["summary"]["checkpoints"] == f"2; the newest after step 6: weights {each['weights']}"


def test_losses_of_layouts_are_compared(recorded: Path, copied: Copied) -> None:
    """With all digits, which the curves of the page do not have; not of runs that should differ."""
    other, third = copied("other"), copied("third")
    config = (other / "config.yaml").read_text()
    (other / "config.yaml").write_text(config.replace("  tp: 2\n", "  tp: 4\n"))
    assert report(recorded, other)["comparison"] == "The same loss in 2 layouts over 6 steps, equal in every digit."

    def changed(step: int, by: float) -> list[dict[str, Any]]:
        return [
            line | {"loss": line["loss"] * (1 + by)} if "loss" in line and line["step"] == step else line
            for line in lines_of(recorded)
        ]

    write_lines(third, changed(4, 2e-7))
    found = report(recorded, other, third)
    assert found["comparison"].startswith("The same loss in 2 layouts over 6 steps: the largest difference is ")
    assert found["comparison"].endswith(" (2e-07 of the loss), of third at step 4.")
    _, of_other, of_third = (run.get("difference") for run in found["runs"])
    assert of_other["values"]["loss"]["mean"] == [0.0] * STEPS
    assert [each > 0 for each in of_third["values"]["loss"]["mean"]] == [step == 4 for step in of_third["last"]]
    write_lines(third, changed(2, 0.1))
    assert report(recorded, third)["comparison"].startswith("The losses in 2 runs over 6 steps differ: ")
    (third / "config.yaml").write_text(config.replace("  lr: 0.01\n", "  lr: 0.02\n"))
    assert report(recorded, third)["comparison"] == ""


def test_commands_that_read_runs_do_not_import_torch(recorded: Path) -> None:
    code = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.partition('.')[0] == 'torch': raise ImportError('torch is blocked')\n"
        "sys.meta_path.insert(0, Blocked())\n"
        "from threefold.cli import main\n"
        "sys.argv = ['threefold', *sys.argv[1:]]\n"
        "main()\n"
    )
    wide = os.environ | {"COLUMNS": "200"}
    for command, said in {"checkpoint list": "2 checkpoints in", "report": "2; the newest after step 6"}.items():
        arguments = [sys.executable, "-c", code, *command.split(), str(recorded)]
        ended = subprocess.run(arguments, capture_output=True, text=True, check=False, env=wide)
        assert ended.returncode == 0, ended.stderr
        assert said in ended.stdout


def test_the_run_wrote_the_page_at_its_end(recorded: Path) -> None:
    """Before it gave the folder a config.yaml here: then without the settings, and with all else."""
    page = (recorded / "report.html").read_text()
    held = json.loads(page.split('type="application/json">')[1].split("</script>")[0])
    (run,) = held["runs"]
    (later,) = report(recorded)["runs"]
    assert run["curves"] == later["curves"]
    assert run["checkpoints"] == later["checkpoints"]
    assert len(page) - len(json.dumps(held)) < 300_000


def test_a_page_that_cannot_be_written_is_one_sentence(copied: Copied, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied("full")
    (folder / "report.html").unlink()
    (folder / "report.html").mkdir()
    RunReport(folder).after_fit()
    assert capsys.readouterr().out == f"Warning: {folder / 'report.html'} cannot be written (Is a directory).\n"


def test_settings_that_differ_between_runs(recorded: Path, copied: Copied) -> None:
    other = copied("other")
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("  lr: 0.01\n", "  lr: 0.02\n").replace("  tp: 2\n", "  tp: 4\n"))
    found = report(recorded, other)
    assert found["differences"] == {"optimizer.lr": [0.01, 0.02], "parallel.tp": [2, 4]}
    assert [run["name"] for run in found["runs"]] == ["short", "other"]
    assert found["runs"][1]["summary"]["layout"] == "dp 2 · tp 4 · pp 1, 8 ranks"
    assert report(recorded, recorded)["runs"][0]["name"] == str(recorded), "the name alone would not do"


def test_a_resumed_run_shows_its_attempts(copied: Copied) -> None:
    """The second attempt began from the checkpoint of step 3: by its clock or, if that went on, by the ledger."""
    folder = copied("resumed")
    steps = [line for line in lines_of(folder) if "loss" in line]
    ledgers = [line for line in lines_of(folder) if "goodput" in line]

    def seconds(starting: float, lost: float, total: float) -> dict[str, Any]:
        return {"steps": 1.0, "repeated": 0.0, "evaluating": 0.0, "saving": 0.0, "starting": starting, "lost": lost} | {
            "total": total
        }

    def written(clocks: list[float]) -> list[dict[str, Any]]:
        made = [line | {"wall_clock": clock} for line, clock in zip(steps, clocks, strict=True)]
        first, second = ledgers[0] | {"seconds": seconds(4, 0, 8)}, ledgers[1] | {"seconds": seconds(4, 9, 30)}
        return [*made[:3], first, *made[3:], second]

    write_lines(folder, written([5, 6, 7, 2, 3, 4]))
    (run,) = report(folder)["runs"]
    assert run["attempts"] == [{"step": 4, "elapsed": 8.0}]
    assert run["curves"]["values"]["elapsed"]["mean"] == [5, 6, 7, 10, 11, 12]

    write_lines(folder, written([5, 6, 7, 9, 10, 11]))
    (run,) = report(folder)["runs"]
    assert run["attempts"] == [{"step": 4, "elapsed": 8.0}]


def test_damaged_and_cut_lines_are_named(copied: Copied, threefold: Command) -> None:
    folder = copied("damaged")
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    whole = report(folder)["runs"][0]["curves"]["values"]["loss"]["mean"]
    path.write_bytes(
        b"".join([lines[0], b"\0" * 50 + b"\n", b'{"step": 2, "lo' + lines[1], *lines[2:]]) + b'{"step": 7,'
    )
    (run,) = report(folder)["runs"]
    assert run["curves"]["values"]["loss"]["mean"] == whole, "line 3 ends with a complete one"
    assert run["warnings"] == [
        f"{path} has lines 2, 3 damaged; the other lines are used.",
        f"The last line of {path} was cut short and is not used.",
    ]
    ended = threefold("report", folder)
    assert ended.status == 0
    assert ended.error.splitlines() == [f"Warning: {sentence}" for sentence in run["warnings"]]


@pytest.mark.parametrize(
    "line",
    [
        {"step": 7, "loss": 1.0, "tokens": 10**400, "seconds": "x", "phases": 3, "tokens_per_second": 1e999},
        {"step": 7, "loss": None, "tokens": 8, "tokens_per_second": 5, "mfu": 0, "tflops": [], "phases": {"data": {}}},
        {"step": 10**30, "loss": -1e300, "tokens": -5, "tokens_per_second": 1, "seconds": 0, "wall_clock": -1},
        {"step": 7, "goodput": None, "seconds": {"total": "x", "lost": None}, "restarts": []},
        {"step": 7, "valid_loss": None, "valid_losses": [1], "valid_terms": {"a": None}},
    ],
)
def test_strange_values_are_no_reason_to_fail(copied: Copied, line: dict[str, Any]) -> None:
    folder = copied("strange")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    (folder / "goodput.json").write_text("{}")
    (folder / "samples.jsonl").write_text('{"step": 1}\n{"step": 2, "prompt": "a", "text": "b"}\n')
    (run,) = report(folder)["runs"]
    assert (
        run["curves"]["values"]["loss"]["mean"][:5] == report(folder)["runs"][0]["curves"]["values"]["loss"]["mean"][:5]
    )
    assert run["goodput"]["now"] is None
    assert run["samples"] == [{"step": 2, "prompt": "a", "text": "b"}]
    assert run["warnings"] == [f"{folder / 'samples.jsonl'} has 1 damaged line; the others are used."]


@pytest.mark.parametrize(
    "config", ["a: [", "model: {num_layers: .inf}\nparallel: {dp: 2, ep: 3}\ndata: 3\n", "7", "\0"]
)
def test_a_damaged_config_leaves_the_rest(copied: Copied, config: str) -> None:
    folder = copied("odd")
    (folder / "config.yaml").write_text(config)
    (run,) = report(folder)["runs"]
    assert (len(run["curves"]["last"]), run["layout"]) == (STEPS, None)
    assert [
        sentence for sentence in run["warnings"] if not sentence.endswith("the report is without the settings.")
    ] == []


def test_what_happened_besides_steps(copied: Copied) -> None:
    folder = copied("eventful")
    lines = lines_of(folder)
    for line in lines:
        if line.get("step") in (4, 5) and "loss" in line:
            line |= {"skipped": True, "reason": "the loss is nan", "loss": None}
    write_lines(folder, lines)
    with (folder / "train.log").open("a") as file:
        file.write("global step 6, rolled back to step 3: the loss is nan\nglobal step 6, stopped: enough\n")
    (run,) = report(folder)["runs"]
    assert run["events"] == [
        {"step": 4, "text": "skipped to step 5: the loss is nan"},
        {"step": 6, "text": "rolled back to step 3: the loss is nan"},
        {"step": 6, "text": "stopped: enough"},
    ]
    assert run["curves"]["values"]["loss"]["mean"][3:5] == [None, None]


def test_nothing_in_a_folder_ends_the_script_of_the_page(copied: Copied) -> None:
    folder = copied("</script><img src=x>")
    (folder / "samples.jsonl").write_text(json.dumps({"step": 1, "prompt": "</script>", "text": "<!--<script>"}) + "\n")
    record = RunRecord(folder)
    record.update()
    page = make_page(report_of([record]))
    assert page.count("</script") == 2
    assert "<img" not in page
    assert "<!--" not in page


def test_a_table_in_the_terminal(recorded: Path, copied: Copied, threefold: Command) -> None:
    other = copied("other")
    config = other / "config.yaml"
    config.write_text(config.read_text().replace("  lr: 0.01\n", "  lr: 0.02\n"))
    ended = threefold("report", recorded, other)
    assert (ended.status, ended.error) == (0, "")
    rows = [line.split() for line in ended.output.splitlines()]
    assert ["run", "short", "other"] in rows
    assert ["optimizer.lr", "0.01", "0.02"] in rows
    assert any(row[:1] == ["layout"] for row in rows)


def test_the_page_and_the_data(recorded: Path, tmp_path: Path, threefold: Command) -> None:
    path = tmp_path / "page.html"
    ended = threefold("report", recorded, "--html", path, "--json")
    assert (ended.status, ended.error) == (0, f"Wrote {path}.\n")
    assert json.loads(ended.output)["runs"][0]["name"] == "short"
    assert ended.output.count('"state": "finished"') == 1, "for which docs/guides/several_machines.md looks"
    assert path.read_text().startswith("<!doctype html>")
    assert threefold("report", recorded, "--html", path).status == 0  # a page is replaced
    (tmp_path / "my.yaml").write_text("data: {path: x}\n")
    refused = threefold("report", recorded, "--html", tmp_path / "my.yaml")
    assert refused.status == 2
    assert "my.yaml exists already and is not a page of this program; use another name." in refused.error
    assert (tmp_path / "my.yaml").read_text() == "data: {path: x}\n"


@pytest.mark.parametrize(
    ("folder", "options", "sentence"),
    [
        ("empty", (), "is not a folder of a run: it has no metrics.jsonl and no config.yaml; give a run folder"),
        ("absent", (), "is not there; give a run folder, as for --run-dir."),
        ("file", (), "is a file; give a run folder, as for --run-dir."),
        (
            "short",
            ("--html", "absent/page.html"),
            "--html absent/page.html cannot be written: there is no folder absent.",
        ),
    ],
)
def test_what_is_no_run_is_one_sentence(
    recorded: Path, tmp_path: Path, threefold: Command, folder: str, options: tuple[str, ...], sentence: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    ended = threefold("report", recorded if folder == "short" else tmp_path / folder, *options)
    assert (ended.status, ended.output, ended.error.count("\n")) == (2, "", 1)
    assert sentence in ended.error


def test_a_fifo_in_the_place_of_the_metrics_does_not_block(copied: Copied) -> None:
    folder = copied("pipe")
    (folder / "metrics.jsonl").unlink()
    os.mkfifo(folder / "metrics.jsonl")
    (run,) = report(folder)["runs"]
    assert run["curves"]["first"] == []
    assert "no regular file" in run["warnings"][0]


def test_the_record_of_a_step_comes_back(tmp_path: Path) -> None:
    """What the live line reads of a line of metrics.jsonl is what the run wrote in it."""
    from threefold.report.live import _step
    from threefold.report.metrics import MetricsFile

    used = Performance(2e12, 0.25, 10, 20, 3, 0.25, 7.5)
    given = StepRecord(7, 2.5, 0.5, 1e-3, 60, 64, 0, 0, 0.0, 0.5, loss_scale=8.0, performance=used)
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.before_fit(0)
    file.after_step(given)
    file.close()
    assert _step(lines_of(tmp_path)[0]) == given
