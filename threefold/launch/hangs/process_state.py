"""What the operating system says of a process: whether it runs, how much it has worked, and which one it is."""

import os
from contextlib import suppress
from enum import Enum
from pathlib import Path


class ProcessState(Enum):
    """Whether a process runs."""

    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "traced"


def process_state(pid: int) -> ProcessState:
    """The state of a process of this host; `RUNNING` where the system does not tell."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except (OSError, ValueError):
        return ProcessState.RUNNING
    if status.get("TracerPid", "0") != "0":
        return ProcessState.TRACED
    return ProcessState.STOPPED if status.get("State", "").startswith("T") else ProcessState.RUNNING


def worked_seconds(pid: int) -> float:
    """Seconds for which a process of this host and its children, such as a compiler, have had work for a processor:
    those for which their threads had one, and those for which their main threads waited for one. 0 where the system
    does not tell, as of a process that has ended."""
    try:
        ticks = map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15])
    except (OSError, ValueError):
        return 0.0
    worked = sum(ticks) / os.sysconf("SC_CLK_TCK")
    with suppress(OSError, IndexError, ValueError):  # not counted by every kernel
        worked += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return worked + sum(map(worked_seconds, _children(pid)))


def _children(pid: int) -> list[int]:
    """Processes that a process has started and not waited for; none where the system does not tell."""
    found: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError):
                found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def identify_process(pid: int) -> str:
    """What tells a process from all others, on this host and on others; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""
    return f"{boot} {namespace} {started} {pid}"


def is_here(identity: str) -> bool:
    """Whether an identity is that of a process of this host that has not ended."""
    return bool(identity) and identity == identify_process(_pid(identity))


def kill_if_here(identity: str, number: int) -> None:
    """Send a signal to the process of an identity, if it is one of this host that has not ended."""
    if is_here(identity):
        with suppress(OSError):
            os.kill(_pid(identity), number)


def state_if_here(identity: str) -> ProcessState:
    """The state of the process of an identity; `RUNNING` where it is on another host."""
    return process_state(_pid(identity)) if is_here(identity) else ProcessState.RUNNING


def worked_if_here(identity: str) -> float:
    """As `worked_seconds`, of the process of an identity; 0 where it is on another host."""
    return worked_seconds(_pid(identity)) if is_here(identity) else 0.0


def _pid(identity: str) -> int:
    return int(identity.rpartition(" ")[2])
