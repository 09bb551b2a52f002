"""`threefold checkpoint list` and `show`: every state is told, and each table fits the terminal."""

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.command import Command
from threefold.checkpoint.folder import DIVERGED, folders
from threefold.checkpoint.manifest import PARTIAL, REPLACED
from threefold.report.checkpoints import listed


def damage(run: Path) -> None:
    """One checkpoint of each state: the newest is damaged, another one has diverged, a third is partial."""
    newest = run / "checkpoints" / "step_00000004"
    first = run / "checkpoints" / "step_00000002"
    copy(first, first.with_name(first.name + DIVERGED))
    copy(first, first.with_name("step_00000009" + PARTIAL))
    (newest / "tensors-00001.bin").unlink()


def copy(folder: Path, to: Path) -> None:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())


def test_every_state_is_listed(threefold: Command, run: Path) -> None:
    damage(run)
    ended = threefold("checkpoint", "list", run, "--json")
    found = {(Path(one["path"]).name, one["state"]): one for one in json.loads(ended.output)}
    assert set(found) == {
        ("step_00000002", "complete"),
        ("step_00000002.diverged", "diverged"),
        ("step_00000004", "damaged"),
        ("step_00000009.partial", "partial"),
    }
    complete, damaged = found["step_00000002", "complete"], found["step_00000004", "damaged"]
    assert (complete["consumed_samples"], complete["layout"]["tp"], complete["ranks"]) == (16, 2, 2)
    assert (damaged["consumed_samples"], damaged["layout"]["zero"], damaged["ranks"]) == (32, 1, 4)
    assert damaged["reason"] == "its tensors-00001.bin is missing or no file"
    size = sum(path.stat().st_size for path in (run / "checkpoints" / "step_00000002").iterdir())
    assert complete["bytes"] == size
    age = datetime.now(UTC) - datetime.fromisoformat(complete["saved"])
    assert 0 <= age.total_seconds() < 24 * 3600


def test_a_partial_checkpoint_is_none(run: Path) -> None:
    damage(run)
    assert [path.name for path in folders(run)] == ["step_00000002", "step_00000004"]


@pytest.mark.parametrize("columns", [80, 200])
def test_the_table(threefold: Command, run: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    damage(run)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(run.parent)
    ended = threefold("checkpoint", "list", "run")
    assert (ended.status, ended.error) == (0, "")
    table = ended.output.partition("step_")[0].splitlines()
    assert all(len(line.rstrip()) <= columns for line in table)
    for state in ("complete", "damaged", "diverged", "partial"):
        assert re.search(rf"\d .*\d (kB|MB) .* {state} ", ended.output), ended.output
    assert "step_00000004 is damaged: its tensors-00001.bin is missing or no file." in ended.output
    assert "dp 1 · tp 2 · pp 1" in ended.output


@pytest.mark.parametrize("columns", [80, 200])
def test_what_is_in_one(threefold: Command, saved: Path, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.chdir(saved.parent)
    ended = threefold("checkpoint", "show", "run")
    assert (ended.status, ended.error) == (0, "")
    assert all(len(line.rstrip()) <= columns for line in ended.output.splitlines())
    output = " ".join(ended.output.split())
    facts = json.loads(threefold("checkpoint", "show", "run", "--json", "--tensors").output)
    assert (facts["step"], facts["consumed_samples"], facts["format_version"]) == (4, 32, 1)
    weights = {name: one for name, one in facts["tensors"].items() if name.startswith("model.")}
    assert f"{facts['parameters']:,} in {len(weights)} tensors" in output
    assert facts["parameters"] == sum(one["bytes"] for one in weights.values()) // 4
    assert set(facts["optimizer_states"]) == {"exp_avg", "exp_avg_sq", "step"}
    for text in ("gpt: 3 layers of width 24, 4 heads", "dp 2 · tp 1 · pp 2, zero 1", "on 4 ranks", "optimizer exp_avg"):
        assert text in output
    assert facts["config"]["model"]["hidden_size"] == 24


def test_the_tensors_of_a_pattern(threefold: Command, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    ended = threefold("checkpoint", "show", saved / "checkpoints" / "step_00000002", "model.blocks.*.weight")
    assert all(len(line.rstrip()) <= 80 for line in ended.output.splitlines())
    names = re.findall(r"model\.[\w.]+", ended.output)
    assert names[0].startswith("model.blocks.0.")
    assert all(name.endswith("weight") for name in names)
    assert "float32" in ended.output
    assert " × " in ended.output
    missing = threefold("checkpoint", "show", saved, "blocks.7.")
    assert missing.status == 2
    assert re.search(r"has no tensor whose name matches blocks\.7\.; there is model\.\S+\.\n", missing.error)


def test_the_newest_that_is_good_is_shown(threefold: Command, run: Path) -> None:
    damage(run)
    ended = threefold("checkpoint", "show", run, "--json")
    assert json.loads(ended.output)["step"] == 2
    assert ended.error.startswith("Warning: ")
    assert "step_00000004 (its tensors-00001.bin is missing" in ended.error


@pytest.mark.parametrize(
    ("place", "reason", "advice"),
    [
        (".", "is not a folder of a run: it has no checkpoints/step_…", "the nearest run is run"),
        ("runn", "is not there", "the nearest run is /"),
        ("run/checkpoints/step_00000003", "is not there", "the nearest run is /"),
        ("run/metrics.jsonl", "is a file", "the nearest run is /"),
        ("empty", "is not a folder of a run", "give a run folder, as for --run-dir"),
    ],
)
def test_another_place_names_the_nearest_run(
    threefold: Command, run: Path, monkeypatch: pytest.MonkeyPatch, place: str, reason: str, advice: str
) -> None:
    monkeypatch.chdir(run.parent)
    if place == "empty":
        (run.parent / "empty").mkdir()
        monkeypatch.chdir(run.parent / "empty")
        place = "."
    for command in ("list", "show", "verify"):
        ended = threefold("checkpoint", command, place)
        assert ended.status == 2
        assert ended.output == ""
        assert ended.error.startswith(f"Error: {place} {reason}")
        assert advice in ended.error
        assert ended.error.count("\n") == 1


def test_a_folder_in_a_run_is_the_run(threefold: Command, run: Path) -> None:
    assert json.loads(threefold("checkpoint", "list", run / "checkpoints", "--json").output)[0]["step"] == 2


def test_one_that_was_being_replaced_counts(threefold: Command, run: Path) -> None:
    """As a kill leaves it between the two renames of a save that replaces a checkpoint of its step."""
    newest = run / "checkpoints" / "step_00000004"
    newest.rename(newest.with_name(newest.name + REPLACED))
    found = json.loads(threefold("checkpoint", "list", run, "--json").output)
    assert [(one["step"], one["state"]) for one in found] == [(2, "complete"), (4, "complete")]
    assert json.loads(threefold("checkpoint", "show", run, "--json").output)["step"] == 4
    assert threefold("checkpoint", "verify", run).status == 0


def test_a_file_that_vanishes_meanwhile_is_left_out_of_the_size(run: Path) -> None:
    folder = run / "checkpoints" / "step_00000004"
    size = sum(path.stat().st_size for path in folder.iterdir())
    (folder / "0-vanished").symlink_to(folder / "nowhere")  # has a name in the folder, and `stat` fails
    assert listed(folder).bytes == size
