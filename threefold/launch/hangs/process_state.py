"""What the operating system says of a process: whether it runs, and which one it is."""

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


def _pid(identity: str) -> int:
    return int(identity.rpartition(" ")[2])
