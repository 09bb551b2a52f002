"""A whole run with context parallelism: the samples and documents of token files, evaluation, resuming, generating."""

from pathlib import Path

import pytest

from tests.train.support import Run, losses_of, same, train_rank, write_tokens
from threefold.inference.generate import GenerationRequest, Sampling, generate
from threefold.launch.worker_pool import WorkerPool
from threefold.train.callbacks.metrics_reading import read_metrics

ROPE = (("model.position_embedding", "rope"), ("data.separate_documents", True), ("train.eval_every", 3))


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Documents of a few tokens, several in each sample."""
    from pydoc_data.topics import topics

    documents = [line[:30] for _, text in sorted(topics.items())[:20] for line in text.splitlines()[:8] if line]
    return Run(write_tokens(tmp_path_factory.mktemp("short") / "tokens", documents), set=ROPE)


def evaluations(folder: Path) -> list[float]:
    return [line["valid_loss"] for line in read_metrics(folder / "metrics.jsonl") if "valid_loss" in line]


@pytest.mark.slow
def test_half_a_run_on_cp_2_and_the_rest_in_one_process(pool: WorkerPool, short: Run, tmp_path: Path) -> None:
    run = short.but(dtype="fp64")
    pool.run(1, train_rank, run.but(steps=6), tmp_path / "one")
    pool.run(4, train_rank, run.but(dp=2, cp=2, steps=3), tmp_path / "four")
    pool.run(1, train_rank, run.but(steps=6), tmp_path / "four", True)
    assert same(losses_of(tmp_path / "four"), losses_of(tmp_path / "one"), "fp64")
    assert same(evaluations(tmp_path / "four"), evaluations(tmp_path / "one"), "fp64")
    texts = [generate(tmp_path / name, ["The value"], GenerationRequest(20, Sampling(0))) for name in ("one", "four")]
    assert texts[0] == texts[1]


@pytest.mark.slow
def test_documents_change_what_is_learned(pool: WorkerPool, short: Run, tmp_path: Path) -> None:
    pool.run(1, train_rank, short, tmp_path / "separate")
    together = (*ROPE, ("data.separate_documents", False))
    pool.run(1, train_rank, short.but(set=together), tmp_path / "together")
    assert not same(losses_of(tmp_path / "separate"), losses_of(tmp_path / "together"), "fp32")
