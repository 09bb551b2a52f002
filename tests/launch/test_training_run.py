"""A run that begins in a folder with something in it: what it may replace, and what it refuses."""

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support import ready
from tests.support.command import Ended
from tests.support.other_systems import write_megatron
from tests.train.support import Run, train_rank, write_ids
from threefold.checkpoint.folder import FOLDER, path_of, prune, remove_partial
from threefold.data.samples import document_runs
from threefold.data.tokenizer import END_OF_DOCUMENT
from threefold.verify.worker_pool import WorkerPool


@pytest.fixture(scope="module")
def whole(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after steps 1 and 2, which nobody changes."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    pool.run(1, train_rank, small_run.but(steps=2, set=(("checkpoint.every", 1), ("checkpoint.keep", 0))), folder)
    (folder / "run.lock").touch()  # as `threefold train` leaves it
    return folder


@pytest.fixture
def run(whole: Path, tmp_path: Path) -> Path:
    """A copy of it."""
    return Path(shutil.copytree(whole, tmp_path / "run"))


@pytest.fixture
def config(small_run: Run, tmp_path: Path) -> Path:
    file = tmp_path / "small.yaml"
    file.write_text(
        f"data: {{path: {small_run.data}, sequence_length: 16, split: '80,20'}}\n"
        "model: {num_layers: 1, hidden_size: 8, num_attention_heads: 2}\n"
        "train: {max_steps: 2, global_batch_size: 4, eval_every: 0, device: cpu}\n"
        "checkpoint: {every: 1, keep: 1}\n"
    )
    return file


def train(*arguments: str | Path) -> Ended:
    """Call `threefold train` in a process of its own, as it starts others where it does not refuse."""
    done = ready.run([sys.executable, "-m", "threefold", "train", *arguments], timeout=100)
    return Ended(done.returncode, done.stdout, done.stderr)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def each_step(change: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        for step in (1, 2):
            change(path_of(run, step))

    return damage


def flip(folder: Path) -> None:
    file = folder / "checkpoint.json"
    text = bytearray(file.read_bytes())
    text[len(text) // 2] ^= 1
    file.write_bytes(text)


DAMAGE: dict[str, Callable[[Path], None]] = {
    "a bit of each manifest": each_step(flip),
    "no manifest": each_step(lambda folder: (folder / "checkpoint.json").unlink()),
    "tensors cut short": each_step(lambda folder: os.truncate(folder / "tensors-00000.bin", 8)),
    "replaced and not in place": each_step(lambda folder: (flip(folder), folder.rename(f"{folder}.replaced"))),
    "diverged": each_step(lambda folder: folder.rename(f"{folder}.diverged")),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_run_replaces_no_checkpoint_that_is_damaged(config: Path, run: Path, damage: Callable[[Path], None]) -> None:
    damage(run)
    before = content(run)
    ended = train(config, "--run-dir", run)
    assert ended.status == 2
    assert f"{path_of(run, 2)}" in ended.error
    assert "a run that begins anew would write over it or beside it; choose another --run-dir" in ended.error
    assert ended.error.count("\n") == 1
    assert content(run) == before


@pytest.mark.parametrize("name", ["step_00000002", "step_00000002.partial", "step_00000001.replaced", "step_last"])
def test_a_run_deletes_no_file_of_a_folder_that_no_run_has_used(config: Path, tmp_path: Path, name: str) -> None:
    mine = tmp_path / "mine" / FOLDER / name / "notes.txt"
    mine.parent.mkdir(parents=True)
    mine.write_text("Mine.")
    ended = train(config, "--run-dir", tmp_path / "mine")
    assert ended.status == 2
    assert str(mine.parent) in ended.error
    assert content(tmp_path / "mine") == {f"{FOLDER}/{name}/notes.txt": b"Mine."}


def test_a_folder_of_another_program_is_not_one_that_a_run_has_used(config: Path, tmp_path: Path) -> None:
    """Its `checkpoints` and `logs` do not make its config and its log ours."""
    folder = tmp_path / "project"
    for name in ("checkpoints/epoch=3.ckpt", "logs/today.txt", "train.log"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("Mine.")
    before = content(folder)
    ended = train(config, "--run-dir", folder)
    assert ended.status == 2
    assert "which no run has used and whose train.log the run would replace" in ended.error
    assert content(folder) == before


def test_what_a_killed_run_began_to_write_is_no_checkpoint(run: Path, tmp_path: Path) -> None:
    """It is deleted, and nothing that has another name, nor what a link leads to."""
    folder = run / FOLDER
    path_of(run, 2).rename(folder / "step_00000002.partial")
    path_of(run, 1).rename(tmp_path / "kept")
    path_of(run, 1).symlink_to(tmp_path / "kept")
    for name in ("step_by_step.partial", "step_2.partial", "my_step_00000002.partial"):
        (folder / name).mkdir()
    (folder / "step_00000003.partial").symlink_to(tmp_path / "kept")
    before = content(tmp_path / "kept")
    remove_partial(run)
    names = {"step_by_step.partial", "step_2.partial", "my_step_00000002.partial", "step_00000001"}
    assert {path.name for path in folder.iterdir()} == names
    assert content(tmp_path / "kept") == before


def test_a_checkpoint_behind_a_link_is_kept_when_it_is_pruned(run: Path, tmp_path: Path) -> None:
    """As where the user has moved it to another disk: the link is removed."""
    path_of(run, 1).rename(tmp_path / "kept")
    path_of(run, 1).symlink_to(tmp_path / "kept")
    before = content(tmp_path / "kept")
    prune(run, keep=1)
    assert [path.name for path in (run / FOLDER).iterdir()] == ["step_00000002"]
    assert content(tmp_path / "kept") == before


@pytest.mark.parametrize("kind", ["a file", "a link to nothing"])
def test_a_place_for_checkpoints_that_is_no_folder_is_told_before_the_first_step(
    config: Path, tmp_path: Path, kind: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    if kind == "a file":
        (run / FOLDER).write_text("Mine.")
    else:
        (run / FOLDER).symlink_to(tmp_path / "nowhere")
    ended = train(config, "--run-dir", run)
    assert ended.status == 2
    assert f"{run / FOLDER} is " in ended.error
    assert "the run's checkpoints go there" in ended.error
    assert [path.name for path in run.iterdir()] == [FOLDER]


@pytest.mark.parametrize("kind", ["packed", "separate", "no eod", "valid", "mixture"])
def test_documents_of_one_token_are_told_before_a_rank_starts(
    config: Path, small_run: Run, tmp_path: Path, kind: str
) -> None:
    known = Tokenizer.from_file(str(small_run.data / "tokenizer.json"))
    documents: list[list[int]] = [[] for _ in range(600)]
    more = ["--set", "train.eval_every=0"]
    if kind == "valid":
        runs = document_runs(len(documents), "80,20", "train").tolist()
        for number in (each for run in runs for each in range(*run)):
            documents[number] = [5, 6, 7]
        more = ["--set", "train.eval_every=1"]
    data = write_ids(tmp_path / "data", documents, known, known.token_to_id(END_OF_DOCUMENT))
    if kind == "no eod":
        data = write_megatron(tmp_path / "megatron", [[[5]]] * 600)
        more += ["--set", "model.vocab_size=301"]
    elif kind == "separate":
        more += ["--set", "data.separate_documents=true"]
    if kind == "mixture":
        more += ["--set", "data.path=null", "--set", f"data.mixture={{{small_run.data}: 1, {data}: 1}}"]
    else:
        more += ["--set", f"data.path={data}"]
    ended = train(config, "--run-dir", tmp_path / "run", *more)
    name = "valid" if kind == "valid" else "train"
    assert ended.status == 2
    assert f"{data}, where no token of the {name} split counts for the loss" in ended.error
    assert ended.error.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_nothing_is_written_through_a_link(config: Path, tmp_path: Path) -> None:
    """Its name becomes a file of the run, and what it led to stays, or is not made."""
    run, other = tmp_path / "run", tmp_path / "other"
    (run / "logs").mkdir(parents=True)
    other.mkdir()
    (run / "run.lock").touch()  # as of a run before this one
    names = ("config.yaml", "metrics.jsonl", "train.log", "goodput.json", "loss.png", "metrics.csv", "phases.json")
    names += ("logs/rank_00000.log", "report.html")
    for name in (*names, "config.yaml.tmp", "metrics.jsonl.tmp"):
        target = other / name.replace("/", " ")
        (run / name).symlink_to(target)
        if name != "loss.png":
            target.write_text("Mine.")
    before = content(other)
    command = [sys.executable, "-m", "threefold", "train", config, "--run-dir", run]
    command += ["--set", "train.callbacks=[csv_log, phase_timers]"]
    for more in ((), ("--resume", "--set", "train.max_steps=3")):
        ended = ready.run([*command, *more])
        assert (ended.returncode, ended.stderr) == (0, "")
        assert content(other) == before
    assert [name for name in names if (run / name).is_symlink() or not (run / name).is_file()] == []


FILES = ("config.yaml", "metrics.jsonl", "train.log", "loss.png", "report.html", "goodput.json")


@pytest.mark.parametrize(
    ("name", "callback"),
    [*((name, "") for name in FILES), ("metrics.csv", "csv_log"), ("my.csv", "{name: csv_log, path: my.csv}")],
)
def test_no_file_of_a_folder_that_no_run_has_used_is_replaced(
    config: Path, tmp_path: Path, name: str, callback: str
) -> None:
    mine = tmp_path / "project" / name
    mine.parent.mkdir()
    mine.write_text("Mine.")
    ended = train(config, "--run-dir", mine.parent, "--set", f"train.callbacks=[{callback}]")
    assert ended.status == 2
    assert f"which no run has used and whose {name} the run would replace" in ended.error
    assert content(mine.parent) == {name: b"Mine."}
