"""Launching the ranks of a run: local processes, torchrun or Slurm; and reporting the failure of a rank."""

from threefold.launch.failure import RankFailed
from threefold.launch.launcher import run, spawn
from threefold.launch.worker import RankInfo

__all__ = ["RankFailed", "RankInfo", "run", "spawn"]
