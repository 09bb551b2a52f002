"""Two agents of torchrun as two hosts on loopback: one is lost, and the job goes on with the ranks of the other."""

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from tests.cli.runs import (
    LONGEST,
    check_checkpoints,
    command,
    losses,
    restarts,
    settings,
    start,
    undisturbed,
    wait_for,
)
from tests.support.kills import assert_gone, beacon, moments, pids

RENDEZVOUS = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=2"
STEPS = ("train.max_steps=24", "train.eval_every=0", "checkpoint.every=2", "log.every=1")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def agent(port: int, node: int, arguments: list[str]) -> subprocess.Popen[str]:
    """torchrun with one rank, in a session of its own; that of node 0 keeps the rendezvous."""
    options = ("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--local-addr", "127.0.0.1")
    meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "two-hosts")
    more = ("--rdzv-conf", f"is_host={int(node == 0)},{RENDEZVOUS}")
    module = (arguments[0], "-m", "torch.distributed.run", *options, *meeting, *more)
    return start([*module, *arguments[1:]])


@pytest.mark.slow
def test_the_loss_of_one_of_two_hosts(config_file: Path, tmp_path: Path) -> None:
    """Without --resume: the ranks that are left take a fallback, and go on from the newest checkpoint."""
    run, told = tmp_path / "run", tmp_path / "told"
    options = settings(*STEPS, "parallel.dp=2", "parallel.fallbacks=[dp1]")
    arguments, port = command(config_file, run, *options, *settings(beacon(told))), free_port()
    agents = [agent(port, node, arguments) for node in range(2)]
    try:
        wait_for(lambda: all(any(each.step >= 5 for each in moments(told, rank)) for rank in range(2)), agents[0])
        ranks = [pid for pid in pids(told) if parent_of(pid) == agents[1].pid]
        assert len(ranks) == 1
        for pid in (agents[1].pid, *ranks):  # all of that host at once
            os.kill(pid, signal.SIGKILL)
        output, _ = agents[0].communicate(timeout=LONGEST)
    finally:
        for each in agents:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
        agents[1].communicate(timeout=LONGEST)
    assert agents[0].returncode == 0, output
    (line,) = restarts(output)
    assert line.startswith("Restart 1 of 3 in layout dp1")
    assert f"Resuming from {run}/checkpoints/step_" in line
    assert_gone(list(pids(told)))
    undisturbed(config_file, tmp_path / "whole", *settings(*STEPS))
    found, expected = losses(run), losses(tmp_path / "whole")
    assert [step for step, _ in found] == [step for step, _ in expected] == list(range(1, 25))
    assert [loss for _, loss in found] == pytest.approx([loss for _, loss in expected], rel=1e-5)
    check_checkpoints(run)
