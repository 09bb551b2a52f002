"""`--overwrite` replaces what this program wrote and nothing else, whatever the command."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.huggingface.hand_made import write_llama
from tests.support.command import Command
from tests.support.other_systems import write_megatron
from threefold.output import MARKER


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in sorted(folder.rglob("*"))
    }


@pytest.fixture
def work(tmp_path: Path, tokens: Path) -> Path:
    """A folder with an input for each command, and an output of each."""
    write_llama(tmp_path / "models" / "hf")
    shutil.copytree(tokens, tmp_path / "corpora" / "tokens")
    (tmp_path / "text.jsonl").write_text(json.dumps({"text": "Some text of a document. " * 9}) + "\n")
    write_megatron(tmp_path / "corpora" / "m", [[[5, 6, 7]], [[8, 9, 0]]])
    return tmp_path


Make = Callable[[Path, Path], tuple[object, ...]]

COMMANDS: dict[str, Make] = {
    "prepare": lambda work, out: ("data", "prepare", work / "text.jsonl", "--vocab-size", 260, "--out", out),
    "convert": lambda work, out: ("data", "convert", work / "corpora" / "tokens", "--to", "threefold", "--out", out),
    "import": lambda work, out: ("checkpoint", "import", work / "models" / "hf", "--out", out),
    "export": lambda work, out: ("checkpoint", "export", work / "runs" / "a" / "run", "--out", out),
}


def make_run(threefold: Command, work: Path) -> None:
    made = threefold("checkpoint", "import", work / "models" / "hf", "--out", work / "runs" / "a" / "run")
    assert made.status == 0, made


@pytest.mark.parametrize("name", COMMANDS)
def test_only_an_output_is_replaced(threefold: Command, work: Path, name: str) -> None:
    make_run(threefold, work)
    out = work / "new" / "out"
    arguments = COMMANDS[name](work, out)
    assert threefold(*arguments).status == 0
    (work / "new" / "out.partial").write_text("mine")
    (work / "new" / "out.replaced").mkdir()
    (work / "new" / "out.replaced" / "mine").write_text("mine")
    assert "exists already" in threefold(*arguments).error
    again = threefold(*arguments, "--overwrite")
    assert again.status == 0, again
    assert sorted(path.name for path in (work / "new").iterdir()) == ["out", "out.partial", "out.replaced"]
    assert (work / "new" / "out.replaced" / "mine").read_text() == "mine"

    for foreign in ("thesis.txt", "deep/thesis.txt", ".hidden"):
        (out / foreign).parent.mkdir(exist_ok=True)
        (out / foreign).write_text("mine")
        before = contents(work)
        refused = threefold(*arguments, "--overwrite")
        assert refused.status == 2
        assert refused.error.count("\n") == 1
        assert f"has {foreign.split('/')[0]}" in refused.error
        assert contents(work) == before
        (out / foreign).unlink()
        shutil.rmtree(out / "deep", ignore_errors=True)
    (out / "link").symlink_to(work / "corpora")
    assert "has link, which this program did not write" in threefold(*arguments, "--overwrite").error
    assert (out / "link").is_symlink()


def sources(work: Path) -> list[tuple[str, tuple[object, ...], Path]]:
    corpora, models, runs = work / "corpora", work / "models", work / "runs"
    (work / "alias").symlink_to(models)
    return [
        ("is an input", ("checkpoint", "import", models / "hf"), models / "hf"),
        ("contains", ("checkpoint", "import", models / "hf"), models),
        ("contains", ("checkpoint", "import", work / "alias" / "hf"), models),
        ("contains", ("checkpoint", "export", runs / "a" / "run"), runs / "a"),
        ("is an input", ("checkpoint", "export", runs / "a" / "run"), runs / "a" / "run"),
        ("is inside", ("checkpoint", "export", runs / "a" / "run"), runs / "a" / "run" / "checkpoints"),
        ("contains", ("data", "prepare", corpora / "text.jsonl"), corpora),
        ("contains", ("data", "prepare", work / "text.jsonl", "--tokenizer", corpora / "tokens" / "tokenizer.json"),
         corpora / "tokens"),
        ("is an input", ("data", "convert", corpora / "tokens", "--to", "threefold"), corpora / "tokens"),
        ("is an input", ("data", "convert", corpora / "m", "--to", "megatron"), corpora / "m"),
        ("is an input", ("data", "convert", corpora / "m.idx", "--to", "megatron"), corpora / "m.bin"),
    ]  # fmt: skip


def test_no_input_is_replaced(threefold: Command, work: Path) -> None:
    make_run(threefold, work)
    shutil.copy(work / "text.jsonl", work / "corpora")
    for rule, arguments, out in sources(work):
        before = contents(work)
        refused = threefold(*arguments, "--out", out, "--overwrite")
        assert refused.status == 2, (arguments, refused)
        assert rule in refused.error, (arguments, refused)
        assert refused.error.count("\n") == 1
        assert contents(work) == before


@pytest.mark.parametrize("name", COMMANDS)
def test_an_out_that_is_no_folder_to_make(
    threefold: Command, work: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    make_run(threefold, work)
    monkeypatch.chdir(work)
    (work / "dangling").symlink_to(work / "nowhere")
    (work / "linked").symlink_to(work / "runs")
    os.mkfifo(work / "fifo")
    for out, rule in (
        (".", "--out . is a folder that other things are in"),
        ("..", "--out .. is a folder that other things are in"),
        ("/", "--out / is a folder that other things are in"),
        ("a/..", "is a folder that other things are in"),
        ("dangling", "--out dangling is a symbolic link to"),
        ("linked", "--out linked is a symbolic link to"),
        ("fifo", "--out fifo is a pipe, socket or device"),
        ("text.jsonl", "--out text.jsonl is a file"),
        ("text.jsonl/out", "text.jsonl/out cannot be made (Not a directory)"),
        ("/proc/out", "/proc/out cannot be made"),
        ("/".join(["x" * 100] * 50), "cannot be used (File name too long)"),
    ):
        before = sorted(map(str, work.rglob("*")))
        refused = threefold(*COMMANDS[name](work, Path(out)), "--overwrite")
        assert refused.status == 2, (out, refused)
        assert rule in refused.error, (out, refused)
        assert refused.error.count("\n") == 1
        assert sorted(map(str, work.rglob("*"))) == before


def test_a_pair_of_files(threefold: Command, work: Path) -> None:
    arguments = ("data", "convert", work / "corpora" / "tokens", "--to", "megatron", "--out", work / "new" / "p.bin")
    assert threefold(*arguments).status == 0
    assert sorted(path.name for path in (work / "new").iterdir()) == [f".p{MARKER}", "p.bin", "p.idx"]
    (work / "new" / "p.bin.partial").write_text("mine")
    assert "p.idx exists already" in threefold(*arguments).error
    assert threefold(*arguments, "--overwrite").status == 0
    assert (work / "new" / "p.bin.partial").read_text() == "mine"
    write_megatron(work / "new" / "p", [[[1, 2, 3]]])  # Megatron's, under the same name
    before = contents(work)
    refused = threefold(*arguments, "--overwrite")
    assert refused.status == 2
    assert "p.idx was not written by this program" in refused.error
    assert contents(work) == before
    assert "has no name before .bin" in threefold(*arguments[:-1], work / ".bin").error


def test_files_that_are_written_replace_only_such_files(threefold: Command, work: Path) -> None:
    """Metrics and pictures; the metrics of `eval --json` also in a run's folder."""
    make_run(threefold, work)
    run = work / "runs" / "a" / "run"
    mine, picture = work / "mine.json", work / "mine.png"
    mine.write_text('{"run": 1}')
    picture.write_bytes(b"\x89PNG of a camera")
    (work / "link.json").symlink_to(run / "config.yaml")
    before = contents(work)
    for file in (mine, run / "config.yaml", work / "link.json", run / "checkpoints" / "step_00000000" / "config.yaml"):
        refused = threefold("eval", run, "--data", work / "text.jsonl", "--json", file)
        assert (refused.status, refused.error.count("\n")) == (2, 1)
        assert "exists already and is not an output of this command; name another file" in refused.error
    for draw in (("simulate", "--schedule", "1f1b", "--stages", 2, "--microbatches", 4, "--png"),):
        refused = threefold(*draw, picture)
        assert (refused.status, refused.error.count("\n")) == (2, 1)
        assert "mine.png exists already and is not of this program; use another name" in refused.error
        assert contents(work) == before
        for suffix in (".png", ".svg"):
            for _ in range(2):
                assert threefold(*draw, work / f"new{suffix}").status == 0


def test_an_output_that_lies_in_what_is_read(threefold: Command, work: Path) -> None:
    """Also one that does not exist yet: reading again would find it."""
    make_run(threefold, work)
    (work / "texts").mkdir()
    shutil.copy(work / "text.jsonl", work / "texts")
    prepare: Make = lambda work, out: ("data", "prepare", work / "texts", "--vocab-size", 260, "--out", out)  # noqa: E731
    places = {"convert": "corpora/tokens", "import": "models/hf", "export": "runs/a/run", "prepare": "texts"}
    for name, make in {**COMMANDS, "prepare": prepare}.items():
        refused = threefold(*make(work, work / places[name] / "new"))
        assert (refused.status, refused.error.count("\n")) == (2, 1), refused
        assert f"is inside {work / places[name]}, which is read; choose a folder apart from the inputs" in refused.error
