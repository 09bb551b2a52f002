"""Runs on token files of other systems: the same tokens give the same run, whatever files they are in."""

from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.other_systems import Documents, write_fleet, write_megatron
from tests.train.support import Run, losses_of, same, train_rank
from threefold.checkpoint.resume import find_resumption
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.errors import UserError
from threefold.inference.generate import GenerationRequest, generate
from threefold.verify.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def documents(small_run: Run) -> Documents:
    files = TokenFiles.open(small_run.data)
    bounds = files.documents.tolist()
    return [[files.tokens[start:end].tolist()] for start, end in pairwise(bounds)]


@pytest.fixture(scope="module")
def runs(small_run: Run, documents: Documents, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("other")
    tokenizer = (("data.tokenizer", str(small_run.data / "tokenizer.json")),)
    apart = (("data.separate_documents", True),)
    base = small_run.but(steps=3)
    return {
        "own": base.but(set=apart),
        "megatron": base.but(data=write_megatron(folder / "m", documents), set=apart + tokenizer),
        "fleet": base.but(data=write_fleet(folder / "f", documents, "<i4"), set=apart),
    }


@pytest.fixture(scope="module")
def folders(pool: WorkerPool, runs: dict[str, Run], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Where each of the runs was trained, on one rank."""
    folder = tmp_path_factory.mktemp("runs")
    for name, run in runs.items():
        pool.run(1, train_rank, run, folder / name)
    return {name: folder / name for name in runs}


def test_the_same_tokens_give_the_same_losses(folders: dict[str, Path]) -> None:
    losses = {name: losses_of(folder) for name, folder in folders.items()}
    assert len(set(map(tuple, losses.values()))) == 1, losses


def test_the_layout_changes_nothing(pool: WorkerPool, runs: dict[str, Run], folders: dict[str, Path], tmp_path) -> None:
    pool.run(2, train_rank, runs["fleet"].but(dp=2), tmp_path / "run")
    assert same(losses_of(tmp_path / "run"), losses_of(folders["fleet"]), "fp32")


def test_text_needs_the_tokenizer(folders: dict[str, Path]) -> None:
    (text,) = generate(folders["megatron"], ["The"], GenerationRequest(3))
    assert text.startswith("The")
    with pytest.raises(UserError, match=r"was trained on .* without a tokenizer, so output cannot be decoded"):
        generate(folders["fleet"], ["The"], GenerationRequest(3))


def test_a_run_goes_on_with_its_tokens_in_other_files(runs: dict[str, Run], folders: dict[str, Path]) -> None:
    for before, after in (("own", "megatron"), ("megatron", "own"), ("fleet", "megatron")):
        assert find_resumption(folders[before], runs[after].but(steps=4).config).warnings == ()
    with pytest.raises(UserError, match=r"tokenizer is not the one that .* was trained with"):
        find_resumption(folders["own"], runs["fleet"].but(steps=4).config)


def test_resuming_on_fewer_documents(runs: dict[str, Run], folders: dict[str, Path], documents, tmp_path) -> None:
    fewer = write_fleet(tmp_path / "f", documents[:-1], "<i4")
    with pytest.raises(UserError, match=r"with .* tokens in 59 documents but .* was trained on .* in 60"):
        find_resumption(folders["fleet"], runs["fleet"].but(steps=4, data=fewer).config)
