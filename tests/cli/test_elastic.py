"""Two agents of torchrun on two hosts: one is lost, and the job goes on with the ranks of the other.

The hosts are network namespaces, or loopback alone where those are not allowed.
"""

import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.cli.kills import beacon, moments, pids
from tests.cli.runs import (
    LONGEST,
    check_checkpoints,
    command,
    last_fingerprint,
    losses,
    restarts,
    settings,
    start,
    undisturbed,
    wait_for,
)
from tests.support.hosts import Host, NotAllowed, two_hosts
from tests.support.processes import assert_gone, free_port

RENDEZVOUS = "last_call_timeout=4,keep_alive_interval=2,keep_alive_max_attempt=4"
"""Seconds: short enough for a test, long enough for two agents that other processes keep from running."""
STEPS = ("train.max_steps=24", "train.eval_every=0", "checkpoint.every=2", "log.every=1", "parallel.dp=2")
EXACT = "train.exact=true"
TIMEOUT = 8
"""`train.timeout` of a run whose host cannot say that it is gone."""
PORT = 29400


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host] | None]:
    """Two hosts; None where there can be none."""
    with ExitStack() as stack:
        try:
            found = stack.enter_context(two_hosts())
        except NotAllowed as error:
            warnings.warn(f"two agents on loopback stand for two hosts: {error}", stacklevel=1)
            yield None
        else:
            yield found


def agent(node: int, host: Host | None, keeper: tuple[str, int], arguments: Sequence[str]) -> subprocess.Popen[str]:
    """torchrun with one rank, in a session of its own; that of node 0 keeps the rendezvous, at `keeper`."""
    address = host.address if host else keeper[0]
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", address)
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", "{}:{}".format(*keeper), "--rdzv-id", "two-hosts")
    more = ("--rdzv-conf", f"is_host={int(node == 0)},{RENDEZVOUS}")
    module = (sys.executable, "-m", "torch.distributed.run", *options, *meeting, *more, *arguments)
    return start(host.command(*module) if host else module)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def check_survives(
    config_file: Path,
    folder: Path,
    hosts: tuple[Host, Host] | None,
    lose: Callable[[subprocess.Popen[str], Path], object],
    *more: str,
) -> str:
    """Run a job over two hosts, lose the second one in the middle, and check that the ranks of the first take a
    fallback by themselves, and make the steps of the undisturbed run; returns the line of the restart."""
    run, told = folder / "run", folder / "told"
    options = settings(*STEPS, "parallel.fallbacks=[dp1]", beacon(told), *more)
    arguments = command(config_file, run, *options)[1:]
    keeper = (hosts[0].address, PORT) if hosts else ("127.0.0.1", free_port())
    agents = [agent(node, hosts[node] if hosts else None, keeper, arguments) for node in range(2)]
    try:
        wait_for(lambda: all(any(each.step >= 5 for each in moments(told, rank)) for rank in range(2)), agents[0])
        lose(agents[1], told)
        output, error = agents[0].communicate(timeout=LONGEST)
    finally:
        for each in agents:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
        if hosts:
            hosts[1].kill()
        agents[1].communicate(timeout=LONGEST)
    assert agents[0].returncode == 0, output + error
    (line,) = restarts(output)
    assert line.startswith("Restart 1 of 3 in layout dp1")
    assert f"Resuming from {run}/checkpoints/step_" in line
    undisturbed(config_file, folder / "whole", *settings(*STEPS, *more, "parallel.dp=1"))
    found, expected = losses(run), losses(folder / "whole")
    assert [step for step, _ in found] == [step for step, _ in expected] == list(range(1, 25))
    if EXACT in more:
        assert found == expected
        assert last_fingerprint(run) == last_fingerprint(folder / "whole")
    else:
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-5)
    check_checkpoints(run)
    if hosts:
        assert not hosts[0].processes()
    else:
        assert_gone(pids(told))
    return line


@pytest.mark.sweep
def test_the_loss_of_one_of_two_hosts(config_file: Path, tmp_path: Path, hosts: tuple[Host, Host] | None) -> None:
    """All its processes are killed at once; the exact run that goes on has the bits of the undisturbed one."""

    def lose(agent: subprocess.Popen[str], told: Path) -> None:
        if hosts:
            hosts[1].kill()
            return
        (rank,) = [pid for pid in pids(told) if parent_of(pid) == agent.pid]
        for pid in (agent.pid, rank):
            os.kill(pid, signal.SIGKILL)

    check_survives(config_file, tmp_path, hosts, lose, EXACT)


@pytest.mark.sweep
def test_a_host_that_is_cut_off(config_file: Path, tmp_path: Path, hosts: tuple[Host, Host] | None) -> None:
    """Its processes run, and nothing comes from them, not even that a connection is lost."""
    if hosts is None:
        pytest.skip("no network namespaces are allowed here, without which no link can be taken down")
    line = check_survives(
        config_file, tmp_path, hosts, lambda agent, told: hosts[1].disconnect(), f"train.timeout={TIMEOUT}"
    )
    assert f"not answered for {TIMEOUT} s (train.timeout)" in line
