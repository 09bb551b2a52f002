"""The stages of a long pipeline, each as if it had been run."""

from typing import Any

import pytest

from threefold.config import Config, resolve
from threefold.planner import dry_run as stages
from threefold.planner.dry_run import dry_run, run_stages, stage_ranks
from threefold.planner.dry_step import DryRunReport


def long_pipeline(layers: int = 16, batch: int = 12, **parallel: object) -> Config:
    given = {
        "model": {"num_layers": layers, "hidden_size": 16, "num_attention_heads": 2, "vocab_size": 256},
        "data": {"path": "nowhere", "sequence_length": 8},
        "parallel": {"tp": 2, "pp": 9, "partition": [2, 4, 5, 7, 9, 11, 13, 15], **parallel},
        "train": {"global_batch_size": batch, "micro_batch_size": 1, "recompute": "full"},
    }
    return resolve(Config.model_validate(given), 1)


@pytest.mark.sweep
def test_stages_of_a_long_pipeline_are_those_of_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    config, run = long_pipeline(), []

    def counted(config: Config, rank: int, **_: Any) -> DryRunReport:
        run.append(config.parallel.pp)
        return dry_run(config, rank)

    monkeypatch.setattr(stages, "dry_run", counted)
    found = run_stages(config)
    assert len(found) == 9
    assert set(run) == {2, 3, 4, 5}  # two kinds of stage in the middle, the first and the last: no whole run
    assert len(run) == 4 * 3 + 3
    for stage in (0, 2, 5, 8):
        assert found[stage] == dry_run(config, stage_ranks(config)[stage])


@pytest.mark.parametrize(
    ("pp", "partition"),
    [
        pytest.param(5, [2, 4, 6, 8], marks=pytest.mark.slow),
        pytest.param(8, [1, 3, 4, 5, 6, 7, 8], marks=pytest.mark.sweep),
    ],
)
def test_stages_of_a_shorter_pipeline_with_many_micro_batches_are_those_of_whole_runs(
    pp: int, partition: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config, run = long_pipeline(10, 21, tp=1, pp=pp, partition=partition), []

    def counted(config: Config, rank: int, **_: Any) -> DryRunReport:
        run.append(config.train.gradient_accumulation_steps)
        return dry_run(config, rank)

    monkeypatch.setattr(stages, "dry_run", counted)
    found = run_stages(config)
    assert max(run) == 8
    for stage in (1, pp - 1):
        assert found[stage] == dry_run(config, stage_ranks(config)[stage])


def test_other_pipelines_are_run_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    run: list[int] = []
    monkeypatch.setattr(stages, "dry_run", lambda config, rank, *_, **__: run.append(rank))
    run_stages(long_pipeline(schedule="gpipe"))
    run_stages(long_pipeline(pp=3, partition=[4, 8]))
    assert run == [0, 2, 4, 6, 8, 10, 12, 14, 16, 0, 2, 4]


@pytest.mark.slow
def test_passes_are_told() -> None:
    told: list[tuple[str, int, int]] = []
    config = long_pipeline(4, 4, tp=1, pp=2, partition=None, schedule="interleaved", stage_chunks=2)
    run_stages(config, lambda *each: told.append(each))
    assert told == [(f"rank {rank}", done, 8) for rank in (0, 1) for done in range(8)]


@pytest.mark.slow
def test_exact_run_exchanges_what_a_plain_one_of_its_sample_groups_does() -> None:
    def found(exact: bool) -> DryRunReport:
        given = {
            "model": {"num_layers": 2, "hidden_size": 36, "num_attention_heads": 2, "vocab_size": 256},
            "data": {"path": "nowhere", "sequence_length": 32},
            "parallel": {"tp": 2, "pp": 2},
            "train": {"global_batch_size": 16, "micro_batch_size": 4 if exact else 2, "exact": exact},
        }
        return dry_run(resolve(Config.model_validate(given), 1), rank=0)

    plain, exact = found(exact=False), found(exact=True)
    assert plain.micro_batches == exact.micro_batches == 8
    of_layers = [[each for each in report.collectives if each.axis != "world"] for report in (plain, exact)]
    assert of_layers[0] == of_layers[1]
    assert 0.9 * plain.flops <= exact.flops <= plain.flops  # attention keeps its weights for the backward pass
