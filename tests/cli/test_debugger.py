"""`breakpoint()` in a rank, on a real terminal: `threefold train --debug-rank`, and `threefold.run` of one rank."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cli.runs import LONGEST, command
from tests.support import custom_token_model, ready

STOPS = """
    def forward(self, tokens: Tensor, samples: object = None) -> Tensor:
        import torch.distributed as dist

        if dist.get_rank() == 1 and not hasattr(Embed, "stopped"):
            Embed.stopped = True
            breakpoint()
"""
SCRIPT = """
import os
import sys
import threefold as t3
import torch
import torch.distributed as dist


def compute(x):
    y = x + dist.get_world_size()
    breakpoint()
    return os.getpid(), y


if __name__ == "__main__":
    threads = torch.get_num_threads()
    [(pid, y)] = t3.run(compute, ranks=1, args=(20,))
    assert (pid, dist.is_initialized(), torch.get_num_threads()) == (os.getpid(), False, threads)
    print("value", y)
"""


class Terminal:
    """A process on a pseudo-terminal of its own, and what it has shown."""

    def __init__(self, arguments: list[str], folder: Path) -> None:
        self.shown = ""
        self.pid, self._end = pty.fork()
        if not self.pid:
            os.chdir(folder)
            os.execv(arguments[0], arguments)

    def read_until(self, text: str) -> None:
        deadline = time.monotonic() + LONGEST
        while text not in self.shown:
            assert select.select([self._end], [], [], max(0.0, deadline - time.monotonic()))[0], self.shown
            try:
                data = os.read(self._end, 1 << 16)
            except OSError:  # the other end is closed
                data = b""
            assert data, f"it ended without {text!r}: {self.shown}"
            self.shown += re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", data.decode(errors="replace"))

    def type(self, text: str) -> None:
        self.shown = ""
        os.write(self._end, text.encode() + b"\n")

    def status(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def close(self) -> None:
        os.close(self._end)
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


@contextmanager
def terminal(arguments: list[str], folder: Path) -> Iterator[Terminal]:
    made = Terminal(arguments, folder)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def stopping(config_file: Path) -> list[str]:
    """A run of two ranks, of which the second comes to a `breakpoint()`."""
    layers = custom_token_model.__file__
    text = Path(layers).read_text()
    head = "    def forward(self, tokens: Tensor, samples: object = None) -> Tensor:\n"
    assert text.count(head) == 1
    model = config_file.parent / "mine.py"
    model.write_text(text.replace(head, STOPS.lstrip("\n")))
    config_file.write_text(
        config_file.read_text().replace("model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}\n", "")
    )
    settings = ("--set", "parallel.dp=2", "--set", "train.timeout=2")
    return command(config_file, config_file.parent / "run", "--model", f"{model}:Tiny", *settings)


@pytest.mark.slow
def test_one_rank_has_the_terminal(stopping: list[str], tmp_path: Path) -> None:
    """After `c` the run goes on to its end."""
    with terminal([*stopping, "--debug-rank", "1"], tmp_path) as screen:
        screen.read_until("(Pdb) ")
        screen.type("p 1 + 1, __import__('time').sleep(3)")
        screen.read_until("(2, None)")
        screen.read_until("(Pdb) ")
        screen.type("c")
        screen.read_until("step_00000004")
        assert screen.status() == 0


@pytest.mark.slow
@pytest.mark.parametrize("typed", ["q\n", ""], ids=["quit", "end of input"])
def test_a_debugger_that_is_quit_ends_the_run(stopping: list[str], tmp_path: Path, typed: str) -> None:
    """In a sentence, and without a restart."""
    asked = [*stopping, "--debug-rank", "1", "--set", "train.max_restarts=1"]
    ended = subprocess.run(asked, cwd=tmp_path, input=typed, text=True, capture_output=True, timeout=LONGEST)
    assert ended.returncode == 2
    assert ended.stderr == "Error: The debugger on rank 1 was quit, which ends the run; type c to go on with it.\n"


@pytest.mark.slow
def test_without_it_the_sentence_says_how(stopping: list[str], tmp_path: Path) -> None:
    ended = subprocess.run(
        stopping, cwd=tmp_path, stdin=subprocess.DEVNULL, text=True, capture_output=True, timeout=LONGEST
    )
    assert ended.returncode == 2
    assert ended.stderr == (
        "Error: breakpoint() is called on rank 1, whose process has no terminal; start the run with --debug-rank 1.\n"
    )


@pytest.mark.slow
def test_one_rank_of_a_script_runs_in_its_process(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with terminal([sys.executable, str(script)], tmp_path) as screen:
        screen.read_until("(Pdb) ")
        screen.type("y = y + 21")
        screen.read_until("(Pdb) ")
        screen.type("c")
        screen.read_until("value 42")
        assert screen.status() == 0


def test_a_rank_that_the_layout_lacks_is_refused(config_file: Path, tmp_path: Path) -> None:
    ended = ready.run(command(config_file, tmp_path / "run", "--debug-rank", "1"))
    assert (ended.returncode, ended.stderr) == (
        2,
        "Error: --debug-rank is 1 but the layout has rank 0 alone; use 0.\n",
    )


def test_a_rank_of_a_launcher_has_no_terminal(config_file: Path, tmp_path: Path) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    ended = ready.run(command(config_file, tmp_path / "run", "--debug-rank", "0"), env={**os.environ, **variables})
    assert ended.returncode == 2
    assert ended.stderr.startswith("Error: --debug-rank is 0 but a launcher has started the ranks, which have no ")
