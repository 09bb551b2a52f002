"""A training run: everything that is checked and written before its ranks start, and starting them."""

from dataclasses import dataclass
from pathlib import Path

from threefold.checkpoint.begin import find_beginning
from threefold.checkpoint.folder import newest, write_durably
from threefold.checkpoint.resume import find_resumption
from threefold.config import Config, resolve
from threefold.config.resolve import check_settings
from threefold.data.dataset import open_dataset
from threefold.data.progress import SILENT, Progress
from threefold.errors import UserError
from threefold.launch.device import choose_device, require_gpus
from threefold.launch.environment import find_place
from threefold.launch.process import require_room
from threefold.launch.run import run
from threefold.launch.worker import Device, RankInfo
from threefold.parallel.layout import Layout

CONFIG_FILE = "config.yaml"


def resolve_run(config: Config, progress: Progress = SILENT) -> Config:
    """Fill a config from its data and this machine, and check it against both: what the ranks will be given.

    Args:
        config: as loaded.
        progress: told of text that has to be encoded first.

    Raises:
        UserError: settings that cannot go together, no data or too little, or fewer GPUs than ranks.
    """
    check_settings(config)
    layout, place = Layout.of(config.parallel), find_place()
    if place:
        layout.require_world(place.world_size)
    local_world_size = place.local_world_size if place else layout.world_size
    if config.train.device == "cuda":
        require_gpus(local_world_size)
    dataset = open_dataset(config)
    resolved = resolve(dataset.complete(config), dataset.vocab_size)
    for part in ("train", "valid") if resolved.train.eval_every else ("train",):
        dataset.samples(part, resolved.data, progress)
    device = choose_device(resolved.train.device, resolved.precision.dtype, local_world_size)
    return resolved.model_copy(update={"train": resolved.train.model_copy(update={"device": device})})


@dataclass(frozen=True)
class TrainingRun:
    """A run that was checked and may start.

    Attributes:
        config: resolved.
        run_dir: gets everything that the run writes: the config, logs, metrics and checkpoints.
        resume: go on from the newest checkpoint of `run_dir`.
        speaks: whether this process is the one that tells the user about the run before it starts.
    """

    config: Config
    run_dir: Path
    resume: bool
    speaks: bool

    def start(self, console_ranks: tuple[int, ...] = (0,)) -> None:
        """Train, on processes of this host or as the rank a launcher started here, and wait for the end.

        Args:
            console_ranks: ranks whose output is shown on the console too.

        Raises:
            UserError: the layers cannot be shared among the stages as asked, or the run cannot be, as told by a rank.
            RankFailed: a rank failed; all have been ended.
        """
        from threefold.train.run import check_division  # imported once, here, and not by every forked rank

        check_division(self.config)
        if self.speaks:
            _store(self.config, self.run_dir)
        device: Device = "cuda" if self.config.train.device == "cuda" else "cpu"
        arguments = (self.config, self.run_dir, self.resume)
        ranks = Layout.of(self.config.parallel).world_size
        run(_train, arguments, ranks, device=device, run_dir=self.run_dir, console_ranks=console_ranks)


def prepare_training(
    config: Config, run_dir: Path, *, resume: bool = False, progress: Progress = SILENT
) -> TrainingRun:
    """Check a run before anything is written or started.

    Args:
        config: as loaded.
        run_dir: gets everything that the run writes.
        resume: whether to go on from its newest checkpoint.
        progress: told of text that has to be encoded first.

    Raises:
        UserError: what `resolve_run` raises, `run_dir` has checkpoints that would be lost, or none to go on from.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"--run-dir is {run_dir}, which is a file; name a folder.")
    place = find_place()
    if place is None:
        require_room(Layout.of(config.parallel).world_size)
    resolved = resolve_run(config, progress)
    if resume:
        find_resumption(run_dir, resolved)
    elif newest(run_dir):
        raise UserError(f"{run_dir} already has checkpoints; go on with --resume, or choose another --run-dir.")
    else:
        find_beginning(resolved)
    return TrainingRun(resolved, run_dir, resume, speaks=place is None or place.rank == 0)


def _store(config: Config, run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        fresh = run_dir / (CONFIG_FILE + ".tmp")  # a full disk leaves the one there is
        write_durably(fresh, config.to_yaml_as_given())
        fresh.replace(run_dir / CONFIG_FILE)
    except OSError as error:
        raise UserError(f"Cannot write to --run-dir {run_dir}: {error.strerror}.") from error


def _train(info: RankInfo, config: Config, run_dir: Path, resume: bool) -> None:
    from threefold.train.run import train as train_rank

    train_rank(config, run_dir, resume, reads=info.local_rank == 0)
