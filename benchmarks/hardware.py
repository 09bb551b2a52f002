"""Description of the benchmark machine in one line."""

import os
import platform
from pathlib import Path

import torch

from threefold.host import usable_cores


def hardware_line() -> str:
    """Return processor, usable cores, current load, and versions."""
    cores = usable_cores()
    load = os.getloadavg()[0]
    return (
        f"{_processor()}, {cores} cores (load {load:.1f}, capability {torch.backends.cpu.get_cpu_capability()}), "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    names = (
        [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()
