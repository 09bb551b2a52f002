"""`train.max_restarts`: a run whose ranks are killed goes on by itself, and ends as if nothing had happened."""

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cli.kills import Killer, beacon, moments, pids
from tests.cli.runs import (
    check_checkpoints,
    command,
    end_of,
    losses,
    record,
    restarts,
    settings,
    start_ready,
    undisturbed,
    write_config,
)
from tests.support import ready
from tests.support.processes import assert_gone
from threefold.checkpoint.folder import check_whole, complete

KINDS = ("step", "evaluation", "save")


STEPS = ("train.max_steps=12", "train.eval_every=4", "checkpoint.every=3", "log.every=1", "model.hidden_dropout=0.1")
PAIR = settings(*STEPS, "parallel.dp=2")
LONG_PAIR = settings(*STEPS, "train.max_steps=80", "parallel.dp=2")
"""Long enough for ten kills."""
FOUR = [*LONG_PAIR, *settings("parallel.pp=2")]


@pytest.mark.parametrize("memory", [1, pytest.param(0, marks=pytest.mark.sweep)])
def test_a_killed_rank_costs_no_step(config_file: Path, tmp_path: Path, memory: int) -> None:
    """From memory on the very step that was being made; from the newest checkpoint on the one after it."""
    run, told = tmp_path / "run", tmp_path / "told"
    pair = (*PAIR, *settings("train.eval_every=2"))  # one of them is long enough to be met
    options = (*pair, *settings("train.max_restarts=1", f"checkpoint.memory_every={memory}"))
    process = start_ready(command(config_file, run, *options, *settings(beacon(told))))
    killer = Killer(process, told, seed=5)
    killer.kill(1, "evaluation")
    code, output, error = end_of(process)
    assert (code, error) == (0, "")
    assert_gone(list(pids(told)))
    killed = killer.killed[0][1]
    since = killed.step - 1 if memory else (killed.step - 1) // 3 * 3
    starts = [each.step for each in moments(told, 0) if each.kind == "start"]
    last = [each for each in moments(told, 1) if each.pid == killed.pid][-1]
    if memory and last != killed:  # the evaluation was over as the signal came, and steps up to the last were begun
        assert starts[-1] in (last.step - 2, last.step - 1, last.step)  # amid the copy before it
        since = starts[-1]
    assert starts == [0, since]
    (line,) = restarts(output)
    where = "memory" if memory else str(run / "checkpoints" / f"step_{since:08d}")
    why = "rank 1 failed: its process was killed by SIGKILL, as when memory runs out"
    log = run / "logs" / "rank_00001.log"
    assert line == f"Restart 1 of 1, as {why} (log: {log}). Resuming from {where} after step {since}."
    assert record(run) == undisturbed(config_file, tmp_path / "whole", *pair)
    check_checkpoints(run)
    ledger = json.loads((run / "goodput.json").read_text())
    assert (ledger["attempts"], ledger["restarts"], ledger["step"]) == (2, 1, 12)
    assert ledger["lost"] > 0
    assert f", 1 restart (steps {ledger['steps']:.1f}" in output


@pytest.fixture(scope="module")
def whole_run(tmp_path_factory: pytest.TempPathFactory, tokens: Path) -> list[dict[str, object]]:
    """The record of the run of four ranks, undisturbed."""
    folder = tmp_path_factory.mktemp("whole")
    return undisturbed(write_config(folder, tokens), folder / "run", *FOUR)


def kill_each(
    config_file: Path, tmp_path: Path, layout: list[str], ranks: int, count: int, seed: int, memory: int
) -> list[dict[str, object]]:
    """Kill ranks 0, 1, … in turn in a step, an evaluation or a save, and return the record of the run."""
    run, told = tmp_path / "run", tmp_path / "told"
    more = settings(f"train.max_restarts={count}", f"checkpoint.memory_every={memory}", beacon(told))
    process = start_ready(command(config_file, run, *layout, *more))
    killer = Killer(process, told, seed)
    for number in range(count):
        if killer.kill(number % ranks, KINDS[number % 3]) is None:
            break
    code, output, error = end_of(process)
    assert (code, error) == (0, ""), output
    assert len(restarts(output)) == len(killer.killed) == count
    assert_gone(list(pids(told)))
    check_checkpoints(run)
    return record(run)


@pytest.mark.sweep
def test_each_rank_killed_in_turn(config_file: Path, tmp_path: Path) -> None:
    """Eight kills."""
    expected = undisturbed(config_file, tmp_path / "whole", *LONG_PAIR)
    assert kill_each(config_file, tmp_path, LONG_PAIR, ranks=2, count=8, seed=1, memory=1) == expected


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(6))
def test_each_rank_killed_in_turn_often(
    config_file: Path, tmp_path: Path, whole_run: list[dict[str, object]], seed: int
) -> None:
    """Sixty kills; from memory that is newer than the checkpoints, from older memory, or from checkpoints alone."""
    assert kill_each(config_file, tmp_path, FOUR, ranks=4, count=10, seed=seed, memory=seed % 3) == whole_run


FAILING = """
import os, signal
from threefold import Callback

class Failing(Callback):
    ranks = "all"

    def setup(self, run):
        self.rank = run.mesh.rank

    def before_step(self, step, batch):
        if step == 3 and self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.slow
def test_the_same_failure_twice_in_a_row_is_given_up(config_file: Path, tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    run, more = tmp_path / "run", settings("train.max_restarts=9", f"train.callbacks=[{tmp_path}/failing.py:Failing]")
    ended = ready.run(command(config_file, run, *PAIR, *more))
    assert ended.returncode == 1
    assert len(restarts(ended.stdout)) == 1
    log = run / "logs" / "rank_00001.log"
    assert ended.stderr == (
        f"Error: rank 1 failed: its process was killed by SIGKILL, as when memory runs out (log: {log}); given up, as "
        "step 3 failed in the same way twice in a row with no other step made in between.\n"
    )


@pytest.mark.sweep
def test_the_same_rank_lost_twice_has_a_fallback_take_over(config_file: Path, tmp_path: Path) -> None:
    """With fewer ranks and the same global batch, on the exact next sample."""
    (tmp_path / "failing.py").write_text(FAILING)
    run, more = tmp_path / "run", settings("train.max_restarts=2", f"train.callbacks=[{tmp_path}/failing.py:Failing]")
    options = (*PAIR, *more, *settings("parallel.dp=2", "parallel.tp=2", "parallel.fallbacks=[dp8, dp1·pp1]"))
    options = (*options, *settings("checkpoint.every=1", "train.global_batch_size=8"))
    ended = ready.run(command(config_file, run, *options))
    assert (ended.returncode, ended.stderr) == (0, "")
    first, second = restarts(ended.stdout)
    assert first.startswith("Restart 1 of 2, as rank 1 failed: ")
    assert second.startswith("Restart 2 of 2 in layout dp1, as rank 1 failed: ")
    assert second.endswith(f"Resuming from {run}/checkpoints/step_00000002 after step 2.")
    alone = settings("parallel.dp=1", "train.global_batch_size=8", "checkpoint.every=1")
    expected = undisturbed(config_file, tmp_path / "whole", *settings(*STEPS), *alone)
    found = record(run)
    assert [(line["step"], line.get("tokens")) for line in found] == [
        (line["step"], line.get("tokens")) for line in expected
    ]
    for got, wanted in zip(losses(run), losses(tmp_path / "whole"), strict=True):
        assert got == pytest.approx(wanted, rel=1e-5)


@pytest.mark.sweep
@pytest.mark.parametrize("memory", [0, 1])
def test_a_stop_during_a_restart_is_a_stop(config_file: Path, tmp_path: Path, memory: int) -> None:
    """With states in memory no step is lost: what is in no checkpoint is saved before the run ends."""
    run, told = tmp_path / "run", tmp_path / "told"
    endless = settings("train.max_steps=1000000", "checkpoint.every=50", "train.max_restarts=5", "parallel.dp=2")
    more = settings(f"checkpoint.memory_every={memory}", beacon(told), "train.eval_every=7", "log.every=1")
    process = start_ready(command(config_file, run, *endless, *more))
    killer = Killer(process, told, seed=3)
    killed = killer.kill(0, "evaluation")
    assert killed is not None
    os.kill(process.pid, signal.SIGTERM)
    code, output, error = end_of(process)
    assert (code, error) == (0, "")
    assert output.count("Stopped by SIGTERM ") == 1
    assert_gone(list(pids(told)))
    found = [each.step for each in complete(run)]
    if memory:
        assert f"Stopped by SIGTERM after step {found[-1]}, which is saved in " in output
        assert found[-1] == losses(run)[-1][0] in (killed.step - 1, killed.step)
    for each in complete(run):  # beside them there may be what a killed save left
        check_whole(each)
