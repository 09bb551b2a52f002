"""One flipped bit in the weights or optimizer state of one rank is found, and the rank is named; nothing else is."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch

from tests.support.parity import LLAMA, LLAMA_SIZES, Case, make_engine, over, shard_of
from tests.support.sweep import sweep
from threefold.errors import DivergenceError, HardwareFault
from threefold.resilience.corruption import CorruptionWatch, Watched, watched_tensors
from threefold.train.step import Engine
from threefold.verify.worker_pool import WorkerPool

HYBRID = (("parallel.zero", 1), ("parallel.zero_shards", 2))
LAYOUTS = {
    "dp8": Case().with_layout(8, 1, 1, batch=16),
    "dp4-tp2": Case().with_layout(4, 2, 1),
    "dp2-tp2-pp2": Case().with_layout(2, 2, 2),
    "zero1": Case(settings=(("parallel.zero", 1),)).with_layout(8, 1, 1, batch=16),
    "zero3-tp2": Case(settings=(("parallel.zero", 3),)).with_layout(4, 2, 1),
    "hybrid": Case(settings=HYBRID).with_layout(8, 1, 1, batch=16),
    "ep": replace(over(8, 1, 1, ep=2, batch=16), dtype="fp32"),
    "cp-bf16": Case(dtype="bf16", sequence=12).with_layout(4, 1, 1, cp=2),
}


def bits(each: Watched) -> torch.Tensor:
    size = each.tensor.element_size()
    return each.tensor.detach().view({2: torch.int16, 4: torch.int32, 8: torch.int64}[size]).view(-1)


def flip(engine: Engine, random: Random, kind: str) -> str:
    """Flip one bit of this rank's weights or optimizer state; returns of which tensor."""
    masters = {entry.name for entry in engine.optimizer.entries}
    tensors = [
        each
        for each in watched_tensors(engine.model, engine.optimizer)
        if each.tensor.dim() and each.tensor.numel() and (each.label in masters) == (kind == "weights")
    ]
    chosen = random.choice(tensors)
    words = bits(chosen)
    words[random.randrange(len(words))] ^= torch.ones((), dtype=words.dtype) << random.randrange(
        8 * chosen.tensor.element_size()
    )
    return chosen.label


class Run:
    """A rank of a small run that is watched, and can go back to where it was."""

    def __init__(self, case: Case, every: int) -> None:
        self.case, self.engine, self.every = case, make_engine(case), every
        self.step(0)
        self._kept = [
            (each, each.tensor.detach().clone()) for each in watched_tensors(self.engine.model, self.engine.optimizer)
        ]
        self.watch = CorruptionWatch(self.engine, every)

    def step(self, done: int) -> None:
        self.engine.train_step(shard_of(self.case, done, self.engine.mesh.dp.index), done)

    def watched_step(self, done: int) -> None:
        loss, tokens = self.engine.compute_gradients(shard_of(self.case, done, self.engine.mesh.dp.index), done)
        self.watch.before_update(done + 1)
        try:
            self.engine.update(loss, tokens, done)
        except DivergenceError:
            self.watch.after_divergence(done)
            raise
        self.watch.after_update(done + 1)

    @torch.no_grad()
    def restore(self) -> None:
        for each, value in self._kept:
            each.tensor.copy_(value)
        self.engine.optimizer.restored()
        self.watch = CorruptionWatch(self.engine, self.every)


def named(case: Case, kind: str, seeds: list[int], every: int) -> list[tuple[int, str, tuple[int, ...], str]]:
    """Flip a bit on one rank after a step, for each seed; the rank, the tensor, and what was found."""
    run = Run(case, every)
    found = []
    for seed in seeds:
        random = Random(seed)
        rank = seed % case.world_size
        run.restore()
        run.watch.before_fit(1)
        flipped = flip(run.engine, random, kind) if run.engine.mesh.rank == rank else ""
        (flipped,) = filter(None, run.engine.mesh.world.gather_objects(flipped))
        try:
            for done in range(1, 1 + every):
                run.watched_step(done)
            found.append((rank, flipped, (), "nothing"))
        except HardwareFault as fault:
            found.append((rank, flipped, fault.ranks, str(fault)))
    return found


def check_names(found: list[tuple[int, str, tuple[int, ...], str]]) -> None:
    wrong = [trial for trial in found if trial[2] != (trial[0],) or trial[1] not in trial[3]]
    assert wrong == []


@sweep(("layout", "kind"), zip(LAYOUTS, ["weights", "state"] * 4, strict=True), quick=(0,), slow=(3, 7))
def test_a_flipped_bit_is_named(pool: WorkerPool, layout: str, kind: str) -> None:
    """One bit on each of the eight ranks in turn, within the step that is watched: with or without copies."""
    case = LAYOUTS[layout]
    check_names(pool.run(8, named, case, kind, list(range(8)), 1)[0])


@pytest.mark.sweep
@pytest.mark.parametrize("kind", ["weights", "state"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_twenty_of_twenty(pool: WorkerPool, layout: str, kind: str) -> None:
    check_names(pool.run(8, named, LAYOUTS[layout], kind, list(range(100, 120)), 1)[0])


@sweep(("kind", "ranks"), [("weights", (1, 6)), ("weights", range(8)), ("state", range(8))], quick=(0,), ids=str)
def test_the_majority_names_a_rank_whose_bit_flipped_steps_ago(
    pool: WorkerPool, kind: str, ranks: Sequence[int]
) -> None:
    """Before the interval in which the rank compares its state with itself; by then its gradients have reached all."""
    check_names(pool.run(8, named, LAYOUTS["dp4-tp2"], kind, list(ranks), 3)[0])


@pytest.mark.slow
def test_of_two_copies_both_are_named(pool: WorkerPool) -> None:
    """And where there is no copy, a bit that flipped steps ago is not found."""
    for rank, flipped, ranks, sentence in pool.run(8, named, LAYOUTS["dp2-tp2-pp2"], "weights", list(range(8)), 3)[0]:
        assert rank in ranks
        assert flipped in sentence
        assert len(ranks) == 1 or "there is no majority" in sentence
    found = pool.run(8, named, LAYOUTS["zero1"], "state", list(range(3)), 3)[0]
    assert [sentence for *_, sentence in found] == ["nothing"] * 3


MUON = Case(optimizer="muon", settings=(("parallel.zero", 2), ("parallel.zero_shards", 2)))
QUIET = [
    Case(dropout=0.2).with_layout(2, 2, 2),
    replace(over(4, 2, 1, ep=2), dtype="fp32"),  # whose tensor ranks have shards of different lengths
    over(4, 2, 1, ("parallel.sequence_parallel", True), ("parallel.zero", 3), ep=2),
    Case(sequence=12, dropout=0.1).with_layout(2, 1, 2, cp=2),
    Case(dtype="bf16", settings=(("parallel.zero", 2),)).with_layout(4, 2, 1),
    Case(dtype="fp16", settings=(("parallel.sequence_parallel", True),), sequence=12).with_layout(2, 4, 1),
    MUON.with_layout(4, 2, 1),
    replace(LLAMA, dtype="fp32", model=(*LLAMA_SIZES, ("num_key_value_heads", 2))).with_layout(2, 4, 1),
    Case(layers=8, schedule="zbv").with_layout(2, 1, 4, accumulation=8, batch=32),
    Case(layers=8, schedule="interleaved").with_layout(1, 2, 4, accumulation=4),
    Case(optimizer="lion", settings=(("parallel.gradient_compression", "bf16"),)).with_layout(8, 1, 1, batch=16),
    Case().with_layout(1, 1, 1),
    over(8, 1, 1, ("parallel.zero", 2), ("parallel.zero_shards", 4), ep=2, batch=16),
    Case(optimizer="sgd", settings=(("train.recompute", "full"),)).with_layout(2, 3, 1),
]


def quiet(case: Case) -> int:
    """Six watched steps; returns how many ranks hold a copy of what rank 0 holds first."""
    run = Run(case, 1)
    run.watch.before_fit(1)
    for done in range(1, 7):
        run.watched_step(done)
    found = run.engine.mesh.world.gather_objects(
        [each.identity for each in watched_tensors(run.engine.model, run.engine.optimizer)]
    )
    return sum(found[0][0] in each for each in found)


@sweep(
    "case",
    [*QUIET[:4], *(pytest.param(case, marks=pytest.mark.sweep) for case in QUIET[4:])],
    quick=(0,),
    ids=lambda case: f"dp{case.dp}-tp{case.tp}-pp{case.pp}-{case.dtype}-{case.optimizer}",
)
def test_no_false_alarm(pool: WorkerPool, case: Case) -> None:
    copies = pool.run(case.world_size, quiet, case)[0]
    assert copies >= 1
