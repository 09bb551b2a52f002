"""Starting, watching and ending the ranks of a run."""

from threefold.launch.failure import RankFailed
from threefold.launch.launcher import run, spawn
from threefold.launch.worker import RankInfo

__all__ = ["RankFailed", "RankInfo", "run", "spawn"]
