"""Runs on mixtures and on padded lines: the losses of an average by hand, and resuming in another layout."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from torch.nn import functional as F

from tests.train.support import Run, evaluated, losses_of, manifest, same, steps_of, train_rank, write_ids
from threefold.checkpoint.resume import consumed_by, find_resumption
from threefold.data.dataset import open_dataset
from threefold.data.order import ConsumedSamples
from threefold.errors import UserError
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.parallel.parameter import draw_
from threefold.report.metrics import read_metrics
from threefold.train.run import open_loader, open_samples
from threefold.verify.worker_pool import WorkerPool

WEIGHTS = (5, 3, 2)


@pytest.fixture(scope="module")
def folder(small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`one` and `two`, token files, and `three.jsonl`, lines of very different lengths, all of one tokenizer."""
    folder = tmp_path_factory.mktemp("corpora")
    shutil.copytree(small_run.data, folder / "one")
    tokenizer = Tokenizer.from_file(str(folder / "one/tokenizer.json"))
    from pydoc_data.topics import topics

    texts = [text for _, text in sorted(topics.items())][60:100]
    eod = tokenizer.token_to_id("<|endoftext|>")
    write_ids(folder / "two", [tokenizer.encode(text[:200]).ids for text in texts[:20]], tokenizer, eod)
    # the same text of the tokenizer as in the folder, so that its hash is the same
    (folder / "two/tokenizer.json").write_bytes((folder / "one/tokenizer.json").read_bytes())
    lines = [json.dumps({"text": text[: 3 * number]}) for number, text in enumerate(texts)]
    (folder / "three.jsonl").write_text("\n".join(lines) + "\n")
    return folder


def names(folder: Path) -> list[str]:
    return [str(folder / name) for name in ("one", "two", "three.jsonl")]


def on(run: Run, folder: Path, weights: tuple[float, ...] = WEIGHTS, *more: tuple[str, Any]) -> Run:
    """The run on a mixture of the three, whose folders are of before there was a rule for special tokens."""
    settings = (
        ("data.special_tokens", "text"),
        ("data.path", None),
        ("data.mixture", dict(zip(names(folder), weights, strict=True))),
        ("data.tokenizer", str(folder / "one/tokenizer.json")),
        ("data.separate_documents", True),
    )
    return run.but(set=(*run.set, *settings, *more))


@pytest.mark.slow
def test_a_mixture_goes_on_in_another_layout(pool: WorkerPool, small_run: Run, folder: Path, tmp_path: Path) -> None:
    evaluation = (("train.eval_every", 2), ("train.eval_batches", 3))
    run = on(small_run, folder, WEIGHTS, *evaluation)
    (printed,) = pool.run(1, train_rank, run.but(steps=6), tmp_path / "unbroken")
    pool.run(4, train_rank, run.but(dp=4, steps=3), tmp_path / "broken")
    pool.run(2, train_rank, run.but(dp=2, steps=6), tmp_path / "broken", True)
    assert same(losses_of(tmp_path / "broken"), losses_of(tmp_path / "unbroken"), "fp32")

    tokens = [[line["tokens"] for line in steps_of(tmp_path / name).values()] for name in ("unbroken", "broken")]
    assert tokens[0] == tokens[1]
    epochs = steps_of(tmp_path / "broken")[6]["epochs"]
    samples = {part.name: len(part.samples) for part in open_dataset(run.config).samples("train").parts}
    read = {name: round(epoch * samples[name]) for name, epoch in epochs.items()}
    assert read == dict(zip(names(folder), (20, 12, 8), strict=True)), "of the 40 samples before step 6"
    assert f"30.00% are from {folder / 'two'}, whose {samples[str(folder / 'two')]:,} samples are read" in printed

    evaluations = [line for line in read_metrics(tmp_path / "broken/metrics.jsonl") if "valid_loss" in line]
    for line in evaluations:
        by_corpus = [line["valid_losses"][name] for name in names(folder)]
        weighted = sum(weight / 10 * loss for weight, loss in zip(WEIGHTS, by_corpus, strict=True))
        assert line["valid_loss"] == pytest.approx(weighted)
    assert f"of {folder / 'three.jsonl'} {evaluations[-1]['valid_losses'][names(folder)[2]]:.4f}"[:-1] in printed


def test_evaluation_weighs_the_mean_of_each_corpus(pool: WorkerPool, small_run: Run, folder: Path) -> None:
    fp64 = small_run.but(dtype="fp64", set=(("train.eval_every", 1),))
    tokenizer = ("data.tokenizer", str(folder / "one/tokenizer.json"))
    separate = ("data.separate_documents", True)
    text = ("data.special_tokens", "text")
    alone = [fp64.but(set=(*fp64.set, ("data.path", name), tokenizer, separate, text)) for name in names(folder)]
    losses = [pool.run(1, evaluated, run, 10_000)[0] for run in alone]
    expected = sum(weight / 10 * loss for weight, (loss, _) in zip(WEIGHTS, losses, strict=True))
    for loss, tokens in pool.run(2, evaluated, on(fp64, folder).but(dp=2), 10_000):
        assert loss == pytest.approx(expected, rel=1e-12)
        assert tokens == sum(count for _, count in losses)


def by_hand(run: Run, folder: Path) -> tuple[float, int]:
    """Mean loss and tokens of the held-out lines, each alone and without a pad through the unsplit model."""
    config = run.config
    model = GPT(config.model).double()
    plan = gpt_plan(config.model, config.data.sequence_length)
    for name, parameter in model.named_parameters():
        draw_(parameter, parameter, name, plan, config.train.seed)
    tokenizer = Tokenizer.from_file(str(folder / "one/tokenizer.json"))
    texts = [json.loads(line)["text"] for line in (folder / "three.jsonl").read_text().splitlines()]
    texts = [text for text in texts if text.strip()]
    samples: Any = open_dataset(config).samples("valid")
    total, count = 0.0, 0
    for line in samples.lines(np.arange(len(samples))).tolist():
        ids = [*tokenizer.encode(texts[line]).ids, tokenizer.token_to_id("<|endoftext|>")]
        ids = torch.tensor(ids[: config.data.sequence_length + 1])
        with torch.no_grad():
            total += F.cross_entropy(model(ids[None, :-1])[0], ids[1:], reduction="sum").item()
        count += len(ids) - 1
    return total / count, count


def test_pads_change_no_loss(pool: WorkerPool, small_run: Run, folder: Path) -> None:
    settings = (("data.path", names(folder)[2]), ("data.tokenizer", str(folder / "one/tokenizer.json")))
    run = small_run.but(dtype="fp64", set=(("train.eval_every", 1), ("data.split", "30,70"), *settings))
    ((expected, tokens),) = pool.run(1, by_hand, run, folder)
    for split in (run, run.but(dp=2, cp=2)):
        for loss, count in pool.run(split.world_size, evaluated, split, 10_000):
            assert loss == pytest.approx(expected, rel=1e-12)
            assert count == tokens


@pytest.fixture(scope="module")
def saved(pool: WorkerPool, small_run: Run, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on the mixture with a checkpoint after step 2."""
    run_dir = tmp_path_factory.mktemp("saved")
    pool.run(1, train_rank, on(small_run, folder).but(steps=2), run_dir)
    return run_dir


def test_corpora_may_move_and_weights_be_written_otherwise(
    saved: Path, small_run: Run, folder: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    moved.symlink_to(folder)
    found = find_resumption(saved, on(small_run, moved, (1, 0.6, 0.4)).but(steps=4).config)
    assert found.warnings == ()
    facts = manifest(found.checkpoint.path)
    assert len(facts["corpora"]) == 3
    assert facts["tokens"] == sum(tokens for tokens, _ in facts["corpora"])


def test_another_mixture_is_refused(saved: Path, small_run: Run, folder: Path, tmp_path: Path) -> None:
    fewer = dict.fromkeys(names(folder)[:2], 1.0)
    with pytest.raises(UserError, match=r"data.mixture is .* was made with .*order of the samples follows from it"):
        find_resumption(saved, small_run.but(steps=4, set=(*on(small_run, folder).set, ("data.mixture", fewer))).config)
    with pytest.raises(UserError, match=r"data.mixture is None .* was made with"):
        find_resumption(saved, small_run.but(steps=4, data=folder / "one").config)
    shutil.copytree(folder, tmp_path / "other")
    with (tmp_path / "other/three.jsonl").open("a") as file:
        file.write('{"text": "one more"}\n')
    with pytest.raises(UserError, match=r"data.mixture has .*three.jsonl with .* but .* was trained on .* there"):
        find_resumption(saved, on(small_run, tmp_path / "other").but(steps=4).config)


def test_other_weights_read_each_corpus_on(pool: WorkerPool, small_run: Run, folder: Path, tmp_path: Path) -> None:
    """A resumed run with other weights in another layout: nothing read again, nothing left out."""
    run, other = on(small_run, folder).but(steps=3), on(small_run, folder, (1, 1, 18)).but(dp=2, steps=6)
    pool.run(1, train_rank, run, tmp_path / "run")
    (warning,) = find_resumption(tmp_path / "run", other.config).warnings
    assert warning.endswith(": each corpus is read on from where it stands.")
    read = indices(run, ConsumedSamples(8), range(3)) + indices(other, consumed_of(tmp_path / "run", 3), range(3, 6))
    start = 0
    for part in open_dataset(run.config).samples("train").parts:
        own = [index - start for index in read if 0 <= index - start < len(part.samples)]
        assert own == part.samples.ordered(np.arange(len(own)), run.config.train.seed).tolist()
        start += len(part.samples)
    before, weights = (12, 7.2, 4.8), (0.05, 0.05, 0.9)
    for steps in (5, 6):
        pool.run(2, train_rank, other.but(steps=steps), tmp_path / "run", True)
        counts = [count for count, _ in consumed_of(tmp_path / "run", steps).blend]
        due = [first + weight * 8 * (steps - 3) for first, weight in zip(before, weights, strict=True)]
        assert sum(counts) == 8 * steps
        assert all(abs(count - each) < 1 for count, each in zip(counts, due, strict=True))


def indices(run: Run, consumed: ConsumedSamples, steps: range) -> list[int]:
    loader = open_loader(run.config, open_samples(run.config, open_dataset(run.config)), Alone(), consumed)
    try:
        return [index for step in steps for index in loader.sample_indices(step).tolist()]
    finally:
        loader.close()


class Alone:
    """The dp axis of one replica."""

    index, size = 0, 1


def consumed_of(folder: Path, step: int) -> ConsumedSamples:
    facts = manifest(folder / f"checkpoints/step_{step:08d}")
    return ConsumedSamples(8, step, facts["consumed_samples"], tuple(map(tuple, facts["blend"])))


@pytest.mark.slow
@pytest.mark.parametrize("stop", [2, 3, 5])
def test_weights_by_step_resume_anywhere(
    pool: WorkerPool, small_run: Run, folder: Path, tmp_path: Path, stop: int
) -> None:
    """Before, at and after a change, in another layout, with batches that change too; a layout of one batch size."""
    sizes = ("train.global_batch_size", {0: 8, 4: 4})
    weights = ({0: 5, 3: 0.001}, {0: 0, 3: 0.999}, 1)
    run = on(small_run, folder, weights, sizes).but(dtype="fp64")
    pool.run(1, train_rank, run.but(steps=7), tmp_path / "unbroken")
    pool.run(2, train_rank, run.but(pp=2, steps=stop), tmp_path / "broken")
    pool.run(4, train_rank, run.but(dp=2, tp=2, steps=7), tmp_path / "broken", True)
    assert same(losses_of(tmp_path / "broken"), losses_of(tmp_path / "unbroken"), "fp64")
    last = "checkpoints/step_00000007"
    assert manifest(tmp_path / "broken" / last)["blend"] == manifest(tmp_path / "unbroken" / last)["blend"]
    assert steps_of(tmp_path / "broken")[7]["epochs"] == steps_of(tmp_path / "unbroken")[7]["epochs"]


def test_a_checkpoint_from_before_goes_on(pool: WorkerPool, small_run: Run, folder: Path, tmp_path: Path) -> None:
    """A checkpoint without `blend` stands where its config's weights say."""
    run = on(small_run, folder).but(steps=3)
    pool.run(1, train_rank, run, tmp_path / "run")
    found = find_resumption(tmp_path / "run", run.but(steps=4).config).checkpoint
    expected = consumed_by(found, run.config)
    assert expected.blend == found.facts.blend
    before = replace(found, facts=replace(found.facts, blend=()))
    assert consumed_by(before, run.config) == expected
