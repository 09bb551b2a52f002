"""What is wrong with a machine, in words, and how to mend it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from threefold.byte_sizes import format_bytes
from threefold.plan.doctor.disk import DiskSpeed
from threefold.plan.doctor.machine import Machine
from threefold.plan.doctor.measuring import RankRates
from threefold.plan.doctor.network import Interface

Severity = Literal["error", "warning", "note"]
_FEW_FILES: Final = 4096
_LITTLE_SHARED_MEMORY: Final = 256 << 20
_SLOW_DISK: Final = 100e6
_BUSY: Final = 0.5
"""Of the cores, by other programs."""
_THROTTLED: Final = 0.6
"""Of the highest clock."""


@dataclass(frozen=True)
class MachineFinding:
    """Something that is wrong, or good to know.

    Attributes:
        severity: `error` where training cannot work, `warning` where it is slower or may fail, `note` otherwise.
        text: one clause.
        remedy: what to do; a clause.
    """

    severity: Severity
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text[0].upper()}{self.text[1:]}: {self.remedy}."


def findings_of(
    machine: Machine,
    device: str,
    rates: Sequence[RankRates],
    disk: DiskSpeed | None,
    outside: Interface | None = None,
) -> list[MachineFinding]:
    """What is wrong, the worst first.

    Args:
        machine, device, rates, disk: as of an examination.
        outside: the interface that ranks take to other hosts; None where it is not known.
    """
    found = [*_of_host(machine), *_of_rates(machine, device, rates), *_of_gpus(machine, device)]
    if disk is not None and disk.bandwidth < _SLOW_DISK:
        text = f"the disk of {disk.folder} takes {format_bytes(int(disk.bandwidth))}/s, so checkpoints take long"
        found.append(MachineFinding("warning", text, "write runs to a faster disk, or set checkpoint.async_save: true"))
    if outside is not None and outside.address.startswith("127."):
        text = f"the name {machine.host} resolves to {outside.address}, which no other host can reach"
        remedy = "for runs on several hosts give its address in /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface"
        found.append(MachineFinding("note", text, remedy))
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def _of_host(machine: Machine) -> Iterator[MachineFinding]:
    if not machine.backends.get("gloo"):
        yield MachineFinding("error", "this build of torch has no gloo", "install torch from https://pytorch.org")
    if 0 < machine.quota < machine.cores:
        text = f"the control group allows {machine.quota:g} cores' worth of time, on {machine.cores} cores"
        yield MachineFinding("warning", text, "raise the container's limit of CPU time (docker --cpus)")
    if machine.load > _BUSY * machine.cores:
        text = f"other programs keep {machine.load:.1f} processes busy on {machine.cores} cores"
        yield MachineFinding("warning", text, "measure again when the machine is quiet, as all rates here are too low")
    if 0 < machine.shared_memory < _LITTLE_SHARED_MEMORY:
        text = f"/dev/shm has {format_bytes(machine.shared_memory)} free, too little for the collectives of many ranks"
        yield MachineFinding("warning", text, "make it larger (docker --shm-size 2g); without, ranks talk over sockets")
    if 0 < machine.open_files < _FEW_FILES:
        text = f"a process may have {machine.open_files:,} files open, and ranks take several for each other rank"
        yield MachineFinding("warning", text, "raise the limit with `ulimit -n 65536`")
    if not machine.compiler:
        text = "there is no C compiler, which train.compile needs"
        yield MachineFinding("note", text, "install one (apt install g++) if you want compiled layers")
    if not machine.swap:
        text = "there is no swap, so a rank that needs too much memory is killed at once"
        yield MachineFinding("note", text, "look at the memory that `threefold estimate` tells before a large run")


def _of_rates(machine: Machine, device: str, rates: Sequence[RankRates]) -> Iterator[MachineFinding]:
    if not rates:
        return
    most = rates[-1]
    if device == "cpu" and most.ranks > machine.cores:
        text = f"{most.ranks} ranks share {machine.cores} cores, each computing at a part of their rate"
        yield MachineFinding("note", text, f"train with at most {machine.cores} ranks where speed counts")
    alone = {dtype: max(sizes.values()) for dtype, sizes in rates[0].matrix.items() if sizes}
    if device == "cpu" and alone.get("bf16", 0.0) < alone.get("fp32", 0.0):
        share = alone.get("bf16", 0.0) / alone["fp32"]
        text = f"bf16 products reach {share:.0%} of the rate of fp32 on this processor"
        yield MachineFinding("warning", text, "train with precision.dtype fp32 here")
    reduced = most.collectives.get("all_reduce")
    if device == "cpu" and reduced is not None and reduced.transport != "shared memory":
        text = "local ranks talk over sockets, as they cannot share memory"
        yield MachineFinding("warning", text, "give /dev/shm more room")


def _of_gpus(machine: Machine, device: str) -> Iterator[MachineFinding]:
    if machine.gpus and device == "cpu":
        text = f"there are {len(machine.gpus)} GPUs, and torch {machine.versions.get('torch', '')} can use none"
        yield MachineFinding("error", text, "install a build of torch for their driver from https://pytorch.org")
    if device != "cuda":
        return
    if not machine.backends.get("nccl"):
        yield MachineFinding(
            "error", "this build of torch has no NCCL", "install torch for CUDA from https://pytorch.org"
        )
    for number, gpu in enumerate(machine.gpus):
        if "disabled" in gpu.ecc.lower():
            text = f"GPU {number} ({gpu.name}) does not correct memory errors (ECC is disabled)"
            yield MachineFinding(
                "warning", text, "enable it with `nvidia-smi -e 1` and restart, or set train.watch_every"
            )
        if 0 < gpu.power_limit < gpu.largest_power_limit:
            text = f"GPU {number} is limited to {gpu.power_limit:.0f} W of {gpu.largest_power_limit:.0f} W"
            yield MachineFinding("warning", text, "raise it with `nvidia-smi -pl`, or expect lower rates")
        if 0 < gpu.clock < _THROTTLED * gpu.largest_clock:
            text = f"GPU {number} runs at {gpu.clock:.0f} MHz of {gpu.largest_clock:.0f} MHz"
            yield MachineFinding(
                "note", text, "that is usual while it idles; under load look for heat or a power limit"
            )
    if len({gpu.name for gpu in machine.gpus}) > 1:
        yield MachineFinding("warning", "the GPUs are of different types", "give each run GPUs of one type")
