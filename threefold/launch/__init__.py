"""Launch the ranks of a run as local processes or under torchrun or Slurm, and report the failure of a rank."""

from threefold.launch.failure import RankFailed
from threefold.launch.launcher import run
from threefold.launch.local import spawn
from threefold.launch.worker import RankInfo

__all__ = ["RankFailed", "RankInfo", "run", "spawn"]
