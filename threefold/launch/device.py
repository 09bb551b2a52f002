"""Choice of the device (CPU or CUDA), and the memory budget of a rank."""

from pathlib import Path
from typing import Final, Literal

from threefold.errors import UserError
from threefold.host import memory

Backend = Literal["auto", "gloo"]
"""As `parallel.backend` has it."""

_SHARE = {"cpu": 0.5, "cuda": 0.7}
"""Fraction of the memory that a run may use; the rest is for fragmentation and, on a CPU, for other programs."""
_OWN = {"cpu": 400 << 20, "cuda": 1 << 30}
"""Bytes of a rank's process without a model: torch, and on a GPU the CUDA context and NCCL's buffers."""

_DRIVERS: Final = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvmap", "/dev/dxg", "/dev/kfd")
"""Device files of the drivers of NVIDIA (Linux, Tegra, WSL) and AMD GPUs, of which torch needs one."""


def choose_device(
    setting: Literal["auto", "cpu", "cuda"], dtype: str, local_world_size: int, backend: Backend = "auto"
) -> Literal["cpu", "cuda"]:
    """Resolve `train.device`: `auto` takes CUDA when there is a GPU for each rank of this host.

    Args:
        setting: of the config.
        dtype: of the computation.
        local_world_size: ranks of this host.
        backend: with `gloo` ranks may share a GPU.

    Raises:
        UserError: `setting` is cuda and there are fewer GPUs than ranks.
    """
    if setting == "cuda":
        require_gpus(local_world_size, backend)
        return "cuda"
    if setting == "cpu" or dtype == "fp64":
        return "cpu"
    return "cuda" if gpu_count() >= _gpus_needed(local_world_size, backend) else "cpu"


def _gpus_needed(local_world_size: int, backend: Backend) -> int:
    return 1 if backend == "gloo" else local_world_size


def require_gpus(local_world_size: int, backend: Backend = "auto") -> None:
    """Check that there is a GPU for each rank of this host; over gloo, that there is one.

    Raises:
        UserError: there are fewer.
    """
    gpus = gpu_count()
    if gpus < _gpus_needed(local_world_size, backend):
        fewer = f", start at most {gpus} ranks here, or debug with parallel.backend gloo" if gpus else ""
        raise UserError(
            f"train.device is cuda but this machine has {gpus} GPUs for {local_world_size} ranks; "
            f"set train.device to cpu{fewer}."
        )


def gpu_count() -> int:
    """Number of GPUs that torch can use, without initialising CUDA, which forked workers could not use then.

    Without a driver torch is not imported, which takes seconds that a config error should not wait for.
    """
    if not any(Path(driver).exists() for driver in _DRIVERS):
        return 0
    import torch

    return torch.cuda.device_count()


def memory_per_rank(device: Literal["cpu", "cuda"], local_world_size: int) -> int:
    """Memory budget of a rank of this host, in bytes; does not depend on the current load.

    Args:
        device: of several GPUs, the smallest counts.
        local_world_size: ranks of this host, which divide the memory of a CPU; of GPUs where these are fewer.
    """
    if device == "cpu":
        return max(0, int(memory() * _SHARE[device] / local_world_size) - _OWN[device])
    import torch

    sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpu_count())]
    sharing = -(-local_world_size // len(sizes))
    return max(0, int(min(sizes) * _SHARE[device] / sharing) - _OWN[device])
