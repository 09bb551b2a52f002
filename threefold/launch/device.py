"""Choose the device of a run, CPU or CUDA."""

from pathlib import Path
from typing import Final, Literal

from threefold.errors import UserError

Backend = Literal["auto", "gloo"]
"""Value of `parallel.backend`."""

_DRIVERS: Final = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""Device files of the drivers of NVIDIA (Linux, Tegra, WSL) and AMD GPUs; torch needs one of them."""


def choose_device(
    setting: Literal["auto", "cpu", "cuda"], dtype: str, local_world_size: int, backend: Backend = "auto"
) -> Literal["cpu", "cuda"]:
    """Resolve `train.device`: `auto` is CUDA if there is a GPU for each rank of this host; over gloo they may share.

    A `UserError` is raised if `setting` is cuda and there are fewer GPUs than ranks.
    """
    if setting == "cuda":
        require_gpus(local_world_size, backend)
        return "cuda"
    if setting == "cpu" or dtype == "fp64":
        return "cpu"
    return "cuda" if gpu_count() >= (1 if backend == "gloo" else local_world_size) else "cpu"


def require_gpus(local_world_size: int, backend: Backend = "auto") -> None:
    """Raise `UserError` unless there is a GPU for each rank of this host; over gloo, unless there is at least one."""
    gpus = gpu_count()
    if gpus < (1 if backend == "gloo" else local_world_size):
        fewer = f", start at most {gpus} ranks here, or debug with parallel.backend gloo" if gpus else ""
        raise UserError(
            f"train.device is cuda but this machine has {gpus} GPUs for {local_world_size} ranks; "
            f"set train.device to cpu{fewer}."
        )


def gpu_count() -> int:
    """Count the GPUs that torch can use, without initialising CUDA, which forked workers could not use afterwards.

    Without a driver, torch is not imported: the import takes seconds, and a config error should not wait for it.
    """
    if not any(Path(driver).exists() for driver in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()
