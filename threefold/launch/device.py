"""Which device the ranks of this host compute on."""

from typing import Literal

from threefold.errors import UserError


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
        raise UserError(
            f"train.device is cuda but this machine has {gpus} GPUs for {local_world_size} ranks; "
            f"set train.device to cpu or start at most {gpus} ranks here."
        )


def gpu_count() -> int:
    """GPUs that torch can use, counted without initialising CUDA (forked workers could not use it then)."""
    import torch

    return torch.cuda.device_count()
