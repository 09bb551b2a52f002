"""Starting point of a run: initial weights, its own newest good checkpoint (resume), or another run's (warm start)."""

from pathlib import Path

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import Checkpoint
from threefold.checkpoint.resume import Resume, Resumption, continues, find_resumption
from threefold.checkpoint.selection import from_first
from threefold.checkpoint.warm_start import WarmStart, find_warm_start
from threefold.comm.mesh import Axis
from threefold.config import Config
from threefold.train.state import Checkpoints


class Start:
    """Finds on rank 0, for all ranks, the checkpoint that a run starts from. Collective over the world.

    Args:
        config: resolved.
        run_dir: the run's folder.
        resume: whether to resume from its own checkpoint; "auto" does if there is one.
        world: all ranks.

    Raises:
        UserError: on every rank, when no checkpoint fits the config.
    """

    def __init__(self, config: Config, run_dir: Path, resume: Resume, world: Axis) -> None:
        self._config, self._run_dir, self._resume, self._world = config, run_dir, resume, world
        self._damaged: dict[Path, str] = {}
        self._found = self._find()

    @property
    def resumed(self) -> Checkpoint | None:
        """The run's own checkpoint that it is resumed from, after `load`; None otherwise."""
        return self._found.checkpoint if isinstance(self._found, Resumption) else None

    def load(self, checkpoints: Checkpoints) -> tuple[int, list[str]]:
        """Load the starting point into the engine; all ranks skip a checkpoint that any rank finds damaged.

        Returns:
            updates made so far, and lines to print.

        Raises:
            UserError: on every rank, when no checkpoint can be read.
        """
        while True:
            try:
                return self._load(checkpoints)
            except DamagedCheckpoint as damage:
                self._damaged[damage.path] = damage.reason
                self._found = self._find()

    def _find(self) -> Resumption | WarmStart | None:
        def find() -> Resumption | WarmStart | None:
            if continues(self._run_dir, self._resume):
                return find_resumption(self._run_dir, self._config, self._damaged)
            return find_warm_start(self._config, self._damaged)

        return from_first(self._world, find)

    def _load(self, checkpoints: Checkpoints) -> tuple[int, list[str]]:
        found = self._found
        if found is None:
            return 0, []
        if isinstance(found, Resumption):
            step, how = checkpoints.restore(found.checkpoint, found.passed), "Resuming"
        else:
            checkpoints.start_from(found.checkpoint)
            step, how = 0, "Starting"
        return step, [f"{how} from {found.checkpoint.path}.", *found.warnings]
