"""What the copier of a console rank makes of its text."""

import io
import os
import re
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from threefold.launch.output import _plain
from threefold.report.whole_lines import whole_lines

LOGGED = """
import os, sys
from pathlib import Path
from threefold.launch.output import logged_and_shown
with logged_and_shown(Path({log!r}), {prefix!r}):
    {body}
print("after")
"""


def printed(log: Path, body: str, prefix: str = "") -> str:
    script = LOGGED.format(log=str(log), prefix=prefix, body=body)
    return subprocess.run([sys.executable, "-c", script], text=True, stdout=subprocess.PIPE, check=True).stdout


def test_console_and_log_get_all_in_order(tmp_path: Path) -> None:
    body = "[print(n) if n % 2 else os.system(f'echo {n}') for n in range(20)]"
    expected = "".join(f"{n}\n" for n in range(20))
    assert printed(tmp_path / "log", body) == expected + "after\n"
    assert (tmp_path / "log").read_text() == expected


def test_last_line_without_an_end_is_kept(tmp_path: Path) -> None:
    assert printed(tmp_path / "log", "print('half', end='')") == "halfafter\n"
    assert (tmp_path / "log").read_text() == "half\n"


def test_prefix_is_for_the_console(tmp_path: Path) -> None:
    assert printed(tmp_path / "log", r"print('a\nb')", "[rank 3] ") == "[rank 3] a\n[rank 3] b\nafter\n"
    assert (tmp_path / "log").read_text() == "a\nb\n"


def test_endless_progress_bar_leaves_its_last_state(tmp_path: Path) -> None:
    printed(tmp_path / "log", r"[print(f'\r{n:9}', end='') for n in range(20_000)]; print()")
    assert (tmp_path / "log").read_text() == f"{19_999:9}\n"


def test_log_goes_on_when_the_console_is_gone(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    script = LOGGED.format(log=str(tmp_path / "log"), prefix="", body="print('a'); print('b')")
    subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.DEVNULL)
    os.close(write)
    assert (tmp_path / "log").read_text() == "a\nb\n"


def test_helpers_that_outlive_the_rank_do_not_hold_it_up(tmp_path: Path) -> None:
    """Such as the resource tracker of multiprocessing, which keeps standard error open."""
    body = "import subprocess; print(subprocess.Popen(['sleep', '600']).pid)"
    script = LOGGED.format(log=str(tmp_path / "log"), prefix="", body=body)
    (tmp_path / "script.py").write_text(script)
    process = subprocess.Popen([sys.executable, str(tmp_path / "script.py")], text=True, stdout=subprocess.PIPE)
    assert process.wait(timeout=300) == 0
    assert process.stdout is not None
    pid, after = process.stdout.read().splitlines()
    assert after == "after"
    os.kill(int(pid), 15)


PRINTERS = 4
IN_PIECES = """
    import os, sys
    for turn in range(40):
        letter = "abcd"[rank]
        for _ in range(turn % 5 + 1):  # up to 20 kB, more than one call of write into a pipe keeps whole
            print(letter * 4_000, end="", flush=True)
        print()
        print(letter, file=sys.stderr)
"""
LOGGED_RANKS = f"""
import os, sys
from pathlib import Path
from threefold.launch.output import logged_and_shown
def body(rank):{IN_PIECES}
for rank in range({PRINTERS}):
    if not os.fork():
        with logged_and_shown(Path(sys.argv[1]) / str(rank), f"[rank {{rank}}] "):
            body(rank)
        os._exit(0)
for _ in range({PRINTERS}):
    os.wait()
"""
SPAWNED_RANKS = f"""
import threefold as t3
def body():
    rank = t3.init_mesh().rank{IN_PIECES}
t3.spawn(body, {PRINTERS})
"""


@pytest.mark.parametrize(
    ("script", "prefix"), [(LOGGED_RANKS, r"\[rank {}\] "), pytest.param(SPAWNED_RANKS, "", marks=pytest.mark.slow)]
)
def test_ranks_that_print_at_once_leave_whole_lines(script: str, prefix: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", script, str(tmp_path)]
    ended = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    lines = ended.stdout.splitlines()
    kinds = [re.compile(rf"{prefix.format(rank)}({letter}|{letter * 4_000}+)") for rank, letter in enumerate("abcd")]
    assert len(lines) == 2 * 40 * PRINTERS
    assert all(any(kind.fullmatch(line) for kind in kinds) for line in lines)


def test_a_rank_that_shares_the_console_shows_its_progress_and_its_last_line() -> None:
    below = io.StringIO()
    with redirect_stdout(below), whole_lines():
        print("a", end="", flush=True)
        assert below.getvalue() == ""
        print("b\r", "c\nd", sep="\n", end="")
        assert below.getvalue() == "ab\r\nc\n"
        print("\n\r50 %", end="")
        assert below.getvalue() == "ab\r\nc\nd\n\r50 %"
        print("\r100 %", end="")
        print()
        print("last", end="")
    assert below.getvalue() == "ab\r\nc\nd\n\r50 %\r100 %\nlast"


@pytest.mark.parametrize(
    ("line", "plain"),
    [
        (b"text", b"text"),
        (b"text\r", b"text"),
        (b"10 %\r50 %\r100 %", b"100 %"),
        (b"\x1b[1;32mgreen\x1b[0m", b"green"),
        (b"\x1b]0;title\x07text", b"text"),
        (b"\r\x1b[2K\x1b[32m50 %\x1b[0m", b"50 %"),
    ],
)
def test_plain(line: bytes, plain: bytes) -> None:
    assert _plain(line) == plain


def test_a_rank_whose_log_is_on_a_full_disk_prints_on() -> None:
    """A rank that is not shown on the console writes into its log itself."""
    script = (
        "from pathlib import Path\nfrom threefold.launch.output import logged\n"
        "with logged(Path('/dev/full')):\n    print('lost')\nprint('after')"
    )
    ended = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "after\n", "")
