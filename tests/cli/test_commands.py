"""Commands up to the point where workers start: what they print, and the status they end with."""

import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import typer
from typer.testing import CliRunner

from tests.convert.foreign_configs import FLEET, FLEET_BASE
from tests.support import ready
from threefold import __version__
from threefold.cli.main import COMMANDS, _tell, make_app
from threefold.config import load_config
from threefold.errors import UserError


def test_version(threefold) -> None:
    assert threefold("--version") == (0, f"threefold {__version__}\n", "")


@pytest.mark.parametrize(
    ("given", "spins"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, "None")],
    ids=str,
)
def test_idle_threads_sleep_unless_the_user_chose_how_they_wait(given: dict[str, str], spins: str) -> None:
    code = """if True:
        import atexit, os, sys
        from threefold.cli import main
        atexit.register(lambda: print(os.environ.get("GOMP_SPINCOUNT"), "torch" in sys.modules))
        sys.argv = ["threefold", "--version"]
        main()
    """
    unset = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in unset} | given
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert ended.stdout.splitlines()[-1] == f"{spins} False"  # set before torch, which loads OpenMP, is imported


def test_a_command_is_a_function_and_its_line_in_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    added = ModuleType("say_twice")
    added.command = lambda word: typer.echo(f"{word} {word}")  # type: ignore[attr-defined]
    added.command.__annotations__["word"] = str  # type: ignore[attr-defined]
    added.command.__module__ = added.__name__  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, added.__name__, added)
    told = CliRunner().invoke(
        make_app({**COMMANDS, "say-twice": ("Train and use", "say_twice:command")}), ["say-twice", "cat"]
    )
    assert (told.exit_code, told.stdout) == (0, "cat cat\n")


@pytest.mark.parametrize(("words", "completed"), [("threefold ver", "verify"), ("threefold verify --ex", "--exact")])
def test_a_shell_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch, words: str, completed: str) -> None:
    monkeypatch.setenv("_THREEFOLD_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    command = [sys.executable, "-c", "import sys; sys.argv[0] = 'threefold'; from threefold.cli import main; main()"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() == [completed]


def test_misuse_ends_with_status_2(threefold) -> None:
    status, output, error = threefold("trian")
    assert (status, output) == (2, "")
    assert "trian" in error


def test_config_show_prints_what_loads_back_equal(threefold, config_file: Path, tmp_path: Path) -> None:
    status, output, error = threefold(
        "config", "show", config_file, "--set", "parallel.tp=2", "--set", "optimizer.lr=3e-4"
    )
    assert (status, error) == (0, "")
    (tmp_path / "again.yaml").write_text(output)
    again = threefold("config", "show", tmp_path / "again.yaml")
    assert again == (0, output, "")
    config = load_config(tmp_path / "again.yaml")
    assert (config.parallel.tp, config.optimizer.lr, config.train.device) == (2, 3e-4, "cpu")
    assert config.model.vocab_size is None  # follows from the data again
    (vocabulary,) = re.findall(r"# vocab_size: (\d+)", output)
    assert 256 < int(vocabulary) <= 300


def test_config_size_needs_no_data(threefold, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data: {path: nowhere}\nmodel: {preset: mixtral-8x7b}\nparallel: {tp: 8, pp: 2}\n"
    )
    status, output, error = threefold("config", "size", tmp_path / "run.yaml", "--set", "model.num_layers=3")
    assert (status, error) == (0, "")
    assert output.startswith(
        "Parameters: 4,615,958,528, 1,445,064,704 active per token.\nLayout: dp 1 · tp 8 · pp 2, 16"
    )
    assert "together" in output
    assert not (tmp_path / "nowhere").exists()


def test_config_convert(threefold, tmp_path: Path) -> None:
    """What goes to stdout is a config and nothing else; what has no counterpart is told beside it."""
    (tmp_path / "base.yaml").write_text(FLEET_BASE)
    (tmp_path / "gpt.yaml").write_text(FLEET)
    status, output, error = threefold("config", "convert", tmp_path / "gpt.yaml")
    assert status == 2
    assert "is taken for PaddlePaddle Fleet's by its section _base_" in error
    assert "Model.frobnicate = 7: unknown to this converter" in error
    assert "Model.frobnicate change the training and are unsupported, or are unknown" in error
    assert "Traceback" not in error
    status, accepted, error = threefold("config", "convert", tmp_path / "gpt.yaml", "--allow-unsupported")
    assert (status, accepted) == (0, output)
    assert "Model.frobnicate = 7: unknown to this converter" in error
    (tmp_path / "converted.yaml").write_text(output)
    assert load_config(tmp_path / "converted.yaml").model.hidden_size == 4096

    (tmp_path / "flags.txt").write_text("--num-layers 4 --hidden-size 64 --num-attention-heads 7")
    status, output, error = threefold("config", "convert", "--from", "megatron", tmp_path / "flags.txt")
    assert status == 2
    assert "num_attention_heads: 7" in output
    assert "Error: The converted config is invalid: model.num_attention_heads is 7" in error

    (tmp_path / "flags.txt").write_text("--num-layers 4 --hidden-size 64 --num-attention-heads 4")
    status, output, error = threefold("config", "convert", "--from", "megatron", tmp_path / "flags.txt")
    assert status == 1
    assert output.startswith(
        "# Still to be set: data.path: tokens is a placeholder; name your folder or token files.\n"
    )
    assert "Still to be set:\n  data.path: tokens is a placeholder" in error
    assert error.endswith("The config cannot run as it is: set data.path.\n")
    (tmp_path / "converted.yaml").write_text(output)
    assert load_config(tmp_path / "converted.yaml").data.path == "tokens"

    (tmp_path / "flags.txt").write_text(
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --data-path $DATA --tokenizer-type NullTokenizer"
    )
    status, output, error = threefold("config", "convert", "--from", "megatron", tmp_path / "flags.txt")
    assert (status, output.count("# Still to be set: ")) == (1, 2)
    assert error.endswith("The config cannot run as it is: set data.path and model.vocab_size.\n")

    (tmp_path / "flags.txt").write_text(
        "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --data-path files --vocab-size 99"
    )
    status, output, error = threefold("config", "convert", "--from", "megatron", tmp_path / "flags.txt")
    assert (status, "Still to be set" in output + error) == (0, False)

    assert "nowhere.sh" in threefold("config", "convert", tmp_path / "nowhere.sh").refusal


def test_config_compatibility(threefold) -> None:
    status, output, _ = threefold("config", "compatibility", "zero3", "zbv")
    assert status == 0
    assert output.startswith("zero3 and zbv cannot be combined: parallel.zero is 3 but parallel.schedule zbv")
    status, output, _ = threefold("config", "compatibility")
    assert status == 0
    assert {"dp: data parallelism", "zero1: ZeRO stage 1: optimizer states shared"} <= set(output.splitlines())


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        (
            "train.max_step=3",
            "--set train.max_step=3: train.max_step is not a setting; the nearest is train.max_steps.",
        ),
        ("parallel.tp=3", "--set parallel.tp=3: parallel.tp is 3 but must divide model.num_attention_heads 4; use 2."),
        ("parallel.dp=3", "train.global_batch_size is 4 but must be a multiple of parallel.dp 3; use 3."),
        ("parallel.pp=3", "each stage needs a layer and model.num_layers is 2; use at most 2."),
        ("data.path=nowhere", "data.path is nowhere, which does not exist in "),
        ("data.split=0,1", 'data.split is "0,1"'),
        ("data.sequence_length=1000000", "1000000"),
    ],
)
def test_mistakes_are_one_sentence_before_anything_is_written(
    threefold, config_file: Path, tmp_path: Path, override: str, sentence: str
) -> None:
    error = threefold("train", config_file, "--run-dir", tmp_path / "run", "--set", override).refusal
    assert sentence in error
    assert error.endswith((".\n", "!\n", "?\n"))
    assert not (tmp_path / "run").exists()


def test_run_dir_that_is_a_file(threefold, config_file: Path) -> None:
    status, _, error = threefold("train", config_file, "--run-dir", config_file)
    assert status == 2
    assert "which is a file" in error


@pytest.mark.parametrize(
    ("ranks", "layout", "sentence"),
    [
        ("-1", "1", "--console-ranks has -1 but the layout has rank 0 alone; use 0."),
        ("0,2", "2", "--console-ranks has 2 but the layout has ranks 0 to 1; use 1."),
    ],
)
def test_console_ranks_that_do_not_exist(
    threefold, config_file: Path, tmp_path: Path, ranks: str, layout: str, sentence: str
) -> None:
    options = (f"--console-ranks={ranks}", "--set", f"parallel.dp={layout}")
    ended = threefold("train", config_file, "--run-dir", tmp_path / "run", *options)
    assert ended == (2, "", f"Error: {sentence}\n")
    assert not (tmp_path / "run").exists()


def test_run_replaces_no_config_of_the_users(threefold, config_file: Path, tmp_path: Path) -> None:
    """Such as the very config that it is started with, comments and all."""
    folder = tmp_path / "experiment"
    folder.mkdir()
    mine = folder / "config.yaml"
    mine.write_text("# Mine.\n" + config_file.read_text())
    ended = threefold("train", mine, "--run-dir", folder)
    assert ended.status == 2
    assert ended.error == (
        f"Error: --run-dir is {folder}, which no run has used and whose config.yaml the run would replace; choose "
        f"another, such as {folder / 'run'}.\n"
    )
    assert list(folder.iterdir()) == [mine]
    (folder / "logs").mkdir()  # as a run leaves it that failed before its first checkpoint
    with_wrong = threefold("train", mine, "--run-dir", folder, "--set", "train.max_steps=0")
    assert "train.max_steps" in with_wrong.error


@pytest.mark.parametrize(
    "command",
    [
        ("--version",),
        ("doctor",),
        ("train", "/nowhere.yaml"),
        ("generate", "/nowhere", "--prompt", "a"),
        ("checkpoint", "show", "/nowhere"),
        ("data", "verify", "/nowhere"),
        ("estimate", "/nowhere.yaml", "--hardware", "h100"),
    ],
)
def test_a_deleted_working_directory_is_told_by_every_command(
    threefold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    ended = threefold(*command)
    assert (ended.status, ended.output) == (2, "")
    assert ended.error == (
        "Error: The working directory cannot be used (No such file or directory), as where it has been deleted; change "
        "to one that exists, as with cd ~.\n"
    )


def test_a_folder_or_a_model_that_cannot_be_used_is_told_before_anything_starts(
    threefold, config_file: Path, tmp_path: Path
) -> None:
    beside = sorted(tmp_path.iterdir())
    error = threefold("train", config_file, "--run-dir", config_file / "run").refusal
    assert error == f"Error: Cannot write to --run-dir {config_file / 'run'}: Not a directory.\n"
    assert sorted(tmp_path.iterdir()) == beside
    (tmp_path / "model.py").write_text("import torch\n")
    error = threefold("train", config_file, "--model", tmp_path / "model.py").refusal
    assert error.startswith("Error: model.py has no function make_model; it needs make_model(config), which returns ")


def test_missing_data_are_named_with_their_setting(threefold, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And, where the path is relative, with the folder in which they were looked for."""
    monkeypatch.chdir(tmp_path)
    sizes = "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}\n"
    Path("run.yaml").write_text(f"data: {{path: no\\tkens}}\n{sizes}")
    where = f"Error: data.path is no\\tkens, which does not exist in {tmp_path}"
    use = "make token files with `threefold data prepare INPUT --out no\\tkens`.\n"
    assert threefold("train", "run.yaml") == (2, "", f"{where}; {use}")
    assert threefold("show", "run.yaml")[2].startswith(f"{where}, and model.vocab_size is not set, so nothing says how")
    error = threefold("train", "run.yaml", "--set", f"data.path={tmp_path}/no.jsonl")[2]
    assert error.startswith(f"Error: data.path is {tmp_path}/no.jsonl, which does not exist; make")
    Path("run.yaml").write_text(f"data: {{mixture: {{here: 1, there: 2}}}}\n{sizes}")
    assert threefold("train", "run.yaml")[2].startswith("Error: data.mixture has here, which does not exist in ")


@pytest.mark.parametrize("columns", ["0", "1", "-3"])
def test_a_width_without_room_for_a_table_is_none(columns: str, tmp_path: Path) -> None:
    for name, path in (("a.yaml", "x"), ("b.yaml", "y")):
        (tmp_path / name).write_text(f"data: {{path: {path}}}\nmodel: {{vocab_size: 64}}")
    command = [sys.executable, "-m", "threefold", "config", "diff", "a.yaml", "b.yaml"]
    ended = ready.run(command, cwd=tmp_path, env={**os.environ, "COLUMNS": columns})
    assert re.search(r'data\.path +"x" +"y"', ended.stdout)


@pytest.mark.parametrize(
    "arguments",
    [
        ("config", "show", "no\x1b[31m\nfile.yaml"),
        ("config", "show", "run.yaml", "--set", "data.pa\nth=3"),
        ("config", "show", "run.yaml", f"--{'x' * 5000}\n"),
        ("n" * 5000 + "\n",),
        ("data", "\x07" + "s" * 5000),
        ("checkpoint", "show", "c\n\x1b]0;title\x07" + "d" * 100),
        ("generate", "no\nrun", "--prompt", "x", "--tp", "1\n2" + "3" * 5000),
    ],
    ids=lambda arguments: ascii(arguments[-1])[:20],
)
def test_what_errors_quote_is_short_and_printable(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    (tmp_path / "run.yaml").write_text("data: {path: x}")
    ended = ready.run([sys.executable, "-m", "threefold", *arguments], cwd=tmp_path)
    *hints, line = ended.stderr.splitlines()
    assert ended.returncode == 2
    assert line.startswith("Error: ")
    assert [hint.partition(" ")[0] for hint in hints] in ([], ["Usage:", "Try", ""])
    assert line.isprintable()
    assert len(line) < 600


def test_an_error_is_one_line_whatever_it_quotes(capsys: pytest.CaptureFixture[str]) -> None:
    """As the text of a library's error may be."""
    assert _tell(UserError("It says\n\x1b[2Jno\0 " + "y" * 3000 + " here")) == 2
    line = capsys.readouterr().err
    assert line.startswith("Error: It says\\n\\x1b[2Jno\\x00 yyyy")
    assert line.endswith("yyyy here.\n")
    assert len(line) < 300
