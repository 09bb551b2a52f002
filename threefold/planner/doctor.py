"""Examination of this machine: its parts, network, disk and rates, its problems in words, and its hardware entry."""

import importlib.metadata
import os
import platform
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import isfinite
from pathlib import Path
from typing import Any, Final, Literal, get_args

from threefold.comm.layout import AXES
from threefold.errors import UserError
from threefold.files import format_bytes, shown
from threefold.host import cpu_quota, interface_address, memory, usable_cores
from threefold.models.block import describe_model
from threefold.planner import measuring
from threefold.planner.cost import block_seconds, cost_block
from threefold.planner.hardware import THIS_MACHINE, Achievable, Hardware, cpu_name, entry_of_gpu
from threefold.planner.measuring import RankRates
from threefold.planner.systems import SYSTEMS

RANKS: Final = (2, 4, 8)
"""Numbers of local ranks that are measured on a CPU."""

RunRanks = Callable[[Callable[..., object], tuple[Any, ...], int, str], object]
"""Function that runs a worker on some local ranks of a device and returns the first rank's result."""
Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class MachineFinding:
    """Problem of a machine (an error if training cannot work, a warning if it is slower or may fail) and its remedy."""

    severity: Severity
    text: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.text[0].upper()}{self.text[1:]}: {self.remedy}."


@dataclass(frozen=True)
class Gpu:
    """GPU as its driver describes it, with clocks in MHz, limits in watts, and `Enabled` or `Disabled` for error
    correction; unknown strings are empty, unknown numbers 0."""

    name: str
    driver: str = ""
    clock: float = 0.0
    largest_clock: float = 0.0
    ecc: str = ""
    power_limit: float = 0.0
    largest_power_limit: float = 0.0


@dataclass(frozen=True)
class Machine:
    """Description of this machine.

    Of `machine_cores`, this process may use `cores`; the control group allows `quota` cores' worth of time (0 for no
    limit), rounded up in `cores`. Memory is in usable bytes, shared memory in free bytes of /dev/shm (0 if it cannot be
    written), open files are the limit per process, and load is the mean number of runnable processes in the last
    minute (0 if unknown). `compiler` is the path of a C compiler, empty for none; `backends` has the availability of
    each `torch.distributed` backend.
    """

    host: str
    system: str
    processor: str
    cores: int
    machine_cores: int
    quota: float
    memory: int
    swap: int
    shared_memory: int
    open_files: int
    load: float
    compiler: str
    gpus: tuple[Gpu, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    backends: dict[str, bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Interface:
    """Network interface: its name, its IPv4 or else IPv6 address (empty for none), and Mb/s (0 if unknown)."""

    name: str
    address: str
    megabits: int = 0

    def __str__(self) -> str:
        speed = f", {self.megabits / 1000:g} Gb/s" if self.megabits else ""
        return f"{self.name} ({self.address or 'no address'}{speed})"

    @property
    def is_loopback(self) -> bool:
        return bool(re.fullmatch(r"lo\d*", self.name))


@dataclass(frozen=True)
class AxisRoute:
    """Transports between the ranks of a mesh axis: on this host (`here`), and between hosts."""

    axis: str
    here: str
    hosts: str


@dataclass(frozen=True)
class DiskSpeed:
    """Speed of a folder's disk in bytes per second until written data is on it, and its free bytes."""

    folder: str
    bandwidth: float
    free: int


@dataclass(frozen=True)
class Examination:
    """Description of a machine with its network, rates (of one rank, then of several), disk and problems.

    The device is `cuda` if torch can use a GPU; the disk is that of the given folder, None if it cannot be written.
    """

    machine: Machine
    device: str
    interfaces: tuple[Interface, ...]
    routes: tuple[AxisRoute, ...]
    rates: tuple[RankRates, ...]
    disk: DiskSpeed | None
    findings: tuple[MachineFinding, ...]

    def as_json(self) -> dict[str, Any]:
        values = asdict(self)
        for rates in values["rates"]:
            rates["matrix"] = {
                dtype: {str(size): rate for size, rate in sizes.items()} for dtype, sizes in rates["matrix"].items()
            }
        return values


def examine(
    run_ranks: RunRanks, folder: Path, quick: bool = False, tell: Callable[[str, int, int], None] = lambda *_: None
) -> Examination:
    """Examine this machine, which takes half a minute, or some seconds with `quick`, which measures two ranks at most.

    `tell` is called before each part with its name, its index from 0 and the number of parts.
    """
    import torch

    machine, found = this_machine(), interfaces()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0  # without initialising CUDA
    device = "cuda" if gpus else "cpu"
    counts: tuple[int, ...] = (1, 2) if quick else (1, *RANKS)
    if gpus:
        counts = tuple(count for count in (1, *RANKS) if count <= gpus)
    parts = [f"{count} {'rank' if count == 1 else 'ranks'}" for count in counts] + ["disk"]
    rates: list[RankRates] = []
    problems: list[MachineFinding] = []
    for number, count in enumerate(counts):
        tell(parts[number], number, len(parts))
        effort = measuring.QUICK if quick else measuring.MeasuringEffort()
        if not quick and gpus:
            attention = ((2048, 64), (2048, 128), (8192, 128))
            sizes = (512, 1024, 2048, 4096, 8192)
            effort = measuring.MeasuringEffort(sizes=sizes, nbytes=256 << 20, attention=attention, copied=1 << 30)
        elif not quick and count not in (1, counts[-1]):
            effort = measuring.MeasuringEffort(sizes=(256,), seconds=0.2)
        try:
            measured = run_ranks(measuring.measure_ranks, (("fp32", "bf16"), effort, device), count, device)
            assert isinstance(measured, RankRates)
            rates.append(measured)
        except (UserError, RuntimeError) as error:
            reason = str(error).splitlines()[0].rstrip(".") if str(error) else type(error).__name__
            remedy = "see what the sentence says; nothing can be trained with so many ranks before"
            problems.append(MachineFinding("error", f"{parts[number]} cannot be run here: {reason}", remedy))
    tell("disk", len(counts), len(parts))
    disk = None
    try:
        disk = measure_disk(folder, 16 << 20 if quick else 128 << 20)
    except UserError as error:
        remedy = "give a folder that can be written, with --folder"
        problems.append(MachineFinding("warning", str(error).rstrip("."), remedy))
    problems += findings_of(machine, device, rates, disk, between_hosts(found))
    routes = tuple(axis_routes(device, found))
    return Examination(machine, device, tuple(found), routes, tuple(rates), disk, tuple(problems))


def findings_of(
    machine: Machine, device: str, rates: Sequence[RankRates], disk: DiskSpeed | None, outside: Interface | None = None
) -> list[MachineFinding]:
    """Return the findings about a machine, the worst first; `outside` is the interface to other hosts, if known."""
    found = [*_of_host(machine), *_of_rates(machine, device, rates), *_of_gpus(machine, device)]
    if disk is not None and disk.bandwidth < 100e6:
        text = f"the disk of {disk.folder} takes {format_bytes(int(disk.bandwidth))}/s, so checkpoints take long"
        found.append(MachineFinding("warning", text, "write runs to a faster disk, or set checkpoint.async_save: true"))
    if outside is not None and outside.address.startswith("127."):
        text = f"the name {machine.host} resolves to {outside.address}, which no other host can reach"
        remedy = "for runs on several hosts give its address in /etc/hosts, or set GLOO_SOCKET_IFNAME to an interface"
        found.append(MachineFinding("note", text, remedy))
    return sorted(found, key=lambda finding: get_args(Severity).index(finding.severity))


def _of_host(machine: Machine) -> Iterator[MachineFinding]:
    if not machine.backends.get("gloo"):
        yield MachineFinding("error", "this build of torch has no gloo", "install torch from https://pytorch.org")
    if 0 < machine.quota <= machine.cores and machine.quota < machine.machine_cores:
        text = f"the control group allows {machine.quota:g} cores' worth of time, on {machine.machine_cores} cores"
        yield MachineFinding("warning", text, "raise the container's limit of CPU time (docker --cpus)")
    if machine.load > machine.cores / 2:
        text = f"other programs keep {machine.load:.1f} processes busy on {machine.cores} cores"
        yield MachineFinding("warning", text, "measure again when the machine is quiet, as all rates here are too low")
    if not machine.shared_memory and machine.system.startswith("Linux"):
        text = "/dev/shm is missing, full or read-only, so local ranks share memory in files of TMPDIR, or use sockets"
        yield MachineFinding("warning", text, "mount it writable (docker --shm-size 2g, or --tmpfs /dev/shm)")
    if 0 < machine.shared_memory < 256 << 20:
        text = f"/dev/shm has {format_bytes(machine.shared_memory)} free, too little for the collectives of many ranks"
        yield MachineFinding("warning", text, "make it larger (docker --shm-size 2g); without, ranks talk over sockets")
    if 0 < machine.open_files < 4096:
        text = f"a process may have {machine.open_files:,} files open, and ranks take several for each other rank"
        yield MachineFinding("warning", text, "raise the limit with `ulimit -n 65536`")
    if not machine.compiler:
        text = "there is no C compiler, which train.compile needs"
        yield MachineFinding("note", text, "install one (apt install g++) if you want compiled layers")
    if not machine.swap:
        text = "there is no swap, so a rank that needs too much memory is killed at once"
        yield MachineFinding("note", text, "check the memory use that `threefold estimate` reports before a large run")


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
        text = "this build of torch has no NCCL"
        yield MachineFinding("error", text, "install torch for CUDA from https://pytorch.org")
    for number, gpu in enumerate(machine.gpus):
        if "disabled" in gpu.ecc.lower():
            text = f"GPU {number} ({gpu.name}) does not correct memory errors (ECC is disabled)"
            remedy = "enable it with `nvidia-smi -e 1` and restart, or set train.watch_every"
            yield MachineFinding("warning", text, remedy)
        if 0 < gpu.power_limit < gpu.largest_power_limit:
            text = f"GPU {number} is limited to {gpu.power_limit:.0f} W of {gpu.largest_power_limit:.0f} W"
            yield MachineFinding("warning", text, "raise it with `nvidia-smi -pl`, or expect lower rates")
        if 0 < gpu.clock < 0.6 * gpu.largest_clock:
            text = f"GPU {number} runs at {gpu.clock:.0f} MHz of {gpu.largest_clock:.0f} MHz"
            remedy = "that is usual while it idles; under load look for heat or a power limit"
            yield MachineFinding("note", text, remedy)
    if len({gpu.name for gpu in machine.gpus}) > 1:
        yield MachineFinding("warning", "the GPUs are of different types", "give each run GPUs of one type")


def measured_entry(found: Examination) -> Hardware | None:
    """Build the entry `this-machine`; None if no ranks could be measured.

    Its rates are those of each rank in the largest measurement while all ranks computed, so no further fraction
    applies; only the depth at which a product reaches half of its rate is fitted.
    """
    several = [rates for rates in found.rates if any(rates.matrix.values())]
    if not several:
        return None
    most, machine, is_gpu = several[-1], found.machine, found.device == "cuda"
    rates = {dtype: max(sizes.values()) for dtype, sizes in most.matrix.items() if sizes}
    fp32 = most.matrix.get("fp32") or next(sizes for sizes in most.matrix.values() if sizes)
    largest = max(fp32)
    depth = measuring.half_depth(fp32, 128 if largest >= 128 else 0)
    peaks = {dtype: rate * (1 + depth / largest) for dtype, rate in rates.items()}
    title, bytes_of_rank = machine.processor, max(1, machine.memory // most.ranks)
    if is_gpu:
        title = machine.gpus[0].name if machine.gpus else "GPU"
        import torch

        listed = entry_of_gpu(title, 0)
        bytes_of_rank = listed.memory_bytes if listed is not None else 16 << 30
        if torch.cuda.is_available():
            bytes_of_rank = int(torch.cuda.get_device_properties(0).total_memory)
    link = measuring.measured_link(most)
    whole = dict.fromkeys(("matrix", "memory", "link", "network"), 1.0)
    shares = whole | measuring.attention_shares(most, peaks)
    reached = Achievable(**shares, matrix_depth=depth, kernel=most.kernel, step=0.0)
    measured = f"{most.ranks} local ranks of {most.threads} threads at the same time"
    entry = Hardware(
        name=THIS_MACHINE,
        title=title,
        device=found.device,
        matrix_rates=peaks,
        memory_bytes=bytes_of_rank,
        memory_bandwidth=most.memory_bandwidth,
        gpus_per_node=most.ranks,
        inside=link,
        between=link,
        achievable=reached,
        cores=0 if is_gpu else machine.cores,
        sources=(f"threefold doctor on {machine.host}: {measured}",),
    )
    if is_gpu:  # a GPU's kernels run beside the host's work
        return replace(entry, achievable=replace(reached, block=most.block))
    kinds = "sharded_block", "tensor_block", "context_block"
    longer = {kind: max(0.0, getattr(most, kind) - most.block) for kind in kinds}
    kernels = 0.0  # the part of the measured block time that is not the host's work
    if most.block:
        config, system = measuring.tiny_config(), SYSTEMS["own-cpu"]
        block = describe_model(config.model, config.data.sequence_length).blocks[0]
        kernels = block_seconds(cost_block(config, block, 1, system), entry, system).total
    return replace(entry, achievable=replace(reached, block=max(0.0, most.block - kernels), **longer))


_LIBRARIES: Final = ("torch", "numpy", "triton", "tokenizers", "safetensors", "pydantic", "transformers")
_QUERY: Final = "name,driver_version,clocks.sm,clocks.max.sm,ecc.mode.current,power.limit,power.max_limit"
_NETWORK, _INFINIBAND = Path("/sys/class/net"), Path("/sys/class/infiniband")
_BLOCK: Final = 4 << 20


def this_machine() -> Machine:
    """Describe this machine without measuring. Imports torch, but does not initialise CUDA."""
    import torch
    import torch.distributed as dist

    versions = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    versions["torch"] = torch.__version__
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    if torch.cuda.is_available():
        with suppress(Exception):  # torch raises if it cannot load the library
            versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    quota, swap, shared_memory, open_files = cpu_quota(), 0, 0, 0
    if found := re.search(r"^SwapTotal:\s*(\d+)", _text("/proc/meminfo"), re.MULTILINE):
        swap = int(found[1]) * 1024
    if os.access("/dev/shm", os.W_OK):  # not where it is mounted read-only
        folder = os.statvfs("/dev/shm")
        shared_memory = folder.f_bavail * folder.f_frsize
    if sys.platform != "win32":
        import resource

        open_files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    chosen = (os.environ.get("CXX") or os.environ.get("CC") or "").split()
    compilers = map(shutil.which, (*chosen[:1], "g++", "clang++", "c++", "gcc", "cc"))
    return Machine(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        processor=cpu_name(),
        cores=usable_cores(),
        machine_cores=os.cpu_count() or 1,
        quota=quota if isfinite(quota) else 0.0,
        memory=memory(),
        swap=swap,
        shared_memory=shared_memory,
        open_files=open_files,
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        compiler=next(filter(None, compilers), ""),
        gpus=_gpus(),
        versions=versions,
        backends={"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()},
    )


def _text(path: str | Path) -> str:
    """Return the text of a file of the operating system; empty if there is none."""
    with suppress(OSError):
        return Path(path).read_text()
    return ""


def _gpus() -> tuple[Gpu, ...]:
    """List the GPUs by nvidia-smi, which initialises nothing in this process, or else by torch."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
        return tuple(gpu_of(line) for line in done.stdout.splitlines() if line.strip())
    import torch

    return tuple(Gpu(f"GPU {number}") for number in range(torch.cuda.device_count()))


def gpu_of(line: str) -> Gpu:
    """Parse a line of nvidia-smi's answer to the query."""

    def number(text: str) -> float:
        with suppress(ValueError):
            return float(text)
        return 0.0

    name, driver, clock, largest, ecc, power, most = [*(part.strip() for part in line.split(",")), *[""] * 7][:7]
    return Gpu(name, driver, number(clock), number(largest), ecc.strip("[]"), number(power), number(most))


def interfaces() -> list[Interface]:
    """List the network interfaces of this machine, in the system's order."""
    found = []
    for _, name in socket.if_nameindex():
        speed = 0
        with suppress(ValueError):
            speed = max(0, int(_text(_NETWORK / name / "speed")))
        found.append(Interface(name, interface_address(name), speed))
    return found


def between_hosts(found: list[Interface]) -> Interface | None:
    """Return gloo's interface between hosts: the one in `GLOO_SOCKET_IFNAME`, or the one with the host's address."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named:
        return next((each for each in found if each.name == named), Interface(named, ""))
    address = ""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    own = next((each for each in found if each.address == address), None)
    return own or next((each for each in found if each.address and not each.is_loopback), None)


def axis_routes(device: str, found: list[Interface]) -> list[AxisRoute]:
    """List the transports of each mesh axis for ranks on `cpu` or `cuda`."""
    over = str(between_hosts(found) or "no interface has an address")
    if device == "cuda":
        adapters = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
        hosts = f"NCCL over InfiniBand or RoCE ({', '.join(adapters)})" if adapters else f"NCCL over {over}"
        return [AxisRoute(axis, "NCCL over NVLink or PCIe", hosts) for axis in (*AXES, "ep")]
    hosts = f"gloo over {over}"
    loopback = next((each for each in found if each.is_loopback), None)
    routes = [AxisRoute(axis, "shared memory", hosts) for axis in AXES]
    return [*routes, AxisRoute("ep", f"gloo over {loopback or over}", hosts)]


def measure_disk(folder: Path, nbytes: int) -> DiskSpeed:
    """Time writing `nbytes` into a temporary file of `folder` until they are on the disk; UserError if that fails."""
    block = os.urandom(_BLOCK)  # random, so that no disk compresses it
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".threefold-doctor-") as file:
            started = time.perf_counter()
            for _ in range(max(1, nbytes // _BLOCK)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            seconds = time.perf_counter() - started
        space = os.statvfs(folder)
    except OSError as error:
        raise UserError(f"The folder {shown(str(folder))} cannot be written: {error.strerror}.") from None
    return DiskSpeed(str(folder.resolve()), max(_BLOCK, nbytes) / seconds, space.f_bavail * space.f_frsize)
