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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from math import log2
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, Final, Literal

from threefold.byte_sizes import format_bytes
from threefold.comm.layout import AXES
from threefold.errors import UserError
from threefold.files import shown
from threefold.host import memory, usable_cores
from threefold.models.block import describe_model
from threefold.planner.block_cost import block_seconds, cost_block
from threefold.planner.hardware import THIS_MACHINE, Achievable, Hardware, Link, cpu_name, entry_of_gpu
from threefold.planner.measuring import (
    NCCL,
    QUICK,
    AttentionRate,
    MeasuringEffort,
    RankRates,
    measure_ranks,
    tiny_config,
)
from threefold.planner.systems import SYSTEMS

SHARED_MEMORY: Final = Path("/dev/shm")
_LIBRARIES: Final = ("torch", "numpy", "triton", "tokenizers", "safetensors", "pydantic", "transformers")
_QUERY: Final = "name,driver_version,clocks.sm,clocks.max.sm,ecc.mode.current,power.limit,power.max_limit"
_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Gpu:
    """GPU as its driver describes it; unknown strings are empty.

    Attributes:
        name, driver: name of the GPU type, and driver version.
        clock, largest_clock: current and highest clock of its multiprocessors in MHz; 0 if unknown.
        ecc: state of error correction: `Enabled` or `Disabled`.
        power_limit, largest_power_limit: watts; 0 if unknown.
    """

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

    Attributes:
        host, system: host name, and operating system with its kernel.
        processor: name and usable cores, as `cpu_name` returns them.
        cores, machine_cores: cores that this process may use, and cores of the machine.
        quota: cores' worth of time that the control group allows; 0 for no limit.
        memory, swap: usable bytes of memory, and bytes of swap space.
        shared_memory: free bytes of /dev/shm; 0 if it does not exist.
        open_files: limit of open files per process.
        load: mean number of runnable processes in the last minute; 0 if unknown.
        compiler: path of a C compiler; empty for none.
        gpus: GPUs of this machine.
        versions: versions of the interpreter and libraries, by name.
        backends: availability of each `torch.distributed` backend.
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


def this_machine() -> Machine:
    """Describe this machine without measuring. Imports torch, but does not initialise CUDA."""
    import torch.distributed as dist

    backends = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    return Machine(
        host=socket.gethostname(),
        system=f"{platform.system()} {platform.release()} ({platform.machine()})",
        processor=cpu_name(),
        cores=usable_cores(),
        machine_cores=os.cpu_count() or 1,
        quota=_quota(Path("/sys/fs/cgroup/cpu.max")),
        memory=memory(),
        swap=_swap(),
        shared_memory=_free(SHARED_MEMORY),
        open_files=_open_files(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0,
        compiler=_compiler(),
        gpus=_gpus(),
        versions=_versions(),
        backends=backends,
    )


def _versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version()}
    for name in _LIBRARIES:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    found["torch"] = torch.__version__
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if torch.cuda.is_available():
        with suppress(Exception):  # torch raises if it cannot load the library
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _compiler() -> str:
    given = (os.environ.get("CXX") or os.environ.get("CC") or "").split()
    names = (*given[:1], "g++", "clang++", "c++", "gcc", "cc")
    return next((found for name in names if (found := shutil.which(name))), "")


def _gpus() -> tuple[Gpu, ...]:
    """List the GPUs by nvidia-smi, which initialises nothing in this process, or else by torch."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return tuple(gpu_of(line) for line in done.stdout.splitlines() if line.strip())
    import torch

    return tuple(Gpu(f"GPU {number}") for number in range(torch.cuda.device_count()))


def gpu_of(line: str) -> Gpu:
    """Parse a line of nvidia-smi's answer to the query."""
    name, driver, clock, largest, ecc, power, most = [*(part.strip() for part in line.split(",")), *[""] * 7][:7]
    return Gpu(name, driver, _number(clock), _number(largest), ecc.strip("[]"), _number(power), _number(most))


def _number(text: str) -> float:
    with suppress(ValueError):
        return float(text)
    return 0.0


def _quota(file: Path) -> float:
    with suppress(OSError, ValueError):
        quota, period = file.read_text().split()
        return float(quota) / float(period)
    return 0.0


def _swap() -> int:
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) * 1024
    return 0


def _free(folder: Path) -> int:
    with suppress(OSError):
        found = os.statvfs(folder)
        return found.f_bavail * found.f_frsize
    return 0


def _open_files() -> int:
    if sys.platform == "win32":
        return 0
    import resource

    return resource.getrlimit(resource.RLIMIT_NOFILE)[0]


_CLASS = Path("/sys/class/net")
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Interface:
    """Network interface of this machine.

    Attributes:
        name: name, such as `eth0`.
        address: IPv4 or else IPv6 address; empty for none.
        megabits: megabits per second reported by the driver; 0 if unknown.
    """

    name: str
    address: str
    megabits: int = 0

    def __str__(self) -> str:
        speed = f", {self.megabits / 1000:g} Gb/s" if self.megabits else ""
        return f"{self.name} ({self.address or 'no address'}{speed})"


@dataclass(frozen=True)
class AxisRoute:
    """Transports between the ranks of a mesh axis: on this host (`here`), and between hosts."""

    axis: str
    here: str
    hosts: str


def interfaces() -> list[Interface]:
    """List the network interfaces of this machine, in the system's order."""
    return [Interface(name, _address(name), _speed(name)) for _, name in socket.if_nameindex()]


def between_hosts(found: list[Interface]) -> Interface | None:
    """Return gloo's interface between hosts: the one in `GLOO_SOCKET_IFNAME`, or the one with the host's address."""
    named = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
    if named:
        return next((each for each in found if each.name == named), Interface(named, ""))
    address = ""
    with suppress(OSError):
        address = socket.gethostbyname(socket.gethostname())
    own = next((each for each in found if each.address == address), None)
    return own or next((each for each in found if each.address and not _is_loopback(each)), None)


def axis_routes(device: str, found: list[Interface]) -> list[AxisRoute]:
    """List the transports of each mesh axis.

    Args:
        device: device of the ranks, `cpu` or `cuda`.
        found: network interfaces.
    """
    outside = between_hosts(found)
    loopback = next((each for each in found if _is_loopback(each)), None)
    over = str(outside) if outside else "no interface has an address"
    if device == "cuda":
        adapters = sorted(path.name for path in _INFINIBAND.iterdir()) if _INFINIBAND.is_dir() else []
        here = "NCCL over NVLink or PCIe"
        hosts = f"NCCL over InfiniBand or RoCE ({', '.join(adapters)})" if adapters else f"NCCL over {over}"
        return [AxisRoute(axis, here, hosts) for axis in (*AXES, "ep")]
    inside = {"ep": f"gloo over {loopback or over}"}
    return [AxisRoute(axis, inside.get(axis, "shared memory"), f"gloo over {over}") for axis in (*AXES, "ep")]


def _is_loopback(interface: Interface) -> bool:
    return bool(re.fullmatch(r"lo\d*", interface.name))


def _address(name: str) -> str:
    """Return an interface's IPv4 address (SIOCGIFADDR), or else its IPv6 address from /proc."""
    with suppress(ImportError, OSError):
        import fcntl

        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            answer = fcntl.ioctl(asking.fileno(), 0x8915, name.encode()[:15].ljust(256, b"\0"))
        return socket.inet_ntoa(answer[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, own = line.split()
            if own == name:
                return socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
    return ""


def _speed(name: str) -> int:
    with suppress(OSError, ValueError):
        return max(0, int((_CLASS / name / "speed").read_text()))
    return 0


_BLOCK = 4 << 20


@dataclass(frozen=True)
class DiskSpeed:
    """Speed of a folder's disk in bytes per second until written data is on it, and its free bytes."""

    folder: str
    bandwidth: float
    free: int


def measure_disk(folder: Path, nbytes: int) -> DiskSpeed:
    """Write `nbytes` into a temporary file of `folder` and time it until they are on the disk.

    Raises:
        UserError: the folder cannot be written.
    """
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
