"""A dry run of a rank against the same rank of a real run: bytes, collectives, errors."""

from dataclasses import replace

import pytest
import torch.distributed as dist

from tests.planner.dry_run_support import measured_ranks
from tests.planner.golden_collectives import LAYOUTS, first_difference, names_of, read
from tests.support.parity import Case
from tests.support.sweep import sweep
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.errors import UserError
from threefold.planner import dry_run as rank_run
from threefold.planner.dry_run import dry_run, run_step
from threefold.planner.dry_step import (
    ACTIVATIONS,
    GRADIENTS,
    OPTIMIZER,
    WEIGHTS,
    DryRunReport,
    Measured,
    Observer,
    measure_step,
)
from threefold.torch_private.fake import FakeTensor
from threefold.train.step import Engine
from threefold.verify.worker_pool import WorkerPool

NEAR = 0.01


LARGE = [name for name, case in LAYOUTS.items() if case.world_size > 4]
SMALL = [name for name in LAYOUTS if name not in LARGE]


@pytest.mark.sweep
@pytest.mark.parametrize("name", LARGE)
def test_memory_and_collectives_of_eight_ranks(pool: WorkerPool, name: str) -> None:
    compare(pool, name)


@sweep("name", SMALL, quick=(8,), slow=slice(0, None, 3))
def test_memory_and_collectives_are_those_of_a_real_rank(pool: WorkerPool, name: str) -> None:
    compare(pool, name)


def compare(pool: WorkerPool, name: str) -> None:
    """The first rank and the last."""
    case = LAYOUTS[name]
    ranks = list(dict.fromkeys((0, case.world_size - 1)))
    runs = [run_step(case.config, rank) for rank in ranks]
    assert not dist.is_initialized()
    for measured in measured_ranks(pool, case):
        for rank, (report, events) in zip(ranks, runs, strict=True):
            real = measured[rank]
            held = (report.parameter_bytes, report.gradient_bytes, report.optimizer_bytes)
            assert held == tuple(real.held[kind] for kind in (WEIGHTS, GRADIENTS, OPTIMIZER))
            assert first_difference([names_of(events)], [names_of(real.events)]) is None
            if not case.config.model.num_experts:  # whose bytes follow from the routing
                assert first_difference([names_of(events)], [read()[name][rank]]) is None
        if all(is_near(report, measured[rank]) for rank, (report, _) in zip(ranks, runs, strict=True)):
            return
    pytest.fail(f"{name}: {[(report.at_peak, measured[report.rank].peak) for report, _ in runs]}")


def is_near(report: DryRunReport, real: Measured) -> bool:
    """Within one percent, of the whole and of the activations alone."""
    whole, activations = sum(real.peak.values()), real.peak[ACTIVATIONS]
    return abs(report.peak_bytes - whole) <= NEAR * whole and abs(report.activation_bytes - activations) <= (
        NEAR * activations
    )


def small(**sections: dict[str, object]) -> Config:
    given = {
        "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 32},
        "data": {"path": "nowhere", "sequence_length": 8},
        **sections,
    }
    return resolve(Config.model_validate(given), 1)


def test_flops_of_a_step_are_those_of_its_products() -> None:
    """Six for each weight of a matrix product and each token; attention's beside."""
    config = small(train={"global_batch_size": 4})
    tokens, hidden, vocab = 4 * 8, 16, 32
    products = 2 * 12 * hidden**2 + hidden * vocab
    scores = 2 * 2 * tokens * 8 * hidden  # two products a layer, of all pairs of positions
    assert dry_run(config).flops == 6 * tokens * products + 2 * (scores + scores * 5 // 2)


@sweep("name", ("tp2", "dp2 pp2, ZeRO 3", "mixture, ep2"), quick=(1,))
def test_no_number_has_memory(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    seen: list[bool] = []

    def checked(engine: Engine, batch: Batch, observer: Observer | None = None) -> Measured:
        of_weights = [each for weight in engine.model.weights for each in (weight.leaf, weight.master)]
        numbers = [*of_weights, *(state for *_, state in engine.optimizer.states())]
        seen.extend(isinstance(each, FakeTensor) for each in numbers)
        return measure_step(engine, batch, observer)

    monkeypatch.setattr(rank_run.dry_step, "measure_step", checked)
    dry_run(LAYOUTS[name].config)
    assert len(seen) > 100
    assert all(seen)


def test_recomputation_is_counted() -> None:
    plain, full = (dry_run(small(train={"global_batch_size": 4, "recompute": mode})) for mode in ("none", "full"))
    assert full.flops > 1.2 * plain.flops
    assert full.activation_bytes < plain.activation_bytes


def test_a_world_of_thousands_of_ranks_takes_one_process() -> None:
    config = small(parallel={"dp": 2048, "tp": 2, "pp": 2}, train={"global_batch_size": 4096})
    report = dry_run(config, 8191)
    assert (report.world_size, dict(report.coordinates)) == (8192, {"dp": 2047, "pp": 1, "cp": 0, "tp": 1})
    assert report.parameters == dry_run(replace_dp(config, 2), 3).parameters


def replace_dp(config: Config, dp: int) -> Config:
    parallel = config.parallel.model_copy(update={"dp": dp})
    train = config.train.model_copy(update={"global_batch_size": 2 * dp})
    return config.model_copy(update={"parallel": parallel, "train": train})


def test_a_rank_that_does_not_exist_is_one_sentence() -> None:
    config = Case(dp=2).config
    with pytest.raises(UserError, match=r"^rank is 2 but the layout dp 2 · tp 1 · pp 1 has ranks 0 to 1; use 1\.$"):
        dry_run(config, 2)
    with pytest.raises(UserError, match=r"rank is -1 .* use 0\.$"):
        dry_run(config, -1)


def test_no_process_group_is_left_or_taken_over(tmp_path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", rank=0, world_size=1, store=store)
    try:
        with pytest.raises(RuntimeError, match="has another"):
            dry_run(replace(Case(), layers=1).config)
    finally:
        dist.destroy_process_group()
