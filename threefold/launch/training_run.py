"""A training run: prepare it, and start it on its ranks or as one of them."""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from threefold.checkpoint.resume import Resume, continues, copies_of, find_resumption, find_warm_start, is_finished
from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.data.dataset import open_dataset
from threefold.doors import call_hook, hook, needed
from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import FolderFiles
from threefold.launch.checks import checked, naming_fallback
from threefold.launch.environment import find_launched_rank
from threefold.launch.failure import Failure
from threefold.launch.launcher import joined_rank, run, run_in_process
from threefold.launch.output import failure_file
from threefold.launch.process import StopSignals, lasting_imports
from threefold.launch.run_folder import (
    locked_folder,
    require_free,
    require_no_checkpoints,
    require_no_foreign,
    require_place,
    require_writable,
)
from threefold.launch.worker import RankInfo
from threefold.output import SILENT, Progress
from threefold.train.attempt import Attempt

if TYPE_CHECKING:
    from threefold.models.source import ModelSource
    from threefold.train.callbacks.base import Callback
    from threefold.train.run import SelfCheck
    from threefold.train.stop import Stopped


def train_as_rank(
    info: RankInfo,
    config: Config,
    run_dir: Path,
    resume: Resume,
    began: float,
    attempt: Attempt,
    profile_steps: int = 0,
    verify: "SelfCheck | None" = None,
    callbacks: "Sequence[Callback]" = (),
    source: "ModelSource | None" = None,
) -> "Stopped | None":
    """Train as one rank (see `threefold.train.run.train`), profiling `profile_steps` steps, 0 for none."""
    import torch

    from threefold.models.source import ConfigSource
    from threefold.train.run import RunOptions, train

    profiler, gpu = needed("profiler", "--profile", "planner")(profile_steps) if profile_steps else None, None
    if info.device == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        gpu = (properties.name, properties.total_memory)
    peak = call_hook("peak_rate", config.precision.dtype, info.device, info.local_world_size, gpu)
    options = RunOptions(
        asked=info.asked,
        reads=info.local_rank == 0,
        callbacks=callbacks,
        source=source or ConfigSource(),
        began=began,
        heartbeat=info.heartbeat,
        attempt=attempt,
        peak_rate=peak,
        profiler=profiler,
        verify=verify,
    )
    return train(config, run_dir, resume, options)


@dataclass(frozen=True)
class TrainingRun:
    """Training run that has been checked and may start.

    Attributes:
        resume: whether to resume from the newest checkpoint of `run_dir`; "auto" does so if there is one.
        finished: whether all steps are done, so that starting does nothing (only with "auto").
        layout: layout of the config if it is one of the fallbacks; otherwise empty.
        fallbacks: by layout with which ranks started here can continue, the resolved config.
        began: `time.time()` of the preparation; `train.max_seconds` counts from it.
        verify: called on every rank before the model is made, to verify the layout of a custom model; a function of
            a module.
    """

    config: Config
    run_dir: Path
    resume: Resume
    finished: bool = False
    layout: str = ""
    fallbacks: dict[str, Config] = field(default_factory=dict)
    began: float = field(default_factory=time.time)
    profile_steps: int = 0
    verify: "SelfCheck | None" = None

    def start(
        self,
        console_ranks: tuple[int, ...] = (0,),
        signals: StopSignals | None = None,
        debug_rank: int | None = None,
    ) -> "Stopped | None":
        """Train on processes of this host, or as the rank that a launcher started here, and wait for the end.

        With `signals`, handlers entered by the caller, the first signal ends the run with a checkpoint; without them,
        SIGINT and SIGTERM end it at once.

        Returns:
            None after the last step; otherwise the step at which a signal, a callback or the time limit ended the run.

        Raises:
            RankFailed: a rank failed; all have been ended.
            StopRequested: a signal came before the first step, or a second one.
        """
        if self.finished:
            return None
        with lasting_imports():  # once here rather than on every forked rank
            from threefold.torch_private.runtime import end_openmp_threads
            from threefold.train.run import check_division, import_named

            import_named(self.config)
        call_hook("require_memory", self.config, find_launched_rank(), check_division(self.config))
        if self.config.train.max_restarts:
            call_hook("import_writer")
        for name, config in self.fallbacks.items():
            with naming_fallback(self.config, name):
                check_division(config)
        here = find_launched_rank() is None
        if here:
            end_openmp_threads()  # forked ranks would wait for those of this process, where something has used them
        restarts = None
        if here and self.config.train.max_restarts:
            restarts = hook("restarts")(self.config, self.run_dir, self.fallbacks, self.began, self._args)
        args = restarts.args() if restarts else self._args(self.config)
        options = self._options() | {"console_ranks": console_ranks, "debug_rank": debug_rank}
        ended = run(
            train_as_rank, args, lock=self._locked_folder, signals=signals, again=restarts or self._end, **options
        )
        stopped = cast("Stopped | None", ended)
        if stopped and stopped.signal and signals and here:  # ranks get SIGTERM for every signal
            stopped = replace(stopped, signal=signals.received or stopped.signal)
        return stopped

    def start_here(
        self,
        callbacks: "Sequence[Callback]" = (),
        source: "ModelSource | None" = None,
        signals: StopSignals | None = None,
    ) -> "Stopped | None":
        """Train in this process as one rank: of torchrun or Slurm, of an initialised process group, or alone.

        Returns and raises as `start`. `callbacks` are those of this rank besides the built-in ones and those that the
        config names, and `source` is used in place of the config's model.
        """
        from threefold.models.source import ConfigSource
        from threefold.train.run import check_division

        source, options = source or ConfigSource(), self._options()
        joined, launched = joined_rank(), find_launched_rank()
        call_hook("require_memory", self.config, joined or launched, check_division(self.config, source))
        args = (*self._args(self.config), tuple(callbacks), source)
        if joined is None and launched is not None:
            ended = run(train_as_rank, args, lock=self._locked_folder, signals=signals, **options)
        else:
            place = {name: options[name] for name in ("world_size", "device")}
            ended = run_in_process(train_as_rank, args, lock=self._locked_folder, signals=signals, **place)
        return cast("Stopped | None", ended)

    def _end(self, failure: Failure) -> NoReturn:
        """End the run as `spawn` does without `again`; with one, a signal during the start reaches the ranks."""
        raise failure.exception(self.run_dir)

    def _locked_folder(self) -> AbstractContextManager[None]:
        return locked_folder(self.run_dir, self.config, is_new=not self.resume)

    def _options(self) -> dict[str, Any]:
        return {
            "world_size": Layout.from_config(self.config.parallel).world_size,
            "device": "cuda" if self.config.train.device == "cuda" else "cpu",
            "run_dir": self.run_dir,
            "timeout": self.config.train.timeout,
            "backend": self.config.parallel.backend,
        }

    def _args(self, config: Config, attempt: Attempt | None = None) -> tuple[Any, ...]:
        """Return the rank arguments of an attempt, by default of the launcher's current one."""
        attempt = attempt or _launched_attempt(self.run_dir, self.began, self.layout)
        resume = (self.resume or "auto") if attempt.number else self.resume
        return config, self.run_dir, resume, self.began, attempt, self.profile_steps, self.verify


def prepare_training(
    config: Config,
    run_dir: Path,
    *,
    resume: Resume = False,
    progress: Progress = SILENT,
    profile_steps: int = 0,
    say: Callable[[str], object] = lambda line: None,
) -> TrainingRun:
    """Check a run before anything is written or started.

    Args:
        config: config as loaded.
        progress: shows the encoding of text, where that is needed.
        say: called with the line that opens the run's output, after the checks; a built-in model imports torch later.
    """
    from threefold.train.callbacks.registry import try_trackers

    began = time.time()
    if profile_steps:
        needed("profiler", "--profile", "planner")
    require_place(run_dir)
    launched = joined_rank() or find_launched_rank()
    is_first = launched is None or launched.rank == 0
    if launched is not None and launched.attempt:
        resume = resume or "auto"
    if is_first:  # to the other ranks, rank 0 would look like another run
        require_no_foreign(run_dir, config)
        require_free(run_dir)
    if launched is None:
        call_hook("require_room", Layout.from_config(config.parallel).world_size)
    found = checked(config, progress)
    resolved = found.resolved
    if is_first:
        try_trackers(config.train.callbacks or ())
    if (copies := copies_of(resolved, run_dir)) is not None:
        for line in copies.look(bool(resume), open_dataset(resolved), is_first, resolved.train.max_steps):
            say(f"Warning: {line}")
    if resume == "auto" and is_finished(run_dir, resolved):
        if copies is not None and is_first and (copied := copies.copy_newest()):
            say(f"{copied} was not at {shown(resolved.checkpoint.remote)} yet; it has been copied there.")
        return TrainingRun(resolved, run_dir, resume, finished=True)
    if continues(run_dir, resume):  # only for the errors: `Start` in train/state.py chooses the checkpoint
        find_resumption(run_dir, resolved)
    else:
        require_no_checkpoints(run_dir)
        find_warm_start(resolved)
    fitted = found.fitted()
    if fitted.model.file:
        with lasting_imports():
            from threefold.train.run import check_division  # imports torch, as the model's file does

            check_division(fitted)
    if is_first:
        require_writable(run_dir)
    ranks = Layout.from_config(resolved.parallel).world_size
    say(f"Starting {ranks:,} ranks …" if ranks > 1 else "Starting 1 process …")
    fallbacks = {name: other.fitted() for name, other in found.fallbacks.items()}
    return TrainingRun(fitted, run_dir, resume, False, found.layout, fallbacks, began, profile_steps)


def _launched_attempt(run_dir: Path, began: float, layout: str) -> Attempt:
    """Return the current attempt of the launcher that started this process; the first one without a launcher.

    A rank of the previous attempt may have written to `run_dir` why it failed.
    """
    launched = find_launched_rank()
    if launched is None or not launched.attempt:
        return Attempt(began=began, layout=layout)
    try:
        failure = FolderFiles(run_dir).text(failure_file(run_dir).name).strip()
    except UserError:  # no rank could write it
        failure = ""
    return Attempt(launched.attempt, launched.restarts, began, failure, layout)
