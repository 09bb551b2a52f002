"""`threefold watch`: a run that goes on, one that has ended, and the server, through which nothing else can be read."""

import http.client
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from tests.cli.runs import start
from tests.support.command import Command
from threefold.report import live
from threefold.report.live import RunServer, follow
from threefold.report.record import RunRecord

Copied = Callable[[str], Path]


def lock(folder: Path, pid: int, host: str = "") -> None:
    holder = {"host": host or socket.gethostname(), "pid": pid, "since": str(datetime.now())}
    (folder / "run.lock").write_text(json.dumps(holder))


def test_a_run_that_goes_on_is_followed_to_its_end(copied: Copied, capsys: pytest.CaptureFixture[str]) -> None:
    folder = copied("going")
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0])
    lock(folder, os.getpid())
    later = [b"", lines[1] + lines[2][:20], lines[2][20:] + b"".join(lines[3:-1]), lines[-1]]

    def pause() -> None:
        """The run writes on, once half a line; it ends, and its last line comes with the end."""
        with path.open("ab") as file:
            file.write(later.pop(0))
        if not later:
            (folder / "run.lock").write_text("")

    follow(RunRecord(folder), pause)
    shown = capsys.readouterr().out.splitlines()
    steps = [line.split()[1] for line in shown if line.startswith("step ")]
    assert steps == ["1/6", "2/6", "6/6", "6/6"], "none for a pause in which nothing came"
    assert "val " in shown[2]
    assert shown[-2][0] in "▁▂▃▄▅▆▇█"
    assert shown[-1] == f"{folder}: finished, 6 steps."


def test_two_lines_in_place_on_a_terminal(
    copied: Copied, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = copied("going")
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0])
    lock(folder, os.getpid())
    monkeypatch.setattr(live, "on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "50")

    def pause() -> None:
        path.write_bytes(b"".join(lines))
        (folder / "run.lock").unlink()

    follow(RunRecord(folder), pause)
    *drawn, last = capsys.readouterr().out.split("\n")[:-1]
    assert [line[:5] for line in drawn] == ["\x1b[Kst", drawn[1][:5], "\x1b[2F\x1b", drawn[3][:5]]
    assert all(len(line.replace("\x1b[2F", "").replace("\x1b[K", "")) <= 49 for line in drawn)
    assert last == f"{folder}: finished, 6 steps."


@pytest.mark.parametrize("holder", ["none", "a process that is gone"])
def test_an_ended_run_is_shown_once(recorded: Path, copied: Copied, threefold: Command, holder: str) -> None:
    folder = copied("ended")
    if holder != "none":
        lock(folder, 2**22 - 1)
    ended = threefold("watch", folder)
    assert (ended.status, ended.error) == (0, "")
    assert ended.output.splitlines()[0].startswith("step 6/6  loss ")
    assert ended.output.splitlines()[-1] == f"{folder}: finished, 6 steps."


def test_a_run_of_another_host_goes_on(copied: Copied) -> None:
    folder = copied("elsewhere")
    lock(folder, 1, "another.example")
    assert RunRecord(folder).is_running
    assert not RunRecord(folder, ended=True).is_running


def test_a_run_before_its_first_step(copied: Copied, threefold: Command) -> None:
    folder = copied("young")
    (folder / "metrics.jsonl").unlink()
    ended = threefold("watch", folder)
    assert (ended.status, ended.output) == (0, f"{folder}: ended before the first step.\n")


@pytest.mark.parametrize("way", ["a longer file in its place", "cut in place"])
def test_a_rewritten_file_is_read_again(copied: Copied, way: str) -> None:
    """As a resumed run does, which may have gone on by the next look, and a new run in the folder."""
    folder = copied("resumed")
    record = RunRecord(folder)
    record.update()
    path = folder / "metrics.jsonl"
    lines = [line for line in path.read_text().splitlines(keepends=True) if json.loads(line)["step"] <= 3]
    if way == "cut in place":
        path.write_text("".join(lines))
    else:
        fresh = path.with_name("fresh")
        fresh.write_text("".join(lines) + "\n" * path.stat().st_size)
        fresh.replace(path)
    assert record.update()
    assert record.curves.last_step == 3
    assert not record.update()


def test_ctrl_c_ends_the_watch_without_a_traceback(copied: Copied) -> None:
    folder = copied("going")
    lock(folder, os.getpid())
    process = start([sys.executable, "-m", "threefold", "watch", str(folder)])
    assert process.stdout is not None
    assert process.stdout.readline().startswith("step 6/6")
    os.killpg(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert (process.returncode, error) == (130, "")


@contextmanager
def served(folder: Path) -> Iterator[RunServer]:
    server = RunServer(RunRecord(folder), 0)
    thread = threading.Thread(target=server.serve)
    thread.start()
    try:
        yield server
    finally:
        server.close()
        thread.join()


def get(server: RunServer, path: str, host: str = "") -> tuple[int, str, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.putrequest("GET", path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.port}")
    connection.endheaders()
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, answer.headers["Content-Type"], content


def test_the_served_document_follows_the_run(copied: Copied) -> None:
    folder = copied("served")
    path = folder / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]))
    with served(folder) as server:
        status, kind, page = get(server, "/")
        assert (status, kind) == (200, "text/html; charset=utf-8")
        assert b'data-poll="2000"' in page
        first = get(server, "/report.json")
        assert first[:2] == (200, "application/json; charset=utf-8")
        assert json.loads(first[2])["runs"][0]["curves"]["last"] == [1, 2]
        assert get(server, "/report.json") == first, "the same bytes as long as nothing has changed"
        path.write_bytes(b"".join(lines))
        assert json.loads(get(server, "/report.json")[2])["runs"][0]["curves"]["last"] == [1, 2, 3, 4, 5, 6]


ESCAPES = (
    *(
        "/metrics.jsonl",
        "/config.yaml",
        "/../secret",
        "/../../etc/passwd",
        "/..%2fsecret",
        "/%2e%2e/secret",
        "//etc/passwd",
    ),
    *("/report.json/../config.yaml", "/report.json?file=/etc/passwd", "/.", "file:///etc/passwd", "*", "/\\..\\secret"),
)


@pytest.mark.parametrize("path", ESCAPES)
def test_no_other_file_is_served(copied: Copied, path: str) -> None:
    folder = copied("served")
    (folder.parent / "secret").write_text("secret")
    with served(folder) as server:
        assert get(server, path)[::2] == (404, b"There is / and /report.json.\n")


def test_a_name_of_another_host_is_refused(recorded: Path) -> None:
    """As of a foreign page whose name was made to lead to this machine."""
    with served(recorded) as server:
        assert get(server, "/", "attacker.example")[0] == 403
        assert get(server, "/report.json", f"attacker.example:{server.port}")[0] == 403
        assert get(server, "/", f"localhost:{server.port}")[0] == 200


def test_it_listens_on_the_loopback_interface_alone(recorded: Path) -> None:
    with served(recorded) as server:
        listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        hosts = {
            row[1].split(":")[0] for row in listening if row[3] == "0A" and int(row[1].split(":")[1], 16) == server.port
        }
        assert hosts == {"0100007F"}


def test_a_port_that_is_taken_is_one_sentence(recorded: Path, threefold: Command) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = threefold("watch", recorded, "--serve", port)
    assert (ended.status, ended.output, ended.error.count("\n")) == (2, "", 1)
    assert f"--serve {port} cannot be used (Address already in use); use --serve 0" in ended.error
    ended = threefold("watch", recorded, "--serve=70000")
    assert (ended.status, ended.error) == (2, "Error: --serve 70000 must be at most 65,535; use 65535.\n")


def test_serving_without_a_port_ends_at_ctrl_c(
    recorded: Path, threefold: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    class Interrupted(RunServer):
        def __init__(self, run: RunRecord, port: int) -> None:
            asked.append(port)
            super().__init__(run, 0)

        def serve(self) -> None:
            self._server.server_close()
            raise KeyboardInterrupt

    monkeypatch.setattr(live, "RunServer", Interrupted)
    for options in (("--serve", recorded), (recorded, "--serve"), (recorded, "--serve", "8000")):
        ended = threefold("watch", *options)
        assert (ended.status, ended.error) == (130, "")
        assert ended.output.startswith("Serving the report at http://127.0.0.1:")
    assert asked == [6070, 6070, 8000]
