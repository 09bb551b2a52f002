"""Examination of a machine: its problems in words, each with a remedy, and its measured hardware entry."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import log2
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Final, Literal

from threefold.errors import UserError
from threefold.files import format_bytes
from threefold.models.block import describe_model
from threefold.planner.block_cost import block_seconds, cost_block
from threefold.planner.doctor.machine import (
    AxisRoute,
    DiskSpeed,
    Interface,
    Machine,
    axis_routes,
    between_hosts,
    interfaces,
    measure_disk,
    this_machine,
)
from threefold.planner.doctor.measuring import (
    NCCL,
    QUICK,
    AttentionRate,
    MeasuringEffort,
    RankRates,
    measure_ranks,
    tiny_config,
)
from threefold.planner.hardware import THIS_MACHINE, Achievable, Hardware, Link, entry_of_gpu
from threefold.planner.systems import SYSTEMS

Severity = Literal["error", "warning", "note"]
_FEW_FILES: Final = 4096
_LITTLE_SHARED_MEMORY: Final = 256 << 20
_SLOW_DISK: Final = 100e6
_BUSY: Final = 0.5
"""Share of the cores that other programs may use without a warning."""
_THROTTLED: Final = 0.6
"""Share of the highest clock below which a GPU counts as throttled."""


@dataclass(frozen=True)
class MachineFinding:
    """Problem of a machine and its remedy, one clause each.

    Attributes:
        severity: `error` if training cannot work, `warning` if it is slower or may fail, `note` otherwise.
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
    """Return the findings about a machine, the worst first.

    Args:
        machine, device, rates, disk: see `Examination`.
        outside: network interface to other hosts; None if unknown.
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


RANKS: Final = (2, 4, 8)
"""Numbers of local ranks that are measured on a CPU."""
_DTYPES: Final = ("fp32", "bf16")
_ON_DISK, _ON_DISK_QUICK = 128 << 20, 16 << 20

RunRanks = Callable[[Callable[..., object], tuple[Any, ...], int, str], object]
"""Function that runs a worker on some local ranks of a device and returns the first rank's result."""


@dataclass(frozen=True)
class Examination:
    """Description of a machine with its network, rates (of one rank, then of several), disk and problems.

    Attributes:
        device: `cuda` if torch can use a GPU, else `cpu`.
        disk: speed of the folder's disk; None if the folder cannot be written.
    """

    machine: Machine
    device: str
    interfaces: tuple[Interface, ...]
    routes: tuple[AxisRoute, ...]
    rates: tuple[RankRates, ...]
    disk: DiskSpeed | None
    findings: tuple[MachineFinding, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the examination as numbers, strings, lists and mappings only."""
        values = asdict(self)
        for rates in values["rates"]:
            rates["matrix"] = {
                dtype: {str(size): rate for size, rate in sizes.items()} for dtype, sizes in rates["matrix"].items()
            }
        return values


def examine(
    run_ranks: RunRanks, folder: Path, quick: bool = False, tell: Callable[[str, int, int], None] = lambda *_: None
) -> Examination:
    """Examine this machine, which takes half a minute, or some seconds with `quick`.

    Args:
        run_ranks: starts local ranks, as training does.
        folder: folder whose disk is measured.
        quick: whether to measure less, and at most two ranks.
        tell: callback before each part, with its name, its index from 0 and the number of parts.
    """
    machine, found = this_machine(), interfaces()
    device = "cuda" if usable_gpus() else "cpu"
    counts: tuple[int, ...] = (1, 2) if quick else (1, *RANKS)
    if device == "cuda":
        counts = tuple(count for count in (1, *RANKS) if count <= usable_gpus())
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
    """Count the GPUs that torch can use, without initialising CUDA."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


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


_LEAST_SIZE = 128
_GIB = 1 << 30


def measured_entry(found: Examination) -> Hardware | None:
    """Build the entry `this-machine`; None if no ranks could be measured.

    Its rates are those of each rank in the largest measurement while all ranks computed, so no further fraction
    applies; only the depth at which a product reaches half of its rate is fitted.
    """
    several = [rates for rates in found.rates if any(rates.matrix.values())]
    if not several:
        return None
    most = several[-1]
    ranks, machine = most.ranks, found.machine
    rates = {dtype: max(sizes.values()) for dtype, sizes in most.matrix.items() if sizes}
    fp32 = most.matrix.get("fp32") or next(sizes for sizes in most.matrix.values() if sizes)
    depth = half_depth(fp32, _LEAST_SIZE if max(fp32) >= _LEAST_SIZE else 0)
    largest = max(fp32)
    peaks = {dtype: rate * (1 + depth / largest) for dtype, rate in rates.items()}
    if found.device == "cuda":
        gpu = machine.gpus[0].name if machine.gpus else "GPU"
        title, memory = gpu, _gpu_memory(gpu)
    else:
        title, memory = machine.processor, max(1, machine.memory // ranks)
    link = measured_link(most)
    reached = Achievable(
        matrix=1.0,
        matrix_depth=depth,
        memory=1.0,
        link=1.0,
        network=1.0,
        kernel=most.kernel,
        step=0.0,
    )
    reached = _with_attention(reached, most, peaks)
    entry = Hardware(
        name=THIS_MACHINE,
        title=title,
        device=found.device,
        matrix_rates=peaks,
        memory_bytes=memory,
        memory_bandwidth=most.memory_bandwidth,
        multiprocessors=1,
        gpus_per_node=ranks,
        inside=link,
        between=link,
        achievable=reached,
        cores=machine.cores if found.device == "cpu" else 0,
        sources=(
            f"threefold doctor on {machine.host}: {ranks} local ranks of {most.threads} threads at the same time",
        ),
    )
    if found.device == "cuda":  # a GPU's kernels run beside the host's work
        return replace(entry, achievable=replace(reached, block=most.block))
    longer = {
        name: max(0.0, measured - most.block)
        for name, measured in (
            ("sharded_block", most.sharded_block),
            ("tensor_block", most.tensor_block),
            ("context_block", most.context_block),
        )
    }
    return replace(entry, achievable=replace(reached, block=_host_work(most, entry), **longer))


def _host_work(rates: RankRates, entry: Hardware) -> float:
    """Return the part of the measured block time that its kernels do not explain."""
    config, system = tiny_config(), SYSTEMS["own-cpu"]
    block = describe_model(config.model, config.data.sequence_length).blocks[0]
    kernels = block_seconds(cost_block(config, block, 1, system), entry, system).total if rates.block else 0.0
    return max(0.0, rates.block - kernels)


def _with_attention(reached: Achievable, rates: RankRates, peaks: Mapping[str, float]) -> Achievable:
    """Set the fractions of attention, in the first dtype that has rates, and the sizes that reach half of them."""
    dtype = next((dtype for dtype in peaks if rates.attention.get(dtype)), None)
    if dtype is None:
        return replace(reached, attention=0.5, attention_backward=0.5, attention_length=0.0, attention_depth=0.0)
    narrow, wide, long = rates.attention[dtype]
    depth = half_depth({each.head_dim: _of_both_passes(each) for each in (narrow, wide)})
    length = half_depth({each.positions: _of_both_passes(each) for each in (wide, long)})
    shares = [
        (1 + depth / each.head_dim) * (1 + length / each.positions) * rate / peaks[dtype]
        for each in (narrow, wide, long)
        for rate in each[-2:]
    ]
    return replace(
        reached,
        attention=geometric_mean(shares[::2]),
        attention_backward=geometric_mean(shares[1::2]),
        attention_length=length,
        attention_depth=depth,
    )


def _of_both_passes(rate: AttentionRate) -> float:
    """Return the FLOP/s of both passes; the backward pass has 2.5 times the operations of the forward pass."""
    return 3.5 / (1 / rate.forward + 2.5 / rate.backward)


def half_depth(rates: Mapping[int, float], least: int = 0) -> float:
    """Fit the size d at which a product reaches half its rate, if the rate at size n is proportional to n / (n + d).

    Args:
        rates: FLOP/s by size.
        least: smallest size to consider.
    """
    sizes = sorted(size for size in rates if size >= least)
    largest = sizes[-1]
    found = []
    for size in sizes[:-1]:
        ratio = rates[largest] / rates[size]  # n (s + d) / (s (n + d)) for sizes n and s
        if ratio > 1 and largest > ratio * size:
            found.append(size * largest * (ratio - 1) / (largest - ratio * size))
    return median(found) if found else 0.0


def measured_link(rates: RankRates) -> Link:
    """Fit the link that explains the collectives of shared memory or NCCL as rings, or for one rank a copy."""
    if not rates.collectives:
        return Link(rates.memory_bandwidth / 2, rates.kernel)
    groups = {"pairs": 2, "all_reduce": rates.ranks}
    bandwidths, latencies = [], []
    for name, ranks in groups.items():
        measured = rates.collectives[name]
        bandwidths.append(2 * (ranks - 1) / ranks * measured.bandwidth)
        latencies.append(measured.latency / (2 * (log2(ranks) if measured.transport == NCCL else 1)))
    return Link(geometric_mean(bandwidths), geometric_mean(latencies))


def _gpu_memory(name: str) -> int:
    import torch

    if torch.cuda.is_available():
        return int(torch.cuda.get_device_properties(0).total_memory)
    entry = entry_of_gpu(name, 0)
    return entry.memory_bytes if entry is not None else 16 * _GIB
