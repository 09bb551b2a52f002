"""A model of the user on samples that are not tokens: one loss in every layout, resumed; and checks of what is read."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.train.support import Run, losses_of, same, steps_of, train_rank
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.compat.map_dataset import DistributedDataLoader
from threefold.config.loading import config_of
from threefold.data.dataset import open_dataset
from threefold.data.formats.custom_data import NestedSamples
from threefold.data.loader import BatchSlice, Loader
from threefold.errors import UserError
from threefold.plugins import import_file
from threefold.resilience.data_checks import DataCheck
from threefold.verify.worker_pool import WorkerError, WorkerPool

WHOLE = BatchSlice(4)
FILE = Path(__file__).parents[2] / "examples" / "two_tower.py"


def two_towers(run: Run, **changes: Any) -> Run:
    own = (
        ("model", {"architecture": "own", "file": f"{FILE}:TwoTower"}),
        ("data", {"path": f"{FILE}:pairs", "split": "80,19"}),
        ("optimizer", {"name": f"{FILE}:Soft", "lr": 0.1, "warmup_steps": 2, "decay_steps": 20}),
    )
    evaluated = (("train.eval_every", 3), ("train.eval_batches", 2), ("train.callbacks", ["csv_log", "epoch_metrics"]))
    return run.but(dtype="fp64", sections=own, set=evaluated, **changes)


def terms_of(folder: Path) -> list[dict[str, float]]:
    return [step["terms"] for step in steps_of(folder).values()]


def test_losses_and_terms_are_those_of_one_process_and_a_run_resumes_in_another_layout(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    """Over the end of an epoch of 80 samples in batches of 8."""
    run = two_towers(small_run, steps=12)
    [printed] = pool.run(1, train_rank, run, tmp_path / "alone")
    assert "12 steps of 8 samples read the 80 training samples 1.2 times" in printed
    assert "samples/s" in printed
    alone, terms = losses_of(tmp_path / "alone"), terms_of(tmp_path / "alone")
    assert alone == pytest.approx([each["match"] + 0.01 * each["size"] for each in terms], rel=1e-14)
    pool.run(4, train_rank, two_towers(small_run, dp=2, tp=2, steps=5), tmp_path / "more")
    pool.run(4, train_rank, two_towers(small_run, tp=2, pp=2, steps=12), tmp_path / "more", True)
    assert same(losses_of(tmp_path / "more"), alone, "fp64")
    for name in ("match", "size"):
        assert same([each[name] for each in terms_of(tmp_path / "more")], [each[name] for each in terms], "fp64")
    for file in ("metrics.csv", "epochs.csv"):
        rows = [list(csv.DictReader((tmp_path / folder / file).open())) for folder in ("more", "alone")]
        columns = [name for name in rows[1][0] if "loss" in name or "term/" in name]
        assert {"term/match", "term/size"} <= set(columns)
        assert len(rows[0]) - len(rows[1]) == 1  # the evaluation after its last step, the epoch in two parts
        for more, one in zip(rows[0][-2:], rows[1][-2:], strict=True) if file == "metrics.csv" else ():
            for name in columns:
                assert (more[name] == one[name] == "") or float(more[name]) == pytest.approx(float(one[name]), rel=1e-9)


DATA = """
import torch
import torch.distributed as dist


class Rows:
    def __init__(self, item, samples=10):
        self.item, self.samples = item, samples

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        return self.item(index)


def of_rank():
    "Rank 3 reads another file."
    return Rows(lambda index: (torch.tensor([index, dist.get_rank() == 3]), float(index)), 8)


nested = Rows(lambda index: {"x": (torch.full((2,), index), index), "y": 0.5 * index})
tuples = Rows(lambda index: (torch.ones(3), torch.ones(2), index))
shapes = Rows(lambda index: {"x": torch.zeros(1 + index)})
text = Rows(lambda index: {"x": torch.zeros(1), "name": "a"})
missing = Rows(lambda index: {}["x"])
tokens = Rows(lambda index: (torch.arange(4), torch.arange(4)))
more = Rows(lambda index: {"x": [0, {"y": 1.5, **({"late": 1} if index == 3 else {})}]})
named = Rows(lambda index: {"tokens": torch.arange(4), "labels": torch.arange(4), "kind": index})
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("nested") / "my_rows.py"
    path.write_text(DATA)
    return path


def loader_of(file: Path, name: str, part: BatchSlice = WHOLE, model: Mapping[str, Any] | None = None) -> Loader:
    sections = {"data": {"path": f"{file}:{name}", "split": "1"}, "model": {"architecture": "own", **(model or {})}}
    samples = open_dataset(config_of(sections)).samples("train")
    return Loader(samples, samples, part, seed=3)


def test_replicas_read_disjoint_blocks_of_the_global_batch(file: Path) -> None:
    whole, *parts = (loader_of(file, "nested", BatchSlice(4, *place)).batch(2) for place in ((0, 1), (0, 2), (1, 2)))
    assert torch.cat([part["x"][0] for part in parts]).equal(whole["x"][0])
    assert whole["y"].tolist() == [0.5 * index for index in whole["x"][1].tolist()]
    order = [index for step in range(5) for index in loader_of(file, "nested").batch(step)["x"][1].tolist()]
    assert sorted(order) == sorted([*range(10), *range(10)])


def test_the_last_batch_of_an_evaluation_is_filled_with_the_first_samples(file: Path) -> None:
    batches = [batch["x"][1].tolist() for batch in loader_of(file, "nested").eval_batches()]
    assert batches == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 0, 1]]


def test_a_key_beside_tokens_and_labels_reaches_a_custom_model(file: Path) -> None:
    batch = loader_of(file, "named", model={"vocab_size": 9}).batch(2)
    assert sorted(batch) == ["kind", "labels", "tokens"]
    assert len(set(batch["kind"].tolist())) == 4
    assert batch["tokens"].tolist() == batch["labels"].tolist() == [[0, 1, 2, 3]] * 4
    rows = import_file(file).named
    in_a_loop = DistributedDataLoader(rows, 5, shuffle=False)
    assert [each["kind"].tolist() for each in in_a_loop] == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("shapes", r"whose samples \d, \d, \d, … cannot be put into one batch \(RuntimeError: .*\); give all the same"),
        ("text", r"whose sample \d has a str in it but must be tensors, arrays and numbers, or tuples, lists and map"),
        ("missing", r"whose sample \d cannot be read \(KeyError: 'x'\); correct its __getitem__\."),
        (
            "tokens",
            r"how many ids there are; set model\.vocab_size, or return mappings if its samples are not tokens\.",
        ),
    ],
)
def test_wrong_samples(file: Path, name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.path is .*{sentence}"):
        loader_of(file, name).batch(0)


def test_a_key_that_the_first_of_a_batch_lacks_is_not_lost(file: Path) -> None:
    sections = {"data": {"path": f"{file}:more", "split": "1"}, "model": {"architecture": "own"}}
    samples = open_dataset(config_of(sections)).samples("train")
    assert isinstance(samples, NestedSamples)
    assert samples.batch(np.array([0, 2]))["x"][1]["y"].tolist() == [1.5, 1.5]
    sentence = r"one batch \(ValueError: sample 3 has 'late', and sample 0 has not\); give all the same nesting, keys"
    with pytest.raises(UserError, match=sentence):
        samples.batch(np.array([0, 3]))


def test_they_are_not_mixed(file: Path) -> None:
    mixture = {f"{file}:nested": 1.0, f"{file}:tuples": 1.0}
    with pytest.raises(UserError, match=r"^data\.mixture names .*nested and .*tuples, of which one has other samples"):
        open_dataset(config_of({"data": {"mixture": mixture}, "model": {"architecture": "own"}}))


def checked(file: Path, same_rows: bool) -> str:
    """What the check of this rank's first batch says; with `same_rows` both replicas read the first one's."""
    mesh = Mesh(Layout(dp=2, tp=2))
    loader = loader_of(file, "tuples" if same_rows else "of_rank", BatchSlice(4, 0 if same_rows else mesh.dp.index, 2))
    try:
        DataCheck(mesh, 10, loader.slice.rows.tolist()).before_step(1, loader.batch(0))
    except UserError as error:
        return str(error)
    finally:
        loader.close()
    return f"nothing on rank {dist.get_rank()}"


def test_ranks_that_read_other_samples_are_named(pool: WorkerPool, file: Path) -> None:
    found = pool.run(4, checked, file, False)
    assert found == [found[0]] * 4
    assert found[0].startswith("At step 1 rank 3 (dp 1, pp 0, tp 1) read other samples than the others of its replica")
    found = pool.run(4, checked, file, True)
    assert found == ["At step 1 the replicas dp 0 and dp 1 read the same samples; each must have its own."] * 4


DRAWN = """
import random

import numpy as np
import torch


class Drawn:
    def __init__(self):
        self.base = torch.randint(0, 97, (60, 17))

    def __len__(self):
        return 60

    def __getitem__(self, number):
        ids = self.base[number].clone()
        if self.draws(number):
            ids[np.random.randint(17)] = random.randrange(97)
            ids[torch.randint(17, ())] = torch.randint(97, ())
        return ids

    def draws(self, number):
        return True


class Seldom(Drawn):
    def draws(self, number):
        return number % 23 == 5


class Own(Drawn):
    def __init__(self):
        super().__init__()
        self.own = random.Random(0)

    def draws(self, number):
        return number % 23 == 5 and self.own.random() < 2
"""


@pytest.mark.parametrize("name", ["Drawn", "Seldom"])
def test_samples_that_are_drawn_are_the_same_in_every_layout_and_resumed(
    name: str, pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    """Over the end of an epoch; `Seldom` draws first in a batch that is read in the background."""
    run = _drawn(small_run, tmp_path, name)
    pool.run(1, train_rank, run.but(steps=9), tmp_path / "alone")
    alone = losses_of(tmp_path / "alone")
    pool.run(2, train_rank, run.but(dp=2, steps=5), tmp_path / "more")
    pool.run(2, train_rank, run.but(tp=2, steps=9), tmp_path / "more", True)
    assert same(losses_of(tmp_path / "more"), alone, "fp64")


def test_a_data_set_that_draws_from_its_own_generator_is_refused_by_a_run(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    with pytest.raises(
        WorkerError, match=r"drawn\.py:Own, whose samples draw from own, a random\.Random that it keeps"
    ):
        pool.run(1, train_rank, _drawn(small_run, tmp_path, "Own").but(steps=9), tmp_path / "run")


def _drawn(run: Run, folder: Path, name: str) -> Run:
    (folder / "drawn.py").write_text(DRAWN)
    data = {"path": f"{folder / 'drawn.py'}:{name}", "split": "8,2", "sequence_length": 16}
    return run.but(dtype="fp64", sections=(("data", data),), set=(("model.vocab_size", 97), ("train.eval_every", 4)))
