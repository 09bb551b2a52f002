"""Runs on preferences: the loss and its terms in several layouts, references, evaluation, resuming, and refusals."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.train.support import Run, same, steps_of, train_rank, write_tokens
from threefold.checksums import seal
from threefold.config import Config
from threefold.config.resolve import resolve
from threefold.data.preparation import prepare
from threefold.errors import UserError
from threefold.report.metrics import read_metrics
from threefold.verify.worker_pool import WorkerError

WORDS = ["red", "green", "blue", "river", "stone", "cloud", "light", "small", "large", "old", "new", "house", "tree"]
FILE = "reference_logps.json"


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run on pairs of all lengths, whose model has many weights for its size."""
    folder, draw = tmp_path_factory.mktemp("pairs"), random.Random(3)
    write_tokens(folder / "texts", [" ".join(draw.choices(WORDS, k=30)) for _ in range(60)])
    lines = []
    for _ in range(41):
        words = [" ".join(draw.choices(known, k=draw.randint(1, 8))) for known in (WORDS, WORDS[:7], WORDS[7:])]
        lines.append(dict(zip(("prompt", "chosen", "rejected"), words, strict=True)))
    (folder / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    prepare((folder / "pairs.jsonl",), folder / "tokens", tokenizer=folder / "texts" / "tokenizer.json")
    settings = (
        ("preference.beta", 0.3),
        ("train.eval_every", 2),
        ("data.sequence_length", 96),
        ("checkpoint.every", 2),
    )
    settings = (*settings, ("data.separate_documents", True), ("log.every", 1), ("optimizer.lr", 1e-3))
    return Run(folder / "tokens", dtype="fp64", dropout=0.0, steps=4, set=settings)


@pytest.fixture(scope="module")
def trained(pool, pairs: Run, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Trains a run of a name once, or resumes it."""
    folder = tmp_path_factory.mktemp("runs")

    def of(name: str, resume: bool = False, **changes: Any) -> Path:
        run = pairs.but(**changes)
        if resume or not (folder / name).exists():
            pool.run(run.world_size, train_rank, run, folder / name, resume)
        return folder / name

    return of


def numbers(run_dir: Path) -> list[dict[str, float]]:
    """Return the loss and its terms of each step and evaluation, by name."""
    found = []
    for line in read_metrics(run_dir / "metrics.jsonl"):
        for loss, terms in (("loss", "terms"), ("valid_loss", "valid_terms")):
            if loss in line:
                found.append({"loss": line[loss], **line[terms]})
    return found


def test_a_run_learns_and_evaluates(trained) -> None:
    folder = trained("alone")
    steps, lines = steps_of(folder), numbers(folder)
    assert len(lines) == 6
    assert steps[1]["loss"] == pytest.approx(0.6931471805599453, rel=1e-12)  # log 2: the reference is the model
    assert steps[1]["terms"]["margin"] == pytest.approx(0, abs=1e-12)
    for line in lines:
        assert line["loss"] == pytest.approx(line["preference"], rel=1e-12)
        assert line["margin"] == pytest.approx(line["chosen"] - line["rejected"], rel=1e-9, abs=1e-12)
    assert lines[-1]["loss"] < 0.69
    assert 0 < lines[-1]["accuracy"] <= 1
    stored = json.loads((folder / FILE).read_text())
    assert {name: len(rows) for name, rows in stored["logps"].items()} == stored["data"]["pairs"]
    assert all(value < 0 for rows in stored["logps"].values() for row in rows for value in row)


@pytest.mark.parametrize(
    "layout",
    [
        {"cp": 2, "tp": 2},
        pytest.param({"dp": 2, "pp": 2}, marks=pytest.mark.slow),
        pytest.param({"dp": 4, "more": (("parallel.zero", 3),)}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_numbers_are_the_same_in_every_layout(trained, pairs: Run, layout: dict[str, Any]) -> None:
    settings = (*pairs.set, *layout.pop("more", ()))
    alone, cut = trained("alone"), trained(str(layout), set=settings, **layout)
    one, other = (json.loads((folder / FILE).read_text())["logps"] for folder in (alone, cut))
    for name, rows in one.items():
        assert same([each for row in rows for each in row], [each for row in other[name] for each in row], "fp64")
    for expected, found in zip(numbers(alone), numbers(cut), strict=True):
        assert expected.keys() == found.keys()
        for name, value in expected.items():
            assert found[name] == pytest.approx(value, rel=1e-11, abs=1e-13), name


@pytest.mark.slow
def test_resuming_keeps_the_references(trained, pool, pairs: Run) -> None:
    alone = trained("alone")
    folder = trained("resumed", steps=2, tp=2)
    before = (folder / FILE).read_bytes()
    trained("resumed", resume=True, pp=3)
    assert (folder / FILE).read_bytes() == before
    expected, found = ([line["loss"] for line in steps_of(each).values()] for each in (alone, folder))
    assert same(expected, found, "fp64")
    facts = json.loads(before)
    del facts["checksum"]
    other = {**facts, "data": {**facts["data"], "split": "1"}}
    for text, says in (
        (None, "does not exist, and the run resumes after step 4"),
        (before.decode().replace('"train": [[-', '"train": [[-1'), "is damaged, and"),
        (json.dumps(seal(other)), "is of other data"),
    ):
        (folder / FILE).unlink() if text is None else (folder / FILE).write_text(text)
        with pytest.raises(WorkerError, match=says):
            pool.run(1, train_rank, pairs.but(steps=6), folder, True)


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"preference": {"beta": 0.1}, "train": {"exact": True}}, "train.exact is true, .* use 0"),
        ({"preference": {"label_smoothing": 0.1}}, "preference.beta is 0, so there is no loss of pairs"),
        ({"preference": {"beta": 0.1, "loss": "ipo", "label_smoothing": 0.1}}, "ipo has no smoothing; use 0"),
        ({"preference": {"beta": 0.1}, "data": {"loss_tokens": "all"}}, "compares answers alone; use answers"),
        (
            {"preference": {"beta": 0.1}, "model": {"architecture": "llama", "mtp_layers": 1}},
            "pairs have no loss of further tokens; use 0",
        ),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(sections: dict[str, dict[str, Any]], says: str) -> None:
    given = {**sections, "data": {"path": "none", "sequence_length": 16, **sections.get("data", {})}}
    with pytest.raises(UserError, match=says):
        resolve(Config.model_validate(given), 60)
