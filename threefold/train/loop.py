"""Training loop: step, evaluate, save, and call the callbacks."""

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
from threefold.train.optim import learning_rate
from threefold.train.performance import PerformanceMeter
from threefold.train.step import Engine, NonFiniteStep
from threefold.train.stop import Stopped

_PATIENCE: Final = 60.0
"""Seconds that a failed run waits for background writes to complete."""


def is_due(step: int, every: int, last: int) -> bool:
    """Return whether something done every `every` steps (0: never), and after the last step, is due after `step`."""
    return every > 0 and (step % every == 0 or step == last)


class TrainingLoop:
    """Training loop of a run. Collective over the world: every rank has one; their callbacks may differ.

    Args:
        callbacks: callbacks, called in this order at each moment.
        store: saves and loads checkpoints.
        run: argument of the callbacks' `setup`; None if they have been set up already.
        policy: decides which steps are skipped and what follows a bad step; None for the config's policy.
        watch: watch for silent corruption; None for none.
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
        self._updated = 0  # last step of this process that made an update

    def fit(self, start: int = 0, unsaved: bool = False, evaluation_missed: bool = False) -> Stopped | None:
        """Run the remaining updates of `train.max_steps`, after `start` updates.

        A signal or a callback's `stop` ends the run after the current step, with a checkpoint. An evaluation ends at
        once, and is repeated when the run resumes.

        Args:
            start: updates made before.
            unsaved: whether no checkpoint holds the state after them, so that one is saved if the run ends here.
            evaluation_missed: whether an evaluation after them is still due.

        Returns:
            None after the last step; otherwise how a signal or a callback ended the run, the same on every rank.

        Raises:
            CallbackFailed: on the ranks whose callback raised.
            UserError: divergence, a full disk, or a callback's error for the user to fix.
        """
        try:
            ended = self._run(start, unsaved, evaluation_missed)
        except BaseException as error:
            # After any other error a rank may be lost, and the background writes would wait for it.
            self.saving.end(_PATIENCE if isinstance(error, UserError) else 0)
            with suppress(UserError):  # report the first error
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
            if step <= done:  # rolled back
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
                stop.agree(mesh)  # a signal during a long save must not start another step
            if stop.is_due and step < last:
                return self._stopped(step)
        self._notify("after_fit")
        return None

    def _stopped(self, step: int) -> Stopped:
        """Return how the run ended before its last step, and notify the callbacks if one of them ended it."""
        stopped = self.engine.stop.result(self.engine.mesh, step)
        if stopped.reason:
            self._notify("after_stop", step, stopped.reason)
            self._notify("after_fit")
        return stopped

    def _step(self, done: int) -> int:
        """Make or skip the step after `done` updates; return the new number of updates, smaller after a rollback."""
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
        self._evaluation, self._updated = None, 0
        if self.watch is not None:
            self.watch.begin(start)
        self._notify("after_rollback", step, start, response.reason)
        return start

    def _evaluate(self, step: int) -> bool:
        """Evaluate; return False if the run ended before the evaluation was complete."""
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
        """Roll back if the state to save is not finite; return the updates made then, or None if the run goes on."""
        ends = step == self.config.train.max_steps or self.engine.stop.is_due
        if not self.policy.rolls_back or not (ends or self.saving.will_save(self._is_due(step))):
            return None
        self._finish_saving()  # a rollback may load it
        response = self.bad_steps.state_not_finite(step)
        if response is None or response.start is None:
            return None
        return self._rolled_back(step, response, response.start)

    def _is_due(self, step: int) -> bool:
        by_clock = self.engine.stop.save_is_due
        return by_clock or is_due(step, self.config.checkpoint.every, self.config.train.max_steps)

    def _save(self, step: int) -> bool:
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
        self.engine.stop.save_ended = False
        if (written := self.saving.finish()) is not None:
            self._notify("after_checkpoint", written.step, written.path)

    def _save_last(self, step: int) -> None:
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
        """Return a loss of the weights after `step` updates: this step's evaluation, or the last updating batch."""
        known = self._evaluation
        if known is not None and known.step == step and isfinite(known.loss):
            return known.loss
        # Use samples that made a good step: a skipped step has none, or they may be the cause.
        measured = self._updated or self.policy.next_step(step + 1)
        loss, tokens = self.engine.evaluate(self.loader.batch(measured - 1, self.policy.next_step(step + 1) - 1))
        return loss / max(1, tokens)

    def _consumed_by(self, done: int) -> int | None:
        consumed = self.loader.consumed
        return None if consumed.has_one_size else consumed.before(done)

    def _epoch(self, done: int) -> int:
        return int(self.loader.epoch(done))

    def _epochs_ended(self, done: int, count: int = 1) -> bool:
        """Return whether the last of `done` updates completed a multiple of `count` epochs."""
        return done > 0 and self._epoch(done) // count > self._epoch(done - 1) // count

    def _first_step(self, epoch: int) -> int:
        """Return the number of updates before the first step that begins in `epoch`."""
        return self.loader.consumed.steps_until(epoch * len(self.loader.train))

    def _notify(self, moment: str, *arguments: Any) -> None:
        for callback in self.callbacks:
            self.heartbeat.callback(type(callback).__name__, alone=callback.ranks == "first")
            call(callback, moment, self.engine.mesh.rank, *arguments)
            if reason := stop_reason(callback):
                self.engine.stop.ask(reason)

    def _close(self) -> None:
        failures = []
        for callback in self.callbacks:
            try:
                call(callback, "close", self.engine.mesh.rank)
            except UserError as error:
                failures.append(error)
        if failures:
            raise failures[0]


def call(callback: Callback, moment: str, rank: int, *arguments: Any) -> None:
    """Call a method of a callback; a `UserError` passes, and any other exception becomes `CallbackFailed`."""
    try:
        getattr(callback, moment)(*arguments)
    except UserError:
        raise
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(".").removesuffix(":")
        name = type(callback).__name__
        raise CallbackFailed(f"The callback {name} on rank {rank} failed in {moment} with {what}.") from error


def evaluate(engine: Engine, loader: Loader, batches: int, step: int) -> EvaluationRecord | None:
    """Return the mean loss over the first `batches` global batches of the validation part, the same on every rank.

    The batches are divided among the corpora of a mixture by their weights, and the loss is the weighted mean of the
    corpora's losses. Gradients and random state are unchanged. Collective over the world.

    Args:
        engine: model to evaluate.
        loader: loader of the validation samples, with the same number of batches on every rank.
        batches: maximum number of batches.
        step: updates made so far.

    Returns:
        the record; None if the run is to end before all batches were seen (`engine.stop`).

    Raises:
        UserError: all labels of the batches are masked.
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
    """Return the terms of a loss; none for a loss that is a single mean."""
    return {} if set(terms) <= {LOSS} else dict(terms)


def _counted(sums: LossSums) -> int:
    """Return the number of valid tokens, or the count of the only term; the number of samples for several terms."""
    (only, *others) = sums.counts.values()
    return sums.samples if others else int(only)


def _sums(engine: Engine, batches: Iterator[Any], name: str) -> LossSums | None:
    """Sum the loss over batches; None if the run is to end."""
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
