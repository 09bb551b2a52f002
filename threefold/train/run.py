"""Training entry point of a rank: opens the data, builds the engine, restores the state, runs the loop."""

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import torch

from threefold.checkpoint.copies import Copies, copies_of
from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import SelectedCheckpoint, from_first, model_files, newest
from threefold.checkpoint.manifest import AnomalyFacts
from threefold.checkpoint.resume import Resume, consumed_by, continues, find_resumption, find_warm_start
from threefold.checkpoint.save import BackgroundSaver, on_first
from threefold.comm.axis import Axis
from threefold.comm.heartbeat import Heartbeat
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.comm.rank_state import Activity
from threefold.config import Config
from threefold.config.model import OWN
from threefold.data.dataset import Dataset, open_dataset
from threefold.data.loader import Loader, Share
from threefold.data.samples import ConsumedSamples, Samples
from threefold.errors import UserError
from threefold.files import counted, how_often
from threefold.host import keep_freed_memory
from threefold.models.family import family_of
from threefold.models.sharding import ModelPlan
from threefold.models.source import ConfigSource, MakeModel, ModelSource, file_source
from threefold.parallel.pipeline.partition import StageMap, stage_map
from threefold.parallel.plan_check import check_layout, check_source
from threefold.train.attachment import HeldStates, Profiler, attachments, held_states, import_attachments
from threefold.train.attempt import Attempt
from threefold.train.callbacks.base import Callback, RunContext, say
from threefold.train.callbacks.registry import import_always, make_callbacks
from threefold.train.data_checks import (
    DataCheck,
    TokenCheck,
    agree_on_micro_batch,
    require_same_own_data,
    require_shared_folder,
)
from threefold.train.loop import TrainingLoop
from threefold.train.optim import learning_rate
from threefold.train.optimizers import update_rule
from threefold.train.saving import Checkpoints, SafeSaving, StartingPoint, load_weights, restore_engine
from threefold.train.step import Engine
from threefold.train.stop import RunClock, Stop, Stopped
from threefold.train.terms import agree_on_terms

SelfCheck = Callable[[Config, Path, ModelSource, Mesh], None]
"""Check of a run's layout, called on all its ranks; raises a `UserError` on every rank."""


def train(
    config: Config,
    run_dir: Path,
    resume: Resume,
    asked: Callable[[], int] = lambda: 0,
    reads: bool = True,
    callbacks: Sequence[Callback] = (),
    source: ModelSource = ConfigSource(),  # noqa: B008
    began: float | None = None,
    heartbeat: Heartbeat | None = None,
    attempt: Attempt | None = None,
    peak_rate: float | None = None,
    profiler: Profiler | None = None,
    verify: SelfCheck | None = None,
) -> Stopped | None:
    """Train a model as its config says. Call on every rank, in an initialized process group that matches the layout.

    Args:
        run_dir: folder of the run, shared by all ranks, for metrics, logs, curves and checkpoints.
        asked: returns the number of the signal that ends the run, 0 for none.
        reads: whether this rank checks the token files of its host in the background.
        callbacks: further callbacks, called after the built-in ones and those of `train.callbacks`.
        began: start of the run in `time.time` seconds; None for now.
        heartbeat: where this rank reports its activity; None if nobody reads it.
        peak_rate: peak FLOP/s of a rank, see `RunContext`.
        verify: check called before the model is made, in the first attempt only.

    Returns:
        None after the last step; otherwise how a signal or a callback ended the run, the same on every rank.

    Raises:
        UserError: on every rank: bad data, no checkpoint to resume from, divergence, a full disk.
    """
    began, attempt = time.time() if began is None else began, attempt or Attempt()
    keep_freed_memory()
    on_gpu = config.train.device == "cuda"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    heartbeat = heartbeat or Heartbeat()
    if profiler is not None:
        heartbeat = profiler.observing(heartbeat, device)
    heartbeat.activity(Activity.DATA)
    dataset = open_dataset(config)
    samples = open_samples(config, dataset)  # before the generators begin, as the user's own may draw from them
    heartbeat.activity(Activity.JOIN)
    notes = agree_on_terms(config, dataset, samples, source, device.type, heartbeat)
    mesh = Mesh(Layout.from_config(config.parallel), device, exact=config.train.exact, heartbeat=heartbeat)
    require_same_own_data(dataset, mesh)
    config = agree_on_micro_batch(config, mesh)

    mesh.heartbeat.activity(Activity.RESTORE)
    held = held_states(attempt.memory[mesh.rank] if attempt.memory else (), config)
    copies = copies_of(config, run_dir)
    start_from = Start(config, run_dir, resume, mesh.world, held, attempt, copies)  # before any rank changes the folder
    if mesh.rank == 0:
        run_dir.mkdir(parents=True, exist_ok=True)
    require_shared_folder(run_dir, mesh, reads)
    if verify is not None and not attempt.number:
        mesh.heartbeat.activity(Activity.MODEL)
        verify(config, run_dir, source, mesh)

    background = BackgroundSaver(mesh) if config.checkpoint.async_save else None
    is_first = mesh.rank == 0
    clock = RunClock(config, began, None if background is None else lambda: background.is_done)
    stop = Stop(asked, run_dir, clock if is_first else None)

    mesh.heartbeat.activity(Activity.MODEL)
    make_model, plan = source.load(config)
    engine = Engine(make_model, plan, mesh, config, stop, source.loss(config))
    if config.model.architecture == OWN:
        engine.generators.begin(config.train.seed)
    mesh.heartbeat.activity(Activity.RESTORE)
    start = start_from.load(engine)

    with closing(open_loader(config, samples, mesh.dp, start.consumed)) as loader:
        if is_first:
            if not attempt.number or attempt.layout:
                _announce(config, run_dir, mesh, loader, make_model, plan)
            for line in (*notes, *start.lines):
                say(line)
        attached = attachments(engine, loader, start, held)
        tokens = TokenCheck(mesh, dataset.contents(), config.log.every, start.resumed, reads)

        def record() -> AnomalyFacts | None:
            return next((found for each in attached if (found := each.record())), None)

        if copies is not None:
            _claim(copies, bool(resume or attempt.number), dataset, mesh.world)
        checkpoints = Checkpoints(
            run_dir, engine, loader, dataset, start, tokens.contents, record, clock, background, copies
        )
        run = RunContext(config, run_dir, mesh, attempt, peak_rate)
        reports = make_callbacks(run, callbacks)
        saving = SafeSaving(checkpoints, lambda step: all(each.is_proved(step) for each in attached))

        compared = [DataCheck(mesh, config.log.every, loader.share.rows.tolist())] if mesh.world.size > 1 else []
        # All callbacks of the run, in the order in which they are called at each moment.
        all_callbacks: list[Callback] = [
            *compared,
            tokens,
            *reports,  # goodput, console, metrics, TensorBoard, log, stragglers, curve, summary; then the user's
            *([profiler] if profiler else []),
            *(callback for each in attached for callback in each.callbacks(saving)),
        ]
        loop = TrainingLoop(run, engine, loader, saving, all_callbacks)
        missed = start.resumed is not None and start.resumed.facts.evaluation_missed
        return loop.fit(start.step, start.is_unsaved, missed)


def _claim(copies: Copies, resumes: bool, dataset: Dataset, world: Axis) -> None:
    """Take the address of `checkpoint.remote` for this run; raise a `UserError` on every rank if it is another's."""

    def claim() -> None:
        for line in copies.claim(resumes, dataset):
            say(line)

    on_first(world, claim)


def check_division(config: Config, source: ModelSource = ConfigSource()) -> tuple[int, int]:  # noqa: B008
    """Check the partition, layout, device and user's model of a resolved config before any process starts.

    A user's model must suit its plan and the layout, and checkpoints must be able to hold its files.

    Returns:
        number of parameters of the user's own model, and of its trained parameters; zeros for a built-in model.
    """
    parameters = (0, 0)
    if config.model.architecture == OWN:
        parameters = check_source(source, config)
        if config.model.file:
            model_files(file_source(config.model).path)
    train = config.train
    if train.watch_every and train.watch == "gradients" and train.device == "cuda":
        raise UserError(
            "train.watch is gradients but on a GPU the same step need not give the same bits twice (train.device is "
            "cuda); use weights."
        )
    check_layout(source, config)
    return parameters


def import_named(config: Config) -> None:
    """Import everything that a config names and `train` would import lazily, for processes that are forked later.

    Raises a `UserError` if the optimizer or the learning-rate schedule cannot be imported.
    """
    if config.model.architecture != OWN:
        family_of(config.model).import_parts()
    update_rule(config.optimizer)
    learning_rate(config.optimizer.warmup_steps + 1, config.optimizer)
    import_always()
    import_attachments()


Parts = tuple[Samples, Samples | None]  # samples to train on, and those to evaluate on; None without evaluation


def open_samples(config: Config, dataset: Dataset) -> Parts:
    """Return the samples that a run needs; raise a `UserError` if a part has none."""
    return dataset.samples("train"), dataset.samples("valid") if config.train.evaluates else None


def open_loader(config: Config, samples: Parts, replicas: Axis, consumed: ConsumedSamples | None = None) -> Loader:
    """Return the loader of this rank's replica.

    `consumed` are the training samples consumed before each step; None for a new run.
    """
    share, pinned = Share(config.train.global_batch_size, replicas.index, replicas.size), config.train.device == "cuda"
    loader = Loader(*samples, share, config.train.seed, config.data.separate_documents, pinned)
    loader.consumed = consumed or loader.consumed
    return loader


def _announce(
    config: Config, run_dir: Path, mesh: Mesh, loader: Loader, make_model: MakeModel, plan: ModelPlan
) -> None:
    with torch.device("meta"):
        model = make_model()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    train = config.train
    samples, read = len(loader.train), loader.consumed.before(train.max_steps)
    length = "" if loader.is_nested else f" of {config.data.sequence_length:,} tokens"
    dtype = f"{config.precision.dtype} with float8 products" if config.precision.fp8 else config.precision.dtype
    corpora = list(config.data.corpora)
    data = corpora[0] if len(corpora) == 1 else f"{len(corpora)} corpora"
    say(
        f"Training {parameters:,} parameters ({config.model.title}) in {dtype} on {mesh.device.type}, "
        f"{mesh.layout}: {data} → {run_dir}"
    )
    steps, batch = counted(train.max_steps, "step"), counted(train.global_batch_size, "sample")
    verb = "read" if train.max_steps > 1 else "reads"
    say(f"{steps} of {batch}{length} {verb} the {counted(samples, 'training sample')} {how_often(read / samples)}.")
    for note in loader.train.notes:
        say(f"  {note}")
    for name, epochs in loader.train.epochs(read).items():
        part = next(part for part in loader.train.parts if part.name == name)
        say(f"  {part.weight:.2%} are from {name}, whose {len(part.samples):,} samples are read {how_often(epochs)}.")
    if mesh.pp.size > 1 and config.log.format == "fleet":
        _announce_stages(model, plan, stage_map(plan, config))


def _announce_stages(model: torch.nn.Module, plan: ModelPlan, stages: StageMap) -> None:
    """Print each stage's pp rank, parameters and layers; a tied weight counts at the first stage that uses it."""
    counted: set[torch.nn.Parameter] = set()
    for number, place in enumerate(stages.ranks):
        first, end = stages.layers(number)
        names = plan.layers[first:end]
        held = {parameter for name in names for parameter in model.get_submodule(name).parameters()} - counted
        counted |= held
        layers = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        count = sum(parameter.numel() for parameter in held)
        say(f"Stage {number} on pp rank {place}: {layers}, {count:,} parameters.")
        kinds = (type(model.get_submodule(name)).__name__ for name in names)
        say("  " + ", ".join(f"{first + n} {names[n]} ({kind})" for n, kind in enumerate(kinds)))


class Start:
    """Choice of a run's starting point, made on rank 0 for all ranks. Collective over the world.

    States in memory (`held`) are used if no checkpoint is newer. Raises a `UserError` on every rank if no checkpoint
    fits the config.
    """

    def __init__(
        self,
        config: Config,
        run_dir: Path,
        resume: Resume,
        world: Axis,
        held: HeldStates | None,
        attempt: Attempt,
        remote: Copies | None,
    ) -> None:
        self._config, self._run_dir, self._resume, self._world = config, run_dir, resume, world
        self._held, self._attempt, self._remote = held, attempt, remote
        self._damaged: dict[Path, str] = {}
        self._copies: set[Path] = set()  # damaged checkpoints that a copy has replaced
        self._in_memory, saved = None if held is None else held.newest(world), -1
        if self._in_memory is not None:
            saved = from_first(world, lambda: found.step if (found := newest(run_dir)) else -1)
            if saved > self._in_memory:
                self._in_memory = None
        self._is_unsaved = self._in_memory is not None and saved < self._in_memory
        self._found = self._find() if self._in_memory is None else None

    def load(self, engine: Engine) -> StartingPoint:
        """Load the starting point into the engine. All ranks skip a checkpoint that any rank finds damaged.

        Raises a `UserError` on every rank if no checkpoint can be read.
        """
        lines = self._attempt.lines
        if self._held is not None and self._in_memory is not None:
            said = lines(f"Resuming from memory after step {self._in_memory:,}")
            return self._held.restore(self._in_memory, engine, self._run_dir, self._is_unsaved, said)
        while (found := self._found) is not None:
            try:
                (restore_engine if found.is_resumed else load_weights)(engine, found.checkpoint)
                break
            except DamagedCheckpoint as damage:
                self._damaged[damage.path] = damage.reason
                self._found = self._find()
        new = ConsumedSamples(self._config.train.global_batch_size)
        if found is None:
            return StartingPoint(0, new, lines(""))
        checkpoint = found.checkpoint
        if not found.is_resumed:
            return StartingPoint(
                0, new, [*lines(f"Starting from {checkpoint.path}"), *found.warnings], carried=checkpoint
            )
        after = f" after step {checkpoint.step:,}" if self._attempt.number else ""
        said = [*lines(f"Resuming from {checkpoint.path}{after}"), *found.warnings]
        consumed, skipped = consumed_by(checkpoint, self._config), frozenset(found.skipped)
        return StartingPoint(
            checkpoint.step, consumed, said, checkpoint, checkpoint, skipped, checkpoint.facts.anomalies
        )

    def _find(self) -> SelectedCheckpoint | None:
        def find() -> SelectedCheckpoint | None:
            if continues(self._run_dir, self._resume):
                lines = self._ask_remote()
                found = find_resumption(self._run_dir, self._config, self._damaged)
                return replace(found, warnings=(*lines, *found.warnings))
            return find_warm_start(self._config, self._damaged)

        return from_first(self._world, find)

    def _ask_remote(self) -> tuple[str, ...]:
        """Have a copy at `checkpoint.remote` replace a checkpoint that loading found damaged; return lines about it."""
        if self._remote is None or not self._damaged.keys() - self._copies:
            return ()
        copy, lines = self._remote.replace_damaged(self._damaged)
        if copy is not None and copy not in self._copies:
            self._damaged.pop(copy, None)
            self._copies.add(copy)
        return lines
