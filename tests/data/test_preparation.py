"""Text to token files: exact, the same for any number of workers, and whole or not there at all."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from tests.support.command import Silent
from tests.support.sweep import sweep
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.data.preparation import prepare
from threefold.errors import UserError

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "A journey of a thousand miles begins with a single step, says the <|endoftext|> of a proverb.",
    "Ünïcödé 日本語 and emoji 🙂 are bytes like any others.",
    "def f(x):\n    return x  # code, too\n",
]
TEXTS = [" ".join(SENTENCES[: 1 + i % 4]) + f" Document {i}." for i in range(400)]


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    return write_lines(tmp_path / "a.jsonl", TEXTS)


@pytest.fixture
def word_tokenizer(tmp_path: Path) -> Path:
    """A foreign tokenizer: words, an id out of sequence, an end of another name, a truncation to be switched off."""
    words = sorted({word for text in TEXTS for word in text.split()} - {"<|endoftext|>"})
    vocabulary = {word: i for i, word in enumerate(["[UNK]", "</s>", *words])} | {"far": 70_000}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(tmp_path / "words.json"))
    return tmp_path / "words.json"


def texts_of(files: TokenFiles) -> list[str]:
    ends = files.documents[1:] - 1
    assert (files.tokens[ends] == files.eod).all()
    assert (files.tokens[:] == files.eod).sum() == len(ends), "an end of document comes nowhere but at an end"
    return [
        files.tokenizer.decode(files.tokens[start:end].tolist(), skip_special_tokens=False)
        for start, end in zip(files.documents, ends, strict=False)
    ]


def test_the_tokens_spell_the_documents(lines: Path, tmp_path: Path) -> None:
    progress = Silent()
    files = prepare((lines,), tmp_path / "out", vocab_size=400, special_tokens="text", progress=progress)
    assert texts_of(files) == TEXTS
    assert files.vocab_size == 400 == files.tokenizer.get_vocab_size()
    assert files.tokenizer.id_to_token(files.eod) == "<|endoftext|>"
    assert files.meta.text_bytes == sum(len(text.encode()) for text in TEXTS)
    assert files.meta.tokens < files.meta.text_bytes / 2, "common words have become tokens"
    assert [source.documents for source in files.meta.sources] == [len(TEXTS)]
    size = lines.stat().st_size
    assert progress.phases == [["Learning the vocabulary", size, size], ["Encoding", size, size]]


def test_special_tokens_are_parsed_unless_text_is_not_trusted(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", ["one<|endoftext|>two", "three"])
    for special_tokens, ends in (("parse", 3), ("text", 2)):
        out = tmp_path / special_tokens
        files = prepare((lines,), out, vocab_size=300, special_tokens=special_tokens)
        assert (files.tokens[: len(files.tokens)] == files.eod).sum() == ends
        assert files.meta.special_tokens == files.rule.special_tokens == special_tokens
    assert prepare((lines,), tmp_path / "default", vocab_size=300).meta.special_tokens == "parse"


def test_every_number_of_workers_writes_the_same_bytes(tmp_path: Path) -> None:
    lines = write_lines(tmp_path / "a.jsonl", TEXTS * 10)
    (tmp_path / "z.txt").write_text("One more document, as plain text.")
    folders = [tmp_path / f"out{workers}" for workers in (1, 3)]
    for folder, workers in zip(folders, (1, 3), strict=True):
        prepare((lines, tmp_path / "z.txt"), folder, 300, workers=workers, special_tokens="text")
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == ["documents.bin", "meta.json", "tokenizer.json", "tokens.bin"]
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert texts_of(TokenFiles.open(folders[1]))[-2:] == [TEXTS[-1], "One more document, as plain text."]


def test_a_given_tokenizer_is_used_as_it_is(lines: Path, word_tokenizer: Path, tmp_path: Path) -> None:
    files = prepare((lines,), tmp_path / "out", tokenizer=word_tokenizer)
    assert (files.path / "tokenizer.json").read_bytes() == word_tokenizer.read_bytes()
    assert files.vocab_size == 70_001
    assert files.tokens.dtype == np.int32
    assert files.tokenizer.id_to_token(files.eod) == "</s>"
    assert np.diff(files.documents).tolist() == [len(text.split()) + 1 for text in TEXTS]
    other = prepare((lines,), tmp_path / "out2", tokenizer=word_tokenizer, eod="far")
    assert other.eod == 70_000


def test_a_vocabulary_that_the_text_cannot_fill(tmp_path: Path) -> None:
    files = prepare((write_lines(tmp_path / "a.jsonl", ["ab ab"]),), tmp_path / "out")
    assert 257 <= files.vocab_size < 270


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 256}, r"--vocab-size is 256 .* smallest that works is 257"),
        ({"workers": 0}, "--workers is 0 but must be at least 1"),
        ({"inputs": ("gone.jsonl",)}, r"gone\.jsonl does not exist"),
        ({"inputs": ("empty.jsonl",)}, r"empty\.jsonl: there is no document with text in it"),
        ({"inputs": ("empty.jsonl",), "tokenizer": "words.json"}, "no document with text"),
        ({"inputs": ("bad.jsonl",)}, r"bad\.jsonl:2 is not JSON"),
        ({"inputs": ("bad.jsonl",), "tokenizer": "words.json"}, r"bad\.jsonl:2 is not JSON"),
        ({"inputs": ("bad.jsonl",), "tokenizer": "words.json", "workers": 2}, r"bad\.jsonl:2 is not JSON"),
        ({"key": "body"}, r'a\.jsonl:1 has no key "body" \(its keys: "text"\)'),
        ({"tokenizer": "gone.json"}, r"--tokenizer .*gone\.json does not exist"),
        ({"tokenizer": "bad.jsonl"}, r"--tokenizer .*bad\.jsonl is not a tokenizer.json that can be read"),
        ({"tokenizer": "words.json", "eod": "<end>"}, "no token <end>"),
        ({"tokenizer": "endless.json"}, "none of the end-of-document tokens <|endoftext|>"),
    ],
)
def test_what_cannot_be_prepared_leaves_nothing(
    lines: Path, word_tokenizer: Path, tmp_path: Path, change: dict, message: str
) -> None:
    (tmp_path / "empty.jsonl").write_text('\n{"text": " "}\n')
    (tmp_path / "bad.jsonl").write_text('{"text": "fine"}\nnot json\n')
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "endless.json"))
    paths = {
        name: tuple(tmp_path / path for path in value) if name == "inputs" else tmp_path / value
        for name, value in change.items()
        if name in ("inputs", "tokenizer")
    }
    before = sorted(tmp_path.iterdir())
    with pytest.raises(UserError, match=message) as caught:
        prepare(**({"inputs": (lines,), "out": tmp_path / "out"} | change | paths))
    assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before


RUN = """
import sys
from threefold.cli.main import app
from threefold.errors import UserError
try:
    app(["data", *sys.argv[1:]], prog_name="threefold")
except UserError as error:
    sys.exit(f"error: {error}")
"""


def start(*arguments: object, prelude: str = "") -> "subprocess.Popen[str]":
    """A real `threefold data` process, in a session of its own, that executes `prelude` first."""
    return subprocess.Popen(
        [sys.executable, "-c", prelude + RUN, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # which a shell's background jobs ignore
    )


@sweep("workers", [1, 2], slow=(1,))
@sweep("how", [signal.SIGKILL, signal.SIGINT], slow=(0, 1))
def test_an_interrupted_run_leaves_nothing_half_made(
    tmp_path: Path, word_tokenizer: Path, how: int, workers: int
) -> None:
    """The input is a pipe that has given 4 MB and gives no more, so the process is stopped while it writes tokens."""
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    out = tmp_path / "made" / "out"
    run = start("prepare", pipe, "--out", out, "--tokenizer", word_tokenizer, "--workers", workers)
    with pipe.open("w") as writer:
        writer.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS * 100)
        writer.flush()
        assert list((tmp_path / "made").glob(".out.threefold-*/new/tokens.bin"))
        assert not out.exists()
        os.killpg(run.pid, how) if how == signal.SIGINT else run.kill()
        # The workers hold the same standard output, so its end means that they are gone as well.
        run.communicate(timeout=300)
    assert run.returncode != 0
    assert not out.exists()
    if how == signal.SIGINT:
        assert list((tmp_path / "made").iterdir()) == []

    pipe.unlink()
    again = start("prepare", write_lines(pipe, TEXTS), "--out", out, "--tokenizer", word_tokenizer, "--workers", 1)
    output, _ = again.communicate(timeout=300)
    assert again.returncode == 0, output
    assert [path.name for path in (tmp_path / "made").iterdir()] == ["out"]
    assert TokenFiles.open(out).meta.documents == len(TEXTS)


def test_idle_workers_go_with_a_killed_process(tmp_path: Path, word_tokenizer: Path) -> None:
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    run = start("prepare", pipe, "--out", tmp_path / "out", "--tokenizer", word_tokenizer, "--workers", 2)
    with pipe.open("w"):  # it is opened for reading after the workers have started, and gives them nothing to do
        run.kill()
        run.communicate(timeout=300)
    assert not (tmp_path / "out").exists()


@sweep("workers", [1, 2], quick=(1,))
def test_a_full_disk_is_told_and_leaves_nothing(tmp_path: Path, word_tokenizer: Path, workers: int) -> None:
    lines = write_lines(tmp_path / "a.jsonl", TEXTS * 20)
    out = tmp_path / "made" / "out"
    full = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    command = ("prepare", lines, "--out", out, "--tokenizer", word_tokenizer, "--workers", workers)
    run = start(*command, prelude=full)
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 1
    assert "out could not be written (File too large); make room or choose another --out" in " ".join(output.split())
    assert "Traceback" not in output
    assert list((tmp_path / "made").iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="the children of a process are listed under /proc on Linux only")
def test_a_worker_that_is_killed_ends_the_run(tmp_path: Path, word_tokenizer: Path) -> None:
    pipe = tmp_path / "in.jsonl"
    os.mkfifo(pipe)
    run = start("prepare", pipe, "--out", tmp_path / "out", "--tokenizer", word_tokenizer, "--workers", 2)
    children = Path(f"/proc/{run.pid}/task/{run.pid}/children")
    with contextlib.suppress(BrokenPipeError), pipe.open("w") as writer:  # it may end while this writes
        writer.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS * 50)
        writer.flush()
        os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
        writer.writelines(json.dumps({"text": text}) + "\n" for text in TEXTS * 50)
    output, _ = run.communicate(timeout=300)
    assert run.returncode == 1
    assert "a worker was killed" in " ".join(output.split())
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out.threefold*"))
