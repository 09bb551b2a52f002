"""Training on a rank, from top to bottom: open the data, make the mesh, build the engine, restore it, run the loop."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import torch

from threefold.checkpoint.folder import model_files
from threefold.checkpoint.manifest import AnomalyFacts
from threefold.checkpoint.resume import Resume, copies_of
from threefold.comm.axis import Axis
from threefold.comm.heartbeat import Activity, Heartbeat, new_heartbeat
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.model import CUSTOM
from threefold.config.resolve import with_micro_batch
from threefold.data.dataset import Dataset, open_dataset
from threefold.data.loader import BatchSlice, Loader
from threefold.data.order import ConsumedSamples
from threefold.data.samples import Samples
from threefold.doors import call_hook, hook, needed
from threefold.errors import UserError
from threefold.host import keep_freed_memory
from threefold.models.family import family_of
from threefold.models.groups import check_groups
from threefold.models.source import ConfigSource, ModelSource, file_source
from threefold.parallel.arithmetic import arithmetic_of
from threefold.parallel.layout_check import check_layout, check_source, made_on_meta
from threefold.train.attachment import Checks, Profiler, attachments, import_attachments
from threefold.train.attempt import Attempt
from threefold.train.callbacks.base import Callback, RunContext, say
from threefold.train.callbacks.registry import import_always, make_callbacks
from threefold.train.loop import TrainingLoop
from threefold.train.optim import learning_rate
from threefold.train.optimizers import update_rule
from threefold.train.saving import CheckpointContents, Checkpoints, SafeSaving
from threefold.train.state import Start, kept_states
from threefold.train.step import Engine
from threefold.train.stop import RunClock, Stop, Stopped

SelfCheck = Callable[[Config, Path, ModelSource, Mesh], None]
"""Check of a run's layout, called on all its ranks; raises a `UserError` on every rank."""


@dataclass(frozen=True)
class RunOptions:
    """Options that a launcher and a caller give a rank, beside config and folder of the run.

    Attributes:
        asked: returns the number of the signal that ends the run, 0 for none.
        reads: whether this rank checks the token files of its host in the background.
        callbacks: further callbacks, called after the built-in ones and those of `train.callbacks`.
        source: where the model comes from, by default the config.
        began: start of the run in `time.time` seconds; None for now.
        heartbeat: where this rank notes its activity; None if no other process reads it.
        attempt: start of the ranks that this is, see `Attempt`.
        peak_rate: peak FLOP/s of a rank, see `RunContext`.
        profiler: callback of `--profile`; None without it.
        verify: check called before the model is made, in the first attempt only.
    """

    asked: Callable[[], int] = lambda: 0
    reads: bool = True
    callbacks: Sequence[Callback] = ()
    source: ModelSource = field(default_factory=ConfigSource)
    began: float | None = None
    heartbeat: Heartbeat | None = None
    attempt: Attempt = field(default_factory=Attempt)
    peak_rate: float | None = None
    profiler: Profiler | None = None
    verify: SelfCheck | None = None


def train(config: Config, run_dir: Path, resume: Resume, options: RunOptions | None = None) -> Stopped | None:
    """Train a model as its config says. Call on every rank, in an initialized process group that matches the layout.

    Args:
        run_dir: folder of the run, shared by all ranks, for metrics, logs, curves and checkpoints.

    Returns:
        None after the last step; otherwise how a signal or a callback ended the run, the same on every rank.

    Raises:
        UserError: on every rank: bad data, no checkpoint to resume from, divergence, a full disk.
    """
    options = options or RunOptions()
    began = time.time() if options.began is None else options.began
    keep_freed_memory()
    on_gpu = config.train.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    heartbeat = options.heartbeat or new_heartbeat()
    if options.profiler is not None:
        heartbeat = options.profiler.observing(heartbeat, device)
    heartbeat.activity(Activity.DATA)
    dataset = open_dataset(config)
    samples = open_samples(config, dataset)  # before the generators begin, as the user's own may draw from them
    heartbeat.activity(Activity.JOIN)
    checks = (hook("checks") or Checks)(config, dataset, options.reads)
    notes = checks.on_start(samples, options.source, heartbeat)
    in_tree = arithmetic_of(config).is_bitwise
    mesh = Mesh(Layout.from_config(config.parallel), device, in_tree=in_tree, heartbeat=heartbeat)
    checks.on_mesh(mesh)
    config = agree_on_micro_batch(config, mesh)
    run = RunContext(config, run_dir, mesh, options.attempt, options.peak_rate)

    heartbeat.activity(Activity.RESTORE)
    memory = run.attempt.memory[mesh.rank] if run.attempt.memory else ()
    kept, copies = kept_states(memory, config), copies_of(config, run_dir)
    start_from = Start(run, resume, kept, copies)  # before any rank changes the folder
    _open_folder(run, options, checks)

    background = call_hook("background_saver", mesh) if config.checkpoint.async_save else None
    clock = RunClock(config, began, None if background is None else lambda: background.is_done)
    stop = Stop(options.asked, run_dir, clock if mesh.world.is_first else None)

    heartbeat.activity(Activity.MODEL)
    make_model, plan = options.source.load(config)
    engine = Engine(make_model, plan, mesh, config, stop, options.source.loss(config))
    if config.model.architecture == CUSTOM:
        engine.generators.begin(config.train.seed)
    if options.profiler is not None:
        options.profiler.attach(engine)
    heartbeat.activity(Activity.RESTORE)
    start = start_from.load(engine)
    run = replace(run, view=engine.view)
    if config.preference.beta:
        find = needed("with_references", "preference.beta", "preference")
        samples = find(run, engine, samples, dataset, start)

    with closing(open_loader(config, samples, mesh.dp, start.consumed)) as loader:
        if mesh.world.is_first:
            if not run.attempt.number or run.attempt.layout:
                call_hook("announce", run, loader, make_model, plan)
            if config.model.architecture == CUSTOM and hook("check_model") is None:
                say(UNCHECKED)
            for line in (*notes, *start.lines):
                say(line)
        attached = attachments(engine, loader, start, kept)
        first = checks.callbacks(mesh, loader, start.resumed)

        def anomalies() -> AnomalyFacts | None:
            return next((found for each in attached if (found := each.record())), None)

        parts = run_dir, CheckpointContents(engine, loader, dataset, checks.contents, anomalies), start, clock
        if background is None and copies is None:
            checkpoints = Checkpoints(*parts)
        else:
            checkpoints = hook("checkpoints")(*parts, background, copies, bool(resume or run.attempt.number))
        saving = SafeSaving(checkpoints, lambda step: all(each.is_proved(step) for each in attached))
        # In the order in which they are called at each moment.
        callbacks: list[Callback] = [
            *first,
            *make_callbacks(run, options.callbacks),  # those of every run, of `train.callbacks`, and of the caller
            *([options.profiler] if options.profiler else []),
            *(callback for each in attached for callback in each.callbacks(saving)),
        ]
        loop = TrainingLoop(run, engine, loader, saving, callbacks)
        missed = start.resumed is not None and start.resumed.facts.evaluation_missed
        return loop.fit(start.step, start.is_unsaved, missed)


def agree_on_micro_batch(config: Config, mesh: Mesh) -> Config:
    """Set a derived micro-batch size to the smallest of all ranks, as each derives it from its host's memory.

    Collective over the world.
    """
    if "train.micro_batch_size" not in config.derived:
        return config
    (smallest,) = min(mesh.world.gather_numbers(mesh.device, config.train.micro_batch_size))
    return config if smallest == config.train.micro_batch_size else with_micro_batch(config, smallest)


def _open_folder(run: RunContext, options: RunOptions, checks: Checks) -> None:
    """Make the run's folder, check that all hosts share it, and have the layout checked if that was asked for."""
    if run.mesh.world.is_first:
        run.run_dir.mkdir(parents=True, exist_ok=True)
    checks.on_folder(run.run_dir, run.mesh)
    if options.verify is not None and not run.attempt.number:
        run.mesh.heartbeat.activity(Activity.MODEL)
        options.verify(run.config, run.run_dir, options.source, run.mesh)


def check_division(config: Config, source: ModelSource = ConfigSource()) -> tuple[int, int]:  # noqa: B008
    """Check the partition, layout, device and user's model of a resolved config before any process starts.

    A user's model must suit its plan and the layout, and checkpoints must be able to hold its files.

    Returns:
        number of parameters of a custom model, and of its trained parameters; zeros for a built-in model.
    """
    parameters = (0, 0)
    if config.model.architecture == CUSTOM:
        parameters = check_source(source, config)
        if config.model.file:
            model_files(file_source(config.model).path)
    train = config.train
    if train.watch_every and train.watch == "gradients" and train.device == "cuda":
        raise UserError(
            "train.watch is gradients but on a GPU the same step need not give the same bits twice (train.device is "
            "cuda); use weights."
        )
    if config.optimizer.groups:
        make_model, plan = source.load(config)
        check_groups(config, plan, [plan.whole_name(name) for name, _ in made_on_meta(make_model).named_parameters()])
    check_layout(source, config)
    return parameters


def import_named(config: Config) -> None:
    """Import everything that a config names and `train` would import lazily, for processes that are forked later.

    Raises a `UserError` if the optimizer or the learning-rate schedule cannot be imported.
    """
    if config.model.architecture != CUSTOM:
        family_of(config.model).import_parts()
    for part in config.optimizer.parts:
        update_rule(part.config)
    learning_rate(config.optimizer.warmup_steps + 1, config.optimizer)
    import_always()
    import_attachments()


UNCHECKED: Final = (
    "Warning: threefold.verify is not installed, so nothing checks that the custom model and its plan compute in this "
    "layout what one process does."
)

Parts = tuple[Samples, Samples | None]  # samples to train on, and those to evaluate on; None without evaluation


def open_samples(config: Config, dataset: Dataset) -> Parts:
    """Return the samples that a run needs; raise a `UserError` if a part has none."""
    return dataset.samples("train"), dataset.samples("valid") if config.train.evaluates else None


def open_loader(config: Config, samples: Parts, replicas: Axis, consumed: ConsumedSamples | None = None) -> Loader:
    """Return the loader of this rank's replica.

    `consumed` are the training samples consumed before each step; None for a new run.
    """
    part = BatchSlice(config.train.global_batch_size, replicas.index, replicas.size)
    pinned = config.train.device == "cuda"
    length = config.data.sequence_length
    loader = Loader(*samples, part, config.train.seed, config.data.separate_documents, pinned, length)
    loader.consumed = consumed or loader.consumed
    return loader
