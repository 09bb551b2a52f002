"""Description of this machine without measurements, except of the disk: processor, memory, limits, GPUs, network."""

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
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from threefold.comm.layout import AXES
from threefold.errors import UserError
from threefold.files import shown
from threefold.host import memory, usable_cores
from threefold.planner.hardware import cpu_name

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
