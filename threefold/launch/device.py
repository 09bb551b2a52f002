"""Which device the ranks of this host compute on."""

from pathlib import Path
from typing import Final, Literal

from threefold.errors import UserError
from threefold.host import memory

_SHARE = {"cpu": 0.5, "cuda": 0.7}
"""Of the memory, that a run plans with: the rest is for what no formula counts, and on a CPU for other programs."""
_OWN = {"cpu": 400 << 20, "cuda": 1 << 30}
"""Bytes of a rank's process before it has a model: torch itself, and on a GPU its context and NCCL's buffers."""

_DRIVERS: Final = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""What the drivers of NVIDIA's GPUs (Linux, Tegra, WSL) and of AMD's make, of which torch needs one."""


def choose_device(setting: Literal["auto", "cpu", "cuda"], dtype: str, local_world_size: int) -> Literal["cpu", "cuda"]:
    """The device of `train.device`: `auto` takes CUDA when there is a GPU for each rank of this host.

    Raises:
        UserError: CUDA is asked for and there are fewer GPUs than ranks.
    """
    if setting == "cuda":
        require_gpus(local_world_size)
        return "cuda"
    if setting == "cpu" or dtype == "fp64":
        return "cpu"
    return "cuda" if gpu_count() >= local_world_size else "cpu"


def require_gpus(local_world_size: int) -> None:
    """Check that each rank of this host has its GPU.

    Raises:
        UserError: there are fewer.
    """
    gpus = gpu_count()
    if gpus < local_world_size:
        fewer = f" or start at most {gpus} ranks here" if gpus else ""
        raise UserError(
            f"train.device is cuda but this machine has {gpus} GPUs for {local_world_size} ranks; "
            f"set train.device to cpu{fewer}."
        )


def gpu_count() -> int:
    """GPUs that torch can use, counted without initialising CUDA (forked workers could not use it then).

    Where no driver is, torch is not asked: importing it takes seconds, which an error in a config should not wait for.
    """
    if not any(Path(driver).exists() for driver in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def memory_per_rank(device: Literal["cpu", "cuda"], local_world_size: int) -> int:
    """Bytes that a rank of this host may plan with: the same whenever it is asked.

    Args:
        device: what it computes on; of several GPUs, the smallest counts.
        local_world_size: ranks of this host, which share the memory of a CPU.
    """
    if device == "cpu":
        return max(0, int(memory() * _SHARE[device] / local_world_size) - _OWN[device])
    import torch

    sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpu_count())]
    return max(0, int(min(sizes) * _SHARE[device]) - _OWN[device])
