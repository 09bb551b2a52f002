"""Commands in environments of containers and other locales: streams that lack characters, users without a home."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from threefold.cli.main import COMMANDS

CONFIG = """
model: {num_layers: 1, hidden_size: 16, num_attention_heads: 2}
data: {path: texts.jsonl, tokenizer: tokens/tokenizer.json, sequence_length: 16, split: "8,2"}
train: {max_steps: 2, global_batch_size: 2, device: cpu}
"""


def call(
    folder: Path, *arguments: str, before: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    kept = {name: os.environ[name] for name in ("PATH", "PYTHONPATH") if name in os.environ}
    command = [*before, sys.executable, "-m", "threefold", *arguments]
    return subprocess.run(
        command, cwd=folder, env=kept | environment, capture_output=True, text=True, encoding="latin-1", timeout=120
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("here")
    texts = [json.dumps({"text": f"the naïve text — number {number}"}) for number in range(40)]
    (made / "texts.jsonl").write_text("\n".join(texts) + "\n")
    (made / "c.yaml").write_text(CONFIG)
    found = call(made, "data", "prepare", "texts.jsonl", "--out", "tokens", HOME=str(made))
    assert found.returncode == 0, found.stderr
    return made


@pytest.mark.slow
def test_no_command_ends_at_a_character_that_the_output_lacks(folder: Path) -> None:
    """Each is run, or its help is printed, in an encoding without dashes, dots and lines."""
    run: list[list[str]] = [
        ["train", "c.yaml", "--run-dir", "run"],
        ["generate", "run", "--prompt", "the naïve", "--max-new-tokens", "3"],
        ["show", "c.yaml"],
        ["config", "show", "c.yaml"],
        ["data", "show", "tokens"],
        ["report", "run"],
        ["verify", "c.yaml"],
    ]
    for arguments in [*run, *([name, "--help"] for name in COMMANDS if name not in {one[0] for one in run})]:
        found = call(folder, *arguments, HOME=str(folder), PYTHONIOENCODING="latin-1", COLUMNS="120")
        assert (found.returncode, "Traceback" in found.stderr) == (0, False), (arguments, found.stderr[-500:])
        assert found.stdout


@pytest.mark.parametrize("encoding", ["latin-1", "latin-1:strict"])
def test_characters_that_the_output_lacks_are_escaped(folder: Path, encoding: str) -> None:
    found = call(folder, "data", "show", "tokens", HOME=str(folder), PYTHONIOENCODING=encoding)
    assert found.returncode == 0
    assert "\\u2014" in found.stdout


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv")
@pytest.mark.parametrize("home", ["none", "another's"])
def test_a_user_without_a_home_trains(folder: Path, tmp_path: Path, home: str) -> None:
    """As in a container with a foreign user id: neither HOME nor an entry in passwd, or HOME is another user's."""
    if not all(os.stat(parent).st_mode & 0o001 for parent in Path(__file__).parents):
        pytest.skip("another user cannot read this checkout")
    closed = tmp_path / "root"
    (closed / ".config" / "threefold" / "hardware").mkdir(parents=True)
    (closed / ".config" / "threefold" / "hardware" / "this-machine.yaml").write_text("{}")
    closed.chmod(0o700)
    here = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        shutil.copytree(folder, here / "work", ignore=shutil.ignore_patterns("run", "*.cache"))
        for path in (here, *here.rglob("*")):
            path.chmod(0o777)
        foreign = ("setpriv", "--reuid", "77777", "--regid", "77777", "--clear-groups")
        given = {"HOME": str(closed)} if home != "none" else {}
        found = call(here / "work", "train", "c.yaml", "--run-dir", "run", before=foreign, **given)
        assert found.returncode == 0, found.stderr[-800:]
        assert not (here / "work" / "~").exists()
    finally:
        shutil.rmtree(here)
