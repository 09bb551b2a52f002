"""All tokens are read once while a run trains; damage, and other text than a checkpoint's, ends it on all ranks."""

import contextlib
import io
import json
import shutil
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.damage import flip
from tests.support.other_systems import write_megatron
from tests.train.support import Run, manifest, train_rank
from threefold.checkpoint.folder import path_of
from threefold.checkpoint.resume import find_resumption
from threefold.checksums import seal_text
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.data.corpus import DOCUMENTS_FILE, META_FILE, TOKENS_FILE, StoredArray
from threefold.data.dataset import open_dataset
from threefold.data.formats.threefold_folder import Meta, TokenFiles, file_checksums
from threefold.errors import UserError
from threefold.resilience.data_checks import TokenCheck
from threefold.verify.worker_pool import WorkerError, WorkerPool


def with_checksums(folder: Path) -> Path:
    meta = Meta.read(folder)
    Meta(**{**vars(meta), "checksums": file_checksums(folder)}).write(folder / META_FILE)
    return folder


@pytest.fixture
def run(small_run: Run, tmp_path: Path) -> Run:
    """A run on a folder of its own, with checksums."""
    return small_run.but(data=with_checksums(Path(shutil.copytree(small_run.data, tmp_path / "tokens"))))


def reverse(folder: Path) -> None:
    """Every document backwards but for its end: other text, and as much of it."""
    files = TokenFiles.open(folder)
    tokens, bounds = files.tokens[:].copy(), files.documents.tolist()
    for start, end in pairwise(bounds):
        tokens[start : end - 1] = tokens[start : end - 1][::-1]
    tokens.tofile(folder / TOKENS_FILE)


def sentences(run: Run, wait_for: int, reading: tuple[int, ...]) -> list[str]:
    """What the check says on this rank, asked at each of three steps and at the end."""
    mesh = Mesh(Layout(dp=run.dp))
    check = TokenCheck(mesh, open_dataset(run.config).contents(), 1, None, mesh.rank in reading, wait_for)
    found = []
    check.before_fit(0)
    try:
        for step in range(1, 4):
            check.before_step(step, None)  # type: ignore[arg-type]
        check.after_fit()
    except UserError as error:
        found.append(str(error))
    check.close()
    return found


@pytest.mark.parametrize("reading", [(0,), (2,), (0, 1, 2, 3)])
def test_every_rank_says_the_same(pool: WorkerPool, run: Run, reading: tuple[int, ...]) -> None:
    assert pool.run(4, sentences, run.but(dp=4), 1 << 30, reading) == [[]] * 4
    flip(run.data / TOKENS_FILE, 800)
    found = pool.run(4, sentences, run.but(dp=4), 1 << 30, reading)
    assert found == [found[0]] * 4
    (sentence,) = found[0]
    assert "tokens.bin is damaged (its checksum is not the one that was written)" in sentence
    assert "\n" not in sentence


def said_at_the_end(run: Run, is_read: bool) -> str:
    """What the check prints of a run that ends while the tokens are still being read, or after that."""
    go_on = threading.Event()

    class Waiting(StoredArray):
        def __getitem__(self, index: Any) -> Any:
            assert go_on.wait(60)
            return super().__getitem__(index)

    (corpus,) = open_dataset(run.config).contents()
    tokens = Waiting(corpus.files[0], corpus.tokens.dtype, len(corpus.tokens))
    check = TokenCheck(Mesh(Layout()), [replace(corpus, tokens=tokens)], 1, None, True, 1 << 30 if is_read else -1)
    if is_read:
        go_on.set()
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        check.before_fit(0)
        check.after_fit()
    check.close()
    go_on.set()
    return printed.getvalue()


def test_a_run_that_ends_before_all_is_read_says_so(pool: WorkerPool, run: Run) -> None:
    assert "The run ended when 0% of its tokens had been checked" in pool.run(1, said_at_the_end, run, False)[0]
    assert pool.run(1, said_at_the_end, run, True) == [""]


@pytest.mark.parametrize("bit", [801, 9_000])
def test_a_damaged_file_ends_the_run(pool: WorkerPool, run: Run, tmp_path: Path, bit: int) -> None:
    flip(run.data / TOKENS_FILE, bit)
    with pytest.raises(WorkerError, match=r"tokens.bin (is damaged|holds token)"):
        pool.run(1, train_rank, run.but(steps=2), tmp_path / "run")
    assert not path_of(tmp_path / "run", 2).exists(), "nothing is saved of such a run"


def test_other_text_is_not_resumed(pool: WorkerPool, run: Run, tmp_path: Path) -> None:
    pool.run(1, train_rank, run.but(steps=2), tmp_path / "run")
    find_resumption(tmp_path / "run", run.but(steps=4).config)
    (content,) = manifest(path_of(tmp_path / "run", 2))["contents"]
    assert content["dtype"] == "uint16"
    reverse(run.data)
    with_checksums(run.data)
    with pytest.raises(UserError, match=r"tokens.bin holds other text than .*step_00000002 was trained on"):
        find_resumption(tmp_path / "run", run.but(steps=4).config)


def test_other_bounds_of_documents_are_not_resumed(pool: WorkerPool, run: Run, tmp_path: Path) -> None:
    plain = json.loads((run.data / META_FILE).read_text())
    pool.run(1, train_rank, run.but(steps=2), tmp_path / "run")
    bounds = np.fromfile(run.data / DOCUMENTS_FILE, dtype="<i8")
    tokens = np.fromfile(run.data / TOKENS_FILE, dtype="<u2")
    tokens[bounds[2] - 3], tokens[bounds[2] - 1] = plain["eod"], 5  # another place for one end
    tokens[bounds[2] - 1] = plain["eod"]
    bounds[2] -= 2
    bounds.tofile(run.data / DOCUMENTS_FILE)
    tokens.tofile(run.data / TOKENS_FILE)
    with_checksums(run.data)
    with pytest.raises(UserError, match=r"documents.bin holds other text than .*step_00000002 was trained on"):
        find_resumption(tmp_path / "run", run.but(steps=4).config)


def test_a_checkpoint_that_does_not_say_is_resumed(pool: WorkerPool, run: Run, tmp_path: Path) -> None:
    pool.run(1, train_rank, run.but(steps=2), tmp_path / "run")
    path = path_of(tmp_path / "run", 2) / "checkpoint.json"
    facts = json.loads(path.read_text())
    del facts["contents"]
    del facts["checksum"]
    path.write_text(seal_text(json.dumps(facts, indent=2)))
    assert find_resumption(tmp_path / "run", run.but(steps=4).config).checkpoint.step == 2


def foreign(run: Run, tmp_path: Path) -> Run:
    files = TokenFiles.open(run.data)
    bounds = files.documents.tolist()
    documents = [[files.tokens[start:end].tolist()] for start, end in pairwise(bounds)]
    prefix = write_megatron(tmp_path / "megatron" / "m", documents)
    return run.but(data=prefix, set=(("data.tokenizer", str(run.data / "tokenizer.json")),))


def test_files_without_checksums_are_compared_while_the_run_trains(pool: WorkerPool, run: Run, tmp_path: Path) -> None:
    """A checkpoint on one format is compared with the same tokens in the other, too."""
    theirs = foreign(run, tmp_path)
    pool.run(1, train_rank, theirs.but(steps=2), tmp_path / "run")
    pool.run(1, train_rank, run.but(steps=3), tmp_path / "run", True)
    pool.run(1, train_rank, theirs.but(steps=4), tmp_path / "run", True)
    reverse(run.data)
    other = foreign(run, tmp_path / "other")
    find_resumption(tmp_path / "run", other.but(steps=6).config)
    with pytest.raises(WorkerError, match=r"m.bin holds other text than .*step_00000004 was trained on"):
        pool.run(1, train_rank, other.but(steps=6), tmp_path / "run", True)
    assert not path_of(tmp_path / "run", 6).exists()


def test_a_mixture_names_the_corpus(pool: WorkerPool, run: Run, tmp_path: Path) -> None:
    second = with_checksums(Path(shutil.copytree(run.data, tmp_path / "second")))
    mixture = {str(run.data): 1.0, str(second): 2.0}
    mixed = run.but(set=(("data.path", None), ("data.mixture", mixture)))
    pool.run(1, train_rank, mixed.but(steps=2), tmp_path / "run")
    reverse(second)
    with_checksums(second)
    with pytest.raises(UserError, match=r"second/tokens.bin holds other text"):
        find_resumption(tmp_path / "run", mixed.but(steps=4).config)


def test_a_file_that_is_cut_while_it_is_read(pool: WorkerPool, run: Run) -> None:
    assert "must hold" in pool.run(1, read_after_cutting, run)[0]


def read_after_cutting(run: Run) -> str:
    samples = open_dataset(run.config).samples("train")
    tokens = run.data / TOKENS_FILE
    tokens.write_bytes(tokens.read_bytes()[:100])
    try:
        samples.labelled(np.arange(len(samples)))
    except UserError as error:
        return str(error)
    return ""
