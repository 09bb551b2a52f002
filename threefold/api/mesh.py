"""Process group and mesh for custom training loops (`init_mesh`)."""

from typing import TYPE_CHECKING

from threefold.api.launch import DeviceSetting, device_of, join_launched
from threefold.comm.backends import BACKEND
from threefold.comm.layout import Layout
from threefold.errors import UserError, naming_arguments
from threefold.launch.environment import LaunchedRank, find_launched_rank, missing_variables
from threefold.launch.worker import Device, RankInfo, join, stay_on_loopback

if TYPE_CHECKING:
    from threefold.comm.mesh import Mesh

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
        UserError: the sizes do not make up the world, an earlier call or another rank gave others, the launcher's
            variables are incomplete, or there are fewer GPUs than ranks.

    Example:
        >>> mesh = threefold.init_mesh(dp=2, tp=2, pp=2)
        >>> mesh.tp.index, mesh.tp.size, mesh.pp.next, mesh.is_last_stage
    """
    import torch
    import torch.distributed as dist

    from threefold.comm.mesh import Mesh

    _check_sizes(dp, tp, pp, cp, ep)
    joined = dist.is_initialized()
    launched = None if joined else _launched()
    with naming_arguments():
        if joined:
            layout = _layout(dp, tp, pp, cp, ep, dist.get_world_size())
        else:
            size, because = (launched.world_size, launched.variables) if launched else (None, "")
            layout = _layout(dp, tp, pp, cp, ep, size, because)
            _start(launched, device)
    _agree(layout)
    where = _device_of_group()
    mesh = Mesh(layout, torch.device(where, torch.cuda.current_device()) if where == "cuda" else where)
    _ = mesh.check_group, mesh.local_rank  # created here because it is collective
    return mesh


def mesh_of_all_ranks() -> "Mesh":
    """Return a mesh with one replica per rank, or the mesh of this process alone if there are no other ranks."""
    import torch.distributed as dist

    from threefold.comm.mesh import Mesh

    return init_mesh() if dist.is_initialized() or find_launched_rank() is not None else Mesh.alone()


def _check_sizes(dp: int | None, tp: int, pp: int, cp: int, ep: int) -> None:
    for name, size in (("dp", dp), ("tp", tp), ("pp", pp), ("cp", cp), ("ep", ep)):
        if not (isinstance(size, int) and not isinstance(size, bool)) and not (name == "dp" and size is None):
            raise UserError(f"{name} is {size!r} but must be a whole number of ranks; use {name}=1.")


def _layout(dp: int | None, tp: int, pp: int, cp: int, ep: int, world_size: int | None, because: str = "") -> Layout:
    """Return the layout for a world of `world_size` ranks (None: no launcher); raise UserError if none fits."""
    fixed = Layout(1, tp, pp, cp)
    if dp is None:
        dp = max(1, (world_size or 1) // fixed.world_size)
    layout = Layout(dp, tp, pp, cp, ep)
    if world_size is None and layout.world_size > 1:
        ranks = layout.world_size
        raise UserError(
            f"The layout {layout} needs {ranks} ranks but this process is alone; start it with `torchrun "
            f"--nproc-per-node {ranks} SCRIPT.py`, or call threefold.run(FUNCTION, ranks={ranks})."
        )
    layout.require_world(world_size or 1, because)
    return layout


def _launched() -> LaunchedRank | None:
    launched = find_launched_rank()
    if launched is None and (missing := missing_variables()):
        raise UserError(
            f"The environment has a rank of a launcher but no {' and no '.join(missing)}; start the ranks with "
            "torchrun or srun, which set all of them, or unset RANK and WORLD_SIZE to run alone."
        )
    return launched


def _start(launched: LaunchedRank | None, device: DeviceSetting) -> None:
    import torch.distributed as dist

    if launched is not None:
        join_launched(launched, device)
    else:
        stay_on_loopback()
        join(RankInfo(0, 1, 0, 1, device_of(device, 1)), dist.HashStore())


def _agree(layout: Layout) -> None:
    """Raise UserError unless all ranks and all earlier calls have the same layout."""
    import torch.distributed as dist

    from threefold.torch_private.distributed import default_store

    first = default_store().compare_set(_LAYOUT, "", str(layout)).decode()
    if first != str(layout):
        raise UserError(
            f"init_mesh is called with {layout} on rank {dist.get_rank()} and was called with {first} before; the "
            "ranks have one layout: give the same in every call and on every rank."
        )


def _device_of_group() -> Device:
    """Return the device that the process group's collectives use."""
    import torch
    import torch.distributed as dist

    backend = dist.get_backend_config()
    return "cuda" if ("nccl" in backend or BACKEND in backend) and torch.cuda.is_available() else "cpu"
