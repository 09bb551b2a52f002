"""Workers for the tests of the launcher, in a module that every start method can import."""

import ipaddress
import os
import select
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from threefold.errors import UserError
from threefold.launch import RankInfo


def report_sum(info: RankInfo, folder: Path) -> None:
    """Each rank writes the sum of all ranks, and says hello."""
    total = torch.tensor([float(info.rank)])
    dist.all_reduce(total)
    assert (dist.get_rank(), dist.get_world_size()) == (info.rank, info.world_size)
    (folder / f"sum_{info.rank}").write_text(str(int(total)))
    print(f"hello from {info.rank}")
    os.write(2, f"native words of {info.rank}\n".encode())


def fail(info: RankInfo, folder: Path, rank: int, how: str, others: str = "in a collective") -> None:
    """One rank fails in some way, and writes when, while the others wait for it in a collective or for nothing."""
    (folder / f"pid_{info.rank}").write_text(str(os.getpid()))
    dist.barrier()
    if info.rank == rank:
        print(f"last words of {rank}")
        (folder / "failed_at").write_text(repr(time.monotonic()))
        match how:
            case "raise":
                raise ValueError("the cat sat on the keyboard")
            case "user":
                raise UserError("parallel.tp is 3 but must divide 8; use 2.")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                sys.stdout.flush()
                os._exit(7)
    while True:
        dist.barrier() if others == "in a collective" else signal.pause()


def outlive_rank_zero(info: RankInfo, folder: Path) -> None:
    """Rank 1 fails by itself once the process of rank 0 has ended."""
    (folder / f"pid_{info.rank}").write_text(str(os.getpid()))
    dist.barrier()
    process = os.pidfd_open(int((folder / "pid_0").read_text()))
    dist.barrier()
    if info.rank == 1:
        select.select([process], [], [])
        raise ValueError("the cat sat on the keyboard")


def user_error_everywhere(info: RankInfo) -> None:
    raise UserError("data.path is nowhere.")


def wait_forever(info: RankInfo, folder: Path) -> None:
    """Tell that this rank is up, then hang in a collective that rank 0 never joins."""
    (folder / f"pid_{info.rank}").write_text(str(os.getpid()))
    print(f"up {info.rank}")
    dist.barrier()
    if info.rank == 0:
        print("all up")
        signal.pause()
    dist.barrier()


def draw(info: RankInfo) -> None:
    """A progress bar, when there is a terminal."""
    print("terminal" if sys.stdout.isatty() else "no terminal")
    for percent in (10, 50, 100):
        print(f"\r\x1b[2K\x1b[32m{percent} %\x1b[0m", end="")
    print()


def listening(info: RankInfo, folder: str) -> None:
    """Rank 0 writes the addresses that any process of this network namespace listens on, with all kinds of groups."""
    from torch.distributed.device_mesh import init_device_mesh

    init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    group = dist.new_group([0, 1, 2])
    if info.rank < 3:
        dist.all_reduce(torch.ones(1), group=group)
    dist.barrier()
    if info.rank == 0:
        found = [address for table in ("tcp", "tcp6") for address in _listening(Path("/proc/net") / table)]
        Path(folder, "listening").write_text("\n".join(found))
    dist.barrier()


def listening_in_a_pool(folder: str) -> None:
    """`listening` by the workers of a pool."""
    listening(RankInfo(dist.get_rank(), dist.get_world_size(), dist.get_rank(), dist.get_world_size(), "cpu"), folder)


def _listening(table: Path) -> list[str]:
    lines = [line.split() for line in table.read_text().splitlines()[1:]] if table.exists() else []
    return [_address(line[1].partition(":")[0]) for line in lines if line[3] == "0A"]


def _address(text: str) -> str:
    """An address as the kernel's tables have it: words of four bytes, each in the order of this host."""
    words = [bytes.fromhex(text[start : start + 8])[::-1] for start in range(0, len(text), 8)]
    return str(ipaddress.ip_address(b"".join(words)))
