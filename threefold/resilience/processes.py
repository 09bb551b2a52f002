"""State and work of the processes of ranks, as the operating system reports them."""

import os
from contextlib import suppress
from enum import Enum
from pathlib import Path

# Fields of /proc/PID/stat: user and system time (the longer slice includes children that have ended), niceness, start.
_OWN_TIMES, _TIMES, _NICENESS, _STARTED = slice(11, 13), slice(11, 15), 16, 19


class ProcessState(Enum):
    RUNNING = "running"
    STOPPED = "stopped"
    TRACED = "traced"


def process_state(pid: int) -> ProcessState:
    """Return the state of a process of this host; `RUNNING` if the system does not report it."""
    try:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except (OSError, ValueError):
        return ProcessState.RUNNING
    if status.get("TracerPid", "0") != "0":
        return ProcessState.TRACED
    return ProcessState.STOPPED if status.get("State", "").startswith("T") else ProcessState.RUNNING


def worked_seconds(pid: int) -> float:
    """Return the seconds in which a process of this host and its children ran or waited for a core.

    Counts the running time of all threads except those of lower priority (such as one that writes a checkpoint), and
    the time that main threads waited for a core. A child may be a compiler. 0 if unknown, as for an ended process.
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
    """Return the fields of a /proc stat file (`man proc_pid_stat`), from the third on."""
    return Path(stat).read_text().rpartition(")")[2].split()


def identify_process(pid: int) -> str:
    """Return a text that identifies a process among all hosts; empty if the system has no such text."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        started = _fields(f"/proc/{pid}/stat")[_STARTED]
    except (OSError, IndexError):
        return ""
    return f"{boot} {namespace} {started} {pid}"


def pid_if_here(identity: str) -> int | None:
    """Return the process id of an identity; None unless it belongs to a live process of this host."""
    if not identity:
        return None
    pid = int(identity.rpartition(" ")[2])
    return pid if identity == identify_process(pid) else None
