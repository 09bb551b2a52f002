"""What a run writes and prints, and that all layouts and ways of starting give the same losses."""

import re
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from tests.support.metrics import MEASURED
from tests.train.support import Run, losses_of, same, train, train_rank
from threefold.errors import UserError
from threefold.launch import RankInfo, spawn
from threefold.report.metrics import read_metrics
from threefold.train.run import check_division
from threefold.verify.worker_pool import WorkerError, WorkerPool

STEP_LINE = re.compile(
    r"global step \d+, epoch: \d+, batch: \d+, loss: \d+\.\d{9}, avg_reader_cost: \d+\.\d{5} sec, "
    r"avg_batch_cost: \d+\.\d{5} sec, speed: \d+\.\d\d step/s, ips_total: \d+ tokens/s, ips: \d+ tokens/s, "
    r"learning rate: \d\.\d{5}e[+-]\d\d, tflops: [\de.+-]+, memory: [\d.]+ [kMG]B, max_memory: [\d.]+ [kMG]B "
    r"\(rank \d\), avg_forward_backward_cost: \d+\.\d{5} sec, avg_update_cost: \d+\.\d{5} sec, "
    r"avg_wait_cost: \d+\.\d{5} sec, wall_clock: \d+\.\d sec"
)


@pytest.fixture(scope="module")
def finished(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """The folder of a finished run on dp 2 · pp 2, and what each rank printed."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    evaluated = (("train.eval_every", 4), ("train.eval_batches", 2), ("checkpoint.every", 2), ("checkpoint.keep", 2))
    return folder, pool.run(4, train_rank, small_run.but(dp=2, pp=2, steps=6, set=evaluated), folder, False, True)


def test_metrics_have_every_step_once(finished: tuple[Path, list[str]]) -> None:
    lines = list(read_metrics(finished[0] / "metrics.jsonl"))
    steps = [line for line in lines if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    measured = tuple(key for key in MEASURED if key != "mfu")  # as nobody has measured this machine's peak rate
    assert {tuple(line) for line in steps} == {("step", "loss", "grad_norm", "lr", "tokens", *measured)}
    assert all(0 < line["tokens"] <= 8 * 16 for line in steps)
    evaluations = [line for line in lines if "loss" not in line]
    assert [(line["step"], line["valid_loss"] > 0) for line in evaluations] == [(4, True), (6, True)]


def test_the_log_has_the_form_of_the_original(finished: tuple[Path, list[str]]) -> None:
    lines = (finished[0] / "train.log").read_text().splitlines()
    steps = [line for line in lines if "learning rate" in line]
    assert [int(line.split(",")[0].split()[-1]) for line in steps] == [1, 2, 4, 6]
    assert all(STEP_LINE.fullmatch(line) for line in steps)
    assert sum("validation loss" in line for line in lines) == 2


def test_only_one_rank_prints(finished: tuple[Path, list[str]]) -> None:
    first, *others = finished[1]
    assert others == ["", "", ""]
    shown = [line for line in first.splitlines() if line.startswith("step ")]
    assert [int(line.split()[1].partition("/")[0]) for line in shown if "  loss " in line] == [1, 2, 4, 6]
    assert max(map(len, shown)) <= 120
    assert "validation loss" in first.rpartition("\n\n")[2]  # the summary


def test_the_curves_are_drawn(finished: tuple[Path, list[str]]) -> None:
    assert (finished[0] / "loss.png").read_bytes().startswith(b"\x89PNG")
    (file,) = (finished[0] / "tensorboard").iterdir()
    seen = {(value.tag, event.step) for event in EventFileLoader(str(file)).Load() for value in event.summary.value}
    assert {("loss/train", step) for step in range(1, 7)} | {("loss/validation", 4)} <= seen


def test_the_newest_checkpoints_are_kept(finished: tuple[Path, list[str]]) -> None:
    assert sorted(path.name for path in (finished[0] / "checkpoints").iterdir()) == ["step_00000004", "step_00000006"]


@pytest.mark.slow
def test_stages_are_told_and_a_run_goes_on_under_another_schedule(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    """Each stage with its rank, layers and parameters; the first and the last of a V share a rank."""
    run, checkpointed = small_run.but(dp=1, steps=4), (("checkpoint.every", 2),)
    pool.run(1, train_rank, run.but(steps=6), tmp_path / "one")
    folded = (*checkpointed, ("log.format", "fleet"), ("parallel.schedule", "zbv"), ("parallel.partition", (1, 2, 4)))
    printed = pool.run(2, train_rank, run.but(pp=2, set=folded), tmp_path / "run")[0]
    stages = re.findall(r"Stage (\d) on pp rank (\d): (.*), ([\d,]+) parameters\.", printed)
    where = [("0", "0", "embed"), ("1", "1", "blocks.0"), ("2", "1", "blocks.1 to blocks.2"), ("3", "0", "head")]
    assert [stage[:3] for stage in stages] == where
    total = re.search(r"Training ([\d,]+) parameters", printed)
    assert total is not None
    assert sum(int(size.replace(",", "")) for *_, size in stages) == int(total[1].replace(",", ""))
    looped = (*checkpointed, ("parallel.schedule", "interleaved"))
    pool.run(2, train_rank, run.but(pp=2, steps=6, set=looped), tmp_path / "run", True)
    assert same(losses_of(tmp_path / "run"), losses_of(tmp_path / "one"), "fp32")


def test_seven_layers_on_two_stages_are_told_layer_by_layer(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """Bounds 0, 3, 7; each layer once, with its number, name and class."""
    settings = (("model.num_layers", 5), ("parallel.partition", "uniform"), ("log.format", "fleet"))
    printed = pool.run(2, train_rank, small_run.but(dp=1, pp=2, steps=1, set=settings), tmp_path / "run")[0]
    lines = printed.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("Stage 0 on pp rank 0: embed to "))
    assert lines[first + 1 : first + 4 : 2] == [
        "  0 embed (Input), 1 blocks.0 (Block), 2 blocks.1 (Block)",
        "  3 blocks.2 (Block), 4 blocks.3 (Block), 5 blocks.4 (Block), 6 head (Head)",
    ]
    assert lines[first + 2].startswith("Stage 1 on pp rank 1: blocks.2 to head, ")


def test_a_partition_that_cannot_be_is_told_before_any_process_starts(small_run: Run) -> None:
    check_division(small_run.but(pp=2, set=(("parallel.partition", "class:Block"),)).config)
    with pytest.raises(UserError, match=r"use \[4\]"):
        check_division(small_run.but(pp=2, set=(("parallel.partition", (5,)),)).config)


def spawned(_: RankInfo, run: Run, run_dir: Path) -> None:
    """A rank that `launch` starts."""
    torch.set_num_threads(1)
    train(run.config, run_dir, False)


@pytest.mark.slow
def test_workers_started_from_python_have_the_same_losses(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(dp=2)
    pool.run(2, train_rank, run, tmp_path / "pool")
    spawn(spawned, (run, tmp_path / "spawn"), 2, run_dir=tmp_path / "logs", start_method="spawn")
    assert losses_of(tmp_path / "spawn") == losses_of(tmp_path / "pool")


def test_an_empty_validation_part_is_told_by_every_rank(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(dp=2, set=(("data.split", "1,0"), ("train.eval_every", 2)))
    with pytest.raises(WorkerError) as caught:
        pool.run(2, train_rank, run, tmp_path / "run")
    assert isinstance(caught.value.error, UserError)
    assert "valid split" in str(caught.value.error)
