"""A training run: everything that is checked and written before its ranks start, and starting them."""

from pathlib import Path

from threefold.config import Config, resolve
from threefold.data.files import TokenFiles
from threefold.data.samples import PackedSamples
from threefold.errors import UserError
from threefold.launch.device import choose_device
from threefold.launch.environment import find_place
from threefold.launch.run import run
from threefold.launch.worker import Device, RankInfo
from threefold.parallel.layout import Layout

CONFIG_FILE = "config.yaml"


def resolve_run(config: Config) -> Config:
    """Fill a config from its data and this machine, and check it against both: what the ranks will be given.

    Raises:
        UserError: settings that cannot go together, no data, or fewer GPUs than ranks.
    """
    files = TokenFiles.open(Path(config.data.path))
    resolved = resolve(config, files.vocab_size)
    PackedSamples.open(files, "train", resolved.data.split, resolved.data.sequence_length)
    parallel, place = resolved.parallel, find_place()
    layout = Layout(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp)
    if place:
        layout.require_world(place.world_size)
    local_world_size = place.local_world_size if place else layout.world_size
    device = choose_device(resolved.train.device, resolved.precision.dtype, local_world_size)
    return resolved.model_copy(update={"train": resolved.train.model_copy(update={"device": device})})


def check_run_dir(run_dir: Path, resume: bool) -> None:
    """Refuse to begin anew where checkpoints would be lost.

    Raises:
        UserError: `run_dir` has checkpoints and is not to be resumed, or is no folder.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise UserError(f"--run-dir is {run_dir}, which is a file; name a folder.")
    checkpoints = run_dir / "checkpoints"
    if not resume and checkpoints.is_dir() and any(checkpoints.iterdir()):
        raise UserError(f"{run_dir} already has checkpoints; go on with --resume, or choose another --run-dir.")


def train(config: Config, run_dir: Path, *, resume: bool = False, console_ranks: tuple[int, ...] = (0,)) -> None:
    """Train as `config` says, on processes of this host or as the rank a launcher started here, and wait for the end.

    Args:
        config: as `resolve_run` returned it.
        run_dir: gets everything that the run writes: the config, logs, metrics and checkpoints.
        resume: go on from the newest checkpoint of `run_dir`.
        console_ranks: ranks whose output is shown on the console too.

    Raises:
        UserError: the run cannot be, as told by a rank.
        RankFailed: a rank failed; all have been ended.
    """
    check_run_dir(run_dir, resume)
    parallel, place = config.parallel, find_place()
    if place is None or place.rank == 0:
        _store(config, run_dir)
    import threefold.train.run  # noqa: F401  imported once, here, and not by every forked rank

    device: Device = "cuda" if config.train.device == "cuda" else "cpu"
    world_size = Layout(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp).world_size
    arguments = (config, run_dir, resume)
    run(_train, arguments, world_size, device=device, run_dir=run_dir, console_ranks=console_ranks)


def _store(config: Config, run_dir: Path) -> None:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / CONFIG_FILE).write_text(config.to_yaml(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"Cannot write to --run-dir {run_dir}: {error.strerror}.") from error


def _train(info: RankInfo, config: Config, run_dir: Path, resume: bool) -> None:
    from threefold.train.run import train as train_rank

    train_rank(config, run_dir, resume)
