"""The training loop."""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from math import isfinite, nan
from typing import Any, Final

from threefold.comm.heartbeat import Activity, RunSection
from threefold.config import Config
from threefold.data.loader import Loader
from threefold.errors import UserError
from threefold.models.loss_terms import LOSS, LossSums
from threefold.train.anomalies import AnomalyPolicy, BadSteps, Response
from threefold.train.callbacks.base import (
    Callback,
    CallbackFailed,
    EvaluationRecord,
    RunContext,
    StepRecord,
    stop_reason,
)
from threefold.train.corruption import CorruptionWatch
from threefold.train.divergence import CheckpointStore, SafeSaving
from threefold.train.lr_schedules import learning_rate
from threefold.train.performance import PerformanceMeter
from threefold.train.step import Engine, NonFiniteStep
from threefold.train.stop import Stopped

_PATIENCE: Final = 60.0
"""Seconds that a run which failed gives what it is writing beside the training."""


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done every `every` steps (0: never) is due after `step`; it also is after the last one."""
    return every > 0 and (step % every == 0 or step == last)


class TrainingLoop:
    """Runs an engine through the steps of a run.

    Collective over the world: every rank has one; their callbacks may differ.

    Args:
        engine: the model and its update.
        loader: this replica's batches.
        config: resolved.
        callbacks: called in this order at each moment.
        store: saves the checkpoints.
        run: what the callbacks' `setup` gets; None where they have been set up.
        policy: which steps are skipped, and what follows a bad one; None for that of the config.
        watch: for silent corruption; None for none.
    """

    def __init__(
        self,
        engine: Engine,
        loader: Loader,
        config: Config,
        callbacks: Sequence[Callback],
        store: CheckpointStore,
        run: RunContext | None = None,
        policy: AnomalyPolicy | None = None,
        watch: CorruptionWatch | None = None,
    ) -> None:
        self.engine, self.loader, self.config, self.callbacks, self.run = engine, loader, config, callbacks, run
        self.saving, self.watch = SafeSaving(store, None if watch is None else watch.is_proved), watch
        self.policy = policy or AnomalyPolicy(config)
        self.bad_steps = BadSteps(engine, loader, self.saving, store, self.policy)
        self.heartbeat = engine.mesh.heartbeat
        began = None if run is None else run.attempt.began
        self.meter = PerformanceMeter(engine.mesh, config, None if run is None else run.peak_rate, began)
        self._evaluation: EvaluationRecord | None = None
        self._updated = 0  # the last step of this process that made an update

    def fit(self, start: int = 0, unsaved: bool = False, evaluation_missed: bool = False) -> Stopped | None:
        """Run the remaining updates of `train.max_steps`, after `start` updates.

        A signal, or a callback's `stop`, ends it after the current step, with a checkpoint; an evaluation ends at once,
        and is made where the run continues.

        Args:
            start: updates made before.
            unsaved: whether the state after them is in no checkpoint, so that one is saved if the run ends here.
            evaluation_missed: whether an evaluation after them is still to be made.

        Returns:
            None after the last step; else the step at which a signal or a callback ended the run, the same on every
            rank.

        Raises:
            CallbackFailed: on the ranks whose callback raised.
            UserError: divergence, a full disk, or what a callback says is the user's to correct.
        """
        try:
            ended = self._run(start, unsaved, evaluation_missed)
        except BaseException as error:
            # With another error a rank may be lost, which what is being written would wait for.
            self.saving.end(_PATIENCE if isinstance(error, UserError) else 0)
            with suppress(UserError):  # the first error is the one to report
                self._close()
            raise
        self.saving.end()
        self._close()
        return ended

    def _run(self, start: int, unsaved: bool, evaluation_missed: bool) -> Stopped | None:
        last, stop, mesh = self.config.train.max_steps, self.engine.stop, self.engine.mesh
        if self.run is not None:
            self._notify("setup", self.run)
        self._notify("before_fit", start)
        if self.watch is not None:
            self.watch.begin(start)
        if stop.agree(mesh):
            if unsaved:
                self._save_last(start)
            return self._stopped(start)
        if evaluation_missed and self._evaluates_after(start) and not self._evaluate(start):
            return self._stopped(start)
        done = start
        while done < last:
            if done == start or self._epochs_ended(done):
                self._notify("before_epoch", self._epoch(done))
            step = self._step(done)
            if step <= done:  # after a rollback
                done = start = step
                continue
            done = step
            ended, evaluates = self._epochs_ended(step), self._evaluates_after(step)
            if ended:
                self._notify("after_epoch", self._epoch(step) - 1)
            if evaluates and (stop.is_due or not self._evaluate(step)):
                stop.evaluation_missed = True
            if (ended or evaluates) and not stop.is_due:
                stop.agree(mesh)
            if stop.save_ended:
                self._finish_saving()
            if (back := self._back_from(step)) is not None:
                done = start = back
                continue
            if step == last or stop.is_due:
                self._save_last(step)
            elif self._save(step):
                stop.agree(mesh)  # no further step follows a signal that came during a long save
            if stop.is_due and step < last:
                return self._stopped(step)
        self._notify("after_fit")
        return None

    def _stopped(self, step: int) -> Stopped:
        """How the run ended before its last step; told to the callbacks where one of them ended it."""
        stopped = self.engine.stop.result(self.engine.mesh, step)
        if stopped.reason:
            self._notify("after_stop", step, stopped.reason)
            self._notify("after_fit")
        return stopped

    def _step(self, done: int) -> int:
        """Make the step after `done` updates, or skip it; returns how many were made then, fewer after a rollback."""
        started = time.perf_counter()
        self.heartbeat.section(RunSection.STEP, done + 1)
        self.meter.before_step()
        if reason := self.policy.skipped_for(done + 1):
            self._pass_over(done, reason, started)
            return done + 1
        self.heartbeat.activity(Activity.DATA)
        batch = self.loader.batch(done, self.policy.next_step(done + 2) - 1)
        read = time.perf_counter()
        self._notify("before_step", done + 1, batch)
        self.heartbeat.activity(Activity.NOTHING)
        begun = time.perf_counter()
        if self.watch is not None:
            self.watch.before_forward(done + 1)
        streams, response = self.engine.streams.state_dict(), None
        loss, tokens = self.engine.compute_gradients(batch, done)
        computed = time.perf_counter()
        if self.watch is not None:
            self.watch.before_update(done + 1)
        try:
            result = self.engine.update(loss, tokens, done, self.policy.spikes.reason)
        except NonFiniteStep as error:
            if self.watch is not None:
                self.watch.after_divergence(done)
            self._finish_saving()
            result, response = error.result, self.bad_steps.not_finite(error, batch, done, loss, streams)
        if result.refused:
            self._finish_saving()
            response = self.bad_steps.spike(result.refused, done)
        if response is not None and response.start is not None:
            return self._rolled_back(done + 1, response, response.start)
        if self.watch is not None:
            self.watch.after_update(done + 1)
        ended = time.perf_counter()
        epoch, nested = self._epoch(done), self.loader.is_nested
        read_samples = self.config.train.global_batch_size
        record = StepRecord(
            step=done + 1,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.tokens,
            tokens_read=read_samples * (1 if nested else self.config.data.sequence_length) - result.padding,
            padding=result.padding,
            epoch=epoch,
            batch=done - self._first_step(epoch),
            reader_cost=read - started,
            seconds=ended - started,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
            corpus_epochs=self.loader.corpus_epochs(done),
            phases={
                "data": read - started,
                "callbacks": begun - read,
                "forward_backward": computed - begun,
                "update": ended - computed,
            },
            terms=several(result.terms),
            consumed_samples=self._consumed_by(done + 1),
            unit="samples" if nested else "tokens",
            reason="" if response is None else response.reason,
            performance=self.meter.after_step(ended - started),
        )
        if not result.skipped:
            self.policy.updated(result.loss, result.grad_norm)
            self._updated = done + 1
        self.saving.after_step(record)
        self._notify("after_step", record)
        return done + 1

    def _pass_over(self, done: int, reason: str, started: float) -> None:
        """Skip a step whose samples are not read."""
        epoch = self._epoch(done)
        record = StepRecord(
            step=done + 1,
            loss=nan,
            grad_norm=nan,
            lr=learning_rate(done + 1, self.config.optimizer),
            tokens=0,
            tokens_read=0,
            epoch=epoch,
            batch=done - self._first_step(epoch),
            reader_cost=0.0,
            seconds=time.perf_counter() - started,
            skipped=True,
            corpus_epochs=self.loader.corpus_epochs(done),
            unit="samples" if self.loader.is_nested else "tokens",
            consumed_samples=self._consumed_by(done + 1),
            reason=reason,
        )
        self.saving.after_step(record)
        self._notify("after_step", record)

    def _rolled_back(self, step: int, response: Response, start: int) -> int:
        """Go on from the checkpoint that was loaded after a bad step."""
        self._evaluation, self._updated = None, 0
        if self.watch is not None:
            self.watch.begin(start)
        self._notify("after_rollback", step, start, response.reason)
        return start

    def _evaluate(self, step: int) -> bool:
        """Returns whether it was made, and the run not ended before."""
        self.heartbeat.section(RunSection.EVALUATION, step)
        self._notify("before_evaluation", step)
        record = evaluate(self.engine, self.loader, self.config.train.eval_batches, step)
        if record is None:
            return False
        self._evaluation = record
        self.saving.after_evaluation(record)
        self._notify("after_evaluation", record)
        return True

    def _evaluates_after(self, step: int) -> bool:
        train = self.config.train
        if not train.eval_every_epochs:
            return is_due(step, train.eval_every, train.max_steps)
        return self._epochs_ended(step, train.eval_every_epochs) or step == train.max_steps

    def _back_from(self, step: int) -> int | None:
        """Roll back where a checkpoint would be saved of a state that is not finite, if bad steps lead to a rollback;
        returns the updates made then, or None where the run goes on."""
        ends = step == self.config.train.max_steps or self.engine.stop.is_due
        if not self.policy.rolls_back or not (ends or self.saving.will_save(self._is_due(step))):
            return None
        self._finish_saving()  # a rollback may go back to it
        response = self.bad_steps.state_not_finite(step)
        if response is None or response.start is None:
            return None
        return self._rolled_back(step, response, response.start)

    def _is_due(self, step: int) -> bool:
        by_clock = self.engine.stop.save_is_due
        return by_clock or is_due(step, self.config.checkpoint.every, self.config.train.max_steps)

    def _save(self, step: int) -> bool:
        """Save if a checkpoint is due; returns whether it was."""
        due, self.engine.stop.save_is_due = self._is_due(step), False
        if self.saving.will_save(due):
            self.heartbeat.section(RunSection.SAVE, step)
            self._finish_saving()
            self._before_save(step)
        path = self.saving.save(step, due)
        if path is not None:
            self._notify(*(("after_staging", step) if self.saving.is_background else ("after_checkpoint", step, path)))
        return path is not None

    def _finish_saving(self) -> None:
        """Wait for the checkpoint that is being written in the background, and tell the callbacks of it."""
        self.engine.stop.save_ended = False
        if (written := self.saving.finish()) is not None:
            self._notify("after_checkpoint", written.step, written.path)

    def _save_last(self, step: int) -> None:
        """Save the checkpoint after the last step of this process."""
        self.heartbeat.section(RunSection.SAVE, step)
        self._finish_saving()
        self._before_save(step)
        path = self.saving.save_last(step, lambda: self._loss_after(step))
        self._notify("after_checkpoint", step, path)

    def _before_save(self, step: int) -> None:
        if self.watch is not None:
            self.watch.before_save(step)
        self._notify("before_checkpoint", step)

    def _loss_after(self, step: int) -> float:
        """A loss of the weights after `step` updates: from the evaluation at this step, or of the last batch that made
        one."""
        known = self._evaluation
        if known is not None and known.step == step and isfinite(known.loss):
            return known.loss
        # Of samples that made a good step: those of a skipped one are not read, or may be what was bad.
        measured = self._updated or self.policy.next_step(step + 1)
        loss, tokens = self.engine.evaluate(self.loader.batch(measured - 1, self.policy.next_step(step + 1) - 1))
        return loss / max(1, tokens)

    def _consumed_by(self, done: int) -> int | None:
        """What a record has as `consumed_samples`."""
        consumed = self.loader.consumed
        return None if consumed.has_one_size else consumed.before(done)

    def _epoch(self, done: int) -> int:
        return int(self.loader.epoch(done))

    def _epochs_ended(self, done: int, count: int = 1) -> bool:
        """Whether the last of `done` updates was the last of a multiple of `count` epochs."""
        return done > 0 and self._epoch(done) // count > self._epoch(done - 1) // count

    def _first_step(self, epoch: int) -> int:
        """Updates made before the first step that begins in `epoch`."""
        return self.loader.consumed.steps_until(epoch * len(self.loader.train))

    def _notify(self, moment: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            self.heartbeat.callback(type(callback).__name__, alone=callback.ranks == "first")
            call(callback, moment, self.engine.mesh.rank, *arguments)
            if reason := stop_reason(callback):
                self.engine.stop.ask(reason)

    def _close(self) -> None:
        """Close all callbacks, even where one fails."""
        failures = []
        for callback in self.callbacks:
            try:
                call(callback, "close", self.engine.mesh.rank)
            except UserError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def call(callback: Callback, moment: str, rank: int, *arguments: Any) -> None:
    """Call a method of a callback.

    Raises:
        CallbackFailed: it raised.
        UserError: it raised this.
    """
    try:
        getattr(callback, moment)(*arguments)
    except UserError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(".").removesuffix(":")
        name = type(callback).__name__
        raise CallbackFailed(f"The callback {name} on rank {rank} failed in {moment} with {what}.") from error


def evaluate(engine: Engine, loader: Loader, batches: int, step: int) -> EvaluationRecord | None:
    """Mean loss over the tokens of the first `batches` global batches of the validation part; the same on every rank.

    The corpora of a mixture get batches by their weights, and the loss is the mean of theirs by the same weights.
    Gradients and randomness stay as they are. Collective over the world.

    Args:
        engine: the model.
        loader: has the validation samples; gives every rank the same number of batches.
        batches: at most so many.
        step: updates made so far.

    Returns:
        None where the run is to end before all batches were seen (`engine.stop`).

    Raises:
        UserError: all their labels are masked.
    """
    started = time.perf_counter()
    loss, tokens, by_corpus, terms = 0.0, 0, {}, dict[str, float]()
    for part, count in loader.eval_parts(batches):
        measured = _sums(engine, loader.eval_batches(count, part.samples), part.name)
        if measured is None:
            return None
        loss, tokens = loss + part.weight * measured.loss, tokens + _counted(measured)
        by_corpus[part.name] = measured.loss
        for name, mean in several(measured.terms).items():
            terms[name] = terms.get(name, 0.0) + part.weight * mean
    seconds = time.perf_counter() - started
    return EvaluationRecord(step, loss, tokens, seconds, by_corpus if loader.is_mixture else {}, terms)


def several(terms: Mapping[str, float]) -> dict[str, float]:
    """The terms of a loss where they say more than the loss: none of a loss that is a single mean."""
    return {} if set(terms) <= {LOSS} else dict(terms)


def _counted(sums: LossSums) -> int:
    """What the mean is taken over: valid tokens, or what the one term counts; the samples where there are several."""
    (only, *others) = sums.counts.values()
    return sums.samples if others else int(only)


def _sums(engine: Engine, batches: Iterator[Any], name: str) -> LossSums | None:
    """The loss over the valid tokens, or of the user's terms; None where the run is to end."""
    sums, heartbeat = LossSums(), engine.mesh.heartbeat
    heartbeat.activity(Activity.DATA)
    for batch in batches:
        sums = sums + engine.eval_batch(batch, engine.loss)
        heartbeat.activity(Activity.DATA)
        if engine.stop.is_due:
            return None
    if not any(sums.counts.values()):
        of = f" of {name}" if name else ""
        raise UserError(
            f"All labels of the validation batches{of} are masked, as its documents are empty; prepare other data."
        )
    return sums
