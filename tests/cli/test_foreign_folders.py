"""Folders that a stranger has prepared: no command reads, writes or waits for anything that does not belong to them."""

import json
import os
import shutil
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.huggingface.hand_made import write_llama
from tests.support import ready
from tests.support.chats import CHATML
from tests.support.command import Ended
from tests.support.sweep import sweep
from tests.train.support import Run, train_rank
from threefold.checkpoint.folder import CARRIED, FOLDER, PREFIX, path_of
from threefold.checksums import seal_text
from threefold.verify.worker_pool import WorkerPool

SECRET: Final = "the user's own secret"
COMMANDS: Final = {
    "resume": "train {config} --run-dir {run} --resume",
    "warm start": "train {config} --run-dir {out} --set train.init_from={run}",
    "generate": "generate {run} --prompt If --max-new-tokens 2",
    "chat": "generate {run} --prompt If --max-new-tokens 2 --chat",
    "eval": "eval {run} --data {text}",
    "export": "checkpoint export {run} --out {out}",
    "convert": "checkpoint convert {run} --out {out}",
    "safetensors": "checkpoint convert {run} --out {out} --format safetensors",
    "average": "checkpoint average {run} --latest 2 --out {out}",
    "verify": "checkpoint verify {run}",
    "show": "checkpoint show {run}",
    "list": "checkpoint list {run}",
    "report": "report {run} --html {out}.html",
    "diff": "config diff {checkpoint} {run}",
}
TELLING: Final = ("list", "report")
"""Commands that show a folder as it is, and say what is wrong with it."""
KINDS: Final = ("link", "fifo", "device", "folder", "sparse")
NAMED: Final = ("checkpoint.json", "tensors.json", "tensors-00000.bin", "config.yaml", "writer.json", "tokenizer.json")
OF_RUN: Final = ("config.yaml", "metrics.jsonl", "train.log", "goodput.json", "samples.jsonl", "run.lock", "loss.png")


@pytest.fixture(scope="module")
def whole(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint after its second step, which nobody changes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    pool.run(1, train_rank, small_run.but(steps=2), folder)
    (folder / "run.lock").touch()  # as `threefold train` leaves it
    (folder / "config.yaml").write_text(small_run.but(steps=2).config.to_yaml())
    return folder


class Place:
    """A copy of a run that a stranger changes, and a file of the user beside it, which no command may touch."""

    def __init__(self, whole: Path, small_run: Run, folder: Path) -> None:
        self.folder, self.run = folder, Path(shutil.copytree(whole, folder / "run"))
        self.checkpoint, self.secret = path_of(self.run, 2), folder / "secret"
        self.secret.write_text(SECRET)
        (folder / "text.txt").write_text("The statement returns a value.")
        (folder / "config.yaml").write_text(small_run.but(steps=3).config.to_yaml())

    def attack(self, path: Path, kind: str) -> None:
        """Put something into the place of a file; a sparse file of a terabyte is one that the manifest names so."""
        path.unlink(missing_ok=True)
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "sparse":
            path.touch()
            os.truncate(path, 1 << 40)
        else:
            path.symlink_to(self.secret if kind == "link" else "/dev/zero")
        if kind == "sparse" and path.parent == self.checkpoint and path.name in NAMED[1:]:
            document = json.loads((self.checkpoint / NAMED[0]).read_text())
            del document["checksum"]
            document["files"][path.name]["bytes"] = 1 << 40
            (self.checkpoint / NAMED[0]).write_text(seal_text(json.dumps(document, indent=2)))

    def call(self, command: str) -> Ended:
        """Call a command in a process of its own, which fails where it waits, and look for what it must not do."""
        out = self.folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        places = {"config": self.folder / "config.yaml", "text": self.folder / "text.txt", "out": out}
        given = [word.format(run=self.run, checkpoint=self.checkpoint, **places) for word in command.split()]
        done = ready.run([sys.executable, "-m", "threefold", *given], timeout=60)
        assert "Traceback" not in done.stdout + done.stderr
        assert SECRET not in done.stdout + done.stderr
        assert self.secret.read_text() == SECRET
        files = (path for path in self.folder.rglob("*") if path.is_file() and not path.is_symlink())
        small = [path for path in files if path != self.secret and path.stat().st_size < 1 << 30]
        assert [path for path in small if SECRET.encode() in path.read_bytes()] == []
        return Ended(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def place(whole: Path, small_run: Run, tmp_path: Path) -> Place:
    return Place(whole, small_run, tmp_path)


@sweep("name", COMMANDS, quick=(3, 5), slow=(0, 1))
def test_files_that_the_manifest_does_not_name_are_not_there(place: Place, whole: Path, name: str) -> None:
    """Whatever they are, a command ends as without them, and no checkpoint, export or conversion takes them along."""
    usual = place.call(COMMANDS[name])
    shutil.rmtree(place.run)
    shutil.copytree(whole, place.run)
    unlisted = [PREFIX + each for each in CARRIED]
    for number, each in enumerate(unlisted):
        place.attack(place.checkpoint / each, KINDS[number % len(KINDS)])
    (place.checkpoint / f"{PREFIX}chat_template.jinja").unlink()
    (place.checkpoint / f"{PREFIX}chat_template.jinja").write_text(CHATML)
    ended = place.call(COMMANDS[name])
    assert (ended.status, ended.error) == (usual.status, usual.error)
    written = {path.name for folder in (place.folder / "out", path_of(place.run, 3)) for path in folder.rglob("*")}
    assert not written & {*unlisted, *CARRIED} - {"config.json", "tokenizer_config.json"}  # made anew
    if name == "chat":
        assert "chat template" in ended.error


CASES: Final = [(name, kind) for name in COMMANDS for kind in KINDS]


@sweep(
    "name, kind",
    CASES,
    quick=[CASES.index(case) for case in (("generate", "fifo"), ("export", "sparse"))],
    slow=[
        CASES.index(case) for case in (("resume", "fifo"), ("verify", "sparse"), ("list", "link"), ("diff", "device"))
    ],
)
def test_what_stands_for_a_file_of_a_checkpoint_is_told(place: Place, whole: Path, name: str, kind: str) -> None:
    for file in NAMED:
        shutil.rmtree(place.run)
        shutil.copytree(whole, place.run)
        place.attack(place.checkpoint / file, kind)
        ended = place.call(COMMANDS[name])
        if name in TELLING or (name == "diff" and file != "config.yaml"):
            assert (ended.status, ended.error) in ((0, ""), (1, ended.error)), ended
            continue
        assert ended.status in (1, 2), (file, ended)
        assert ended.error.startswith("Error: "), (file, ended)
        assert ended.error.count("\n") == 1, (file, ended)


@sweep("kind", KINDS, slow=(0, 1))
def test_what_stands_for_a_file_of_a_run_is_told_or_replaced(place: Place, whole: Path, kind: str) -> None:
    """Training goes on without the file, or ends before its first step; it is the run's own file then."""
    for name in OF_RUN:
        shutil.rmtree(place.run)
        shutil.copytree(whole, place.run)
        place.attack(place.run / name, kind)
        assert place.call(COMMANDS["report"]).status == 0
        ended = place.call(COMMANDS["resume"])
        refused = (name == "run.lock" and kind != "sparse") or (name == "config.yaml" and kind == "folder")
        assert ended.status == (2 if refused else 0), (name, ended)
        assert ended.error.count("\n") <= 1
        if not ended.status:
            assert path_of(place.run, 3).is_dir()
            assert name == "samples.jsonl" or not (place.run / name).is_symlink()


def test_generate_keeps_no_text_through_a_link(place: Place) -> None:
    """Its text is the stranger's, and the link may lead to ~/.bashrc."""
    place.attack(place.run / "samples.jsonl", "link")
    ended = place.call(f"{COMMANDS['generate']} --keep")
    assert (ended.status, ended.error) == (0, "")
    assert json.loads((place.run / "samples.jsonl").read_text())["prompt"] == "If"
    assert not (place.run / "samples.jsonl").is_symlink()
    place.attack(place.run / "samples.jsonl", "fifo")
    ended = place.call(f"{COMMANDS['generate']} --keep")
    assert ended.error.endswith(
        "cannot be written (it is no regular file (a pipe, socket or device)); generate without --keep.\n"
    )


@pytest.mark.slow
def test_folders_of_a_run_that_are_links_are_replaced(place: Place) -> None:
    """Also those of its logs, where the next attempt would append."""
    elsewhere = place.folder / "elsewhere"
    elsewhere.mkdir()
    for name in ("logs", "tensorboard", "profile"):
        shutil.rmtree(place.run / name, ignore_errors=True)
        (place.run / name).symlink_to(elsewhere)
    ended = place.call(f"{COMMANDS['resume']} --profile 1")
    assert (ended.status, ended.error) == (0, "")
    assert list(elsewhere.iterdir()) == []
    assert (place.run / "logs" / "rank_00000.log").is_file()


def test_a_run_does_not_train_on_the_checkpoints_of_another(place: Place, whole: Path) -> None:
    other = shutil.copytree(whole, place.folder / "other")
    shutil.rmtree(place.run / FOLDER)
    (place.run / FOLDER).symlink_to(other / FOLDER)
    ended = place.call(COMMANDS["resume"])
    assert ended.status == 2
    assert "is a link to the checkpoints of another run" in ended.error
    assert path_of(other, 2).is_dir()


def test_an_import_follows_no_link_out_of_its_folder(tmp_path: Path, small_run: Run, whole: Path) -> None:
    place = Place(whole, small_run, tmp_path)
    source = write_llama(tmp_path / "hf")
    for name in ("chat_template.jinja", "tokenizer.json", "model.safetensors"):
        shutil.copytree(source, tmp_path / "evil")
        place.attack(tmp_path / "evil" / name, "link")
        ended = place.call(f"checkpoint import {tmp_path / 'evil'} --out {{out}}")
        assert ended.status == 2
        assert f"{name}" in ended.error
        assert "it is a link that leads out of its folder" in ended.error
        shutil.rmtree(tmp_path / "evil")
    cache = tmp_path / "models--a--b"
    shutil.copytree(source, cache / "blobs")
    (cache / "snapshots" / "0123").mkdir(parents=True)
    for path in source.iterdir():
        (cache / "snapshots" / "0123" / path.name).symlink_to(f"../../blobs/{path.name}")
    (tmp_path / "model").symlink_to(cache / "snapshots" / "0123")
    ended = place.call(f"checkpoint import {tmp_path / 'model'} --out {{out}}")
    assert (ended.status, ended.error) == (0, "")
