"""Which hardware entry is that of this machine, and the peak rate of one of its ranks."""

import re
from pathlib import Path

from threefold.errors import UserError
from threefold.host import usable_cores
from threefold.plan.hardware.catalogue import THIS_MACHINE, find_hardware, hardware_names, user_folder
from threefold.plan.hardware.entry import Hardware

_OTHER_VARIANTS = ("pcie", "nvl", "max-q", "laptop")
"""In names of GPUs that are slower than the entry of their type."""


def cpu_name() -> str:
    """The processor of this machine, with the cores that this process may use; by this a saved entry is recognised."""
    found = re.search(r"^(?:model name|Processor|cpu model)\s*:\s*(.+)$", _processors(), re.MULTILINE)
    name = " ".join(found[1].split()) if found else _architecture()
    cores = usable_cores()
    return f"{name}, {cores} {'core' if cores == 1 else 'cores'}"


def saved_entry(title: str) -> Hardware | None:
    """What `threefold doctor` has measured; None where it has not, or on a machine of another `title`."""
    if not (user_folder() / f"{THIS_MACHINE}.yaml").is_file():
        return None
    entry = _readable(THIS_MACHINE)
    return entry if entry is not None and entry.title == title else None


def entry_of_gpu(name: str, memory: int) -> Hardware | None:
    """The entry of a type of GPU; None where the catalogue has none.

    Args:
        name: as the driver has it, such as `NVIDIA A100-SXM4-80GB`.
        memory: bytes, by which types of the same name are told apart.
    """
    words = set(re.split(r"[\s_/-]+", name.lower()))
    if any(variant in words for variant in _OTHER_VARIANTS):
        return saved_entry(name)
    of_type = [each for each in hardware_names() if each != THIS_MACHINE and each.split("-")[0] in words]
    entries = [entry for each in of_type if (entry := _readable(each)) is not None and entry.device == "cuda"]
    return min(entries, key=lambda entry: abs(entry.memory_bytes - memory), default=saved_entry(name))


def peak_rate(dtype: str, device: str, local_ranks: int, gpu: tuple[str, int] | None = None) -> float | None:
    """FLOP/s of matrix products that a rank of this machine can reach at most; None where that is not known.

    Args:
        dtype: as `precision.dtype`.
        device: `cpu` or `cuda`.
        local_ranks: of this machine; they share the cores of a CPU.
        gpu: name and bytes of memory of the rank's GPU.
    """
    if device == "cuda":
        entry = entry_of_gpu(*gpu) if gpu is not None else None
        return entry.matrix_rates.get(dtype) if entry is not None else None
    entry = saved_entry(cpu_name())
    if entry is None or entry.device != "cpu" or dtype not in entry.matrix_rates:
        return None
    return entry.matrix_rates[dtype] * entry.gpus_per_node / local_ranks


def _readable(name: str) -> Hardware | None:
    """An entry; None where it has a mistake, for which no run ends."""
    try:
        return find_hardware(name)
    except UserError:
        return None


def _processors() -> str:
    try:
        return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return ""


def _architecture() -> str:
    import platform

    return platform.processor() or platform.machine()
