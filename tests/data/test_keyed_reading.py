"""A user's sample is a function of seed, epoch and number, whatever was read before; what cannot be one is refused."""

import itertools
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Subset

import threefold
from tests.support.sweep import sweep
from threefold.data.keyed_reading import KeyedReader, pass_key, positions
from threefold.errors import UserError
from threefold.resilience.kept_generators import own_generators


class Drawn(Dataset):
    """Samples that are drawn from all three global generators."""

    def __init__(self, size: int = 24) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, torch.rand(()).item(), np.random.rand(), random.random(), np.random.normal()])


class Together(Drawn):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in indices]


def replica(index: int, size: int) -> Any:
    """All of a mesh that a loader looks at."""
    return SimpleNamespace(dp=SimpleNamespace(index=index, size=size), world=SimpleNamespace(size=1))


def samples(loader: Any, epochs: int = 1) -> dict[tuple[int, int], list[float]]:
    found = {}
    for epoch in range(epochs):
        for batch in loader:
            found |= {(epoch, int(row[0])): row.tolist()[1:] for row in batch}
    return found


@pytest.mark.parametrize("kind", [Drawn, Together])
def test_a_sample_is_the_same_in_every_layout_with_any_workers_and_resumed(kind: type[Drawn]) -> None:
    alone = samples(threefold.DistributedDataLoader(kind(), 4, seed=3), 2)
    assert len({tuple(each) for each in alone.values()}) == 48
    for dp, workers in ((2, 0), (4, 0), (1, 2), (2, 1)):
        parts = [
            threefold.DistributedDataLoader(kind(), 4, replica(index, dp), seed=3, num_workers=workers)
            for index in range(dp)
        ]
        found = [samples(part, 2) for part in parts]
        assert dict(itertools.chain.from_iterable(part.items() for part in found)) == alone, (dp, workers)
    resumed = threefold.DistributedDataLoader(kind(), 4, seed=3)
    resumed.load_state_dict({"epoch": 1, "start": 12, "seed": 3, "samples": 24})
    rest = samples(resumed)
    assert len(rest) == 12
    assert all(alone[1, number] == row for (_, number), row in rest.items())
    assert samples(threefold.DistributedDataLoader(kind(), 4, seed=4)) != {
        place: row for place, row in alone.items() if not place[0]
    }


def test_the_generators_of_the_process_go_on_as_if_nothing_had_been_read() -> None:
    torch.manual_seed(1)
    before = positions()
    samples(threefold.DistributedDataLoader(Drawn(), 4))
    KeyedReader(Drawn(), "it").read([1, 2], [5, 5])
    assert positions() == before


def test_reading_together_is_reading_one_after_the_other_unless_it_draws() -> None:
    calls = list[list[int]]()

    class Plain(Drawn):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index])

        def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
            calls.append(indices)
            return [self[index] for index in indices]

    reader = KeyedReader(Plain(), "it")
    assert [int(each) for each in reader.read([3, 1], [0, 0])] == [3, 1]
    assert (calls, reader.draws) == ([[3, 1]], False)
    reader = KeyedReader(Together(), "it")
    both = reader.read([3, 1], [0, 0])
    assert reader.draws
    assert torch.equal(both[1], KeyedReader(Drawn(), "it").read([1], [0])[0])


class Own(Drawn):
    def __init__(self, generator: Any, draw: Any) -> None:
        super().__init__()
        self.held, self.draw = {"mine": [generator]}, draw

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, float(self.draw(self.held["mine"][0])) if index == 7 else 0.0])


GENERATORS = {
    "numpy.Generator": (np.random.default_rng, lambda own: own.random()),
    "numpy.RandomState": (np.random.RandomState, lambda own: own.rand()),
    "random.Random": (random.Random, lambda own: own.random()),
    "torch.Generator": (lambda seed: torch.Generator().manual_seed(seed), lambda own: torch.rand((), generator=own)),
}


@pytest.mark.parametrize("kind", GENERATORS)
@sweep("workers", [0, 1], quick=(0,))
def test_a_generator_of_the_data_sets_own_is_named_when_it_is_used(kind: str, workers: int) -> None:
    """It moves at one sample of 24 only, so that early readings do not show it; inside other data sets, too."""
    make, draw = GENERATORS[kind]
    data = Subset(Own(make(0), draw), range(24))
    with pytest.raises(UserError) as refused:
        samples(threefold.DistributedDataLoader(data, 4, num_workers=workers))
    assert str(refused.value).startswith(
        f"dataset, a Subset, whose samples draw from dataset.held['mine'][0], a {kind} that it keeps, so that each "
        "depends on those read before it; draw from the global generators of torch, NumPy or random, which are keyed by"
    )
    assert "\n" not in str(refused.value)


MODULE_RNG = np.random.default_rng(0)


class OfModule(Drawn):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, MODULE_RNG.random()])


def test_generators_of_a_module_and_of_a_closure_are_found() -> None:
    with pytest.raises(UserError, match=rf"draw from {__name__}\.MODULE_RNG, a numpy\.Generator that it keeps"):
        threefold.DistributedDataLoader(OfModule(), 4)
    generator = random.Random(0)

    class InClosure(Drawn):
        def __getitem__(self, index: int) -> torch.Tensor:
            return torch.tensor([index, generator.random()])

    assert "generator" in [name for name, _ in own_generators(InClosure())]
    with pytest.raises(UserError, match=r"draw from generator, a random\.Random that it keeps"):
        threefold.DistributedDataLoader(InClosure(), 4)


def test_one_that_is_only_kept_is_not_refused() -> None:
    data = Own(random.Random(0), lambda own: 0.5)
    assert len(samples(threefold.DistributedDataLoader(data, 4))) == 24


class Counting(Drawn):
    def __init__(self, changes_after: int) -> None:
        super().__init__(96)
        self.reads, self.changes_after = 0, changes_after

    def __getitem__(self, index: int) -> torch.Tensor:
        self.reads += 1
        return torch.tensor([index, self.reads // self.changes_after])


@pytest.mark.parametrize("changes_after", [1, 30])
def test_samples_that_change_with_what_was_read_are_refused(changes_after: int) -> None:
    """At once, or when the first one is read again later."""
    with pytest.raises(UserError, match=r"dataset, a Counting, whose sample \d+ changes with what has been read, as"):
        samples(threefold.DistributedDataLoader(Counting(changes_after), 4))
    reader = KeyedReader(Counting(30), "it")
    with pytest.raises(UserError, match="whose sample 0 changes with what has been read"):
        any(reader.read_plain([number]) == [] for number in range(96))


def test_the_key_of_a_pass_follows_from_seed_and_epoch() -> None:
    assert len({pass_key(seed, epoch) for seed in range(20) for epoch in range(20)}) == 400


def test_a_plain_loader_is_what_would_depend_on_the_workers() -> None:
    """So that the tests above would see it."""
    torch.manual_seed(0)
    one = samples(DataLoader(Drawn(), 4))
    assert one != samples(DataLoader(Drawn(), 4))
