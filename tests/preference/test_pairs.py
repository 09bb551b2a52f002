"""Pairs of a chosen and a rejected answer: lines in TRL's formats, their samples, and mistakes in them."""

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.chats import write_tokenizer
from tests.support.command import Command
from threefold.config import Config
from threefold.constants import IGNORE_INDEX
from threefold.data.dataset import open_dataset
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.data.preparation import prepare
from threefold.data.sources import SourceReader
from threefold.data.tokenizer import load_tokenizer
from threefold.errors import UserError
from threefold.inference.inputs import read_texts
from threefold.preference.pairs import PreferencePairs

ASK = [{"role": "user", "content": "What is 2 + 2?"}]
GOOD, BAD = ([{"role": "assistant", "content": text}] for text in ("It is 4.", "Fine."))
TEXT = {"prompt": "What is 2 + 2? ", "chosen": "It is 4.", "rejected": "Fine, fine."}
CHAT = {"prompt": ASK, "chosen": GOOD, "rejected": BAD}
WHOLE = {"prompt": "What is 2 + 2?", "chosen": ASK + GOOD, "rejected": ASK + BAD, "score": 1}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), "llama3")


def written(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def config_of(path: Path, tokenizer: Path | None = None, length: int = 64, beta: float = 0.1, **data: Any) -> Config:
    given = {"path": str(path), "sequence_length": length, "split": "1", **data}
    given |= {} if tokenizer is None else {"tokenizer": str(tokenizer)}
    return Config.model_validate({"data": given, "preference": {"beta": beta}})


@pytest.mark.parametrize("line", [TEXT, CHAT, WHOLE], ids=["texts", "messages", "whole conversations"])
def test_a_pair_is_one_sample_of_two_documents(tmp_path: Path, tokenizer: Path, line: dict[str, Any]) -> None:
    lines = written(tmp_path / "pairs.jsonl", line, line)
    prepare((lines,), tmp_path / "tokens", tokenizer=tokenizer)
    found = []
    for path, given in ((tmp_path / "tokens", None), (lines, tokenizer)):
        dataset = open_dataset(config_of(path, given))
        assert dataset.complete(config_of(path, given)).data.separate_documents
        samples = dataset.samples("train")
        assert len(samples) == 2
        found.append((*samples.labelled(np.arange(2)), samples.documents(np.arange(2))))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    tokens, labels, documents = (each[1] for each in found[0])
    decode = load_tokenizer(tokenizer).decode
    for side, answer in enumerate((GOOD, BAD) if line is not TEXT else ("It is 4.", "Fine, fine.")):
        here = documents == side
        assert "What is 2 + 2?" in decode(tokens[here].tolist())
        learned = labels[here & (labels != IGNORE_INDEX)].tolist()
        assert decode(learned) == (answer if isinstance(answer, str) else answer[0]["content"])
        assert learned[-1] == tokens[here][-1] or not side  # the end of the turn or of the text counts
    assert (labels[documents == 2] == IGNORE_INDEX).all()


def test_long_pairs_are_left_out(tmp_path: Path, tokenizer: Path) -> None:
    lines = [TEXT, {**TEXT, "chosen": "It is 4." * 9}, TEXT]
    files = prepare((written(tmp_path / "pairs.jsonl", *lines),), tmp_path / "tokens", tokenizer=tokenizer)
    sizes = np.diff(files.documents)
    longest, shortest = int(sizes[2] + sizes[3]), int(sizes[0] + sizes[1])
    whole = PreferencePairs.open(files, "train", "1", longest - 1)
    assert (len(whole), whole.notes) == (3, ())
    cut = PreferencePairs.open(files, "train", "1", longest - 2)
    assert len(cut) == 2
    assert cut.notes[0].startswith("1 of 3 pairs are left out")
    assert len(PreferencePairs.open(files, "train", "1", shortest - 1)) == 2
    with pytest.raises(UserError, match=f"the shortest pair .* has {shortest} tokens.*; use {shortest - 1} at least"):
        PreferencePairs.open(files, "train", "1", shortest - 2)


def test_texts_to_evaluate_are_no_pairs(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"--data .*pairs.jsonl holds chosen and rejected answers, whose loss a run"):
        read_texts(written(tmp_path / "pairs.jsonl", TEXT), "text")


def test_data_show(tmp_path: Path, tokenizer: Path, threefold: Command) -> None:
    lines = [TEXT, {**TEXT, "chosen": "It is 4." * 40}]
    prepare((written(tmp_path / "pairs.jsonl", *lines),), tmp_path / "tokens", tokenizer=tokenizer)
    told = threefold("data", "show", tmp_path / "tokens", "--split", "1", "--sequence-length", "64").output
    assert [line.split() for line in told.splitlines() if line.split()[:1] == ["train"]] == [["train", "2", "1", "1"]]
    assert "1 of 2 pairs are left out" in told
    assert re.search(
        r"chosen\n.*What is 2 \+ 2\? ?⟦ ?It is 4\..*\n\nrejected\n.*What is 2 \+ 2\? ?⟦ ?Fine, fine\.", told
    )


def test_splits_keep_pairs(tmp_path: Path, tokenizer: Path) -> None:
    lines = [{**TEXT, "chosen": f"{n} is it."} for n in range(20)]
    files = prepare((written(tmp_path / "pairs.jsonl", *lines),), tmp_path / "tokens", tokenizer=tokenizer)
    parts = [PreferencePairs.open(files, name, "70,30", 64) for name in ("train", "valid")]
    assert [len(part) for part in parts] == [14, 6]
    firsts = np.concatenate([np.searchsorted(files.documents, part.starts) for part in parts]).reshape(-1, 2)
    assert sorted(firsts[:, 0].tolist()) == list(range(0, 40, 2))
    np.testing.assert_array_equal(firsts[:, 0] + 1, firsts[:, 1])


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([{"chosen": "a", "rejected": "b"}], "x.jsonl:1 has chosen and rejected texts without a prompt; give"),
        ([{"chosen": ASK + GOOD, "rejected": ASK + GOOD}], "x.jsonl:1 has chosen messages that are the rejected ones"),
        ([{**TEXT, "rejected": ""}], r"x.jsonl:1 \(rejected\) has an empty completion"),
        ([{**TEXT, "chosen": GOOD}], r"x.jsonl:1 \(chosen\) has a prompt and a completion that are not both texts"),
        ([TEXT, {"text": "a"}], "x.jsonl:2 has no chosen and rejected answers, which the lines before it have; put"),
        ([{"text": "a"}, {"text": "b"}, TEXT], "x.jsonl:3 has chosen and rejected answers, which .* lack; put lines"),
    ],
    ids=str,
)
def test_mistakes_in_lines(tmp_path: Path, lines: list[dict[str, Any]], says: str) -> None:
    with pytest.raises(UserError, match=says):
        list(SourceReader(written(tmp_path / "x.jsonl", *lines), "text", lambda size: None))


def test_data_and_settings_must_agree(tmp_path: Path, tokenizer: Path) -> None:
    pairs, texts = written(tmp_path / "pairs.jsonl", TEXT), written(tmp_path / "texts.jsonl", {"text": "a"})
    for config, says in (
        (
            config_of(pairs, tokenizer, beta=0),
            "holds pairs of a chosen and a rejected answer, and preference.beta is 0",
        ),
        (config_of(texts, tokenizer), "preference.beta is 0.1 but .*texts.jsonl holds no pairs"),
        (config_of(pairs, tokenizer, validation=str(texts)), "data.validation|texts.jsonl holds no pairs"),
        (config_of(pairs, tokenizer, separate_documents=False), "data.separate_documents is false but a pair's"),
    ):
        with pytest.raises(UserError, match=says):
            open_dataset(config)
    with pytest.raises(UserError, match=r"holds chosen and rejected answers and .*texts\.jsonl does not"):
        prepare((pairs, texts), tmp_path / "tokens", tokenizer=tokenizer)
    assert not (tmp_path / "tokens").exists()


def test_folders_without_pairs_stay_as_they_were(tmp_path: Path, tokenizer: Path) -> None:
    files = prepare((written(tmp_path / "t.jsonl", {"text": "a b"}),), tmp_path / "texts", tokenizer=tokenizer)
    assert not files.holds_pairs
    assert "pairs" not in json.loads((tmp_path / "texts" / "meta.json").read_text())
    prepare((written(tmp_path / "pairs.jsonl", TEXT),), tmp_path / "pairs", tokenizer=tokenizer)
    assert TokenFiles.open(tmp_path / "pairs").holds_pairs
