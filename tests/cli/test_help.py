"""Help texts: right at any width, in groups, with examples that have only options that there are."""

import inspect
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from typer.main import get_command

from threefold.cli.main import app
from threefold.errors import UserError

ROOT: Any = get_command(app)
COMMANDS = {
    (name, *sub): command
    for name, top in ROOT.commands.items()
    for sub, command in [((), top), *(((each,), found) for each, found in getattr(top, "commands", {}).items())]
    if name != "parity"  # another package's
}


@pytest.fixture
def help_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return the help of a command on a terminal of some columns; not by CliRunner, which fixes 80."""

    def told(columns: int, *words: str) -> str:
        monkeypatch.setenv("COLUMNS", str(columns))
        ROOT([*words, "--help"], prog_name="threefold", standalone_mode=False)
        return capsys.readouterr().out

    return told


def test_each_path_of_each_command_is_one_of_this_machine() -> None:
    checked = 0
    for words, command in COMMANDS.items():
        if hasattr(command, "commands"):
            continue
        given = {param: "2" for param in command.params if param.required}
        annotated = inspect.signature(command.callback).parameters
        for param in command.params:
            if param.name not in annotated or "Path" not in str(annotated[param.name].annotation):
                continue
            arguments: list[str] = []
            for each, value in {**given, param: "s3://bucket/x"}.items():
                arguments += [value] if each.param_type_name == "argument" else [max(each.opts, key=len), value]
            with pytest.raises(UserError, match=r" is s3://bucket/x but must be a path on this machine \(only check"):
                command.make_context(" ".join(words), arguments)
            checked += 1
    assert checked > 40


@pytest.mark.parametrize("columns", [80, 120, 200])
def test_each_help_is_as_wide_as_the_terminal_up_to_120(columns: int, help_of: Callable[..., str]) -> None:
    widest = 0
    for words in ((), *COMMANDS):
        told = help_of(columns, *words)
        lines = told.splitlines()
        assert lines[0].startswith(" ".join(["Usage: threefold", *words]))
        assert max(map(len, lines)) <= min(columns, 120), words
        assert "  Show this message and exit." in told
        assert not any(raw in told for raw in ("<", "x>=", "[default", "{CONFIG}")), words
        widest = max(widest, *map(len, lines))
    assert widest > min(columns, 120) - 10


def test_options_are_in_groups_with_one_first_column(help_of: Callable[..., str]) -> None:
    lines = help_of(100, "generate").splitlines()
    headings = [line for line in lines if line.endswith(":") and not line.startswith(" ")]
    assert headings == ["Examples:", "Arguments:", "Options:", "Sampling:", "Layout and device:", "Your own model:"]
    texts = ("Run folder.", "Sampling temp", "Tensor-par")
    assert len({line.index(text) for line in lines for text in texts if text in line}) == 1
    (temperature,) = (line for line in lines if "--temperature X" in line)
    assert temperature.endswith("   Sampling temperature; 0 = greedy. (default: 0.8)")
    root = help_of(100)
    assert root.index("Train and use:") < root.index("  init ") < root.index("Check:") < root.index("  verify ")


@pytest.mark.parametrize("words", [words for words, command in COMMANDS.items() if not hasattr(command, "commands")])
def test_examples_are_of_the_command_and_fit_80_columns(words: tuple[str, ...]) -> None:
    command = COMMANDS[words]
    described, _, text = command.help.partition("\n\nExamples:\n")
    assert "Example" not in described
    examples = text.splitlines()
    if len(words) == 1:
        assert examples, "every command has an example"
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    required = [param for param in command.params if param.required and param.param_type_name == "argument"]
    for example in examples:
        assert len(example) <= 78
        given = shlex.split(example.strip())
        if "torchrun" in given:
            given = given[given.index("-m") + 1 :]
        assert tuple(given[1 : 1 + len(words)]) == words
        rest = given[1 + len(words) :]
        assert {each.partition("=")[0] for each in rest if each.startswith("--")} <= options
        assert len([each for each in rest if not each.startswith("-")]) >= len(required)
