"""Fit of a run into the memory of this machine, before its ranks start: its states, and its default micro-batch."""

from contextlib import suppress
from pathlib import Path
from typing import Literal

from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.config.model import CUSTOM
from threefold.errors import UserError
from threefold.files import counted
from threefold.host import memory
from threefold.launch.device import gpu_count
from threefold.launch.environment import LaunchedRank
from threefold.planner.model_size import bytes_of_states

_SHARE = {"cpu": 0.5, "cuda": 0.7}
"""Fraction of memory that a run may use; the rest is for fragmentation and, on a CPU, for other programs."""
_ALONE = {"cpu": 400 << 20, "cuda": 1 << 30}
"""Bytes of a rank's process without a model: torch, and on a GPU the CUDA context and NCCL's buffers."""


def fitting_micro_batch(config: Config, vocab_size: int, device: Literal["cpu", "cuda"], ranks: int) -> int | None:
    """Return the largest micro-batch size that fits into the memory of each of this host's `ranks`.

    None if settings of `config`, as given, determine it, or if no formula tells the activations of its model.
    """
    train = config.train
    if train.micro_batch_size is not None or train.gradient_accumulation_steps is not None:
        return None
    if config.model.architecture == CUSTOM:
        return None
    from threefold.planner.activations import largest_micro_batch  # imports torch, which no check needs
    from threefold.planner.block import UnknownBlock

    room = memory_per_rank(device, ranks)
    try:
        return largest_micro_batch(config, vocab_size, room, device)
    except UnknownBlock:
        return None


def memory_per_rank(device: Literal["cpu", "cuda"], local_world_size: int) -> int:
    """Return the memory budget of a rank of this host in bytes; it does not depend on the current load.

    Ranks share the memory of a CPU, or GPUs, of which the smallest counts, if these are fewer.
    """
    if device == "cpu":
        return max(0, int(memory() * _SHARE[device] / local_world_size) - _ALONE[device])
    import torch

    sizes = [torch.cuda.get_device_properties(gpu).total_memory for gpu in range(gpu_count())]
    sharing = -(-local_world_size // len(sizes))
    return max(0, int(min(sizes) * _SHARE[device] / sharing) - _ALONE[device])


def require_memory(config: Config, launched: LaunchedRank | None, custom_parameters: tuple[int, int] = (0, 0)) -> None:
    """Raise a `UserError` if the states of this host's ranks do not fit into the memory of its CPU.

    Only weights, gradients and optimizer state count, not the further memory that a step needs. `custom_parameters` are
    the number of parameters of a custom model, and the number of trained ones.
    """
    if config.train.device != "cpu":
        return
    layout = Layout.from_config(config.parallel)
    first, ranks = 0, layout.world_size
    if launched:
        first, ranks = launched.rank - launched.local_rank, launched.local_world_size
    needed, has = bytes_of_states(config, layout, first, ranks, custom_parameters), memory() + swap()
    if needed <= has:
        return
    zero = "" if config.parallel.zero == 3 or layout.dp == 1 else "parallel.zero 3, fewer replicas (parallel.dp), "
    raise UserError(
        f"The weights, gradients and optimizer state of {counted(ranks, 'rank')} take {needed / 1e9:,.1f} GB, more "
        f"than the {has / 1e9:,.1f} GB of memory that this machine has for them; use {zero}a smaller model "
        "(model.num_layers, model.hidden_size) or more machines."
    )


def swap() -> int:
    """Return the bytes of swap space on this machine, or 0 if unknown."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("SwapTotal:"):
                return int(line.split()[1]) * 1024
    return 0
