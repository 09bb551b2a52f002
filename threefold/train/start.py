"""Starting point of a run: initial weights, its own newest good checkpoint (resume), another run's (warm start), or, of
a restart, the state that the ranks have in memory."""

from pathlib import Path

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import Checkpoint, newest
from threefold.checkpoint.manifest import AnomalyFacts
from threefold.checkpoint.resume import Resume, Resumption, continues, find_resumption
from threefold.checkpoint.selection import from_first
from threefold.checkpoint.warm_start import WarmStart, find_warm_start
from threefold.comm.mesh import Axis
from threefold.config import Config
from threefold.train.recovery.attempt import Attempt
from threefold.train.recovery.kept_states import KeptStates
from threefold.train.state import Checkpoints


class Start:
    """Finds on rank 0, for all ranks, the checkpoint that a run starts from. Collective over the world.

    Args:
        config: resolved.
        run_dir: the run's folder.
        resume: whether to resume from its own checkpoint; "auto" does if there is one.
        world: all ranks.
        kept: the states in memory of this rank, which are taken where no checkpoint is newer.
        attempt: which of the run this is.

    Attributes:
        is_unsaved: whether it is a state in memory that is newer than every checkpoint.

    Raises:
        UserError: on every rank, when no checkpoint fits the config.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        resume: Resume,
        world: Axis,
        kept: KeptStates | None = None,
        attempt: Attempt | None = None,
    ) -> None:
        self._config, self._run_dir, self._resume, self._world = config, run_dir, resume, world
        self._kept, self._attempt = kept, attempt or Attempt()
        self._damaged: dict[Path, str] = {}
        self.is_unsaved = False
        self._step_kept = self._newer_in_memory()
        self._found = self._find() if self._step_kept is None else None

    @property
    def resumed(self) -> Checkpoint | None:
        """The run's own checkpoint that it is resumed from, after `load`; None otherwise."""
        return self._found.checkpoint if isinstance(self._found, Resumption) else None

    @property
    def anomalies(self) -> AnomalyFacts | None:
        """What the run had done about bad steps, after `load`."""
        if self._kept is not None and self._step_kept is not None:
            return self._kept.anomalies
        return self.resumed.facts.anomalies if self.resumed else None

    @property
    def evaluation_missed(self) -> bool:
        """Whether the run was ended before an evaluation that was due where it goes on, after `load`."""
        return self.resumed is not None and self.resumed.facts.evaluation_missed

    def load(self, checkpoints: Checkpoints) -> tuple[int, list[str]]:
        """Load the starting point into the engine; all ranks skip a checkpoint that any rank finds damaged.

        Returns:
            updates made so far, and lines to print.

        Raises:
            UserError: on every rank, when no checkpoint can be read.
        """
        if self._kept is not None and self._step_kept is not None:
            self._kept.restore(self._step_kept, checkpoints)
            return self._step_kept, self._attempt.lines(f"Resuming from memory after step {self._step_kept:,}")
        while True:
            try:
                return self._load(checkpoints)
            except DamagedCheckpoint as damage:
                self._damaged[damage.path] = damage.reason
                self._found = self._find()

    def _newer_in_memory(self) -> int | None:
        """The step of the state in memory, if every rank has it and no checkpoint is newer."""
        step = None if self._kept is None else self._kept.newest(self._world)
        if step is None:
            return None

        def newest_saved() -> int:
            saved = newest(self._run_dir)
            return saved.step if saved else -1

        saved = from_first(self._world, newest_saved)
        self.is_unsaved = saved < step
        return step if saved <= step else None

    def _find(self) -> Resumption | WarmStart | None:
        def find() -> Resumption | WarmStart | None:
            if continues(self._run_dir, self._resume):
                return find_resumption(self._run_dir, self._config, self._damaged)
            return find_warm_start(self._config, self._damaged)

        return from_first(self._world, find)

    def _load(self, checkpoints: Checkpoints) -> tuple[int, list[str]]:
        found = self._found
        if found is None:
            return 0, self._attempt.lines("")
        if isinstance(found, Resumption):
            step = checkpoints.restore(found.checkpoint, found.passed)
            where = f"Resuming from {found.checkpoint.path}" + (f" after step {step:,}" if self._attempt.number else "")
        else:
            checkpoints.start_from(found.checkpoint)
            step, where = 0, f"Starting from {found.checkpoint.path}"
        return step, [*self._attempt.lines(where), *found.warnings]
