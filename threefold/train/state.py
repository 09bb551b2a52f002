"""State of a run: its checkpoints, the clock that makes saves due, and the warnings about failed saves."""

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from threefold.checkpoint.errors import MODEL, OPTIMIZER, DamagedCheckpoint
from threefold.checkpoint.folder import CONFIG, TOKENIZER, Checkpoint, complete, model_files, prune
from threefold.checkpoint.manifest import AnomalyFacts, Facts, read_manifest
from threefold.checkpoint.remote import Mirror, RemoteCheckpoints
from threefold.checkpoint.resume import consumed_by
from threefold.checkpoint.save import BackgroundSaver, Written, save_checkpoint, set_aside_checkpoint
from threefold.checkpoint.tensors import load_tensors, stored_names
from threefold.checkpoint.writer import WRITER, record_of
from threefold.config import Config
from threefold.config.model import OWN
from threefold.data.chat_template import CONFIG_FILE
from threefold.data.content_checksums import Content
from threefold.data.dataset import Dataset
from threefold.data.samples import ConsumedSamples
from threefold.errors import UserError
from threefold.files import read_text
from threefold.huggingface.tensor_files import PREFIX, carried_by
from threefold.models.source import file_source
from threefold.parallel.moving_buffers import stored_buffers
from threefold.random.generators import is_of_process
from threefold.random.rng import STREAMS, stored_as
from threefold.torch_private.tensors import foreach_norm
from threefold.train.callbacks.base import say
from threefold.train.step import Engine

_FIRST_SAVE: Final = 100e6
"""Assumed speed of the first save in bytes per second, until one has been measured."""


class RunClock:
    """Clock of the first rank that makes saves and the end of the run due; the ranks agree in a step's collective.

    The run ends early enough for twice the longest pause between two queries, plus the longest save so far.

    Args:
        config: resolved config.
        began: start of the run in `time.time` seconds.
        state_bytes: size of a checkpoint in bytes.
        save_ended: returns whether the checkpoint written in the background is complete or has failed.

    Attributes:
        limit: the setting that ends the run, with its value.
        longest_save: seconds of the longest save, updated by `saved`.
    """

    def __init__(self, config: Config, began: float, state_bytes: int, save_ended: Callable[[], bool]) -> None:
        self._every, seconds = config.checkpoint.every_seconds, config.train.max_seconds
        self.limit = f"train.max_seconds {seconds:g}" if seconds else ""
        self._end = None if seconds is None else time.monotonic() + seconds - (time.time() - began)
        self._save_ended = save_ended
        self._saved = time.monotonic()
        self._measured, self.longest_save = False, 1.0 + state_bytes / _FIRST_SAVE
        self._asked: float | None = None
        self._longest_pause = 0.0

    def saving(self) -> None:
        self._saved = time.monotonic()

    def saved(self, seconds: float) -> None:
        """Note that a save took this many seconds."""
        self.longest_save = max(self.longest_save, seconds) if self._measured else seconds
        self._measured = True

    def save_is_due(self) -> bool:
        """Return whether `checkpoint.every_seconds` have passed since the last save began."""
        return self._every is not None and time.monotonic() - self._saved >= self._every

    def time_is_up(self) -> bool:
        """Return whether the run must end now; call it once per step and during evaluations."""
        if self._end is None:
            return False
        now = time.monotonic()
        if self._asked is not None:
            self._longest_pause = max(self._longest_pause, now - self._asked)
        self._asked = now
        return now + 2 * self._longest_pause + self.longest_save >= self._end

    def save_ended(self) -> bool:
        return self._save_ended()


class FailureWarning:
    """Warning printed when something begins to fail, ending with its `consequence`; again only after a success."""

    def __init__(self, prints: bool, consequence: str) -> None:
        self._prints, self._consequence, self._failing = prints, consequence, False

    def failed(self, sentence: str) -> None:
        """Report a failure, described by a sentence."""
        if self._prints and not self._failing:
            say(f"Warning: {sentence.removesuffix('.')}; {self._consequence}.")
        self._failing = True

    def worked(self) -> None:
        """Report a success, so that the next failure is printed."""
        self._failing = False


_LONG_WAIT = 1.0
"""Seconds of waiting for the previous checkpoint above which a warning is printed."""


def model_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return master weights and persistent buffers by their names in the unsplit model, sharing memory."""
    weights = {MODEL + weight.name: weight.stored(weight.master.detach()) for weight in engine.model.weights}
    return weights | {MODEL + name: buffer for name, buffer in stored_buffers(engine.stages).items()}


def engine_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return weights, buffers and optimizer state by their names in the unsplit model, sharing memory.

    Tied embeddings on two stages have the same name and value on both, so they are stored once.
    """
    tensors = model_tensors(engine)
    for name, state, value in engine.optimizer.stored_states():
        tensors[f"{OPTIMIZER}{name}.{state}"] = value
    return tensors


def drawn_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return the states of the random streams drawn from, and the process's generators for the user's own model."""
    sizes = engine.mesh.layout.shape
    streams = engine.streams.stored(sizes) if engine.streams.used else {}
    return streams | engine.generators.stored(sizes) if engine.config.model.architecture == OWN else streams


def checkpoint_tensors(engine: Engine) -> dict[str, Tensor]:
    """Return all tensors of a checkpoint: `engine_tensors` and `drawn_tensors`."""
    return engine_tensors(engine) | drawn_tensors(engine)


def loss_scale_facts(engine: Engine) -> tuple[float | None, int]:
    """Return `loss_scale` and `good_steps` for the facts of a checkpoint."""
    scale = engine.loss_scale
    return (scale.value, scale.good_steps) if scale else (None, 0)


def restore_engine(engine: Engine, checkpoint: Checkpoint) -> None:
    """Load a checkpoint of any layout into an engine: weights, optimizer state, loss scale, streams and generators.

    Raises:
        DamagedCheckpoint: on every rank, if a checksum differs; the engine's state is undefined then.
        UserError: on every rank, if the checkpoint cannot be read.
    """
    _load(engine, engine_tensors(engine), checkpoint.path)
    engine.optimizer.restored()
    facts, scale = checkpoint.facts, engine.loss_scale
    if scale is not None and facts.loss_scale is not None:
        scale.value, scale.good_steps = facts.loss_scale, facts.good_steps
    _restore_streams(engine, checkpoint)


class Checkpoints:
    """Checkpoints of a run: saved, resumed from, pruned and mirrored. Collective over the world.

    Args:
        dataset: training data, with its tokenizer if it has one.
        contents: returns the checksums of each corpus.
        anomalies: returns the record of the run's bad steps.

    Attributes:
        consumed: training samples consumed before each step, from the starting point on.
        passed: folders of damaged checkpoints that were skipped on resuming.
    """

    def __init__(
        self,
        run_dir: Path,
        engine: Engine,
        config: Config,
        dataset: Dataset,
        contents: Callable[[], tuple[Content, ...]] = tuple,
        anomalies: Callable[[], AnomalyFacts | None] = lambda: None,
    ) -> None:
        self.run_dir, self.engine, self.config, self.dataset = run_dir, engine, config, dataset
        self.contents, self.anomalies = contents, anomalies
        self.consumed = ConsumedSamples(config.train.global_batch_size)
        self.passed: frozenset[Path] = frozenset()
        self.clock: RunClock | None = None
        self._background = BackgroundSaver(engine.mesh) if config.checkpoint.async_save else None
        first, tries = engine.mesh.world.is_first, "training continues, and the next checkpoint that is due tries again"
        self._saving, self._pruning = FailureWarning(first, tries), FailureWarning(first, "training continues")
        self._waiting = FailureWarning(first, "save less often (checkpoint.every) to spare that")
        self._mirror = self._open_mirror() if first else None
        self._sizes = dataset.sizes()
        self._texts: dict[str, str] = {}
        if engine.mesh.world.is_first:
            # Resolve every setting of model and data, which the weights depend on; keep the others as given.
            self._texts = {CONFIG: config.to_yaml_as_given(("model", "data"), kept=("train.max_steps",))}
            if config.model.file:
                files = model_files(file_source(config.model).path)
                self._texts |= {name: read_text(file) for name, file in files.items()}
            if dataset.tokenizer_file is not None:
                self._texts[TOKENIZER] = dataset.tokenizer_file.read_text(encoding="utf-8")
            if dataset.template is not None:
                self._texts |= {PREFIX + name: text for name, text in dataset.template.files().items()}

    def run_by(self, began: float) -> RunClock | None:
        """Start this rank's clock for a run that began at `began`; None if nothing depends on the clock."""
        config = self.config
        background = self._background
        if not (config.checkpoint.every_seconds or config.train.max_seconds or background):
            return None
        held = sum(tensor.numel() * tensor.itemsize for tensor in engine_tensors(self.engine).values())
        size = held * self.engine.mesh.pp.size
        self.clock = RunClock(config, began, size, lambda: background is not None and background.is_done)
        return self.clock

    @property
    def is_background(self) -> bool:
        return self._background is not None

    def save(self, step: int, last: bool = False) -> Path | None:
        """Save a checkpoint after `step` updates, in the background if the config says so; return its folder.

        The `last` one is waited for; if it cannot be written, a `UserError` is raised on every rank. For any other one,
        None is returned and the run continues.
        """
        begun = time.monotonic()
        if self.clock is not None:
            self.clock.saving()
        tensors = checkpoint_tensors(self.engine)
        texts = self._texts | {WRITER: record_of(self.config.parallel).text}
        if self._background is not None and not last:
            return self._background.save(self.run_dir, self._facts(step), tensors, texts)
        try:
            path = save_checkpoint(self.run_dir, self._facts(step), tensors, texts, self.engine.mesh.world)
        except UserError as error:
            if last:
                raise
            self._saving.failed(str(error))
            return None
        self._complete(step, path, time.monotonic() - begun)
        return path

    def finish(self) -> Written | None:
        """Wait for the checkpoint being written in the background; warn if it failed; return it once, else None."""
        if self._background is None:
            return None
        begun = time.monotonic()
        written, waited = self._background.wait(), time.monotonic() - begun
        if written is None:
            return None
        if waited > _LONG_WAIT:
            self._waiting.failed(
                f"The checkpoint of step {written.step} was still being written {waited:.1f} s after the next was due, "
                "for which the ranks have waited"
            )
        if written.failure is not None:
            self._saving.failed(str(written.failure))
        else:
            self._complete(written.step, written.path, written.seconds)
        return written

    def end(self, seconds: float | None = None) -> None:
        """End the background writes, within this many seconds; None to wait until they are done."""
        if self._background is not None and self._background.end(seconds):
            self.finish()
        if self._mirror is not None:
            self._mirror.end(seconds)

    def prune(self, step: int) -> None:
        """Delete, on the first rank, checkpoints up to `step` that `checkpoint.keep` and `keep_every` do not keep."""
        if not self.engine.mesh.world.is_first:
            return
        if self._background is not None:  # only with the checkpoint of `step` complete are older ones superfluous
            self._background.then(lambda: self._prune(step))
        else:
            self._prune(step, self.engine.mesh.heartbeat.progress)

    def _prune(self, step: int, progress: Callable[[], None] = lambda: None) -> None:
        settings, used = self.config.checkpoint, frozenset() if self._mirror is None else self._mirror.in_use
        try:
            prune(self.run_dir, settings.keep, step, self.passed | used, settings.keep_every, progress)
            self._pruning.worked()
        except OSError as error:
            self._pruning.failed(f"An old checkpoint of {self.run_dir} cannot be deleted ({error})")

    def _complete(self, step: int, path: Path, seconds: float) -> None:
        self._saving.worked()
        self.passed -= {path}  # it replaced a damaged one
        if self.clock is not None:
            self.clock.saved(seconds)
        if self._mirror is not None:
            self._mirror.add(step, path)

    def _open_mirror(self) -> Mirror | None:
        settings = self.config.checkpoint
        if settings.remote is None:
            return None
        told = FailureWarning(True, "training continues, and the next checkpoint is copied there again")
        remote = RemoteCheckpoints(settings.remote)
        return Mirror(remote, settings.keep, settings.keep_every, told.failed, told.worked)

    def whole(self) -> list[Path]:
        """Return the folders of the complete checkpoints, oldest first."""
        self.finish()
        return [checkpoint.path for checkpoint in complete(self.run_dir)]

    def newest(self) -> Path | None:
        """Return the folder of the newest complete checkpoint; None if there is none."""
        return next(reversed(self.whole()), None)

    def set_aside(self, step: int) -> tuple[Path, Path] | None:
        """Rename the checkpoint of `step` (see `set_aside_checkpoint`) and remove it from the remote store."""
        self.finish()
        moved = set_aside_checkpoint(self.run_dir, step, self.engine.mesh.world)
        if moved is not None and self._mirror is not None:
            self._mirror.remove(step, self.engine.mesh.heartbeat.progress)
        return moved

    def is_finite(self) -> bool:
        """Return whether weights and optimizer state are finite on every rank."""
        optimizer = self.engine.optimizer
        tensors = [weight.master.detach() for weight in self.engine.model.weights]
        tensors += [value for _, _, value in optimizer.states()]
        filled = [tensor for tensor in tensors if tensor.numel()]
        largest = torch.stack([norm.double().to(self.engine.mesh.device) for norm in foreach_norm(filled, torch.inf)])
        bad = (~largest.isfinite()).sum()
        return int(self.engine.mesh.world.all_reduce_(bad)) == 0

    def restore(self, checkpoint: Checkpoint, passed: Collection[Path] = ()) -> int:
        """Load a checkpoint into the engine, and return its number of updates; raises like `restore_engine`.

        Newer, damaged checkpoints that were `passed` over do not count as kept.
        """
        self.passed = frozenset(passed)
        restore_engine(self.engine, checkpoint)
        self.consumed = consumed_by(checkpoint, self.config)
        self.carry(checkpoint)
        return checkpoint.step

    def load(self, path: Path) -> Facts:
        """Load one of the run's checkpoints and return its facts; raise a `UserError` on every rank if that fails."""
        try:
            checkpoint = Checkpoint(path, read_manifest(path).facts)
            self.restore(checkpoint, self.passed)
        except DamagedCheckpoint as damage:
            raise UserError(
                f"The run cannot go back to {path}, which is damaged ({damage.reason}); remove it and use --resume."
            ) from None
        return checkpoint.facts

    def start_from(self, checkpoint: Checkpoint) -> None:
        """Warm-start from another run's weights, each rank reading its shards; raises like `restore_engine`."""
        _load(self.engine, model_tensors(self.engine), checkpoint.path)
        self.engine.optimizer.restored()
        self.carry(checkpoint)

    def carry(self, checkpoint: Checkpoint) -> None:
        """Copy the sidecar files of a checkpoint into the checkpoints that follow."""
        if self.engine.mesh.world.is_first:
            carried = carried_by(checkpoint.path)
            settings = {name: text for name, text in carried.items() if name == PREFIX + CONFIG_FILE}
            # A tokenizer.json of the data is the same; the checkpoint's settings are more complete.
            self._texts = carried | self._texts | settings

    def _facts(self, step: int) -> Facts:
        dataset, train = self.dataset, self.config.train
        scale, good_steps = loss_scale_facts(self.engine)
        return Facts(
            step=step,
            consumed_samples=self.consumed.before(step),
            seed=train.seed,
            eod=dataset.eod,
            tokenizer_sha256=dataset.tokenizer_sha256,
            tokens=sum(tokens for tokens, _ in self._sizes),
            documents=sum(documents for _, documents in self._sizes),
            corpora=self._sizes,
            special_tokens=None if dataset.rule.is_assumed else dataset.rule.special_tokens,
            beginning=dataset.rule.beginning,
            contents=self.contents(),
            loss_scale=scale,
            good_steps=good_steps,
            anomalies=self.anomalies(),
            evaluation_missed=self.engine.stop.evaluation_missed,
        )


def _load(engine: Engine, tensors: Mapping[str, Tensor], path: Path) -> None:
    """Fill tensors; buffers missing from a checkpoint of an older version keep the constructor's values."""
    lacking = {MODEL + name for name in stored_buffers(engine.stages)} - stored_names(path)
    wanted = {name: tensor for name, tensor in tensors.items() if name not in lacking}
    load_tensors(wanted, path, engine.mesh.world)


def _restore_streams(engine: Engine, checkpoint: Checkpoint) -> None:
    """Restore this rank's random streams and generators; in another layout, reseed them from the seed and the step."""
    layout = engine.mesh.layout
    names = {name for name in stored_names(checkpoint.path) if name.startswith(STREAMS)}
    if any(name.startswith(stored_as(layout.shape)) for name in names):
        streams, generators = engine.streams.stored(layout.shape), engine.generators.places(layout.shape)
        mine = {name: state for name, state in (streams | generators).items() if name in names}
        load_tensors(mine, checkpoint.path, engine.mesh.world)
        if drawn := {name: state for name, state in mine.items() if name in streams}:
            engine.streams.load_stored(drawn, layout.shape)  # otherwise this rank's stage never drew
        engine.generators.load_stored(mine, layout.shape)
        return
    of_process = {name for name in names if is_of_process(name)}
    if names - of_process:
        engine.streams.reseed("after", checkpoint.step)
    if of_process:
        engine.generators.reseed(engine.settings.seed, "after", checkpoint.step)
