"""A data set of the user's own, by its import path: the same samples in every layout, resumed, and wrong ones told."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.train.support import Run, losses_of, same, train_rank
from threefold.config.loading import config_of
from threefold.data.dataset import Dataset, open_dataset
from threefold.errors import UserError
from threefold.verify.worker_pool import WorkerPool

FILE = '''
import torch


class Sums(torch.utils.data.Dataset):
    """Sample i: the running sums of i, modulo 50; the pair of 16 tokens and the labels of all but every third."""

    def __init__(self, samples=40, length=16):
        self.samples, self.length = samples, length

    def __len__(self):
        return self.samples

    def __getitem__(self, index):
        row = (torch.arange(self.length + 1) * (index + 3)) % 50
        labels = row[1:].clone()
        labels[::3] = -100
        return row[:-1], labels


class Lines(Sums):
    """One sequence, of 3 to 17 tokens."""

    def __getitem__(self, index):
        return [(index + token) % 50 for token in range(3 + index % 15)]


class Named(Sums):
    def __getitem__(self, index):
        tokens, labels = super().__getitem__(index)
        return {"labels": labels, "tokens": tokens.numpy()}


class Marked(Sums):
    """With keys that no built-in model knows."""

    def __getitem__(self, index):
        tokens, labels = super().__getitem__(index)
        return {"tokens": tokens, "labels": labels, "kind": 1, "weight": 0.5}


class LateMarked(Sums):
    def __getitem__(self, index):
        tokens, labels = super().__getitem__(index)
        return {"tokens": tokens, "labels": labels, **({"kind": 1} if index else {})}


def parts():
    return {"train": Sums(40), "valid": Sums(8)}


def of_one_sample(*sample):
    class One(Sums):
        def __getitem__(self, index):
            return sample

    return One(4)


ready = Sums()
too_long = Sums(length=17)
unequal = of_one_sample([1, 2], [3])
floats = of_one_sample([1.0, 2.0], [3.0, 4.0])
large = of_one_sample([1, 64], [3, 4])
negative = of_one_sample([1, 2], [3, -1])
nothing = 3


def needs(arguments):
    pass


def makes_nothing():
    pass


def other_names():
    return {"train": Sums(), "test_set": Sums()}
'''


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "my_data.py"
    path.write_text(FILE)
    return path


def opened(file: Path, name: str, **data: Any) -> Dataset:
    sections: dict[str, dict[str, Any]] = {"data": {"path": f"{file}:{name}", "sequence_length": 16, **data}}
    return open_dataset(config_of({**sections, "model": {"vocab_size": 64}}))


@pytest.mark.parametrize("name", ["Sums", "ready", "Named", "parts"])
def test_tokens_and_labels(file: Path, name: str) -> None:
    """Of a class, an object, a mapping as a sample, and a function of parts; as the data set has them."""
    samples = opened(file, name, split="1").samples("train")
    assert len(samples) == 40
    tokens, labels = samples.labelled(np.array([7, 0]))
    rows = np.arange(17) * np.array([[10], [3]]) % 50
    expected = rows[:, 1:].copy()
    expected[:, ::3] = -100
    assert tokens.tolist() == rows[:, :-1].tolist()
    assert labels.tolist() == expected.tolist()
    assert samples.padding(np.array([7, 0])).tolist() == [0, 0]


def test_shorter_ones_are_filled_up(file: Path) -> None:
    samples = opened(file, "Lines", split="1").samples("train")
    tokens, labels = samples.labelled(np.array([0, 14]))
    assert tokens.tolist() == [[0, 1] + [0] * 14, [token % 50 for token in range(14, 30)]]
    assert labels.tolist() == [[1, 2] + [-100] * 14, [token % 50 for token in range(15, 31)]]
    assert samples.padding(np.array([14, 0])).tolist() == samples.padding(np.array([14, 0])).tolist() == [0, 14]


def test_keys_that_a_built_in_model_does_not_know_are_named(file: Path) -> None:
    """In the first sample, before a run starts, and in a later one, where it is read."""
    rest = (
        "beside 'tokens' and 'labels', which a built-in model does not know; leave them out, or train a model of your"
    )
    with pytest.raises(UserError, match=rf"whose samples have the keys 'kind', 'weight' {rest} own"):
        opened(file, "Marked")
    late = opened(file, "LateMarked", split="1").samples("train")
    with pytest.raises(
        UserError, match=r"whose sample 3 has the key 'kind' .*, which the first sample lacks; give all"
    ):
        late.labelled(np.array([0, 3]))


def test_splits_share_no_sample(file: Path) -> None:
    """Of one data set by `data.split`; of parts each its own."""
    found = opened(file, "Sums", split="30,8,2")
    chosen = [found.samples(name).chosen.tolist() for name in ("train", "valid", "test")]  # type: ignore[attr-defined]
    assert [len(part) for part in chosen] == [30, 8, 2]
    assert sorted(number for part in chosen for number in part) == list(range(40))
    assert len(opened(file, "parts").samples("valid")) == 8


def run_of(small_run: Run, file: Path, **changes: Any) -> Run:
    settings = (
        ("data.path", f"{file}:parts"),
        ("train.eval_every", 2),
        ("train.eval_batches", 1),
        ("model.vocab_size", 50),
    )
    return small_run.but(dtype="fp64", set=(*settings, *changes.pop("set", ())), **changes)


@pytest.mark.slow
def test_the_same_losses_in_another_layout_and_resumed(
    pool: WorkerPool, small_run: Run, file: Path, tmp_path: Path
) -> None:
    """Over the bound of an epoch of 40 samples in batches of 8, on one rank and on dp 2 · tp 2, then on pp 2 · ZeRO."""
    pool.run(1, train_rank, run_of(small_run, file, steps=7), tmp_path / "one")
    pool.run(4, train_rank, run_of(small_run, file, dp=2, tp=2, steps=4), tmp_path / "more")
    last = run_of(small_run, file, dp=2, pp=2, steps=7, set=(("parallel.zero", 1),))
    pool.run(4, train_rank, last, tmp_path / "more", True)
    assert same(losses_of(tmp_path / "more"), losses_of(tmp_path / "one"), "fp64")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("Sum", r"has no Sum; the nearest is Sums\."),
        ("nothing", r"gives a int but must be a map-style data set, with __len__ and __getitem__, or a function"),
        ("makes_nothing", r"gives a NoneType but must be a map-style data set"),
        ("needs", r"cannot be called without arguments \(TypeError: .*\); name a function that makes the data set\."),
        ("other_names", r"has a part 'test_set'; name them train, valid, test\."),
        ("too_long", r"sample \d+ has 17 tokens but must have 1 to data\.sequence_length 16; cut it or set"),
        ("unequal", r"cannot be read as tokens and labels \(ValueError: it has 2 tokens and 1 labels\); return a pair"),
        ("floats", r"the dtype float64, not \[S\] and integers\)"),
        ("large", r"has the token 64 but model\.vocab_size is 64, so ids are 0 to 63; set it to 65 or more\."),
        ("negative", r"has the label -1 but model\.vocab_size is 64"),
    ],
)
def test_wrong_data_sets(file: Path, name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=rf"^data\.path is .*{sentence}"):
        opened(file, name, split="1").samples("train").labelled(np.array([0]))


def test_what_is_missing(file: Path) -> None:
    with pytest.raises(UserError, match=r"does not say how many ids there are; set model\.vocab_size\.$"):
        open_dataset(config_of({"data": {"path": f"{file}:Sums"}}))
    with pytest.raises(UserError, match=r"whose test part is empty: add 'test' to what it returns\.$"):
        opened(file, "parts").samples("test")
    with pytest.raises(
        UserError, match=r"whose valid part is empty: .*a weight above 0, or set train\.eval_every to 0\.$"
    ):
        opened(file, "Sums", split="1").samples("valid")
