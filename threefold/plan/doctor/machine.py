"""What this machine is: processor, memory, limits, GPUs, libraries and backends. Nothing is measured here."""

import importlib.metadata
import os
import platform
import shutil
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from threefold.host import memory, usable_cores
from threefold.plan.hardware.of_machine import cpu_name

SHARED_MEMORY: Final = Path("/dev/shm")
_LIBRARIES: Final = ("torch", "numpy", "triton", "tokenizers", "safetensors", "pydantic", "transformers")
_QUERY: Final = "name,driver_version,clocks.sm,clocks.max.sm,ecc.mode.current,power.limit,power.max_limit"
_SECONDS: Final = 10.0


@dataclass(frozen=True)
class Gpu:
    """A GPU as its driver tells of it.

    Attributes:
        name: of its type.
        driver: version; empty where it is not known, as all texts.
        clock, largest_clock: MHz of its multiprocessors now and at most; 0 where they are not known.
        ecc: whether memory errors are corrected: `Enabled`, `Disabled`.
        power_limit, largest_power_limit: watts; 0 where they are not known.
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
    """This machine.

    Attributes:
        host: its name.
        system: operating system and kernel.
        processor: its name and the cores that may be used, as `cpu_name`.
        cores: that this process may use.
        machine_cores: that there are.
        quota: cores' worth of time that the control group allows; 0 for no limit.
        memory: bytes that may be used.
        swap: bytes of swap space.
        shared_memory: free bytes of /dev/shm; 0 where there is none.
        open_files: that a process may have.
        load: processes that wanted to run in the last minute; 0 where it is not known.
        compiler: path of a C compiler; empty for none.
        gpus: of this machine.
        versions: of the libraries and the interpreter, by name.
        backends: of torch.distributed, and whether each is there.
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
    """What can be known of this machine without measuring. Imports torch, and does not initialise CUDA."""
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
        with suppress(Exception):  # of torch, where the library cannot be loaded
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _compiler() -> str:
    given = (os.environ.get("CXX") or os.environ.get("CC") or "").split()
    names = (*given[:1], "g++", "clang++", "c++", "gcc", "cc")
    return next((found for name in names if (found := shutil.which(name))), "")


def _gpus() -> tuple[Gpu, ...]:
    """By the tool of the driver, which initialises nothing in this process; or as torch counts them."""
    with suppress(OSError, subprocess.SubprocessError):
        command = ["nvidia-smi", f"--query-gpu={_QUERY}", "--format=csv,noheader,nounits"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
        return tuple(gpu_of(line) for line in done.stdout.splitlines() if line.strip())
    import torch

    return tuple(Gpu(f"GPU {number}") for number in range(torch.cuda.device_count()))


def gpu_of(line: str) -> Gpu:
    """A line of what nvidia-smi answers."""
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
