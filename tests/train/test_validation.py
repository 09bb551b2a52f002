"""Validation data of one's own: evaluations against one process, what is trained on, and data that do not fit."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.support.sweep import sweep
from tests.train.support import Run, evaluated, losses_of, train_rank, write_tokens
from threefold.checkpoint.folder import newest
from threefold.constants import IGNORE_INDEX
from threefold.data.dataset import open_dataset
from threefold.errors import UserError
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.parallel.parameter import draw_
from threefold.report.metrics import read_metrics
from threefold.resilience.terms import data_of
from threefold.train.run import open_samples
from threefold.verify.worker_pool import WorkerPool

TEXTS = [f"Held-out line {number}, which returns a value of {number * 7}, and ends." for number in range(11)]


@pytest.fixture(scope="module")
def held(small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The held-out texts as JSON lines, and as tokens of the training data's tokenizer."""
    folder = tmp_path_factory.mktemp("held")
    lines = folder / "held.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    packed = gzip.compress(lines.read_bytes())
    (folder / "held.jsonl.gz").write_bytes(packed)
    return {"lines": lines, "compressed": folder / "held.jsonl.gz", "folder": small_run.data}


def run_with(small_run: Run, place: Path | str, *more: tuple[str, Any], **layout: Any) -> Run:
    settings = (("data.validation", str(place)), ("data.split", None), ("train.eval_every", 2), *more)
    return small_run.but(set=(*layout.pop("set", ()), *settings), **layout)


def by_hand(run: Run, rows: list[list[int]], eod: int) -> tuple[float, int]:
    """Mean loss and tokens of rows of tokens, one at a time through the unsplit model."""
    config = run.config
    model = GPT(config.model).double()
    plan = gpt_plan(config.model, config.data.sequence_length)
    for name, parameter in model.named_parameters():
        draw_(parameter, parameter, name, plan, config.train.seed)
    losses = []
    for row in rows:
        tokens = torch.tensor(row)
        labels = torch.where(tokens[:-1] == eod, IGNORE_INDEX, tokens[1:])
        with torch.no_grad():
            each = F.cross_entropy(model(tokens[None, :-1])[0], labels, reduction="none", ignore_index=IGNORE_INDEX)
        losses.append(each[labels != IGNORE_INDEX])
    joined = torch.cat(losses)
    return joined.mean().item(), joined.numel()


def rows_of(run: Run, kind: str) -> tuple[list[list[int]], int]:
    """The rows that an evaluation reads, from the tokenizer and the files alone: lines cut, or all tokens packed."""
    (source,) = open_dataset(run.config).sources
    length, eod = run.config.data.sequence_length, source.data.eod
    if kind != "folder":
        ids = [source.data.tokenizer.encode(text).ids for text in TEXTS]
        return [[*each, eod][: length + 1] for each in ids], eod
    tokens = np.asarray(source.data.tokens).tolist()
    return [tokens[first : first + length + 1] for first in range(0, len(tokens) - length, length)], eod


SP, RING = ("parallel.sequence_parallel", True), ("parallel.cp_method", "ring")
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2},
    {"dp": 4},
    {"tp": 2, "set": (SP,)},
    {"pp": 2},
    {"cp": 2, "set": (RING,)},
    {"dp": 2, "set": (("parallel.zero", 3),)},
    {"dp": 2, "tp": 2, "pp": 2},
]


@pytest.mark.parametrize("kind", ["lines", "folder"])
@sweep("layout", LAYOUTS, quick=(0,), slow=(2, 3, 4, 5), ids=str)
def test_every_layout_evaluates_what_one_process_does(
    pool: WorkerPool, small_run: Run, held: dict[str, Path], kind: str, layout: dict[str, Any]
) -> None:
    run = run_with(small_run, held[kind], dtype="fp64", **layout)
    expected, tokens = by_hand(run, *rows_of(run, kind))
    for loss, counted in pool.run(run.world_size, evaluated, run, 10_000):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert counted == tokens


def test_all_of_the_training_data_are_trained_on(small_run: Run, held: dict[str, Path]) -> None:
    """Unless a split says otherwise; with or without validation data, a split gives the same training samples."""
    config = run_with(small_run, held["lines"]).config
    assert config.data.split == "1"
    dataset = open_dataset(config)
    assert len(dataset.samples("valid")) == len(TEXTS)
    split = ("data.split", "80,20")
    some = run_with(small_run, held["lines"], split).config
    plain = open_dataset(small_run.config).samples("train")
    assert len(open_dataset(some).samples("train")) == len(plain) < len(dataset.samples("train"))


def test_a_run_logs_it_resumes_with_other_data_and_eval_reads_it(
    threefold, pool: WorkerPool, small_run: Run, held: dict[str, Path], tmp_path: Path
) -> None:
    more = (("train.eval_batches", 100), ("model.vocab_size", None))
    run = run_with(small_run, held["compressed"], *more, dropout=0.0)
    pool.run(1, train_rank, run, tmp_path / "run")
    lines = [line for line in read_metrics(tmp_path / "run" / "metrics.jsonl") if "valid_loss" in line]
    assert [line["step"] for line in lines] == [2, 4]
    evaluated = threefold("eval", tmp_path / "run", "--stride", "16")
    assert f"on {held['compressed']}: perplexity" in evaluated.output
    # As a split, the same as without; no sample is read twice, and the validation data may move.
    split = ("data.split", "1")
    plain = small_run.but(set=(split, *more), dropout=0.0)
    pool.run(1, train_rank, plain, tmp_path / "plain")
    assert losses_of(tmp_path / "plain") == losses_of(tmp_path / "run")
    pool.run(
        2, train_rank, run_with(small_run, held["folder"], *more, dropout=0.0, steps=6, tp=2), tmp_path / "run", True
    )
    assert (found := newest(tmp_path / "run")) is not None
    assert found.step == 6


def test_ranks_compare_it(small_run: Run, held: dict[str, Path], tmp_path: Path) -> None:
    (other := tmp_path / "held.jsonl").write_text(held["lines"].read_text().replace("line 3", "line 4"))
    terms = []
    for place in (held["lines"], held["compressed"], other):
        config = run_with(small_run, place).config
        terms.append(data_of(dataset := open_dataset(config), open_samples(config, dataset)))
    assert terms[0] == terms[1]
    differ = {name for name in terms[0] if terms[0][name] != terms[2][name]}
    assert differ == {"the data at data.validation"}


def refused(small_run: Run, place: Path | str, *more: tuple[str, Any]) -> str:
    with pytest.raises(UserError) as error:
        open_dataset(run_with(small_run, place, *more).config).samples("valid")
    return str(error.value)


def test_data_that_do_not_fit_are_refused(small_run: Run, held: dict[str, Path], tmp_path: Path) -> None:
    assert re.search(r"data.validation is nowhere, which does not exist in .*; give a", refused(small_run, "nowhere"))
    other = write_tokens(tmp_path / "other", ["Quite another text, with other pieces of words."] * 3)
    assert "data.path and data.validation name" in (said := refused(small_run, other))
    assert f"{other}, which were made with different tokenizers" in said
    said = refused(small_run, held["folder"], ("data.sequence_length", 1 << 20), ("train.global_batch_size", 1))
    assert re.search(r"data.validation is .*, which holds [\d,]+ tokens, and one sample takes one more than", said)
    (tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    said = refused(small_run, tmp_path / "chat.jsonl")
    assert "chat.jsonl, which holds conversations, and the training data hold texts; give texts." in said
    assert "a Python data set; have data.path name a function" in refused(small_run, "my.py:Held")
    (tmp_path / "empty.jsonl").write_text("\n")
    assert "has no line with text" in refused(small_run, tmp_path / "empty.jsonl")
    (tmp_path / "text.txt").write_text("text")
    assert "text.txt" in refused(small_run, tmp_path / "text.txt")


def test_eval_says_what_it_misses(
    threefold, pool: WorkerPool, small_run: Run, held: dict[str, Path], tmp_path: Path
) -> None:
    pool.run(1, train_rank, small_run.but(steps=1), tmp_path / "plain")
    assert "was trained without data.validation; give" in threefold("eval", tmp_path / "plain").error
    shutil.copytree(held["folder"], tmp_path / "tokens")
    pool.run(1, train_rank, run_with(small_run, tmp_path / "tokens", steps=1), tmp_path / "run")
    assert "which is no file of texts here; give one." in threefold("eval", tmp_path / "run").error
