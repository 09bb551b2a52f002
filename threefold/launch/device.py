"""Which device the ranks of this host compute on."""

from pathlib import Path
from typing import Final, Literal

from threefold.errors import UserError

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
