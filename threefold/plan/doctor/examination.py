"""What `threefold doctor` finds out: the machine, its network, what ranks on it reach, and what is wrong."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from threefold.errors import UserError
from threefold.plan.doctor.disk import DiskSpeed, measure_disk
from threefold.plan.doctor.findings import MachineFinding, findings_of
from threefold.plan.doctor.machine import Machine, this_machine
from threefold.plan.doctor.measuring import QUICK, MeasuringEffort, RankRates, measure_ranks
from threefold.plan.doctor.network import AxisRoute, Interface, axis_routes, between_hosts, interfaces

RANKS: Final = (2, 4, 8)
"""Numbers of local ranks that are measured on a CPU."""
_DTYPES: Final = ("fp32", "bf16")
_ON_DISK, _ON_DISK_QUICK = 128 << 20, 16 << 20

RunRanks = Callable[[Callable[..., object], tuple[Any, ...], int, str], object]
"""Runs a worker on so many local ranks of a device, and returns the result of the first."""


@dataclass(frozen=True)
class Examination:
    """All that was found.

    Attributes:
        machine: what it is.
        device: `cuda` where it has GPUs that torch can use, else `cpu`.
        interfaces: of the network.
        routes: over what each axis communicates.
        rates: of one rank, then of several at once.
        disk: of the folder.
        findings: what is wrong.
    """

    machine: Machine
    device: str
    interfaces: tuple[Interface, ...]
    routes: tuple[AxisRoute, ...]
    rates: tuple[RankRates, ...]
    disk: DiskSpeed | None
    findings: tuple[MachineFinding, ...]

    def as_json(self) -> dict[str, Any]:
        """Of numbers, texts, lists and mappings alone."""
        values = asdict(self)
        for rates in values["rates"]:
            rates["matrix"] = {
                dtype: {str(size): rate for size, rate in sizes.items()} for dtype, sizes in rates["matrix"].items()
            }
        return values


def examine(
    run_ranks: RunRanks, folder: Path, quick: bool = False, tell: Callable[[str, int, int], None] = lambda *_: None
) -> Examination:
    """Examine this machine; half a minute, or with `quick` some seconds.

    Args:
        run_ranks: starts local ranks, as training does.
        folder: whose disk is measured.
        quick: whether to measure less, and only up to two ranks.
        tell: called before each part with what it is, its number from 0, and how many there are.

    Raises:
        UserError: the folder cannot be written.
    """
    machine, found = this_machine(), interfaces()
    device = "cuda" if usable_gpus() else "cpu"
    counts = _rank_counts(device, quick)
    parts = [f"{count} {'rank' if count == 1 else 'ranks'}" for count in counts] + ["disk"]
    rates: list[RankRates] = []
    problems: list[MachineFinding] = []
    for number, count in enumerate(counts):
        tell(parts[number], number, len(parts))
        try:
            budget = _budget(device, quick, whole=count in (1, counts[-1]))
            measured = run_ranks(measure_ranks, (_DTYPES, budget, device), count, device)
            assert isinstance(measured, RankRates)
            rates.append(measured)
        except (UserError, RuntimeError) as error:
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            remedy = "see what the sentence says; nothing can be trained with so many ranks before"
            problems.append(MachineFinding("error", f"{parts[number]} cannot be run here: {reason}", remedy))
    tell("disk", len(counts), len(parts))
    disk = None
    try:
        disk = measure_disk(folder, _ON_DISK_QUICK if quick else _ON_DISK)
    except UserError as error:
        problems.append(
            MachineFinding("warning", str(error).rstrip("."), "give a folder that can be written, with --folder")
        )
    routes = tuple(axis_routes(device, found))
    examined = Examination(machine, device, tuple(found), routes, tuple(rates), disk, ())
    return replace(examined, findings=(*problems, *findings_of(machine, device, rates, disk, between_hosts(found))))


def usable_gpus() -> int:
    """GPUs that torch can use, without initialising CUDA."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def _rank_counts(device: str, quick: bool) -> Sequence[int]:
    if device == "cuda":
        gpus = usable_gpus()
        return [count for count in (1, 2, 4, 8) if count <= gpus]
    return (1, 2) if quick else (1, *RANKS)


def _budget(device: str, quick: bool, whole: bool) -> MeasuringEffort:
    if quick:
        return QUICK
    budget = MeasuringEffort()
    if device == "cuda":
        return budget._replace(
            sizes=(512, 1024, 2048, 4096, 8192),
            nbytes=256 << 20,
            attention=((2048, 64), (2048, 128), (8192, 128)),
            copied=1 << 30,
        )
    return budget if whole else budget._replace(sizes=(256,), seconds=0.2)
