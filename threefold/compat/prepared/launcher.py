"""Start of ranks from a notebook with the arguments of `accelerate.notebook_launcher`."""

from collections.abc import Callable
from typing import Any

from threefold.api.launch import DeviceSetting, spawn
from threefold.launch.device import gpu_count


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    *,
    device: DeviceSetting = "auto",
) -> list[Any]:
    """Start ranks from a notebook like `spawn`, with the arguments of `accelerate.notebook_launcher`.

    Args:
        function: function to call; may be defined in a notebook cell.
        args: arguments of `function`.
        num_processes: number of processes; None for one per GPU, or 1.
        device: as in `spawn`.

    Returns:
        the values returned by `function`, by rank.

    Raises:
        UserError, RankFailed, Exception: as in `spawn`.

    Example:
        >>> threefold.notebook_launcher(train, (0.5,), num_processes=4)
    """
    return spawn(function, gpu_count() or 1 if num_processes is None else num_processes, args, device=device)
