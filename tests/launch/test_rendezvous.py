"""Ranks that a launcher started, or a shell in which its variables are still set, wait for others that never come."""

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from torch.distributed import HashStore

from tests.support import ready
from tests.support.command import Command
from tests.support.processes import free_port
from tests.support.ready import ReadyProcess
from threefold.errors import UserError
from threefold.launch import environment
from threefold.launch.environment import LaunchedRank, find_launched_rank, meet, reach_other_hosts
from threefold.launch.output import log_file

SCRIPT = "import threefold as t3\nprint('alone', flush=True)\nt3.{call}\n"


@pytest.fixture
def config_file(tmp_path: Path, tokens: Path) -> Path:
    path = tmp_path / "tiny.yaml"
    path.write_text(
        f"data: {{path: {tokens}, sequence_length: 16, split: '8,2'}}\n"
        "model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4}\n"
        "parallel: {dp: 2}\n"
        "train: {max_steps: 4, global_batch_size: 4, device: cpu}\n"
    )
    return path


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Something that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def leftover(rank: int, port: int, world_size: int = 2) -> dict[str, str]:
    """The environment of a shell in which a rank of torchrun's was started by hand."""
    own = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank, "MASTER_PORT": port}
    return {**os.environ, "MASTER_ADDR": "127.0.0.1", **{name: str(value) for name, value in own.items()}}


def train(config: Path, *settings: str) -> list[str]:
    options = [word for setting in settings for word in ("--set", setting)]
    return [sys.executable, "-m", "threefold", "train", str(config), "--run-dir", str(config.parent / "run"), *options]


def script(folder: Path, name: str, call: str) -> list[str]:
    path = folder / name
    path.write_text(SCRIPT.format(call=call))
    return [sys.executable, str(path)]


ABSENT = {0: "rank 1 has not come", 1: "nothing there answers (connection refused)"}


def place(rank: int, port: int) -> LaunchedRank:
    launched = find_launched_rank(leftover(rank, port))
    assert launched is not None
    return launched


@pytest.mark.parametrize("rank", [0, 1])
def test_waiting_ends_after_the_timeout_in_one_sentence(rank: int, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    with pytest.raises(UserError) as raised:
        meet(place(rank, port), timeout=0.1)
    assert str(raised.value) == (
        f"rank {rank} of 2 is at its rendezvous 127.0.0.1:{port} but {ABSENT[rank]} within 0.4 s (4 times "
        f"train.timeout); RANK={rank} and WORLD_SIZE=2 are set, which `env -u RANK -u WORLD_SIZE COMMAND` is without: "
        "start all ranks, or this one alone without these variables"
    )
    assert capfd.readouterr().err == ""


def test_what_listens_there_and_never_answers_is_not_waited_for_without_end(
    tmp_path: Path, listener: socket.socket
) -> None:
    """Not in this process, where torch's thread would go on to wait."""
    path = tmp_path / "silent.py"
    path.write_text(
        "from threefold.launch.environment import find_launched_rank, meet\nmeet(find_launched_rank(), timeout=0.1)\n"
    )
    ended = ready.run([sys.executable, str(path)], env=leftover(1, listener.getsockname()[1]), timeout=100)
    assert ended.returncode == 1
    assert "but nothing there answers within 0.4 s (4 times train.timeout); RANK=1" in ended.stderr.splitlines()[-1]
    assert "frame #" not in ended.stderr


def test_a_port_that_is_taken_is_told(listener: socket.socket, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"but cannot listen there \(address already in use\); RANK=0 and WORLD_SIZE=2"):
        meet(place(0, listener.getsockname()[1]))
    assert capfd.readouterr().err == ""


def test_the_run_ends_with_the_sentence(config_file: Path, listener: socket.socket) -> None:
    """Once, of the rank that has it, and before anything is written to the run folder."""
    ended = ready.run(train(config_file), env=leftover(0, listener.getsockname()[1]), timeout=100)
    assert (ended.returncode, ended.stderr.count("\n")) == (1, 1)
    assert ended.stderr.startswith("Error: rank 0 of 2 is at its rendezvous 127.0.0.1:")
    assert not log_file(config_file.parent / "run", 0).exists()


@pytest.mark.slow
def test_a_signal_ends_the_waiting_after_the_line_that_says_why(config_file: Path, tmp_path: Path) -> None:
    """Torch's own wait, in native code, went on for half an hour. All wait at the same time."""
    ports = free_port(), free_port()
    calls = "init_mesh()", "run(print, args=('met',))"
    with ExitStack() as stack:

        def start(command: list[str], rank: int, port: int) -> ReadyProcess:
            return stack.enter_context(ReadyProcess(command, env=leftover(rank, port), new_session=True))

        started = [start(train(config_file), rank, port) for rank, port in enumerate(ports)]
        scripts = [start(script(tmp_path, f"script{n}.py", call), 1, free_port()) for n, call in enumerate(calls)]
        for rank, (process, number) in enumerate(zip(started, (signal.SIGINT, signal.SIGTERM), strict=True)):
            line = said(process, number)
            assert line.startswith(f"Waiting: rank {rank} of 2 is at its rendezvous 127.0.0.1:{ports[rank]} but ")
            assert f"but {ABSENT[rank].removesuffix('(connection refused)')}" in line
            assert "`env -u RANK -u WORLD_SIZE COMMAND`" in line
        ended = [(process.communicate(timeout=100)[1], process.returncode) for process in started]
        assert ended == [("", 130), ("", 0)]
        for process in scripts:
            assert said(process, signal.SIGINT).startswith("Waiting: rank 1 of 2 is at its rendezvous 127.0.0.1:")
        for process in scripts:
            output, error = process.communicate(timeout=100)
            assert output == "alone\n"
            assert error.splitlines()[-1] == "KeyboardInterrupt"
            assert "frame #" not in error


def said(process: ReadyProcess, number: int) -> str:
    """The first line on standard error, after which the process gets a signal."""
    assert process.stderr is not None
    line = process.stderr.readline()
    os.kill(process.pid, number)
    return line


def test_a_rank_outside_of_its_world_is_refused(config_file: Path) -> None:
    ended = ready.run(train(config_file), env=leftover(3, free_port(), world_size=1), timeout=100)
    assert (ended.returncode, ended.stderr) == (
        2,
        "Error: The environment variable RANK is 3 but must be 0, as there is 1 rank; set it to 0, start the ranks "
        "with torchrun, which sets it, or run alone with `env -u RANK -u WORLD_SIZE COMMAND`.\n",
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2 without a rank 0, which waits for nobody to tell."""
    monkeypatch.setattr(environment, "NOTICE", 0.0)
    for name, value in leftover(1, free_port()).items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("alone")
def test_leftover_variables_are_named_where_the_layout_has_another_number_of_ranks(
    config_file: Path, threefold: Command
) -> None:
    ended = threefold(*train(config_file, "parallel.dp=1")[3:])
    assert (ended.status, ended.error) == (
        2,
        "Error: The layout dp 1 · tp 1 · pp 1 needs 1 rank but the world has 2 (RANK=1 and WORLD_SIZE=2 are set, which "
        "`env -u RANK -u WORLD_SIZE COMMAND` is without); set parallel.dp to 2 or start 1 rank.\n",
    )


@pytest.mark.usefixtures("alone")
def test_a_mistake_is_told_where_rank_zero_is_not_there_to_tell(config_file: Path, threefold: Command) -> None:
    ended = threefold(*train(config_file, "train.max_stepps=1")[3:])
    assert ended.status == 2
    assert ended.error.startswith("Error: ")
    assert "max_stepps" in ended.error


def test_a_rank_that_cannot_start_tells_those_that_wait_for_it(tmp_path: Path) -> None:
    """Though it comes first, when nobody listens yet."""
    path, port = tmp_path / "refused.py", free_port()
    path.write_text(
        "from threefold.launch.environment import tell_waiting_ranks\n"
        "print(flush=True)\ntell_waiting_ranks('No data.')\n"
    )
    with ReadyProcess([sys.executable, str(path)], env=leftover(1, port)) as refused:
        assert refused.stdout is not None
        refused.stdout.readline()
        with pytest.raises(UserError, match=r"^Not all ranks can start, as rank 1 \(.+\) has ended: No data\.$"):
            meet(place(0, port), timeout=20)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"world": "3"}, r"rank 1 \(.+\) is one of 2 ranks there and others are of 3, as with another number of nodes"),
        ({"come": 1, "come/1": 1}, "another process is rank 1 there, as of another run with this address and port"),
    ],
    ids=["world", "twice"],
)
def test_others_of_another_world_are_told(keys: dict[str, int | str], told: str) -> None:
    """They would wait for each other, or go on without a rank."""
    store = HashStore()
    for key, value in keys.items():
        _ = store.add(key, value) if isinstance(value, int) else store.set(key, value)
    with pytest.raises(UserError, match=told):
        environment._wait_for_others(environment._Wait(place(1, 1), timeout=0.1), store)
    assert store.add("come", 0) == keys.get("come", 0)  # so that those of one world are counted right


def test_gloo_listens_where_the_rendezvous_is_if_the_name_of_the_host_is_of_no_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "chosen")
    monkeypatch.setattr(socket, "gethostname", lambda: "localhost")
    reach_other_hosts("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "chosen"
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    reach_other_hosts("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"


@pytest.mark.slow
def test_a_run_waits_four_times_its_own_timeout(config_file: Path) -> None:
    ended = ready.run(train(config_file, "train.timeout=2"), env=leftover(1, free_port()), timeout=100)
    assert ended.returncode == 1
    assert "within 8 s (4 times train.timeout)" in ended.stderr.splitlines()[-1]
