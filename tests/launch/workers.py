"""Workers for the tests of the launcher, in a module that every start method can import."""

import os
import signal
import sys
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


def fail(info: RankInfo, folder: Path, rank: int, how: str) -> None:
    """One rank fails in some way while the others wait for it in a collective."""
    (folder / f"pid_{info.rank}").write_text(str(os.getpid()))
    dist.barrier()
    if info.rank == rank:
        print(f"last words of {rank}")
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
        dist.barrier()


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
