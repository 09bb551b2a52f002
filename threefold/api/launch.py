"""Starting ranks from a script or a notebook: `run`, `spawn` and `notebook_launcher`."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, Literal

from threefold.errors import UserError, naming_arguments
from threefold.launch.device import choose_device, gpu_count
from threefold.launch.environment import LaunchedRank, find_launched_rank
from threefold.launch.failure import RankFailed, cause
from threefold.launch.in_process import run_in_process
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
    """Call `fn(*args)` on every rank, and return what each of them returned.

    Where `torchrun` or `srun` started this process it is one of the ranks; otherwise they are started here, as `spawn`
    does. So one script serves for both. A single rank runs in this process, where `breakpoint()` has the terminal, with
    a process group that lasts for the call.

    Args:
        fn, args, device, start_method: as of `spawn`.
        ranks: how many; None for those of the launcher, else one for each GPU, or a single one. With
            `start_method="spawn"` a single one is a new process, too.

    Returns:
        the values that `fn` returned, by rank, on every rank.

    Raises:
        UserError: the launcher started another number of ranks, or as `spawn`.
        Exception: what `fn` raised.

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
    """Call `fn(*args)` in so many processes of this host, the ranks of one process group, and wait for their values.

    A rank that fails ends all others within seconds: they are killed, so that no collective waits for it.

    Args:
        fn: called with `torch.distributed` initialised; with "fork" any function, such as one of a notebook's cell.
        ranks: how many processes.
        args: of `fn`.
        device: `auto` takes CUDA when there is a GPU for each rank.
        start_method: "fork" starts a rank in milliseconds, in a process where CUDA is not initialised; "spawn" starts
            new interpreters, and needs a function of an importable module and a main module that starts ranks only
            under `if __name__ == "__main__"`.

    Returns:
        the values that `fn` returned, by rank; they are pickled, tensors by value.

    Raises:
        UserError: an argument is wrong, a rank returned a part of a `DTensor`, there are fewer GPUs than ranks, this
            process is itself a rank, or CUDA is initialised.
        RankFailed: a rank's process ended, such as by SIGKILL; the message names rank and signal.
        Exception: what `fn` raised first, of the same type, with the rank as a note and its traceback as the cause.

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

        with lasting_imports():  # here once, instead of on every forked rank: 0.8 s
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
    """`spawn` with the arguments of `accelerate.notebook_launcher`.

    Args:
        function: may be defined in a cell of the notebook.
        args: of `function`.
        num_processes: None for one for each GPU, or a single one.
        device: as of `spawn`.

    Returns:
        the values that `function` returned, by rank.

    Raises:
        UserError, RankFailed, Exception: as `spawn`.

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
    """What `fn` returns on this rank, pickled."""
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
    """Call `fn` as the only rank, in this process; its process group and number of threads last for the call.

    Raises:
        UserError: this process is a rank already.
    """
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
    """Call `fn` as the rank that a launcher started."""
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
    """Initialise the process group of the ranks that a launcher started.

    Raises:
        UserError: there are fewer GPUs than ranks.
    """
    chosen = device_of(device, launched.local_world_size)
    info = RankInfo(launched.rank, launched.world_size, launched.local_rank, launched.local_world_size, chosen)
    join(info, meet(launched))


def device_of(setting: DeviceSetting, local_world_size: int) -> Device:
    """The device of ranks of which this host has so many.

    Raises:
        UserError: there is no such setting, or there are fewer GPUs than ranks.
    """
    if setting not in ("auto", "cpu", "cuda"):
        raise UserError(f"device is {setting!r} but must be auto, cpu or cuda; use auto.")
    with naming_arguments():
        return choose_device(setting, "fp32", local_world_size)
