"""The core without attached rooms, and what rooms add to it."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from pathlib import Path
from shutil import rmtree

import pytest

import threefold as package
from tests.cli.runs import write_config
from threefold.checkpoint.folder import complete
from threefold.cli.main import COMMANDS
from threefold.config import load_config
from threefold.doors import ROOMS, added, hook, imported
from threefold.launch.checks import resolve_run
from threefold.train.run import UNCHECKED

ALONE = """
import sys
from importlib.abc import MetaPathFinder

ROOMS = {rooms!r}

class TakenAway(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[:2] in [["threefold", room] for room in ROOMS]:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, TakenAway())
sys.argv = ["threefold", *{arguments!r}]
from threefold.cli import main
main()
"""


def alone(folder: Path, *arguments: str, rooms: Sequence[str] = ROOMS) -> subprocess.CompletedProcess[str]:
    """Run a command with attached rooms taken away, by default every one."""
    code = ALONE.format(rooms=rooms, arguments=arguments)
    return subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, timeout=600)


def test_the_commands_of_the_core_need_no_room(tmp_path: Path) -> None:
    ended = alone(tmp_path, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert all(f"\n  {name} " in ended.stdout for name in COMMANDS)
    assert not any(f"\n  {name} " in ended.stdout for name in added("COMMANDS"))


NEEDED = {
    "data.skip_steps": ("resilience", "--set", "data.skip_steps=[2]"),
    "train.watch_every": ("resilience", "--set", "train.watch_every=1"),
    "train.max_restarts": ("resilience", "--set", "train.max_restarts=1"),
    "parallel.fallbacks": ("resilience", "--set", "parallel.fallbacks=[dp2]"),
    "checkpoint.remote": ("resilience", "--set", "checkpoint.remote=memory://there"),
    "checkpoint.async_save": ("resilience", "--set", "checkpoint.async_save=true"),
    "train.exact": ("exact", "--set", "train.exact=true"),
    "train.grain_leaf": ("exact", "--set", "train.grain_leaf=1"),
    "--profile": ("planner", "--profile=2"),
    "parallel.schedule own.csv": ("planner", "--set", "parallel.schedule=own.csv"),
    "data.path texts.jsonl, a file of text,": (
        "convert",
        "--set",
        "data.path=texts.jsonl",
        "--set",
        "data.tokenizer=t",
    ),
}
"""Setting or option → the room that follows it, and how it is given."""


@pytest.mark.parametrize(
    "named", ["data.skip_steps", *(pytest.param(each, marks=pytest.mark.slow) for each in [*NEEDED][1:])]
)
def test_settings_that_a_room_follows_need_the_room(tmp_path: Path, tokens: Path, named: str) -> None:
    (tmp_path / "texts.jsonl").touch()
    room, *given = NEEDED[named]
    ended = alone(tmp_path, "train", str(write_config(tmp_path, tokens)), *given)
    assert ended.returncode == 2
    assert ended.stderr == (
        f"Error: {named} needs threefold.{room}, which is not installed; install it, or leave that out.\n"
    )


@pytest.mark.slow
def test_a_config_that_all_rooms_have_filled_is_read_without_them(tmp_path: Path, tokens: Path) -> None:
    config = resolve_run(load_config(write_config(tmp_path, tokens), {"train.spike_window": 7}))
    (tmp_path / "stored.yaml").write_text(config.to_yaml())
    ended = alone(tmp_path, "config", "show", "stored.yaml")
    assert (ended.returncode, ended.stderr) == (0, "")
    (tmp_path / "shown.yaml").write_text(ended.stdout)
    assert load_config(tmp_path / "shown.yaml") == config


@pytest.mark.slow
def test_texts_are_prepared_without_a_room_and_conversations_need_one(tmp_path: Path, tokens: Path) -> None:
    (tmp_path / "texts.jsonl").write_text("".join(f'{{"text": "line {n} of a text"}}\n' for n in range(40)))
    ended = alone(tmp_path, "data", "prepare", "texts.jsonl", "--out", "made", "--vocab-size", "280", "--workers", "1")
    assert (ended.returncode, ended.stdout.splitlines()[-1].partition(",")[0]) == (0, "Wrote 40 documents")
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"messages": messages}) + "\n")
    tokenizer = ("--tokenizer", "made/tokenizer.json", "--workers", "1")
    ended = alone(tmp_path, "data", "prepare", "chat.jsonl", "--out", "chats", *tokenizer)
    assert ended.returncode == 2
    assert ended.stderr.endswith(
        "A conversation needs threefold.huggingface, which is not installed; install it, or leave that out.\n"
    )


def rooms_imported(room: str, nodes: Iterable[ast.AST]) -> set[str]:
    """The attached rooms that these statements of a room import."""
    names: list[str] = []
    for each in nodes:
        names += [each.module or ""] if isinstance(each, ast.ImportFrom) else []
        names += [name.name for name in each.names] if isinstance(each, ast.Import) else []
    return {name.removeprefix("threefold.").split(".")[0] for name in names} & set(ROOMS) - {room}


def modules(room: str) -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in Path(package.__path__[0], room).rglob("*.py")]


def needs(room: str) -> set[str]:
    return set(getattr(import_module(f"threefold.{room}.door"), "NEEDS", ()))


@pytest.mark.parametrize("room", ROOMS)
def test_a_door_names_the_rooms_that_its_room_needs(room: str) -> None:
    assert set().union(*(rooms_imported(room, module.body) for module in modules(room))) == needs(room)


@pytest.mark.parametrize("room", ROOMS)
def test_a_function_asks_for_another_room_before_it_imports_it(room: str) -> None:
    for module in modules(room):
        for function in (each for each in ast.walk(module) if isinstance(each, ast.FunctionDef)):
            found, text = rooms_imported(room, ast.walk(function)) - needs(room), ast.unparse(function)
            assert [each for each in found if f"require_installed('{each}'" not in text] == [], function.name


@pytest.mark.slow
def test_a_room_that_needs_another_adds_nothing_without_it(tmp_path: Path, tokens: Path) -> None:
    """The planner imports the room report, and verify only to compare layouts."""
    given = ("train", str(write_config(tmp_path, tokens)), "--run-dir", "run", "--set", "train.max_steps=1")
    assert alone(tmp_path, *given, rooms=["report"]).returncode == 0
    ended = alone(tmp_path, *given, "--profile=2", rooms=["report"])
    assert ended.returncode == 2
    assert ended.stderr == (
        "Error: --profile needs threefold.report, which is not installed; install it, or leave that out.\n"
    )
    ended = alone(tmp_path, "show", given[1], "--compare", "dp2", rooms=["verify"])
    assert ended.returncode == 2
    assert ended.stderr == (
        "Error: --compare needs threefold.verify, which is not installed; install it, or leave that out.\n"
    )
    assert alone(tmp_path, "show", given[1], "--no-traffic", rooms=["verify"]).returncode == 0


def logged_losses(run: Path) -> dict[str, float]:
    """The loss of each step in a run's log."""
    found = re.findall(r"step (\d+), epoch.* loss: ([\d.]+)", (run / "train.log").read_text())
    return {step: float(loss) for step, loss in found}


@pytest.mark.slow
def test_a_run_needs_no_room(tmp_path: Path, tokens: Path, threefold) -> None:
    """It trains, resumes in another layout and computes the losses of a run with all rooms."""
    config = str(write_config(tmp_path, tokens))
    every, layout = ("--set", "log.every=1"), ("--set", "parallel.dp=2", "--set", "parallel.tp=2")
    ended = alone(tmp_path, "train", config, "--run-dir", "alone", *every, *layout)
    assert ended.returncode == 0, ended.stderr
    rmtree(complete(tmp_path / "alone")[-1].path)
    ended = alone(tmp_path, "train", config, "--run-dir", "alone", *every, "--resume", "--set", "parallel.pp=2")
    assert ended.returncode == 0, ended.stderr
    assert threefold("train", config, "--run-dir", str(tmp_path / "all"), *every)[0] == 0
    assert [each.step for each in complete(tmp_path / "alone")] == [2, 4]
    assert [*logged_losses(tmp_path / "alone")] == ["1", "2", "3", "4"]
    assert logged_losses(tmp_path / "alone") == pytest.approx(logged_losses(tmp_path / "all"), rel=1e-5)


KINDS = (
    *("FIRST_CALLBACKS", "CALLBACKS", "CHOSEN_CALLBACKS", "TOKEN_FORMATS", "ATTACHMENTS", "RULES", "DEFAULTS"),
    *("SETTING_NAMES", "RUN_CHECKS", "HOOKS", "NAMES", "TYPES"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_door_declares_is_there(kind: str) -> None:
    assert all(imported(path) is not None for path in added(kind).values())


def test_a_hook_that_no_room_declares_is_none() -> None:
    assert hook("no_such_hook") is None


@pytest.mark.parametrize("arguments", [["parity", "compare", "a", "b"], ["parity", "--help"]])
def test_parity_says_which_package_it_needs(arguments: list[str], tmp_path: Path) -> None:
    code = ALONE.replace(
        '[["threefold", room] for room in ROOMS]', '[["threefold_parity"], ["threefold_parity", "command"]]'
    )
    code = code.format(rooms=[], arguments=arguments)
    ended = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 2
    assert ended.stderr == (
        "Error: threefold parity needs the package threefold-parity, which is not installed; use pip install ./parity "
        "in a clone.\n"
    )


CUSTOM = """
import threefold as t3
from torch import nn
from torch.nn import functional as F

class Model(nn.Module):
    plan = t3.Plan(
        ["embed", "blocks.*", "head"],
        {"embed": t3.Vocab(), "blocks.*.up": t3.Column(), "blocks.*.down": t3.Row(), "head.output": t3.Vocab()},
    )

    def __init__(self, vocab_size):
        super().__init__()
        self.embed, self.head = nn.Embedding(vocab_size, 24), Head(vocab_size)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.drop, self.down = nn.Linear(24, 50), t3.Dropout(0.1, "drop"), nn.Linear(50, 24)

    def forward(self, x, samples=None):
        return x + self.down(self.drop(F.gelu(self.up(x)), samples.keys))

class Head(nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.output = nn.Linear(24, vocab_size)

    def forward(self, x, labels):
        return F.cross_entropy(self.output(x).flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
"""
"""Custom model with a dropout of which each rank of the tensor axis has a part, which a room finds by a trial."""


@pytest.mark.slow
def test_a_custom_model_needs_no_room(tmp_path: Path, tokens: Path, threefold) -> None:
    """Without the room that explains mistakes of a custom model, a correct one trains, with the same losses."""
    config, model = str(write_config(tmp_path, tokens)), tmp_path / "custom.py"
    named = ("--model", f"{model}:Model", "--set", "train.max_steps=2", "--set", "log.every=1")
    given = ("train", config, "--run-dir", "alone", *named, "--set", "parallel.tp=2")
    model.write_text(CUSTOM)
    assert (
        "dropout between the sharded layers of a custom model needs threefold.verify" in alone(tmp_path, *given).stderr
    )
    model.write_text(CUSTOM.replace("t3.Dropout(0.1", "t3.Dropout(0.0"))
    ended = alone(tmp_path, *given)
    assert ended.returncode == 0, ended.stderr
    status, output, _ = threefold("train", config, "--run-dir", str(tmp_path / "all"), *named)
    assert (status, [UNCHECKED in each for each in (ended.stdout, output)]) == (0, [True, False])
    assert [*logged_losses(tmp_path / "alone")] == ["1", "2"]
    assert logged_losses(tmp_path / "alone") == pytest.approx(logged_losses(tmp_path / "all"), rel=1e-5)
