"""Ranks that read what they should not are found and named."""

from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.train.support import Run, losses_of, train_rank, write_tokens
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.errors import UserError
from threefold.resilience.data_checks import DataCheck, disagreement
from threefold.train import run as entry_point
from threefold.train.run import agree_on_micro_batch
from threefold.verify.worker_pool import WorkerPool


@pytest.mark.parametrize(
    ("layout", "fingerprints", "found"),
    [
        (Layout(), [7], None),
        (Layout(dp=2, tp=2), [7, 7, 8, 8], None),
        (Layout(dp=2, tp=2, pp=2), [7, 7, 7, 7, 8, 8, 8, 8], None),
        (Layout(dp=2, tp=2, pp=2), [7, 7, 7, 7, 8, 8, 9, 8], "rank 6 (dp 1, pp 1, tp 0) read other samples"),
        (Layout(dp=1, tp=3), [9, 7, 7], "rank 0 (dp 0, pp 0, tp 0) read other samples"),
        (Layout(dp=2), [7, 7], "the replicas dp 0 and dp 1 read the same samples"),
    ],
)
def test_who_is_named(layout: Layout, fingerprints: list[int], found: str | None) -> None:
    problem = disagreement(fingerprints, layout)
    assert problem is None if found is None else problem is not None and problem.startswith(found)


def agreed(sizes: tuple[int, ...], given: bool) -> tuple[int, int, int]:
    """The batch sizes that a rank trains with whose own machine has room for `sizes[rank]` sequences."""
    mesh = Mesh(Layout(dp=len(sizes)))
    train = {"global_batch_size": 48, **({"micro_batch_size": 3} if given else {})}
    config = Config.model_validate({"data": {"path": "x"}, "parallel": {"dp": len(sizes)}, "train": train})
    resolved = resolve(config, 100, sizes[mesh.rank])
    found = agree_on_micro_batch(resolved, mesh).train
    return found.global_batch_size, found.micro_batch_size, found.gradient_accumulation_steps


def test_ranks_of_different_machines_take_the_smallest_default_micro_batch(pool: WorkerPool) -> None:
    assert pool.run(2, agreed, (24, 24), False) == [(48, 24, 1)] * 2
    assert pool.run(3, agreed, (16, 5, 9), False) == [(48, 4, 4)] * 3
    assert pool.run(2, agreed, (16, 2), True) == [(48, 3, 8)] * 2  # given, it is the same everywhere


def compared(wrong: int, at: int, every: int) -> list[str]:
    """Compare the batches of five steps, one rank's differing in one label from step `at` on."""
    mesh = Mesh(Layout(dp=2, tp=2))
    callback = DataCheck(mesh, every)
    tokens = torch.arange(12).view(3, 4) + mesh.dp.index
    batch = Batch(tokens, tokens + 1, torch.arange(3) + 3 * mesh.dp.index)
    other = replace(batch, labels=batch.labels.clone())
    other.labels[2, 3] += 1
    errors = []
    for step in range(1, 6):
        if step % callback.step_interval:
            continue
        try:
            callback.before_step(step, other if dist.get_rank() == wrong and step >= at else batch)
        except UserError as error:
            errors.append(str(error))
    return errors


def test_every_rank_tells_the_same(pool: WorkerPool) -> None:
    found = pool.run(4, compared, 3, 1, 100)
    assert found == [found[0]] * 4
    (sentence,) = found[0]
    assert sentence.startswith("At step 1 rank 3 (dp 1, pp 0, tp 1) read other samples")


def test_later_steps_are_compared_too(pool: WorkerPool) -> None:
    assert len(pool.run(4, compared, 2, 2, 4)[0]) == 1
    assert pool.run(4, compared, 4, 1, 2) == [[]] * 4  # there is no rank 4


def test_one_process_compares_nothing(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    assert "step 4/4  loss" in pool.run(1, train_rank, small_run, tmp_path)[0]


def trained_on(run: Run, others: dict[int, Path], run_dir: Path) -> str:
    """Train on the run's data, some ranks on others, and return the error that ended the run; empty for none."""
    try:
        train_rank(run.but(data=others.get(dist.get_rank(), run.data)), run_dir)
    except UserError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def rotated(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The same documents three times, each time beginning with another one: nothing but the order differs."""
    documents = [f"Document {n} says that {n * n} is the square of {n}." for n in range(60)]
    folder = tmp_path_factory.mktemp("rotated")
    return [write_tokens(folder / str(n), documents[n:] + documents[:n]) for n in range(3)]


def test_a_run_whose_ranks_read_other_files_ends_before_its_first_step(
    pool: WorkerPool, rotated: list[Path], tmp_path: Path
) -> None:
    run = Run(rotated[0], dp=1, tp=2, pp=2)
    found = pool.run(4, trained_on, run, {2: rotated[1]}, tmp_path / "run")
    assert found == found[:1] * 4
    assert found[0].startswith("the data at data.path is 915 tokens of uint16 in 60 documents with the checksums ")
    assert " on ranks 0, 1, 3 (" in found[0]
    assert " on rank 2 (" in found[0]
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert pool.run(4, trained_on, run, {}, tmp_path / "same") == [""] * 4
    assert len(losses_of(tmp_path / "same")) == run.steps


def trained_on_the_first_share(run: Run, run_dir: Path) -> str:
    """Every replica takes the rows of the first."""

    def first(config: Config, samples: object, replicas: object, consumed: object) -> object:
        return opened(config, samples, replace(replicas, index=0), consumed)  # type: ignore[type-var]

    opened = entry_point.open_loader
    with patch.object(entry_point, "open_loader", first):
        return trained_on(run, {}, run_dir)


def test_a_run_whose_replicas_read_the_same_samples_ends_at_its_first_step(
    pool: WorkerPool, rotated: list[Path], tmp_path: Path
) -> None:
    found = pool.run(2, trained_on_the_first_share, Run(rotated[0], dp=2), tmp_path / "run")
    assert found == ["At step 1 the replicas dp 0 and dp 1 read the same samples; each must have its own."] * 2


class CustomRows:
    """A user's own data set of tokens that gives each rank every other sample."""

    def __init__(self) -> None:
        self.first, self.ranks = dist.get_rank(), dist.get_world_size()

    def __len__(self) -> int:
        return 32 // self.ranks

    def __getitem__(self, index: int) -> list[int]:
        place = index * self.ranks + self.first
        return [(place + each) % 300 for each in range(17)]


def run_on_custom_rows(run: Run, folder: Path) -> str:
    try:
        train_rank(run, folder)
    except UserError as error:
        return str(error)
    return ""


def test_a_run_refuses_a_data_set_that_shards_itself(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(data=Path(f"{__name__}:CustomRows"), dp=2)
    for told in pool.run(2, run_on_custom_rows, run, tmp_path / "run"):
        assert told.startswith(
            f"data.path is {__name__}:CustomRows, which has another first sample on rank 1 than on rank 0, as a data "
            "set that shards itself by rank has"
        )
