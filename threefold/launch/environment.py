"""The rank of this process under torchrun or Slurm; only this file reads the launchers' environment variables."""

import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

FIRST_SLURM_PORT = 20_000
SLURM_PORTS = 10_000
_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
TIME_TO_SPEAK = 5.0
"""Seconds that the other ranks wait while rank 0 prints an error that all of them have."""


@dataclass(frozen=True)
class LaunchedRank:
    """A rank that a launcher started.

    Attributes:
        rank: 0 to `world_size` - 1.
        local_rank: 0 to `local_world_size` - 1 on this host.
        rendezvous: URL of the rendezvous, for `torch.distributed`.
        attempt: how often the launcher has restarted the ranks.
        restarts: how often it may.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    rendezvous: str
    attempt: int = 0
    restarts: int = 0


def find_launched_rank(environment: Mapping[str, str] = os.environ) -> LaunchedRank | None:
    """The rank that torchrun or Slurm's srun gave this process; None when no launcher started it."""
    return _torchrun(environment) or _slurm(environment)


def missing_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """The variables that torchrun sets and this process lacks, where it has some of them; empty where no launcher
    started it, or only one rank."""
    if not {"RANK", "WORLD_SIZE"} & environment.keys() or environment.get("WORLD_SIZE") == "1":
        return []
    return [name for name in _TORCHRUN if name not in environment]


def leave_to_rank_zero() -> None:
    """On ranks other than 0 under a launcher, wait while rank 0 prints an error that all ranks have, then exit.

    They wait because some launchers end every rank as soon as one has ended.
    """
    launched = find_launched_rank()
    if launched is not None and launched.rank != 0:
        time.sleep(TIME_TO_SPEAK)
        sys.exit(2)


def _torchrun(environment: Mapping[str, str]) -> LaunchedRank | None:
    if not set(_TORCHRUN) <= environment.keys():
        return None
    world_size = int(environment["WORLD_SIZE"])
    return LaunchedRank(
        int(environment["RANK"]),
        world_size,
        int(environment["LOCAL_RANK"]),
        int(environment.get("LOCAL_WORLD_SIZE", world_size)),
        "env://",
        int(environment.get("TORCHELASTIC_RESTART_COUNT", 0)),
        int(environment.get("TORCHELASTIC_MAX_RESTARTS", 0)),
    )


def _slurm(environment: Mapping[str, str]) -> LaunchedRank | None:
    """A task of a job step; None in the shell of a batch script or of an interactive step."""
    world_size = int(environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or 1)
    if "SLURM_STEP_ID" not in environment or world_size == 1:
        return None
    hosts = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    tasks = environment.get("SLURM_STEP_TASKS_PER_NODE") or environment.get("SLURM_TASKS_PER_NODE", str(world_size))
    step = int(environment["SLURM_JOB_ID"]) * 31 + int(environment["SLURM_STEP_ID"])
    address = f"{first_host(hosts)}:{FIRST_SLURM_PORT + step % SLURM_PORTS}"
    rank = int(environment["SLURM_PROCID"])
    return LaunchedRank(
        rank,
        world_size,
        int(environment["SLURM_LOCALID"]),
        tasks_on(tasks, int(environment.get("SLURM_NODEID", 0))),
        f"tcp://{address}?rank={rank}&world_size={world_size}",
    )


def first_host(hosts: str) -> str:
    """First host of a Slurm host list: `gpu[03-07,9]-ib,other` gives `gpu03-ib`."""
    match = re.match(r"([^,\[]*)(?:\[([0-9]+)[^\]]*\])?([^,]*)", hosts)
    assert match  # every part may be empty
    prefix, number, suffix = match.groups()
    return prefix + (number or "") + suffix


def tasks_on(tasks_per_node: str, node: int) -> int:
    """Tasks on one node of a Slurm list of tasks per node: `4(x2),3` is 4, 4, 3."""
    counts: list[int] = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match:
            counts += [int(match[1])] * int(match[2] or 1)
    return counts[min(node, len(counts) - 1)]
