"""Start ranks from a script or a notebook (`run`, `spawn`), and make their mesh (`init_mesh`)."""

import pickle
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from threefold.comm.layout import Layout
from threefold.constants import STAGED_GLOO
from threefold.doors import call_hook
from threefold.errors import UserError, naming_arguments, require_whole
from threefold.launch.device import choose_device, gpu_count
from threefold.launch.environment import LaunchedRank, find_launched_rank, meet, missing_variables
from threefold.launch.failure import RankFailed, cause
from threefold.launch.launcher import run_in_process
from threefold.launch.local import StartMethod, collect_local
from threefold.launch.process import group_error, lasting_imports, prepare_fork
from threefold.launch.worker import Device, Job, RankInfo, join, stay_on_loopback

if TYPE_CHECKING:
    from threefold.comm.mesh import Mesh


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
    wanted = ranks if ranks is not None else launched.world_size if launched else gpu_count() or 1
    _check(fn, wanted, args)
    if launched is None and (wanted > 1 or start_method != "fork"):
        return spawn(fn, wanted, args, device=device, start_method=start_method)
    import torch
    import torch.distributed as dist

    from threefold.comm.axis import dumps

    if launched is None:  # the only rank, whose process group and thread count do not outlast the call
        chosen = device_of(device, 1)
        if dist.is_initialized():
            raise group_error()
        threads = torch.get_num_threads()
        try:
            return [run_in_process(lambda _, fn, args: fn(*args), (fn, args), 1, device=chosen)]
        finally:
            torch.set_num_threads(threads)
    if wanted != launched.world_size:
        raise UserError(f"ranks is {ranks} but the launcher started {launched.world_size}; use {launched.world_size}.")
    join_launched(launched, device)
    value = fn(*args)
    if not dist.is_initialized():
        raise UserError("The function destroyed the process group, so the ranks' values cannot be gathered; leave it.")
    values: list[Any] = [None] * wanted
    dist.all_gather_object(values, dumps(value))
    dist.destroy_process_group()
    return [pickle.loads(result) for result in values]


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
            new interpreters. It needs a function of an importable module, and a main module that starts ranks only
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
    call_hook("require_room", ranks)
    chosen = device_of(device, ranks)
    one_thread = False
    if start_method == "fork":
        with lasting_imports():  # once here instead of on every forked rank, saving 0.8 s
            import threefold.comm.mesh  # noqa: F401

        one_thread = not prepare_fork()
    elif start_method == "spawn":
        try:
            pickle.dumps((fn, args))
        except Exception as error:
            name = getattr(fn, "__qualname__", repr(fn))
            raise UserError(
                f"start_method is spawn but {name} and its arguments cannot be sent to another process ({error}); "
                "define them in a module, or use fork."
            ) from None
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


def _check(fn: Any, ranks: Any, args: Any) -> None:
    if not callable(fn):
        raise UserError(f"fn is {fn!r} but must be a function that each rank calls; pass the function itself.")
    require_whole("ranks", ranks)
    if not isinstance(args, Sequence) or isinstance(args, str | bytes):
        raise UserError(f"args is {args!r} but must be a tuple of the arguments; use ({args!r},).")


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


def join_launched(launched: LaunchedRank, device: DeviceSetting) -> None:
    """Initialise the process group of launched ranks; raise UserError if there are fewer GPUs than ranks."""
    sizes = launched.rank, launched.world_size, launched.local_rank, launched.local_world_size
    join(RankInfo(*sizes, device_of(device, launched.local_world_size)), meet(launched))


def device_of(setting: DeviceSetting, local_world_size: int) -> Device:
    """Return the device for `local_world_size` ranks of this host; raise UserError if it has too few GPUs."""
    if setting not in ("auto", "cpu", "cuda"):
        raise UserError(f"device is {setting!r} but must be auto, cpu or cuda; use auto.")
    with naming_arguments():
        return choose_device(setting, "fp32", local_world_size)


_LAYOUT = "threefold/layout"
"""Key in the process group's store under which ranks keep the layout of the first call."""


def init_mesh(
    dp: int | None = None,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    ep: int = 1,
    *,
    device: DeviceSetting = "auto",
) -> "Mesh":
    """Initialise `torch.distributed` if needed, and return the mesh of its ranks.

    The ranks are those of `torchrun`, Slurm's `srun`, `threefold.run` or an existing process group; otherwise this
    process alone. The rank at (dp, pp, cp, tp) is ((dp · PP + pp) · CP + cp) · TP + tp. Collective: every rank calls it
    with the same arguments.

    Args:
        dp: data-parallel replicas; None for as many as fill the world.
        tp: tensor-parallel shards of each weight.
        pp: pipeline stages.
        cp: context-parallel parts of each sequence.
        ep: neighbouring replicas that share the experts of a layer; a divisor of dp, not a further factor of the world
            size.
        device: device of the computation; `auto` uses CUDA if there is a GPU for each rank of the host. Ignored for an
            existing process group, whose backend decides.

    Returns:
        the mesh. Its axes `dp`, `pp`, `cp`, `tp` and `ep` have this rank's `index`, the `size`, the global ranks
        `first`, `last`, `previous` and `next`, and the collectives. `rank` is the global rank, `local_rank` the rank on
        this host, and `check_group` the ranks that hold one copy of the model.

    Raises:
        UserError: the product of the sizes is not the world size, an earlier call or another rank gave others, the
            launcher's variables are incomplete, or there are fewer GPUs than ranks.

    Example:
        >>> mesh = threefold.init_mesh(dp=2, tp=2, pp=2)
        >>> mesh.tp.index, mesh.tp.size, mesh.pp.next, mesh.is_last_stage
    """
    import torch
    import torch.distributed as dist

    from threefold.comm.mesh import Mesh
    from threefold.torch_private.distributed import default_store

    for name, size in (("dp", dp), ("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep)):
        if (not isinstance(size, int) or isinstance(size, bool)) and not (name == "dp" and size is None):
            raise UserError(f"{name} is {size!r} but must be a whole number of ranks; use {name}=1.")
    launched = None if dist.is_initialized() else _launched_rank()
    if dist.is_initialized():
        world_size, because = dist.get_world_size(), ""
    elif launched is not None:
        world_size, because = launched.world_size, launched.variables
    else:
        world_size, because = 1, ""
    with naming_arguments():
        replicas = max(1, world_size // Layout(1, tp, pp, cp).world_size) if dp is None else dp
        layout = Layout(replicas, tp, pp, cp, ep)
        if not dist.is_initialized() and launched is None and layout.world_size > 1:
            raise UserError(
                f"The layout {layout} needs {layout.world_size} ranks but this process is alone; start it with "
                f"`torchrun --nproc-per-node {layout.world_size} SCRIPT.py`, or call threefold.run(FUNCTION, "
                f"ranks={layout.world_size})."
            )
        layout.require_world(world_size, because)
        join_ranks(device)
    first = default_store().compare_set(_LAYOUT, "", str(layout)).decode()
    if first != str(layout):
        raise UserError(
            f"init_mesh is called with {layout} on rank {dist.get_rank()} and was called with {first} before; the "
            "ranks have one layout: give the same in every call and on every rank."
        )
    backend = dist.get_backend_config()
    on_gpu = ("nccl" in backend or STAGED_GLOO in backend) and torch.cuda.is_available()
    device_here = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    for each in call_hook("require_same_processes", device_here) or ():
        if dist.get_rank() == 0:
            warnings.warn(f"{each}; the last digits of losses depend on it.", stacklevel=2)
    mesh = Mesh(layout, device_here)
    _ = mesh.check_group, mesh.local_rank  # created here because it is collective
    return mesh


def join_ranks(device: DeviceSetting = "auto") -> None:
    """Initialise `torch.distributed` if needed: with the ranks of a launcher, or with this process alone.

    Raises:
        UserError: the launcher's variables are incomplete, or there are fewer GPUs than ranks.
    """
    import torch.distributed as dist

    if dist.is_initialized():
        return
    if launched := _launched_rank():
        join_launched(launched, device)
    else:
        stay_on_loopback()
        join(RankInfo(0, 1, 0, 1, device_of(device, 1)), dist.HashStore())


def _launched_rank() -> LaunchedRank | None:
    launched = find_launched_rank()
    if launched is None and (missing := missing_variables()):
        raise UserError(
            f"The environment has a rank of a launcher but no {' and no '.join(missing)}; start the ranks with "
            "torchrun or srun, which set all of them, or unset RANK and WORLD_SIZE to run alone."
        )
    return launched


def layout_of_ranks() -> str | None:
    """Return the layout of the first mesh of these ranks, such as `dp 2 · tp 2 · pp 1`; None without a mesh."""
    from threefold.torch_private.distributed import default_store

    store = default_store()
    return store.get(_LAYOUT).decode() if store.check([_LAYOUT]) else None


def mesh_of_all_ranks() -> "Mesh":
    """Return a mesh with one replica per rank, or the mesh of this process alone if there are no other ranks."""
    import torch.distributed as dist

    from threefold.comm.mesh import Mesh

    return init_mesh() if dist.is_initialized() or find_launched_rank() is not None else Mesh.alone()
