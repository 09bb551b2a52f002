"""Commands in environments of containers and other locales.

Streams that lack characters, users without a home, and limits on processes, address space and shared memory.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.core import TyperCommand, TyperGroup

from tests.support.sweep import sweep

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


def commands(command: TyperCommand | TyperGroup, path: tuple[str, ...] = ()) -> Iterator[str]:
    """Names of all commands below one, such as `data show`."""
    if isinstance(command, TyperGroup):
        for name, each in command.commands.items():
            yield from commands(each, (*path, name))
    else:
        yield " ".join(path)


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


UNABLE = "needs root, setpriv and unshare"
IS_ABLE = os.geteuid() == 0 and shutil.which("setpriv") and shutil.which("unshare")


def error_of(folder: Path, *before: str, **environment: str) -> str:
    """The only line of an error of a run on two ranks."""
    found = call(
        folder, "train", "c.yaml", "--run-dir", "limited", "--set", "parallel.dp=2", before=before, **environment
    )
    assert found.returncode in (1, 2), found.stdout[-500:]
    assert len(found.stderr.splitlines()) == 1, found.stderr[-2000:]
    return found.stderr


@pytest.mark.skipif(not IS_ABLE, reason=UNABLE)
# How many threads a rank has started when it fails depends on the machine and on its load.
@sweep(("limit", "words"), [(12, "besides the 2 that"), (26, "failed: no more processes or")], slow=(0,))
def test_a_limit_on_processes_is_named(folder: Path, limit: int, words: str) -> None:
    """Before ranks start, or where a rank starts its threads."""
    here = Path(subprocess.run(["mktemp", "-d"], capture_output=True, text=True, check=True).stdout.strip())
    try:
        shutil.copytree(folder, here / "work", ignore=shutil.ignore_patterns("run", "*.cache"))
        for path in (here, *here.rglob("*")):
            path.chmod(0o777)
        foreign = ("setpriv", "--reuid", f"{77_800 + limit}", "--regid", "77777", "--clear-groups")
        line = error_of(here / "work", "prlimit", f"--nproc={limit}", *foreign)
    finally:
        shutil.rmtree(here)
    assert words in line
    assert f"RLIMIT_NPROC (ulimit -u) allows {limit})" in line
    assert "raise the limit, as with `ulimit -u 4096`" in line


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("prlimit"), reason="needs prlimit")
@pytest.mark.parametrize("limit", ["0.40", "0.60", "1.00"])
def test_a_limit_on_the_address_space_is_named(folder: Path, limit: str) -> None:
    """In which the import of torch fails, or the C library aborts in it or in a rank; without torch, commands work."""
    before = ("prlimit", f"--as={round(float(limit) * 1e9)}")
    line = error_of(folder, *before)
    begin = (
        f"Error: The address space of a process, which RLIMIT_AS (ulimit -v) limits to {limit} GB here, is not enough"
    )
    assert line.startswith(f"{begin}: torch cannot be used in it; a rank of a small model takes 1.3 to 2 GB, so raise")
    assert call(folder, "config", "show", "c.yaml", before=before).returncode == 0


@pytest.mark.slow
@pytest.mark.parametrize(("name", "value"), [("TORCH_DISTRIBUTED_DEBUG", "detial"), ("TORCH_LOGS", "nothing")])
def test_a_variable_that_torch_refuses_is_named(folder: Path, name: str, value: str) -> None:
    line = error_of(folder, **{name: value})
    assert line.startswith(f"Error: The environment variable {name} is {value}, which torch refuses (")


@pytest.mark.slow
@pytest.mark.skipif(not IS_ABLE, reason=UNABLE)
def test_ranks_train_where_dev_shm_is_read_only(folder: Path) -> None:
    """In a namespace of its own, whose /dev/shm is another file system."""
    script = 'mount -t tmpfs -o ro tmpfs /dev/shm && ! touch /dev/shm/x 2> /dev/null && exec "$@"'
    before = ("unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh")
    if call(folder, "--version", before=before).returncode:
        pytest.skip("mounting is not allowed here")
    found = call(folder, "train", "c.yaml", "--run-dir", "read-only", "--set", "parallel.dp=2", before=before)
    assert (found.returncode, found.stderr) == (0, "")
