"""JSON lines: rows against lines encoded by hand, pads that do not count, and the cache with its one writer."""

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from threefold.config import Config
from threefold.convert import json_lines
from threefold.convert.json_lines import JsonLines, PaddedSamples
from threefold.data.corpus import TOKENS_FILE
from threefold.data.dataset import open_dataset
from threefold.data.samples import document_runs
from threefold.errors import UserError
from threefold.output import SILENT

LENGTH = 6
EOD = 0
TEXTS = ["a", "b c", "", "a b c d e f", "c d e f a b c", "   ", "f e d c b a f e d c b", "d d d d d"]
IDS = [[ord(word) - ord("a") + 1 for word in text.split()] for text in TEXTS]
FILLED = [ids for ids in IDS if ids]


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A tokenizer.json: the words a to f are tokens 1 to 6, and token 0 ends a document."""
    words = Tokenizer(models.WordLevel({"<|endoftext|>": EOD, **{chr(96 + i): i for i in range(1, 7)}}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


@pytest.fixture
def lines(tmp_path: Path, tokenizer: Path) -> JsonLines:
    return JsonLines(write(tmp_path / "texts.jsonl", TEXTS), tokenizer)


def write(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts))
    return path


def opened(lines: JsonLines, length: int = LENGTH, name: str = "train", split: str = "1") -> PaddedSamples:
    return PaddedSamples.open(lines.encoded(length, SILENT), name, split, length)


def row(ids: list[int], length: int) -> tuple[list[int], list[int]]:
    """Inputs and labels of a line, by hand."""
    ended = [*ids, EOD][: length + 1]
    inputs = (ended + [EOD] * length)[:length]
    labels = (ended[1:] + [-100] * length)[:length]
    return inputs, labels


def test_a_token_outside_the_vocabulary_is_named(lines: JsonLines) -> None:
    file = lines.encoded(LENGTH, SILENT).files[0].parent / TOKENS_FILE
    tokens = np.fromfile(file, dtype="<u2")
    tokens[len(FILLED[0]) + 2] = 7  # of the second line with text: b, c and the end
    tokens.tofile(file)
    samples = opened(lines)
    place = f"position {len(FILLED[0]) + 2} \\(line 1 with text, sample 1 of the train split\\)"
    with pytest.raises(UserError, match=rf"{TOKENS_FILE} holds token 7 at {place}, outside the vocabulary of 7 tokens"):
        samples.labelled(np.arange(len(samples)))
    samples.labelled(np.array([0, 2]))


@pytest.mark.parametrize("length", [1, 2, 5, 6, 7, 50])
def test_every_line_with_text_is_a_row_cut_or_padded(lines: JsonLines, length: int) -> None:
    samples = opened(lines, length)
    tokens, labels = samples.labelled(np.arange(len(samples)))
    assert tokens.tolist() == [row(ids, length)[0] for ids in FILLED]
    assert labels.tolist() == [row(ids, length)[1] for ids in FILLED]
    assert (labels != -100).sum() == sum(min(len(ids), length) for ids in FILLED), "a pad counts, or a token does not"
    assert tokens.dtype == labels.dtype == np.int64


def test_splits_divide_the_lines(tmp_path: Path, tokenizer: Path) -> None:
    texts = [" ".join("abcdef"[(i // 6**k) % 6] for k in range(3)) for i in range(200)]
    lines = JsonLines(write(tmp_path / "many.jsonl", texts), tokenizer)
    seen = []
    for name in ("train", "valid", "test"):
        samples = opened(lines, 4, name, "6,3,1")
        tokens, _ = samples.labelled(np.arange(len(samples)))
        of_split = [n for first, end in document_runs(200, "6,3,1", name) for n in range(first, end)]
        assert [[ord(word) - 96 for word in texts[n].split()] for n in of_split] == tokens[:, :3].tolist()
        seen += of_split
    assert sorted(seen) == list(range(200))
    with pytest.raises(UserError, match="gives the test split no lines"):
        opened(lines, 4, "test", "1")


def test_a_config_names_lines_also_in_a_mixture(tmp_path: Path, lines: JsonLines, tokenizer: Path) -> None:
    other = write(tmp_path / "other.json", ["f f f", "e e"] * 5, key="body")
    both = {str(lines.path): 1, str(other): 1}
    data = {"tokenizer": str(tokenizer), "sequence_length": LENGTH, "split": "1"}
    dataset = open_dataset(Config.model_validate({"data": {"path": str(other), "key": "body", **data}}))
    assert (dataset.vocab_size, dataset.eod, dataset.sizes()) == (7, EOD, ((5 * 4 + 5 * 3, 10),))
    with pytest.raises(UserError, match=r'texts.jsonl:1 has no key "body" .*; name the right one with data.key'):
        open_dataset(Config.model_validate({"data": {"mixture": both, "key": "body", **data}})).samples("train")
    assert len(open_dataset(Config.model_validate({"data": {"path": str(lines.path), **data}})).samples("train")) == 6
    with pytest.raises(UserError, match=r"other.json holds text, which needs a tokenizer; set data.tokenizer"):
        open_dataset(Config.model_validate({"data": {"path": str(other)}}))


def count_encodings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one for every time that text is encoded."""
    calls: list[int] = []
    real = json_lines.encode_documents
    monkeypatch.setattr(json_lines, "encode_documents", lambda *given: calls.append(1) or real(*given))
    return calls


def test_text_is_encoded_once(lines: JsonLines, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_encodings(monkeypatch)
    first = opened(lines).labelled(np.arange(3))
    again = JsonLines(lines.path, lines.tokenizer_file)
    np.testing.assert_array_equal(opened(again).labelled(np.arange(3)), first)
    moved = lines.tokenizer_file.rename(lines.tokenizer_file.with_name("moved.json"))
    opened(JsonLines(lines.path, moved))
    assert len(calls) == 1


def another_content(lines: JsonLines) -> JsonLines:
    state = lines.path.stat()
    lines.path.write_text(lines.path.read_text().replace('"b c"', '"b d"'))
    os.utime(lines.path, ns=(state.st_atime_ns, state.st_mtime_ns))  # the same size, within the clock's resolution
    return JsonLines(lines.path, lines.tokenizer_file)


def another_tokenizer(lines: JsonLines) -> JsonLines:
    text = lines.tokenizer_file.read_text().replace('"unk_token":"a"', '"unk_token":"b"')
    lines.tokenizer_file.write_text(text.replace('"unk_token": "a"', '"unk_token": "b"'))
    return JsonLines(lines.path, lines.tokenizer_file)


@pytest.mark.parametrize(
    "change",
    [another_content, another_tokenizer, lambda lines: JsonLines(lines.path, lines.tokenizer_file, given_eod=3)],
    ids=["content", "tokenizer", "eod"],
)
def test_what_the_tokens_follow_from_makes_another_cache(
    lines: JsonLines, monkeypatch: pytest.MonkeyPatch, change: Callable[[JsonLines], JsonLines]
) -> None:
    calls = count_encodings(monkeypatch)
    opened(lines)
    opened(change(lines))
    assert len(calls) == 2


def test_the_length_makes_another_cache_and_all_are_kept(lines: JsonLines, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_encodings(monkeypatch)
    for length in (LENGTH, 3, LENGTH, 3):
        assert opened(lines, length).labelled(np.arange(2))[0].shape == (2, length)
    assert len(calls) == 2


def test_an_old_files_hash_is_remembered(lines: JsonLines, monkeypatch: pytest.MonkeyPatch) -> None:
    past = time.time() - 3600
    os.utime(lines.path, (past, past))
    opened(lines)
    monkeypatch.setattr("hashlib.file_digest", lambda *given: pytest.fail("the file was read again"))
    opened(JsonLines(lines.path, lines.tokenizer_file))
    monkeypatch.undo()
    content = lines.path.read_text().replace('"b c"', '"b d"')
    lines.path.write_text(content)  # a new time stamp: the hash is taken again
    assert opened(JsonLines(lines.path, lines.tokenizer_file)).labelled(np.array([1]))[0][0, :2].tolist() == [2, 4]


def test_a_damaged_cache_is_made_again(lines: JsonLines, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_encodings(monkeypatch)
    whole = opened(lines).labelled(np.arange(6))
    (tokens,) = lines.path.with_name("texts.jsonl.cache").glob("*/tokens.bin")
    tokens.write_bytes(tokens.read_bytes()[:-2])
    np.testing.assert_array_equal(opened(lines).labelled(np.arange(6)), whole)
    assert len(calls) == 2


def test_another_place_where_the_folder_cannot_be_written(
    lines: JsonLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines.path.with_name("texts.jsonl.cache").write_text("a file stands where the cache would be")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    opened(lines)
    assert len(list((tmp_path / "home/.cache/threefold").glob("*/tokens.bin"))) == 1
    chosen = JsonLines(lines.path, lines.tokenizer_file, cache=tmp_path / "chosen")
    opened(chosen)
    assert len(list((tmp_path / "chosen").glob("*/tokens.bin"))) == 1
    nowhere = JsonLines(lines.path, lines.tokenizer_file, cache=lines.path / "below a file")
    with pytest.raises(UserError, match=r"no cache can be written in .*below a file .*; set data.cache"):
        opened(nowhere)


def test_the_users_cache_follows_xdg(lines: JsonLines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines.path.with_name("texts.jsonl.cache").write_text("a file stands where the cache would be")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    first = lines.encoded(LENGTH, SILENT).files[0].parent
    assert first.parent == tmp_path / "home/.cache/threefold"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert lines.encoded(LENGTH, SILENT).files[0].parent == tmp_path / "xdg/threefold" / first.name


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        ('{"text": "a"}\n{"text": "b"\n', r"bad.jsonl:2 is not JSON \(.*\); every line must be one JSON object"),
        ('{"text": "a"}\n\n["b"]\n', r"bad.jsonl:3 is not a JSON object"),
        ('{"text": 5}\n', r'bad.jsonl:1 has no text under "text" but 5'),
        ('{"txt": "a"}\n', r'bad.jsonl:1 has no key "text" \(its keys: "txt"\); name the right one with data.key'),
        ('{"text": ""}\n', r'bad.jsonl has no line with text under "text"'),
    ],
)
def test_a_damaged_line_is_named_and_nothing_is_kept(
    tmp_path: Path, tokenizer: Path, damage: str, sentence: str
) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(damage)
    with pytest.raises(UserError, match=sentence):
        opened(JsonLines(path, tokenizer))
    assert not list(tmp_path.glob("bad.jsonl.cache/*/"))


def test_a_tokenizer_that_does_not_fit(tmp_path: Path, lines: JsonLines) -> None:
    with pytest.raises(UserError, match=r"data.tokenizer is .*none.json, which cannot be read \(No such file"):
        opened(JsonLines(lines.path, tmp_path / "none.json"))
    with pytest.raises(UserError, match=r"data.eod is 7 but the vocabulary has 7 tokens; use at most 6"):
        opened(JsonLines(lines.path, lines.tokenizer_file, given_eod=7))


def _open_slowly(lines: JsonLines, written: Path, seconds: float, barrier: Any) -> None:
    real = json_lines.encode_documents

    def slow(*given):
        with written.open("a") as file:
            file.write(f"{os.getpid()}\n")
        for encoded in real(*given):
            time.sleep(seconds)
            yield encoded

    json_lines.encode_documents = slow
    barrier.wait(60)
    assert len(opened(lines)) == len(FILLED)


@pytest.fixture
def start(lines: JsonLines, tmp_path: Path):
    """A function (seconds, ...) -> processes that open the lines at once, taking so many seconds if they encode them.

    Each notes in tmp_path / "written" that it does. What is left of them is killed at the end.
    """
    context, processes = multiprocessing.get_context("fork"), []

    def start_all(*seconds: float) -> list[Any]:
        barrier = context.Barrier(len(seconds))
        arguments = [(lines, tmp_path / "written", each, barrier) for each in seconds]
        started = [context.Process(target=_open_slowly, args=each, daemon=True) for each in arguments]
        for process in started:
            process.start()
        processes.extend(started)
        return started

    yield start_all
    for process in processes:
        process.kill()
        process.join()


def test_of_several_processes_one_writes(start, tmp_path: Path) -> None:
    processes = start(0.2, 0.2, 0.2, 0.2)
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 4
    assert len((tmp_path / "written").read_text().split()) == 1


def test_what_a_killed_writer_left_counts_for_nothing(start, lines: JsonLines, tmp_path: Path) -> None:
    (writer,) = start(600)
    while not (tmp_path / "written").exists():
        time.sleep(0.01)
    (waiting,) = start(0)
    waiting.join(0.3)
    assert waiting.is_alive(), "it waits for the writer"
    os.kill(writer.pid, signal.SIGKILL)
    waiting.join(60)
    assert waiting.exitcode == 0
    assert len((tmp_path / "written").read_text().split()) == 2
    samples = opened(lines)
    assert samples.labelled(np.arange(len(samples)))[0].tolist() == [row(ids, LENGTH)[0] for ids in FILLED]
    assert not list(tmp_path.glob("texts.jsonl.cache/.*.threefold-*"))
