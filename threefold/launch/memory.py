"""Whether the weights, gradients and optimizer state of the ranks of this host fit into its memory."""

import re
from typing import Final

from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.config.model import OWN
from threefold.errors import UserError
from threefold.host import memory, swap
from threefold.launch.environment import LaunchedRank

_NO_MEMORY: Final = re.compile(
    r"DefaultCPUAllocator|can't allocate memory|out of memory|Unable to allocate", re.IGNORECASE
)
_TRIED: Final = re.compile(r"(?:tried to allocate|allocate) ([0-9.]+) ?(bytes|[KMGTPE]iB)", re.IGNORECASE)
_UNITS: Final = {"bytes": 0, "kib": 1, "mib": 2, "gib": 3, "tib": 4, "pib": 5, "eib": 6}


def require_memory(config: Config, launched: LaunchedRank | None, own_parameters: tuple[int, int] = (0, 0)) -> None:
    """Check that the states of the ranks of this host fit into its memory, on a CPU; what a step needs beside them is
    not counted.

    Args:
        config: resolved.
        launched: this rank, where a launcher started it.
        own_parameters: how many a model of the user's own has, and how many of them are trained.

    Raises:
        UserError: they do not.
    """
    if config.train.device != "cpu":
        return
    needed, has = _states(config, launched, own_parameters), memory() + swap()
    if needed <= has:
        return
    layout = Layout.of(config.parallel)
    ranks = launched.local_world_size if launched else layout.world_size
    zero = "" if config.parallel.zero == 3 or layout.dp == 1 else "parallel.zero 3, fewer replicas (parallel.dp), "
    of = "1 rank" if ranks == 1 else f"{ranks:,} ranks"
    raise UserError(
        f"The weights, gradients and optimizer state of {of} take {_gb(needed)}, more than the {_gb(has)} of memory "
        f"that this machine has for them; use {zero}a smaller model (model.num_layers, model.hidden_size) or more "
        "machines."
    )


def _states(config: Config, launched: LaunchedRank | None, own_parameters: tuple[int, int]) -> int:
    """Bytes; of an own model, at least."""
    from threefold.dtypes import DTYPES
    from threefold.plan.model_size import ModelSize, optimizer_states

    layout = Layout.of(config.parallel)
    first, count = (
        (launched.rank - launched.local_rank, launched.local_world_size) if launched else (0, layout.world_size)
    )
    if config.model.architecture == OWN:
        if count < layout.world_size:
            return 0
        each = 2 + min(optimizer_states(config.optimizer, hidden) for hidden in (True, False))
        copies = 1 if config.parallel.zero else layout.dp
        whole, trained = own_parameters
        frozen = (whole - trained) * DTYPES[config.precision.dtype].itemsize
        return (trained * each * config.precision.master_itemsize + frozen) * copies
    size = ModelSize(config)
    by_place = {place: size.largest_rank(place).bytes for place in range(layout.pp)}
    return sum(by_place[layout.coordinates(rank).pp] for rank in range(first, min(first + count, layout.world_size)))


def explain_allocation(error: BaseException) -> str:
    """The sentence about an allocation that failed; empty where an error is none."""
    text = str(error)
    if not (isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and _NO_MEMORY.search(text))):
        return ""
    tried = _TRIED.search(text)
    what = (
        f"{_gb(float(tried[1]) * 1024 ** _UNITS[tried[2].lower()])} could not be allocated" if tried else "none is left"
    )
    where = (
        "the GPU's memory" if "CUDA" in text else f"the memory of this machine, {_gb(memory())} for all its processes"
    )
    return (
        f"{where}, is not enough: {what}; use a smaller train.micro_batch_size, train.recompute, parallel.zero, or "
        "more ranks of tp or pp on more machines"
    )


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"
