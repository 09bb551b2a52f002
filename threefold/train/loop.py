"""Training loop: step, evaluate, save, and call the callbacks.

Steps are numbered from 1 here, in records and in callbacks: after step n, n updates have been made, where a skipped
step counts as one. The engine's `compute_gradients` and `update` and the loader's `batch` take the number of updates
before the step instead, 0 for the first; here it is called `done`.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from math import isfinite, nan
from typing import Any, Final, NamedTuple

from threefold.comm.heartbeat import Activity, RunSection
from threefold.data.loader import Loader
from threefold.data.order import ConsumedSamples
from threefold.doors import call_hook
from threefold.errors import UserError
from threefold.files import describe_error
from threefold.models.loss_terms import LossSums
from threefold.train.callbacks.base import BadStep, Callback, CallbackFailed, Guard, Response, RunContext, say
from threefold.train.callbacks.records import EvaluationRecord, StepRecord
from threefold.train.optim import learning_rate
from threefold.train.saving import SafeSaving
from threefold.train.step import Engine, NonFiniteStep, StepResult, several
from threefold.train.stop import Stopped

_PATIENCE: Final = 60.0  # seconds that a failed run waits for background writes to complete


def is_due(step: int, every: int, last: int) -> bool:
    """Return whether something done every `every` steps (0: never), and after the last step, is due after `step`."""
    return every > 0 and (step % every == 0 or step == last)


class Epoch(NamedTuple):
    """Part of a run in which its training samples are read once; found once for all of its steps.

    `first` and `end` are the updates before its first step and after its last one; `is_uneven` tells whether the global
    batch size has changed.
    """

    number: int
    first: int
    end: int
    consumed: ConsumedSamples
    is_uneven: bool


class TrainingLoop:
    """Training loop of a run, collective over the world: every rank has one, whose callbacks, called in order, may
    differ.
    """

    def __init__(
        self, run: RunContext, engine: Engine, loader: Loader, saving: SafeSaving, callbacks: Sequence[Callback]
    ) -> None:
        self.run, self.engine, self.loader, self.saving, self.callbacks = run, engine, loader, saving, callbacks
        self.config, self.heartbeat = run.config, run.mesh.heartbeat
        self.guards = [callback for callback in callbacks if isinstance(callback, Guard)]
        self.meter: Any = call_hook("performance_meter", run)
        self._evaluation: EvaluationRecord | None = None
        self._save_due = False
        self._best: int | None = None  # step whose evaluation is the best so far, until the next evaluation
        self._is_healthy = True  # whether the last step made an update, and the last loss was finite
        self._updated = 0  # last step of this process that made an update
        self._known_epoch: Epoch | None = None
        self._is_mixture = len(loader.train.parts) > 1
        self._names_calls = True

    def fit(self, start: int = 0, unsaved: bool = False, evaluation_missed: bool = False) -> Stopped | None:
        """Run the remaining updates of `train.max_steps`, after `start` updates.

        A signal or a callback's `stop` ends the run after the current step, with a checkpoint. An evaluation ends at
        once, and is repeated when the run resumes.

        Args:
            unsaved: whether no checkpoint holds the state after them, so that one is saved if the run ends here.
            evaluation_missed: whether an evaluation after them is still due.

        Returns:
            None after the last step; otherwise how a signal or a callback ended the run, the same on every rank.

        Raises:
            CallbackFailed: on the ranks whose callback raised.
            UserError: divergence, a full disk, or a callback's error for the user to fix; on the first rank, a last
                checkpoint that could not be copied to `checkpoint.remote`.
        """
        try:
            ended = self._run(start, unsaved, evaluation_missed)
        except BaseException as error:
            # After any other error a rank may be lost, and the background writes would wait for it.
            missing = self.saving.store.end(_PATIENCE if isinstance(error, UserError) else 0)
            if missing is not None:
                say(f"Warning: {missing}")
            with suppress(UserError):  # report the first error
                self._close()
            raise
        missing = self.saving.store.end()
        self._close()
        if missing is not None:
            raise UserError(missing)
        return ended

    def _run(self, start: int, unsaved: bool, evaluation_missed: bool) -> Stopped | None:
        last, stop, mesh = self.config.train.max_steps, self.engine.stop, self.engine.mesh
        for callback in self.callbacks:
            self._notify_one(callback, "setup", self.run.of(callback))
        self._notify("before_fit", start)
        if stop.agree(mesh):
            if unsaved:
                self._save_last(start)
            return self._stopped(start)
        if evaluation_missed and self._evaluates_after(start) and not self._evaluate(start):
            return self._stopped(start)
        if self._best == start:  # its checkpoint does not say so yet
            self._save(start)
        done = start
        while done < last:
            if done == start or self._epochs_ended(done):
                self._notify("before_epoch", self._epoch(done).number)
            step = self._step(done)
            if step <= done:  # rolled back
                done = start = step
                continue
            done = step
            ended, evaluates = self._epochs_ended(step), self._evaluates_after(step)
            if ended:
                self._notify("after_epoch", self._epoch(step).number - 1)
            missed = evaluates and (stop.is_due or not self._evaluate(step))
            if (ended or evaluates) and not stop.is_due:
                stop.agree(mesh)
            if stop.save_ended:
                self._finish_saving()
            if (back := self._back_from(step)) is not None:
                done = start = back
                continue
            if step == last or stop.is_due:
                self._save_last(step, missed)
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
        step, started = done + 1, time.perf_counter()
        self.heartbeat.section(RunSection.STEP, step)
        if self.meter is not None:
            self.meter.before_step()
        if reason := self._ask_guards("skipped_for", step):
            lr = learning_rate(step, self.config.optimizer)
            passed_over = StepResult(nan, nan, lr, tokens=0, tokens_read=0, skipped=True, reason=reason)
            seconds = time.perf_counter() - started
            self._finish_step(StepRecord(**vars(passed_over) | self._place(step), reader_cost=0.0, seconds=seconds))
            return step
        self.heartbeat.activity(Activity.DATA)
        # The second argument counts the updates before the next step that no guard skips, whose batch is prefetched.
        batch = self.loader.batch(done, self._next_step(step + 1) - 1)
        read = time.perf_counter()
        self._notify("before_step", step, batch, step=step)
        self.heartbeat.activity(Activity.NOTHING)
        begun = time.perf_counter()
        self._ask_guards("before_forward", step)
        streams, error = self.engine.streams.states, None
        loss, tokens = self.engine.compute_gradients(batch, done)
        computed = time.perf_counter()
        unknown = self._unknown_calls()
        self._ask_guards("before_update", step)
        try:
            result = self.engine.update(loss, tokens, done, lambda *values: self._ask_guards("refuses", *values) or "")
        except NonFiniteStep as found:
            error, result = found.with_traceback(None), found.result  # no cycle keeps the batch alive
            self._ask_guards("after_divergence", done)
        reason = ""
        if error is not None or result.reason:
            self._finish_saving()
            response = self._ask_guards("respond", BadStep(step, result.reason, error, batch, loss, streams))
            if response is None:
                raise error or UserError(f"Training was stopped at step {step}: {result.reason}.")
            if response.start is not None:
                return self._rolled_back(step, response)
            reason = response.reason
        self._ask_guards("after_update", step)
        fingerprint = self.engine.fingerprint(step)
        ended = time.perf_counter()
        times = {"data": read - started, "callbacks": begun - read}
        times |= {"forward_backward": computed - begun, "update": ended - computed}
        record = StepRecord(
            **vars(result) | self._place(step) | {"reason": reason},
            reader_cost=read - started,
            seconds=ended - started,
            phases=times,
            performance=None if self.meter is None else self.meter.after_step(step, ended - started),
            fingerprint=fingerprint,
            unknown_calls=unknown,
        )
        if not result.skipped:
            self._updated = step
        self._finish_step(record)
        return step

    def _unknown_calls(self) -> tuple[str, ...]:
        """Print and return, in the first step, the functions not known to be exact that an exact run calls."""
        is_first, self._names_calls = self._names_calls, False
        found = self.engine.arithmetic.take_notes(everywhere=is_first)  # later on this rank alone, as it is rare
        if found and (self.engine.mesh.rank == 0 or not is_first):
            say(unknown_calls_line(found))
        return tuple(found)

    def _place(self, step: int) -> dict[str, Any]:
        """Return the fields of a record that give the step's position in the data."""
        epoch = self._epoch(step - 1)
        return {
            "step": step,
            "epoch": epoch.number,
            "batch": step - 1 - epoch.first,
            "corpus_epochs": self.loader.corpus_epochs(step - 1) if self._is_mixture else {},
            "unit": "samples" if self.loader.is_nested else "tokens",
            "consumed_samples": epoch.consumed.before(step) if epoch.is_uneven else None,
        }

    def _finish_step(self, record: StepRecord) -> None:
        self._is_healthy = not record.skipped
        if self._is_healthy and self.saving.awaits_good_step:
            self.saving.after_good_step()
        self._notify("after_step", record, step=record.step)
        if record.logged:
            self._notify("after_log", record)

    def _rolled_back(self, step: int, response: Response) -> int:
        assert response.start is not None
        self._evaluation, self._best, self._updated, self._save_due, self._is_healthy = None, None, 0, False, False
        self._notify("after_rollback", step, response.start, response.reason)
        return response.start

    def _evaluate(self, step: int) -> bool:
        """Evaluate; return False if the run ended before the evaluation was complete."""
        self.heartbeat.section(RunSection.EVALUATION, step)
        self._notify("before_evaluation", step)
        record = evaluate(self.engine, self.loader, self.config.train.eval_batches, step)
        if record is None:
            return False
        self._evaluation = record
        self._is_healthy = self._is_healthy and isfinite(record.loss)
        if self.config.checkpoint.keep_best is not None:
            self._finish_saving()  # it may be the best so far
            self._best = step if self.saving.store.evaluated(record) else None
        self._notify("after_evaluation", record)
        if record.logged:
            self._notify("after_log", record)
        return True

    def _evaluates_after(self, step: int) -> bool:
        train = self.config.train
        if not train.eval_every_epochs:
            return is_due(step, train.eval_every, train.max_steps)
        return self._epochs_ended(step, train.eval_every_epochs) or step == train.max_steps

    def _back_from(self, step: int) -> int | None:
        """Roll back if the state to save is not finite; return the updates made then, or None if the run continues."""
        ends = step == self.config.train.max_steps or self.engine.stop.is_due
        checks = any(guard.checks_state for guard in self.guards)
        if not checks or not (ends or self._will_save(step)):
            return None
        self._finish_saving()  # a rollback may load it
        response = self._ask_guards("check_state", step)
        return None if response is None else self._rolled_back(step, response)

    def _will_save(self, step: int) -> bool:
        """Return whether a checkpoint is or was due after `step`, and the last loss was finite."""
        by_clock, every = self.engine.stop.save_is_due, self.config.checkpoint.every
        self._save_due = self._save_due or by_clock or is_due(step, every, self.config.train.max_steps)
        return (self._save_due or self._best == step) and self._is_healthy

    def _save(self, step: int) -> bool:
        """Save if a checkpoint is due; one that could not be written is tried again when the next one is due."""
        will_save, self.engine.stop.save_is_due = self._will_save(step), False
        if not will_save:
            return False
        self._save_due = False
        self._begin_save(step)
        path = self.saving.save(step)
        if path is not None and self.saving.store.is_background:
            self._notify("after_staging", step)
        elif path is not None:
            self._notify("after_checkpoint", step, path)
        return path is not None

    def _finish_saving(self) -> None:
        self.engine.stop.save_ended = False
        if (written := self.saving.finish()) is not None:
            self._notify("after_checkpoint", written.step, written.path)

    def _save_last(self, step: int, evaluation_missed: bool = False) -> None:
        self._begin_save(step)
        path = self.saving.save_last(step, lambda: self._loss_after(step), self._is_healthy, evaluation_missed)
        self._notify("after_checkpoint", step, path)

    def _begin_save(self, step: int) -> None:
        self.heartbeat.section(RunSection.SAVE, step)
        self._finish_saving()
        self._ask_guards("before_save", step)
        self._notify("before_checkpoint", step)

    def _loss_after(self, step: int) -> float:
        """Return a loss of the weights after `step` updates: this step's evaluation, or the last updating batch."""
        known = self._evaluation
        if known is not None and known.step == step and isfinite(known.loss):
            return known.loss
        # Use samples that made a good step: a skipped step has none, or they may be the cause.
        following = self._next_step(step + 1)
        loss, tokens = self.engine.evaluate(self.loader.batch((self._updated or following) - 1, following - 1))
        return loss / max(1, tokens)

    def _epoch(self, done: int) -> Epoch:
        known, consumed = self._known_epoch, self.loader.consumed
        if known is None or known.consumed is not consumed or not known.first <= done < known.end:
            number, samples = int(self.loader.epoch(done)), self.loader.epoch_size
            first, end = (consumed.steps_until(count * samples) for count in (number, number + 1))
            self._known_epoch = known = Epoch(number, first, end, consumed, not consumed.has_one_size)
        return known

    def _epochs_ended(self, done: int, count: int = 1) -> bool:
        """Return whether the last of `done` updates completed a multiple of `count` epochs."""
        return done > 0 and self._epoch(done).number // count > self._epoch(done - 1).number // count

    def _next_step(self, step: int) -> int:
        return max([step, *(guard.next_step(step) for guard in self.guards if _overrides(guard, "next_step", Guard))])

    def _ask_guards(self, moment: str, *arguments: Any) -> Any:
        """Call a method of the guards that override it, in order, until one returns a result; return that, or None."""
        asked = (getattr(guard, moment) for guard in self.guards if _overrides(guard, moment, Guard))
        return next((found for ask in asked if (found := ask(*arguments))), None)

    def _notify(self, moment: str, *arguments: Any, step: int | None = None) -> None:
        """Call a method of the callbacks that override it; those of a step only at the callback's `step_interval`."""
        for callback in self.callbacks:
            every = 1 if step is None else callback.step_interval
            if every and (step is None or step % every == 0):
                self._notify_one(callback, moment, *arguments)
            elif reason := callback.stop_reason:
                self.engine.stop.ask(reason)

    def _notify_one(self, callback: Callback, moment: str, *arguments: Any) -> None:
        if _overrides(callback, moment, Callback):
            self.heartbeat.callback(type(callback).__name__, alone=callback.ranks == "first")
            call(callback, moment, self.engine.mesh.rank, *arguments)
        if reason := callback.stop_reason:
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


def evaluate(engine: Engine, loader: Loader, batches: int, step: int) -> EvaluationRecord | None:
    """Return the mean loss over the first `batches` global batches of the validation part, the same on every rank.

    The batches are divided among the corpora of a mixture by their weights, and the loss is the weighted mean of the
    corpora's losses. If the run averages its weights, the averages are evaluated after them. Gradients and random state
    are unchanged. Collective over the world.

    Returns:
        the record; None if the run must end before all batches were seen (`engine.stop`).

    Raises:
        UserError: all labels of the batches are masked.
    """
    started = time.perf_counter()
    record, average = _evaluated(engine, loader, batches, step), None
    if record is not None and engine.optimizer.average is not None:
        with engine.optimizer.averaged():
            if (average := _evaluated(engine, loader, batches, step)) is None:
                return None
    averaged = None if average is None else average.loss
    return record and replace(record, seconds=time.perf_counter() - started, average_loss=averaged)


def _evaluated(engine: Engine, loader: Loader, batches: int, step: int) -> EvaluationRecord | None:
    heartbeat = engine.mesh.heartbeat
    loss, tokens, by_corpus, terms = 0.0, 0, {}, dict[str, float]()
    for part, count in loader.eval_parts(batches):
        sums = LossSums()
        heartbeat.activity(Activity.DATA)
        for batch in loader.eval_batches(count, part.samples):
            sums = sums + engine.eval_batch(batch, engine.loss)
            heartbeat.activity(Activity.DATA)
            if engine.stop.is_due:
                return None
        if not any(sums.counts.values()):
            of = f" of {part.name}" if part.name else ""
            raise UserError(
                f"All labels of the validation batches{of} are masked: none of the {sums.samples:,} samples read has a "
                "token to predict, as in conversations without answers, prompts cut off at data.sequence_length, and "
                "empty documents; raise train.eval_batches, or prepare other data."
            )
        # Valid tokens, or the count of the only term; samples for several terms.
        (only, *others) = sums.counts.values()
        tokens += sums.samples if others else int(only)
        loss += part.weight * sums.loss
        by_corpus[part.name] = sums.loss
        for name, mean in several(sums.terms).items():
            terms[name] = terms.get(name, 0.0) + part.weight * mean
    return EvaluationRecord(step, loss, tokens, 0.0, by_corpus if loader.is_mixture else {}, terms)


def unknown_calls_line(names: Sequence[str]) -> str:
    """Return a sentence that names the functions called by an exact run that are not known to be exact."""
    return (
        f"train.exact: not known to have the same bits in every layout: {', '.join(names)}. Layouts may differ by what "
        "these compute (docs/exact.md)."
    )


def _overrides(callback: Callback, moment: str, base: type[Callback]) -> bool:
    """Return whether a callback overrides a method of its base class, which does nothing there."""
    return getattr(getattr(callback, moment), "__func__", None) is not getattr(base, moment)


def call(callback: Callback, moment: str, rank: int, *arguments: Any) -> None:
    """Call a method of a callback; a `UserError` passes, and any other exception becomes `CallbackFailed`."""
    try:
        getattr(callback, moment)(*arguments)
    except UserError:
        raise
    except Exception as error:
        what, name = describe_error(error).removesuffix(":"), type(callback).__name__
        raise CallbackFailed(f"The callback {name} on rank {rank} failed in {moment} with {what}.") from error
