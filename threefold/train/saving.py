"""Checkpoints of a run: which ones are saved, kept and rolled back to, so that a good one always remains."""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from math import isfinite
from pathlib import Path

import torch
from torch import Tensor

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import (
    CONFIG,
    PREFIX,
    TOKENIZER,
    best_step,
    carried_by,
    code_text,
    complete,
    from_first,
    model_files,
    prune,
)
from threefold.checkpoint.manifest import WRITER, AnomalyFacts, Checkpoint, Facts, read_manifest, record_of
from threefold.checkpoint.save import Written, save_checkpoint, set_aside_checkpoint
from threefold.data.conversations import CONFIG_FILE
from threefold.data.corpus import Content
from threefold.data.dataset import Dataset
from threefold.data.loader import Loader
from threefold.errors import DivergenceError, UserError
from threefold.files import read_text
from threefold.models.source import file_source
from threefold.torch_private.tensors import foreach_norm
from threefold.train.callbacks.base import FailureWarning
from threefold.train.callbacks.records import EvaluationRecord
from threefold.train.state import StartingPoint, checkpoint_tensors, engine_tensors, loss_scale_facts, restore_engine
from threefold.train.step import Engine
from threefold.train.stop import RunClock


class SafeSaving:
    """Save due checkpoints, and never replace a good checkpoint with one of a diverged model.

    A checkpoint is good once its weights have given a finite loss, in a step that was not skipped or in an evaluation:
    a bad update shows in the next loss. Hence

    - the training loop saves only after a good step: a save that is due while steps are skipped, or after a loss that
      is not finite, waits for the next one;
    - older checkpoints are deleted only when the new one is complete, good, and proved by `is_proved`, given its step;
    - when the run diverges, a checkpoint that no good step followed is renamed; a resumed run starts from the one
      before.

    All ranks see the same losses and make the same decisions. While `awaits_good_step` is true, call `after_good_step`
    after the next step that was not skipped.
    """

    def __init__(self, store: "Checkpoints", is_proved: Callable[[int], bool] = lambda step: True) -> None:
        self.store, self._is_proved = store, is_proved
        self.awaits_good_step = True
        self._awaiting: int | None = None  # step of the last checkpoint, until a good step has followed
        self._tried: Path | None = None  # checkpoint that the last rollback loaded, until a good step follows
        self._good: int | None = None  # step of a checkpoint that a good step followed, while older ones are kept
        self._has_good_steps = False

    def after_good_step(self) -> None:
        """Record a step that was not skipped; call it directly after the step."""
        self._has_good_steps, self._tried = True, None
        self._settle()
        self.awaits_good_step = self._good is not None

    def save(self, step: int, last: bool = False, evaluation_missed: bool = False) -> Path | None:
        """Save after `step` updates, after a good step; return the checkpoint's folder, or None if it is not written.

        Raises:
            DivergenceError: the weights are not finite.
        """
        if not self.store.is_finite():
            raise self.set_aside_and_explain(
                f"Training diverged at step {step}: weights or optimizer state are not finite after it"
            )
        path = self.store.save(step, last, evaluation_missed)
        if path is not None:
            self._awaiting, self.awaits_good_step = step, True
        return path

    def finish(self) -> Written | None:
        """Wait for the checkpoint being written in the background; return it once if complete. Collective."""
        written = self.store.finish()
        if written is None or written.failure is None:
            return written
        if self._awaiting == written.step:
            self._awaiting = None
        return None

    def save_last(
        self, step: int, loss: Callable[[], float], is_after_good_step: bool, evaluation_missed: bool = False
    ) -> Path:
        """Save the checkpoint after the last step of this process.

        No later step can show that its weights are good, so `loss` is called to compute the loss that they give. After
        a skipped step they are only known to be unchanged since the last good one.

        Raises:
            DivergenceError: weights or loss are not finite.
            UserError: on every rank, if the checkpoint cannot be written.
        """
        value = loss()
        if not isfinite(value):
            raise self.set_aside_and_explain(
                f"Training diverged at step {step}: the loss of the weights after it is {value:g}"
            )
        path = self.save(step, True, evaluation_missed)
        assert path is not None  # the last save raises instead
        if is_after_good_step:
            self._settle()
        return path

    def roll_back(self) -> Path | None:
        """Return the checkpoint to load after a bad step, the newest one; None if there is none.

        If the newest was already loaded like this and no good step followed, set it aside and return the one before it.
        """
        self.finish()
        found = self.store.newest()
        if found is not None and found == self._tried:
            moved = self.store.set_aside(int(found.name.partition(".")[0].rpartition("_")[2]))
            if moved is None:
                return None
            self._awaiting, found = None, moved[1]
        if found is not None:
            self._tried, self.awaits_good_step = found, True
        return found

    def resume_hint(self) -> str:
        """Return a clause with the checkpoint to resume from after a hardware fault, which casts doubt on none."""
        newest = self.store.newest()
        return f"--resume starts from {newest}" if newest else "there is no checkpoint to resume from"

    def set_aside_and_explain(self, message: str) -> DivergenceError:
        """Return the error with the checkpoint to resume from; set aside a checkpoint that no good step followed."""
        self.finish()
        if self._awaiting is not None and (moved := self.store.set_aside(self._awaiting)):
            aside, older = moved
            return DivergenceError(
                f"{message}; no good step followed the newest checkpoint, which is {aside} now, so --resume starts "
                f"from {older}."
            )
        whole = self.store.whole()
        if not whole or (self._has_good_steps and self._awaiting is None):
            return DivergenceError(f"{message}; {self.resume_hint()}.")
        ways = f"remove it to resume from {whole[-2]}" if len(whole) > 1 else "start a new run in another folder"
        return DivergenceError(f"{message}; no good step followed {whole[-1]}: {ways}.")

    def _settle(self) -> None:
        if self._awaiting is not None:
            self._good, self._awaiting = self._awaiting, None
        if self._good is not None and self._is_proved(self._good):
            self.store.prune(self._good)
            self._good = None


@dataclass(frozen=True)
class CheckpointContents:
    """Facts and files of a run that its checkpoints hold beside the tensors.

    Attributes:
        contents: returns the checksums of each corpus.
        anomalies: returns the record of the run's bad steps.
    """

    engine: Engine
    loader: Loader
    dataset: Dataset
    contents: Callable[[], tuple[Content, ...]]
    anomalies: Callable[[], AnomalyFacts | None]

    @cached_property
    def _sizes(self) -> tuple[tuple[int, int], ...]:
        return self.dataset.sizes()

    def facts(self, step: int, evaluation_missed: bool, measured: tuple[str, float] | None = None) -> Facts:
        """Return the state of the run besides its tensors after `step` updates."""
        dataset, sizes = self.dataset, self._sizes
        scale, good_steps = loss_scale_facts(self.engine)
        return Facts(
            step=step,
            consumed_samples=self.loader.consumed.before(step),
            blend=self.loader.blend(step),
            seed=self.engine.config.train.seed,
            eod=dataset.eod,
            tokenizer_sha256=dataset.tokenizer_sha256,
            tokens=sum(tokens for tokens, _ in sizes),
            documents=sum(documents for _, documents in sizes),
            corpora=sizes,
            special_tokens=None if dataset.rule.is_assumed else dataset.rule.special_tokens,
            beginning=dataset.rule.beginning,
            contents=self.contents(),
            loss_scale=scale,
            good_steps=good_steps,
            anomalies=self.anomalies(),
            measured=measured,
            evaluation_missed=evaluation_missed,
            fingerprint=self.engine.fingerprint(step),
        )

    def texts(self, carried: Checkpoint | None) -> dict[str, str]:
        """Return the text files of a checkpoint: config, model files, tokenizer, and further ones of `carried`."""
        config, dataset = self.engine.config, self.dataset
        # Resolve every setting of model and data, which the weights depend on; keep the others as given.
        texts = {CONFIG: config.to_yaml_as_given(("model", "data"), kept=("train.max_steps",))}
        if config.model.file:
            texts |= {name: code_text(file) for name, file in model_files(file_source(config.model).path).items()}
        if dataset.tokenizer_file is not None:
            texts[TOKENIZER] = read_text(dataset.tokenizer_file)
        if dataset.template is not None:
            texts |= {PREFIX + name: text for name, text in dataset.template.files().items()}
        if carried is None:
            return texts
        found = carried_by(carried.path)
        # A tokenizer.json of the data is the same; the checkpoint's settings are more complete.
        return found | texts | {name: text for name, text in found.items() if name == PREFIX + CONFIG_FILE}


class Checkpoints:
    """Checkpoints of a run: saving, rollback and pruning. Collective over the world.

    An attached room has those that are written in the background or copied elsewhere (`checkpoints` of its `HOOKS`).

    Attributes:
        contents: facts and files of the run.
        skipped: folders of damaged checkpoints that were passed over on resuming.
    """

    is_background = False
    """Whether checkpoints other than the last are written while training continues."""

    def __init__(self, run_dir: Path, contents: CheckpointContents, start: StartingPoint, clock: RunClock) -> None:
        engine = contents.engine
        self.run_dir, self.engine, self.skipped = run_dir, engine, start.skipped
        self.contents, self._settings = contents, engine.config.checkpoint
        self._clock = clock
        first, tries = engine.mesh.world.is_first, "training continues, and the next checkpoint that is due tries again"
        self._saving, self._pruning = FailureWarning(first, tries), FailureWarning(first, "training continues")
        self._texts = contents.texts(start.carried) if first else {}
        self._measured: tuple[int, tuple[str, float]] | None = None  # step, and metric with its value
        held = sum(tensor.numel() * tensor.itemsize for tensor in engine_tensors(engine).values())
        clock.begin(held * engine.mesh.pp.size)  # of one stage, whole; the others hold about as much

    def save(self, step: int, last: bool = False, evaluation_missed: bool = False) -> Path | None:
        """Save a checkpoint after `step` updates; return its folder.

        If the last checkpoint cannot be written, raises UserError on every rank. If another cannot be written, warns
        and returns None.
        """
        begun = time.monotonic()
        tensors, texts = self._begin()
        try:
            facts = self._facts(step, evaluation_missed)
            path = save_checkpoint(self.run_dir, facts, tensors, texts, self.engine.mesh.world)
        except UserError as error:
            if last:
                raise
            self._saving.failed(str(error))
            return None
        self._complete(step, path, time.monotonic() - begun, last)
        return path

    def _begin(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Begin a save; return the tensors and the texts of the checkpoint."""
        self._clock.saving()
        return checkpoint_tensors(self.engine), self._texts | {WRITER: record_of(self.engine.config.parallel).text}

    def evaluated(self, record: EvaluationRecord) -> bool:
        """Note an evaluation; return whether `checkpoint.keep_best` asks for a checkpoint, as no other is as good."""
        metric, self._measured = self._settings.keep_best, None
        value = record.average_loss if metric == "valid_loss_average" else record.loss
        if metric is None or value is None or not isfinite(value):
            return False

        def lowest() -> tuple[str, float] | None:
            facts = [each.facts for each in complete(self.run_dir) if each.path not in self.skipped]
            return next((each.measured for each in facts if each.step == best_step(facts)), None)

        self._measured = record.step, (metric, value)
        known = from_first(self.engine.mesh.world, lowest)
        return known is None or known[0] != metric or value < known[1]

    def _facts(self, step: int, evaluation_missed: bool) -> Facts:
        measured = self._measured[1] if self._measured is not None and self._measured[0] == step else None
        return self.contents.facts(step, evaluation_missed, measured)

    def finish(self) -> Written | None:
        """Wait for the checkpoint being written in the background; warn if it failed; return it once, else None."""
        return None

    def end(self, seconds: float | None = None) -> str | None:
        """End what goes on in the background, within this many seconds; None to wait until it is done.

        Returns, on the first rank, a sentence if the newest checkpoint could not be copied elsewhere.
        """
        return None

    def prune(self, step: int) -> None:
        """Delete, on the first rank, checkpoints up to `step` that `keep`, `keep_every` and `keep_best` do not keep."""
        if self.engine.mesh.world.is_first:
            self._prune(step, self.engine.mesh.heartbeat.progress)

    def _prune(self, step: int, progress: Callable[[], None], used: Collection[Path] = ()) -> None:
        settings = self._settings
        try:
            prune(self.run_dir, settings.keep, step, self.skipped | {*used}, settings.keep_every, progress)
            self._pruning.worked()
        except OSError as error:
            self._pruning.failed(f"An old checkpoint of {self.run_dir} cannot be deleted ({error})")

    def whole(self) -> list[Path]:
        """Return the folders of the complete checkpoints, oldest first."""
        self.finish()
        return [checkpoint.path for checkpoint in complete(self.run_dir)]

    def newest(self) -> Path | None:
        return next(reversed(self.whole()), None)

    def set_aside(self, step: int) -> tuple[Path, Path] | None:
        """Rename the checkpoint of `step`, and its copy, so that no run resumes from it.

        Returns its new folder and the next older one; None if it is the only checkpoint, which then stays.
        """
        self.finish()
        return set_aside_checkpoint(self.run_dir, step, self.engine.mesh.world)

    def is_finite(self) -> bool:
        """Return whether weights and optimizer state are finite on every rank."""
        tensors = [weight.master.detach() for weight in self.engine.model.weights]
        tensors += [value for _, _, value in self.engine.optimizer.states()]
        tensors += [average for _, average in self.engine.optimizer.averages()]
        filled = [tensor for tensor in tensors if tensor.numel()]
        largest = torch.stack([norm.double().to(self.engine.mesh.device) for norm in foreach_norm(filled, torch.inf)])
        bad = (~largest.isfinite()).sum()
        return int(self.engine.mesh.world.all_reduce_(bad)) == 0

    def load(self, path: Path) -> Facts:
        """Load one of the run's checkpoints and return its facts; raise a `UserError` on every rank if that fails."""
        try:
            return self._load(path)
        except DamagedCheckpoint as damage:
            reason = damage.reason
        if self._replaced(path, reason):
            with suppress(DamagedCheckpoint):
                return self._load(path)
        raise UserError(f"The run cannot go back to {path}, which is damaged ({reason}); remove it and use --resume.")

    def _replaced(self, path: Path, reason: str) -> bool:
        """Replace a damaged checkpoint by its copy; return whether there was one."""
        return False

    def _load(self, path: Path) -> Facts:
        checkpoint = read_manifest(path)
        restore_engine(self.engine, checkpoint)
        return checkpoint.facts

    def _complete(self, step: int, path: Path, seconds: float, last: bool = False) -> None:
        self._saving.worked()
        self.skipped -= {path}  # it replaced a damaged one
        self._clock.saved(seconds)
