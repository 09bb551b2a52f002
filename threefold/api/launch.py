"""Starting ranks from a script or a notebook: `run`, `spawn` and `notebook_launcher`."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal

from threefold.errors import UserError, naming_arguments
from threefold.launch.device import choose_device, gpu_count
from threefold.launch.environment import LaunchedRank, find_launched_rank
from threefold.launch.failure import RankFailed, cause
from threefold.launch.launcher import run_in_process
from threefold.launch.local import StartMethod, collect_local
from threefold.launch.process import has_group, require_room
from threefold.launch.rendezvous import meet
from threefold.launch.worker import Device, Job, RankInfo, join

DeviceSetting = Literal["auto", "cpu", "cuda"]


def run(
    fn: Callable[..., Any],
    ranks: int | None = None,
    args: tuple[Any, ...] = (),
    *,
    device: DeviceSetting = "auto",
    start_method: StartMethod = "fork",
) -> list[Any]:
    """Call `fn(*args)` on every rank, and return the value of each.

    If `torchrun` or `srun` started this process, it is one of the ranks; otherwise ranks are started here, as by
    `spawn`. One script serves both cases. A single rank runs in this process, with a process group that lasts for the
    call, so `breakpoint()` works in the terminal.

    Args:
        fn, args, device, start_method: as in `spawn`.
        ranks: number of ranks; None for the launcher's, or else one per GPU, or 1. With `start_method="spawn"` even a
            single rank is a new process.

    Returns:
        the values returned by `fn`, by rank, on every rank.

    Raises:
        UserError: the launcher started another number of ranks, or for the reasons of `spawn`.
        Exception: the exception raised by `fn`.

    Example:
        >>> losses = threefold.run(train, ranks=8)
    """
    launched = find_launched_rank()
    if launched is None:
        ranks = gpu_count() or 1 if ranks is None else ranks
        _check(fn, ranks, args)
        if ranks == 1 and start_method == "fork":
            return [_run_alone(fn, args, device)]
        return spawn(fn, ranks, args, device=device, start_method=start_method)
    _check(fn, launched.world_size if ranks is None else ranks, args)
    if ranks not in (None, launched.world_size):
        raise UserError(f"ranks is {ranks} but the launcher started {launched.world_size}; use {launched.world_size}.")
    return _run_here(fn, args, launched, device)


def spawn(
    fn: Callable[..., Any],
    ranks: int,
    args: tuple[Any, ...] = (),
    *,
    device: DeviceSetting = "auto",
    start_method: StartMethod = "fork",
) -> list[Any]:
    """Call `fn(*args)` in `ranks` processes of this host that form one process group, and return their values.

    A rank that fails ends all others within seconds: they are killed, so no collective waits for it.

    Args:
        fn: function called with `torch.distributed` initialised; with "fork" any function, such as one from a notebook
            cell.
        ranks: number of processes.
        args: arguments of `fn`.
        device: `auto` uses CUDA if there is a GPU for each rank.
        start_method: "fork" starts a rank in milliseconds, in a process where CUDA is not initialised; "spawn" starts
            new interpreters, and needs a function of an importable module and a main module that starts ranks only
            under `if __name__ == "__main__"`.

    Returns:
        the values returned by `fn`, by rank; they are pickled, tensors by value.

    Raises:
        UserError: an argument is wrong, a rank returned part of a `DTensor`, there are fewer GPUs than ranks, this
            process is itself a rank, or CUDA is initialised.
        RankFailed: a rank's process ended, for example by SIGKILL; the message names the rank and the signal.
        Exception: the first exception raised by `fn`, of the same type, with the rank as a note and its traceback as
            the cause.

    Example:
        >>> def train(lr):
        ...     mesh = threefold.init_mesh(tp=2)
        ...     return mesh.rank * lr
        >>> threefold.spawn(train, ranks=4, args=(0.5,))
        [0.0, 0.5, 1.0, 1.5]
    """
    _check(fn, ranks, args)
    require_room(ranks)
    chosen = device_of(device, ranks)
    one_thread = False
    if start_method == "fork":
        from threefold.launch.process import lasting_imports, prepare_fork

        with lasting_imports():  # once here instead of on every forked rank, saving 0.8 s
            import threefold.comm.mesh  # noqa: F401

        one_thread = not prepare_fork()
    elif start_method == "spawn":
        _require_picklable(fn, args)
    else:
        raise UserError(f"start_method is {start_method!r} but must be fork or spawn; use fork.")
    job = Job(_call, (fn, args, one_thread), chosen, None, tuple(range(ranks)), prints_traceback=False)
    failures, results = collect_local(job, ranks, start_method)
    if failures:
        raise cause(failures).original()
    values = []
    for rank, result in enumerate(results):
        if not isinstance(result, bytes):
            raise RankFailed(f"rank {rank} failed: its process ended before the function returned")
        values.append(pickle.loads(result))
    return values


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


def _check(fn: Any, ranks: Any, args: Any) -> None:
    if not callable(fn):
        raise UserError(f"fn is {fn!r} but must be a function that each rank calls; pass the function itself.")
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise UserError(f"ranks is {ranks!r} but must be a whole number of at least 1; use 1.")
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise UserError(f"args is {args!r} but must be a tuple of the arguments; use ({args!r},).")


def _require_picklable(fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
    try:
        pickle.dumps((fn, args))
    except Exception as error:
        name = getattr(fn, "__qualname__", repr(fn))
        raise UserError(
            f"start_method is spawn but {name} and its arguments cannot be sent to another process ({error}); define "
            "them in a module, or use fork."
        ) from None


def _call(info: RankInfo, fn: Callable[..., Any], args: tuple[Any, ...], one_thread: bool) -> bytes:
    """Run `fn` on this rank, and return its pickled value."""
    import torch

    from threefold.comm.axis import dumps

    if one_thread:
        torch.set_num_threads(1)
    value = fn(*args)
    try:
        return dumps(value)
    except UserError:
        raise
    except Exception as error:
        raise UserError(
            f"Rank {info.rank} returned a {type(value).__name__}, which cannot be sent to the process that started it "
            f"({error}); return numbers, tensors or nothing."
        ) from None


def _run_alone(fn: Callable[..., Any], args: tuple[Any, ...], device: DeviceSetting) -> Any:
    """Call `fn` as the only rank, in this process, and restore its process group and thread count afterwards."""
    import torch
    import torch.distributed as dist

    chosen = device_of(device, 1)
    if dist.is_initialized():
        raise has_group()
    threads = torch.get_num_threads()
    try:
        return run_in_process(_call_alone, (fn, args), 1, device=chosen)
    finally:
        torch.set_num_threads(threads)


def _call_alone(info: RankInfo, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return fn(*args)


def _run_here(
    fn: Callable[..., Any], args: tuple[Any, ...], launched: LaunchedRank, device: DeviceSetting
) -> list[Any]:
    """Call `fn` as a rank that a launcher started, and gather the values."""
    import torch.distributed as dist

    from threefold.comm.axis import dumps

    join_launched(launched, device)
    value = fn(*args)
    if not dist.is_initialized():
        raise UserError("The function destroyed the process group, so the ranks' values cannot be gathered; leave it.")
    values: list[Any] = [None] * launched.world_size
    dist.all_gather_object(values, dumps(value))
    dist.destroy_process_group()
    return [pickle.loads(result) for result in values]


def join_launched(launched: LaunchedRank, device: DeviceSetting) -> None:
    """Initialise the process group of launched ranks; raise UserError if there are fewer GPUs than ranks."""
    chosen = device_of(device, launched.local_world_size)
    info = RankInfo(launched.rank, launched.world_size, launched.local_rank, launched.local_world_size, chosen)
    join(info, meet(launched))


def device_of(setting: DeviceSetting, local_world_size: int) -> Device:
    """Return the device for `local_world_size` ranks of this host; raise UserError if it has too few GPUs."""
    if setting not in ("auto", "cpu", "cuda"):
        raise UserError(f"device is {setting!r} but must be auto, cpu or cuda; use auto.")
    with naming_arguments():
        return choose_device(setting, "fp32", local_world_size)
