"""What the operating system says of a process: whether it runs, how much it has worked, and which one it is."""

import os
from contextlib import suppress
from enum import Enum
from pathlib import Path

_OWN_TIMES, _TIMES = slice(11, 13), slice(11, 15)  # user and system time; with those of children that have ended
_NICENESS, _STARTED = 16, 19


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
    """Seconds for which a process of this host and its children, such as a compiler, have had work for a processor.

    Those for which their threads had one, but for threads of lower priority, such as one that writes a checkpoint
    beside the training; and those for which their main threads waited for one. 0 where the system does not tell, as of
    a process that has ended.
    """
    try:
        fields = _fields(f"/proc/{pid}/stat")
        ticks, niceness = sum(map(int, fields[_TIMES])), int(fields[_NICENESS])
    except (OSError, ValueError):
        return 0.0
    children: list[int] = []
    with suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with suppress(OSError, ValueError):
                fields = _fields(f"/proc/{pid}/task/{thread}/stat")
                if int(fields[_NICENESS]) > niceness:
                    ticks -= sum(map(int, fields[_OWN_TIMES]))
                children += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    worked = ticks / os.sysconf("SC_CLK_TCK")
    with suppress(OSError, IndexError, ValueError):  # not counted by every kernel
        worked += int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    return worked + sum(map(worked_seconds, children))


def _fields(stat: str) -> list[str]:
    """The fields of a file as `man proc_pid_stat` has it, from the third on."""
    return Path(stat).read_text().rpartition(")")[2].split()


def identify_process(pid: int) -> str:
    """What tells a process from all others, on this host and on others; empty where the system does not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        started = _fields(f"/proc/{pid}/stat")[_STARTED]
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
