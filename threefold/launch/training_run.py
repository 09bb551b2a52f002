"""Prepare a training run, start it on its ranks or as one of them, and explain how it stopped."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from threefold.checkpoint.copies import copies_of
from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import FOLDER, newest, remains, require_outside_checkpoints
from threefold.checkpoint.manifest import MANIFEST, PARTIAL, read_manifest
from threefold.checkpoint.resume import Resume, continues, find_resumption, find_warm_start, is_finished
from threefold.comm.layout import Layout
from threefold.config import Config, resolve
from threefold.config.loading import config_of
from threefold.config.model import OWN
from threefold.config.optimizer import BUILT_IN
from threefold.config.resolve import check_settings, on_device
from threefold.config.schema import check_fault_policies
from threefold.constants import PARITY_WIDE
from threefold.data.dataset import open_dataset
from threefold.doors import hook, needed
from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import FolderFiles
from threefold.launch.device import choose_device, memory_per_rank, require_gpus, require_memory
from threefold.launch.environment import find_launched_rank
from threefold.launch.launcher import joined_rank, run, run_in_process
from threefold.launch.output import log_file
from threefold.launch.process import StopSignals, lasting_imports, require_room, signal_name
from threefold.launch.restarts import Fallback, Restarts, fallbacks_of, in_world, launched_attempt, naming_fallback
from threefold.launch.run_lock import LOCK_FILE, cannot_write, require_folder, require_free, run_lock
from threefold.launch.worker import RankInfo
from threefold.output import SILENT, Progress, write_durably
from threefold.train.attempt import Attempt
from threefold.train.callbacks.tensorboard import import_writer

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
    check: "SelfCheck | None" = None,
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
    find_peak = hook("peak_rate")
    peak = find_peak and find_peak(config.precision.dtype, info.device, info.local_world_size, gpu)
    options = RunOptions(
        info.asked,
        info.local_rank == 0,
        callbacks,
        source or ConfigSource(),
        began,
        info.heartbeat,
        attempt,
        peak,
        profiler,
        check,
    )
    return train(config, run_dir, resume, options)


CONFIG_FILE = "config.yaml"


def resolve_run(config: Config) -> Config:
    """Resolve a config, as loaded, against its data and this machine, and check it."""
    return _checked(config, SILENT).fitted()


def check_run(config: Config, progress: Progress = SILENT) -> Config:
    """Resolve and check a config as `resolve_run`, but leave its default micro-batch size, which needs no torch."""
    return _checked(config, progress).resolved


@dataclass(frozen=True)
class _Checked:
    """Config checked against its data and this machine, except for the memory of a step.

    Attributes:
        given: config as loaded, plus values that follow from the data alone.
        resolved: config with the default micro-batch size of a CPU.
        layout: layout of the config if it is one of the fallbacks; otherwise empty.
    """

    given: Config
    resolved: Config
    vocab_size: int
    samples: int
    local_world_size: int
    layout: str = ""
    fallbacks: "tuple[tuple[Fallback, _Checked], ...]" = ()

    def fitted(self) -> Config:
        """Return the config with the largest micro-batch size that fits into memory, unless settings determine it."""
        config, device, train = self.given, self.resolved.train.device, self.given.train
        if train.micro_batch_size is not None or train.gradient_accumulation_steps is not None:
            return self.resolved
        if config.model.architecture == OWN:  # no formula gives its activations
            return self.resolved
        largest_micro_batch = hook("largest_micro_batch")  # imports torch, which no check needs
        if largest_micro_batch is None:
            return self.resolved
        from threefold.models.block import UnknownBlock

        room = memory_per_rank(device, self.local_world_size)
        try:
            largest = largest_micro_batch(config, self.vocab_size, room, device)
        except UnknownBlock:  # the planner has no formulas for it
            return self.resolved
        return on_device(resolve(config, self.vocab_size, largest, self.samples), device)


def _checked(config: Config, progress: Progress) -> _Checked:
    from threefold.train.callbacks.registry import check_names

    if os.environ.get(PARITY_WIDE):
        config = config_of({**config.sections(), "precision": {"dtype": "fp64"}})
    check_settings(config)
    _require_resilience(config)
    check_names(config.train.callbacks or ())
    check_fault_policies(config.train.on_nan, config.train.on_spike)
    if config.optimizer.name not in BUILT_IN:
        from threefold.train.optimizers import check_optimizer  # imports torch, as the optimizer does

        check_optimizer(config.optimizer)
    launched, named, fallbacks = joined_rank() or find_launched_rank(), "", fallbacks_of(config)
    if launched:
        config, named = in_world(config, fallbacks, launched.world_size, launched.variables)
        fallbacks = ()  # the launcher starts the ranks
    local_world_size = launched.local_world_size if launched else Layout.from_config(config.parallel).world_size
    if config.train.device == "cuda":
        require_gpus(local_world_size, config.parallel.backend)
    dataset = open_dataset(config)
    config = dataset.complete(config)
    resolved = resolve(config, dataset.vocab_size)
    train = dataset.samples("train", resolved.data, progress)
    dataset.require_labels("train", train)
    if resolved.train.evaluates:
        dataset.require_labels("valid", dataset.samples("valid", resolved.data, progress))
    known, samples = dataset.vocab_size, len(train)
    if config.train.epochs is not None:
        resolved = resolve(config, known, samples=samples)
    device = choose_device(resolved.train.device, resolved.precision.dtype, local_world_size, resolved.parallel.backend)
    others = []
    for each in fallbacks:
        with naming_fallback(config, str(each)):
            given = dataset.complete(each.config)
            settled = resolve(given, known, samples=samples)
        others.append((each, _Checked(given, on_device(settled, device), known, samples, each.world_size)))
    return _Checked(config, on_device(resolved, device), known, samples, local_world_size, named, tuple(others))


def _require_resilience(config: Config) -> None:
    """Refuse settings that only the attached room `resilience` follows, where it is not there."""
    train = config.train
    given = {
        "train.watch_every": train.watch_every,
        "train.spike_factor": train.spike_factor,
        "train.on_nan": train.on_nan != "stop",
        "data.skip_steps": config.data.skipped.ranges,
    }
    for name in (name for name in given if given[name]):
        needed("held_states", name, "resilience")


@dataclass(frozen=True)
class TrainingRun:
    """Training run that has been checked and may start.

    Attributes:
        resume: whether to resume from the newest checkpoint of `run_dir`; "auto" does so if there is one.
        finished: whether all steps are done, so that starting does nothing (only with "auto").
        layout: layout of the config if it is one of the fallbacks; otherwise empty.
        fallbacks: layouts with which ranks started here can continue, with resolved configs.
        began: `time.time()` of the preparation; `train.max_seconds` counts from it.
        check: called on every rank before the model is made, to verify the layout of a user's own model; a function of
            a module.
    """

    config: Config
    run_dir: Path
    resume: Resume
    finished: bool = False
    layout: str = ""
    fallbacks: tuple[Fallback, ...] = ()
    began: float = field(default_factory=time.time)
    profile_steps: int = 0
    check: "SelfCheck | None" = None

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
            for name in ("peak_rate", "over_shared_memory", "share_mailbox"):
                hook(name)
        require_memory(self.config, find_launched_rank(), check_division(self.config))
        if self.config.train.max_restarts:
            import_writer()
        for each in self.fallbacks:
            with naming_fallback(self.config, str(each)):
                check_division(each.config)
        here = find_launched_rank() is None
        if here:
            end_openmp_threads()  # forked ranks would wait for those of this process, where something has used them
        restarts = Restarts(self.config, self.run_dir, self.fallbacks, self.began, self._args) if here else None
        args = restarts.args() if restarts else self._args(self.config)
        options = self._options() | {"console_ranks": console_ranks, "debug_rank": debug_rank}
        ended = run(train_as_rank, args, own=self._folder, signals=signals, again=restarts, **options)
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
        require_memory(self.config, joined or launched, check_division(self.config, source))
        args = (*self._args(self.config), tuple(callbacks), source)
        if joined is None and launched is not None:
            ended = run(train_as_rank, args, own=self._folder, signals=signals, **options)
        else:
            place = {name: options[name] for name in ("world_size", "device")}
            ended = run_in_process(train_as_rank, args, own=self._folder, signals=signals, **place)
        return cast("Stopped | None", ended)

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
        attempt = attempt or launched_attempt(self.run_dir, self.began, self.layout)
        resume = (self.resume or "auto") if attempt.number else self.resume
        return config, self.run_dir, resume, self.began, attempt, self.profile_steps, self.check

    @contextmanager
    def _folder(self) -> Iterator[None]:
        """Lock the run folder and write the config into it."""
        with run_lock(self.run_dir):
            if not self.resume:
                _require_no_checkpoints(self.run_dir)  # left by a run that ended since the first check
            try:
                fresh = self.run_dir / (CONFIG_FILE + ".tmp")  # on a full disk the existing file stays
                write_durably(fresh, self.config.to_yaml_as_given())
                fresh.replace(self.run_dir / CONFIG_FILE)
            except OSError as error:
                raise cannot_write(self.run_dir, error) from error
            yield


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
        say: called with the line that opens the run's output, after the checks and before torch is imported.
    """
    from threefold.train.callbacks.registry import try_trackers

    began = time.time()
    if profile_steps:
        needed("profiler", "--profile", "planner")
    require_folder(run_dir)
    require_outside_checkpoints(run_dir, "--run-dir")
    folder = run_dir / FOLDER
    if os.path.lexists(folder) and not folder.is_dir():
        what = "a link to something that is not a folder" if folder.is_symlink() else "not a folder"
        raise UserError(
            f"{shown(folder)} is {what}, and the run's checkpoints go there; move it, or choose another --run-dir."
        )
    there = Path(os.path.realpath(folder))
    if folder.is_symlink() and there.name == FOLDER and FolderFiles(there.parent).holds(LOCK_FILE):
        raise UserError(
            f"{shown(folder)} is a link to the checkpoints of another run, {shown(there.parent)}, which this one would "
            "delete; remove the link, or choose another --run-dir."
        )
    if folder.is_dir() and not os.access(folder, os.W_OK | os.X_OK):
        raise UserError(
            f"{shown(folder)} cannot be written, and the run's checkpoints go there; make it writable, or choose "
            "another --run-dir."
        )
    launched = joined_rank() or find_launched_rank()
    if launched is not None and launched.attempt:
        resume = resume or "auto"
    if launched is None or launched.rank == 0:  # to the other ranks, rank 0 would look like another run
        _require_no_foreign(run_dir, config)
        require_free(run_dir)
    if launched is None:
        require_room(Layout.from_config(config.parallel).world_size)
    checked = _checked(config, progress)
    if launched is None or launched.rank == 0:
        try_trackers(config.train.callbacks or ())
    first, steps = launched is None or launched.rank == 0, checked.resolved.train.max_steps
    if (copies := copies_of(checked.resolved, run_dir)) is not None:
        for line in copies.look(bool(resume), open_dataset(checked.resolved), first, steps):
            say(f"Warning: {line}")
    if resume == "auto" and is_finished(run_dir, checked.resolved):
        if copies is not None and first and (copied := copies.copy_newest()):
            say(f"{copied} was not at {shown(checked.resolved.checkpoint.remote)} yet; it has been copied there.")
        return TrainingRun(checked.resolved, run_dir, resume, finished=True)
    if continues(run_dir, resume):
        find_resumption(run_dir, checked.resolved)
    else:
        _require_no_checkpoints(run_dir)
        find_warm_start(checked.resolved)
    ranks = Layout.from_config(checked.resolved.parallel).world_size
    say(f"Starting {ranks:,} ranks …" if ranks > 1 else "Starting 1 process …")
    fallbacks = tuple(replace(each, config=other.fitted()) for each, other in checked.fallbacks)
    return TrainingRun(checked.fitted(), run_dir, resume, False, checked.layout, fallbacks, began, profile_steps)


def explain_stop(run_dir: Path, signal: int | str, step: int | None, command: str, resumed: str | None = None) -> str:
    """Return the message about a run that a signal or its time limit ended, with the command that resumes it.

    Args:
        signal: signal number, or the time limit as text (`Stopped.limit`).
        step: number of updates made; None if a second signal ended the run without a checkpoint.
        resumed: command that resumes it; None for `command`, which started the run, with `--resume`.
    """
    saved = newest(run_dir)
    by = signal if isinstance(signal, str) else signal_name(signal)
    resumed = resumed or (command if "--resume" in command else f"{command} --resume")
    if step is None:
        where = f"the newest checkpoint is {saved.path}" if saved else "there is no checkpoint"
        begin = f"Ended at once by a second {by}, without saving; {where}"
    elif saved is None:
        begin = f"Stopped by {by} before the first step, with nothing to save"
    elif saved.step == step:
        begin = f"Stopped by {by} after step {step:,}, which is saved in {saved.path}"
    else:
        begin = f"Stopped by {by} after step {step:,}; the newest checkpoint is {saved.path}"
    return f"{begin}; resume with:\n  {resumed}" if saved else f"{begin}; start again with:\n  {command}"


def explain_early_stop(run_dir: Path, step: int, reason: str) -> str:
    """Return the message about a run that a callback ended for `reason` after `step` updates."""
    saved = newest(run_dir)
    where = f", which is saved in {saved.path}" if saved and saved.step == step else ""
    return f"Stopped by a callback after step {step:,}{where}: {reason}."


def _require_no_foreign(run_dir: Path, config: Config) -> None:
    """Check that a folder unused by any run has no files that the run would overwrite."""
    from threefold.train.callbacks import console, metrics
    from threefold.train.callbacks.registry import files_of

    replaced = [CONFIG_FILE, metrics.FILE, console.LOG_FILE, console.CURVE_FILE, console.REPORT_FILE]
    replaced += [metrics.GOODPUT_FILE, *files_of(config.train.callbacks or ())]
    if (copies := copies_of(config, run_dir)) is not None:
        replaced += copies.new_files()
    found = [name for name in replaced if os.path.lexists(run_dir / name)]
    if found and not _is_used(run_dir):
        raise UserError(
            f"--run-dir is {shown(run_dir)}, which no run has used and whose {found[0]} the run would replace; choose "
            f"another, such as {shown(run_dir / 'run')}."
        )


def _is_used(run_dir: Path) -> bool:
    files = (run_dir / LOCK_FILE, log_file(run_dir, 0), *(path / MANIFEST for path in remains(run_dir)))
    return any(map(os.path.lexists, files))


def _require_no_checkpoints(run_dir: Path) -> None:
    """Check that a new run finds nothing named like a checkpoint, whatever program wrote it.

    Incomplete checkpoints of an interrupted run do not count.
    """
    if newest(run_dir):
        raise UserError(f"{run_dir} already has checkpoints; resume with --resume, or choose another --run-dir.")
    used = _is_used(run_dir)
    named = sorted((run_dir / FOLDER).glob("step_*"))
    if found := [path for path in named if not (used and path.name.endswith(PARTIAL))]:
        try:
            read_manifest(found[-1]).check_sizes()
            what = "is there"
        except DamagedCheckpoint as damage:
            what = f"is not a complete checkpoint ({damage.reason})"
        raise UserError(
            f"{shown(found[-1])} {what}, and a run that begins anew would write over it or beside it; choose another "
            "--run-dir, restore it and resume with --resume, or move it away."
        )
