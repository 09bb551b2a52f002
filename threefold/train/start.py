"""What a run starts from: nothing, its own newest good checkpoint, or the weights of another run."""

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
    """Where a run starts, found by the first rank for all. Collective over the world.

    Args:
        config: resolved.
        run_dir: the run's folder.
        resume: whether to start from its own checkpoint; "auto" does where there is one.
        world: all ranks.

    Raises:
        UserError: on every rank, when there is nothing to start from that fits the config.
    """

    def __init__(self, config: Config, run_dir: Path, resume: Resume, world: Axis) -> None:
        self._config, self._run_dir, self._resume, self._world = config, run_dir, resume, world
        self._damaged: dict[Path, str] = {}
        self._found = self._find()

    @property
    def resumed(self) -> Checkpoint | None:
        """The run's own checkpoint that it starts from, as `load` left it."""
        return self._found.checkpoint if isinstance(self._found, Resumption) else None

    def load(self, checkpoints: Checkpoints) -> tuple[int, list[str]]:
        """Put the engine where the run starts; what turns out to be damaged as it is read is passed over by all ranks.

        Returns:
            the updates made so far, and what the user is told.

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
