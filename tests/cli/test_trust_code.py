"""What a checkpoint or a run's folder from elsewhere brings along as code runs only where the user asks for it."""

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import custom_token_model, ready
from tests.support.command import Command, Ended
from tests.train.support import Run, train_rank
from threefold.checkpoint.folder import CONFIG, MODEL_FILE, path_of
from threefold.checkpoint.manifest import read_manifest, write_manifest
from threefold.verify.worker_pool import WorkerPool

FILE = Path(custom_token_model.__file__)
ASK = "runs only where you ask for it"


def write_evil(file: Path, ran: Path, text: str = "") -> Path:
    """Python that makes the file `ran` when it is imported."""
    file.write_text(f"{text}\nfrom pathlib import Path\n\nPath({str(ran)!r}).touch()\n")
    return file


def change_config(checkpoint: Path, **changes: Any) -> None:
    """Change a checkpoint's config and make its manifest fit, and the run's config alike."""
    values = yaml.safe_load((checkpoint / CONFIG).read_text())
    for key, value in changes.items():
        section, name = key.split("__")
        values[section][name] = value
        if key == "optimizer__name":  # another one reads no settings of AdamW
            values[section] = {"name": value, "lr": 1e-2}
    (checkpoint / CONFIG).write_text(yaml.safe_dump(values))
    shutil.copyfile(checkpoint / CONFIG, checkpoint.parent.parent / CONFIG)
    seal(checkpoint)


def seal(checkpoint: Path) -> None:
    facts = read_manifest(checkpoint).facts
    (checkpoint / "checkpoint.json").unlink()
    write_manifest(checkpoint, facts)


@pytest.fixture(scope="module")
def honest(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of a custom model and one of a GPT."""
    folder = tmp_path_factory.mktemp("honest")
    own = (("model.architecture", "own"), ("model.file", f"{FILE}:Tiny"), ("model.arguments", {"blocks": 1}))
    pool.run(1, train_rank, small_run.but(steps=1, dropout=0.0, set=own), folder / "own")
    pool.run(1, train_rank, small_run.but(steps=1), folder / "gpt")
    return folder


@pytest.fixture
def ran(tmp_path: Path) -> Path:
    """The file that evil code makes."""
    return tmp_path / "ran"


@pytest.fixture
def own(honest: Path, tmp_path: Path, ran: Path) -> Path:
    """A run whose checkpoint has been given evil code, with checksums that fit."""
    run = Path(shutil.copytree(honest / "own", tmp_path / "own"))
    checkpoint = path_of(run, 1)
    for name in (MODEL_FILE, f"huggingface-{MODEL_FILE}", "huggingface-modeling_evil.py"):
        write_evil(checkpoint / name, ran, FILE.read_text())
    change_config(checkpoint, model__file=f"{checkpoint / MODEL_FILE}:Tiny")
    return run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "a.txt"
    file.write_text("The statement returns a value.")
    return file


def call(threefold: Command, *command: str | Path) -> Ended:
    """Call a command: in this process, unless it would start others if it were not refused."""
    if command[0] != "train":
        return threefold(*command)
    done = ready.run([sys.executable, "-m", "threefold", *command], timeout=120)
    return Ended(done.returncode, done.stdout, done.stderr)


def write_gpt(folder: Path, small_run: Run, model: str = "") -> Path:
    """A user's config, which names no code."""
    file = folder / "gpt.yaml"
    file.write_text(
        f"data: {{path: {small_run.data}, sequence_length: 16, split: '80,20'}}\n{model}"
        "train: {max_steps: 2, global_batch_size: 8, eval_every: 0, device: cpu}\n"
    )
    return file


def test_a_checkpoint_with_code_opens_without_it_or_is_refused(
    threefold: Command, own: Path, text: Path, ran: Path, tmp_path: Path, small_run: Run
) -> None:
    for command in (
        ("generate", own, "--prompt", "The"),
        ("eval", own, "--data", text),
        ("checkpoint", "export", own, "--out", tmp_path / "hf"),
        ("train", write_gpt(tmp_path, small_run), "--run-dir", own, "--resume"),
        ("train", write_gpt(tmp_path, small_run), "--run-dir", own, "--resume=auto"),
    ):
        ended = call(threefold, *command)
        assert ended.status == 2, command
        assert ASK in ended.error
        assert str(path_of(own, 1) / MODEL_FILE) in ended.error
        assert ended.error.count("\n") == 1
        assert not ran.exists(), command
    for command in (
        ("checkpoint", "show", own),
        ("checkpoint", "list", own),
        ("checkpoint", "verify", own),
        ("checkpoint", "convert", own, "--out", tmp_path / "converted"),
    ):
        assert threefold(*command).status == 0, command
        assert not ran.exists(), command
    assert not (tmp_path / "hf").exists()


def test_code_that_the_user_named_runs_and_not_that_of_the_checkpoint(
    threefold: Command, own: Path, text: Path, ran: Path, tmp_path: Path
) -> None:
    named = ("--model", f"{FILE}:Tiny")
    for command in (
        ("generate", own, "--prompt", "The", "--max-new-tokens", "2", *named),
        ("eval", own, "--data", text, *named),
        ("checkpoint", "export", own, "--out", tmp_path / "hf", *named),
    ):
        ended = threefold(*command)
        assert (ended.status, ended.error) == (0, ""), command
        assert not ran.exists(), command
    assert (tmp_path / "hf" / MODEL_FILE).read_text() == FILE.read_text()
    assert [path.name for path in (tmp_path / "hf").glob("*.py")] == [MODEL_FILE]


@pytest.mark.parametrize("command", ["generate", "export"])
def test_code_that_the_user_trusts_runs(threefold: Command, own: Path, ran: Path, tmp_path: Path, command: str) -> None:
    words = {"generate": ("generate", own, "--prompt", "The", "--max-new-tokens", "2")}
    words["export"] = ("checkpoint", "export", own, "--out", tmp_path / "hf")
    ended = threefold(*words[command], "--trust-code")
    assert (ended.status, ended.error) == (0, "")
    assert ran.exists()


def test_another_architecture_is_told_before_anything_is_imported(
    threefold: Command, own: Path, honest: Path, ran: Path, tmp_path: Path, small_run: Run
) -> None:
    """Also where the user trusts the checkpoint: his config names a GPT."""
    config = write_gpt(tmp_path, small_run, "model: {architecture: gpt, vocab_size: 301}\n")
    for trust in ((), ("--trust-code",)):
        ended = call(threefold, "train", config, "--run-dir", own, "--resume", *trust)
        assert ended.status == 2
        assert "model.architecture is 'gpt' but" in ended.error
        assert not ran.exists()
    mine = write_evil(tmp_path / "mine.py", ran, FILE.read_text())
    for command in (
        ("generate", honest / "gpt", "--prompt", "a", "--model", mine),
        ("checkpoint", "export", honest / "gpt", "--out", tmp_path / "hf", "--model", mine),
    ):
        ended = threefold(*command)
        assert ended.status == 2
        assert "is a gpt; leave --model out." in ended.error
        assert not ran.exists()


def names(evil: Path) -> dict[str, Any]:
    """The settings that name code, as a stored config has them."""
    return {
        "optimizer__name": f"{evil}:Thing",
        "train__on_nan": f"{evil}:Thing",
        "train__callbacks": [{"name": f"{evil}:Thing", "key": 1}],
        "data__path": f"{evil}:Thing",
    }


def test_no_setting_of_a_stored_config_runs_code_when_its_checkpoint_is_opened(
    threefold: Command, honest: Path, text: Path, ran: Path, tmp_path: Path, small_run: Run
) -> None:
    run = Path(shutil.copytree(honest / "gpt", tmp_path / "run"))
    change_config(path_of(run, 1), **names(write_evil(tmp_path / "evil.py", ran)))
    begun = ("--set", f"train.init_from={run}", "--set", "train.max_steps=1")
    for command, status in (
        (("generate", run, "--prompt", "The", "--max-new-tokens", "2"), 0),
        (("eval", run, "--data", text), 0),
        (("checkpoint", "export", run, "--out", tmp_path / "hf"), 0),
        (("checkpoint", "show", run), 0),
        (("checkpoint", "verify", run), 0),
        (("checkpoint", "convert", run, "--out", tmp_path / "converted"), 0),
        (("train", write_gpt(tmp_path, small_run), "--run-dir", run, "--resume"), 2),  # another optimizer
        (("train", write_gpt(tmp_path, small_run), "--run-dir", tmp_path / "new", *begun), 2),  # another model
    ):
        assert call(threefold, *command).status == status, command
        assert not ran.exists(), command


@pytest.mark.parametrize(
    "key", ["model__file", "optimizer__name", "train__on_nan", "train__callbacks", "data__path", "data__mixture"]
)
def test_a_stored_config_names_no_code(
    threefold: Command, own: Path, honest: Path, ran: Path, tmp_path: Path, key: str
) -> None:
    evil = write_evil(tmp_path / "evil.py", ran, FILE.read_text())
    run = own
    if key != "model__file":
        run = Path(shutil.copytree(honest / "gpt", tmp_path / "run"))
        if key == "data__mixture":
            change_config(path_of(run, 1), data__path=None, data__mixture={f"{evil}:Thing": 1.0})
        else:
            change_config(path_of(run, 1), **{key: names(evil)[key]})
    config, hardware = run / CONFIG, ("--hardware", "h100")
    commands: list[tuple[str | Path, ...]] = [
        ("train", config, "--run-dir", tmp_path / "new"),
        ("config", "size", path_of(run, 1) / CONFIG),
    ]
    if key == "model__file":
        commands += [
            ("config", "size", config),
            ("estimate", config, *hardware),
            ("plan", config, *hardware, "--gpus", "2"),
            ("dry-run", config),
            ("dry-run", config, "--world", "2"),
            ("verify", config, "dp2"),
        ]
    for command in commands:
        ended = call(threefold, *command)
        assert ended.status == 2, command
        assert ASK in ended.error, command
        assert key.replace("__", ".") in ended.error
        assert ended.error.count("\n") == 1
        assert not ran.exists(), command
    plain = path_of(honest / "gpt", 1) / CONFIG
    for command in (("config", "show", config), ("config", "diff", run, run), ("config", "diff", run, plain)):
        ended = call(threefold, *command)
        assert ended.status == int(command[-1] == plain), ended.error
        assert f"other settings follow from {key.replace('__', '.')} " in ended.error
        assert "code of a run, which is not run" in ended.error
        assert not ran.exists(), command


def test_a_config_of_the_user_names_his_code(threefold: Command, own: Path, ran: Path, tmp_path: Path) -> None:
    """As does `--model` beside a stored config, or `--trust-code`."""
    mine = tmp_path / "mine.yaml"
    shutil.copyfile(own / CONFIG, mine)
    for command in (
        ("config", "size", own / CONFIG, "--model", f"{FILE}:Tiny"),
        ("config", "size", own / CONFIG, "--set", f"model.file={FILE}:Tiny"),
    ):
        assert threefold(*command).status == 0
        assert not ran.exists()
    for command in (("config", "size", mine), ("config", "size", own / CONFIG, "--trust-code")):
        ended = threefold(*command)
        assert ended.status == 0, ended.error
    assert ran.exists()
