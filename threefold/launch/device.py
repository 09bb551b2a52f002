"""Choose the device (CPU or CUDA), and check the memory of ranks."""

from pathlib import Path
from typing import Final, Literal

from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.doors import hook
from threefold.errors import UserError
from threefold.files import counted
from threefold.host import memory, swap
from threefold.launch.environment import LaunchedRank

Backend = Literal["auto", "gloo"]
"""Value of `parallel.backend`."""

_SHARE = {"cpu": 0.5, "cuda": 0.7}
"""Fraction of memory that a run may use; the rest is for fragmentation and, on a CPU, for other programs."""
_OWN = {"cpu": 400 << 20, "cuda": 1 << 30}
"""Bytes of a rank's process without a model: torch, and on a GPU the CUDA context and NCCL's buffers."""

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


def memory_per_rank(device: Literal["cpu", "cuda"], local_world_size: int) -> int:
    """Return the memory budget of a rank of this host in bytes; it does not depend on the current load.

    Ranks share the memory of a CPU, or GPUs, of which the smallest counts, if these are fewer.
    """
    if device == "cpu":
        return max(0, int(memory() * _SHARE[device] / local_world_size) - _OWN[device])
    import torch

    sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpu_count())]
    sharing = -(-local_world_size // len(sizes))
    return max(0, int(min(sizes) * _SHARE[device] / sharing) - _OWN[device])


def require_memory(config: Config, launched: LaunchedRank | None, own_parameters: tuple[int, int] = (0, 0)) -> None:
    """Raise a `UserError` if the states of this host's ranks do not fit into the memory of its CPU.

    Only weights, gradients and optimizer state count, not the further memory that a step needs. `own_parameters` are
    the number of parameters of the user's own model, and the number of trained ones.
    """
    if config.train.device != "cpu":
        return
    layout = Layout.from_config(config.parallel)
    first, ranks = 0, layout.world_size
    if launched:
        first, ranks = launched.rank - launched.local_rank, launched.local_world_size
    bytes_of_states = hook("bytes_of_states")
    if bytes_of_states is None:
        return
    needed, has = bytes_of_states(config, layout, first, ranks, own_parameters), memory() + swap()
    if needed <= has:
        return
    zero = "" if config.parallel.zero == 3 or layout.dp == 1 else "parallel.zero 3, fewer replicas (parallel.dp), "
    raise UserError(
        f"The weights, gradients and optimizer state of {counted(ranks, 'rank')} take {needed / 1e9:,.1f} GB, more "
        f"than the {has / 1e9:,.1f} GB of memory that this machine has for them; use {zero}a smaller model "
        "(model.num_layers, model.hidden_size) or more machines."
    )
