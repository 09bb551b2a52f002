"""The training loop."""

import time
from collections.abc import Callable, Sequence
from math import isfinite

from threefold.config import Config
from threefold.data.loader import Loader
from threefold.train.callbacks.base import Callback, EvaluationRecord, StepRecord
from threefold.train.divergence import CheckpointStore, DivergenceError, SafeSaving
from threefold.train.engine import Engine
from threefold.train.evaluate import evaluate
from threefold.train.stop import Stopped


def is_due(step: int, every: int, last: int) -> bool:
    """Whether something done every `every` steps (0: never) is due after `step`; it also is after the last one."""
    return every > 0 and (step % every == 0 or step == last)


class Trainer:
    """Runs an engine through the steps of a run.

    Collective over the world: every rank has one; their callbacks may differ.

    Args:
        engine: the model and its update.
        loader: this replica's batches.
        config: resolved.
        callbacks: called in this order.
        store: saves the checkpoints.
    """

    def __init__(
        self, engine: Engine, loader: Loader, config: Config, callbacks: Sequence[Callback], store: CheckpointStore
    ) -> None:
        self.engine, self.loader, self.config, self.callbacks = engine, loader, config, callbacks
        self.saving = SafeSaving(store)
        self._evaluation: EvaluationRecord | None = None

    def fit(self, start: int = 0) -> Stopped | None:
        """Run the remaining updates of `train.max_steps`, after `start` updates.

        A signal ends it after the current step, with a checkpoint; an evaluation ends at once.

        Returns:
            None after the last step; else the step at which a signal ended it, the same on every rank.
        """
        last, stop = self.config.train.max_steps, self.engine.stop
        try:
            self._notify(lambda callback: callback.before_fit(start))
            if stop.agree(self.engine.mesh):
                return Stopped(stop.signal, start)
            for done in range(start, last):
                if done == start or self._begins_epoch(done):
                    self._begin_epoch(done)
                self._step(done)
                step = done + 1
                if self._begins_epoch(step):
                    self._end_epoch(step)
                if is_due(step, self.config.train.eval_every, last) and not stop.signal:
                    self._evaluate(step)
                if step == last or stop.signal:
                    self._save_last(step)
                elif self._save(step):
                    stop.agree(self.engine.mesh)  # no further step follows a signal that came during a long save
                if stop.signal and step < last:
                    return Stopped(stop.signal, step)
            self._notify(lambda callback: callback.after_fit())
            return None
        finally:
            self._notify(lambda callback: callback.close())

    def _step(self, done: int) -> None:
        started = time.perf_counter()
        batch = self.loader.batch(done)
        read = time.perf_counter()
        self._notify(lambda callback: callback.before_step(done + 1, batch))
        try:
            result = self.engine.train_step(batch, done)
        except DivergenceError as error:
            raise self.saving.explained(error) from error
        ended = time.perf_counter()
        epoch = self._epoch(done)
        record = StepRecord(
            step=done + 1,
            loss=result.loss,
            grad_norm=result.grad_norm,
            lr=result.lr,
            tokens=result.tokens,
            tokens_read=self.config.train.global_batch_size * self.config.data.sequence_length - result.padding,
            padding=result.padding,
            epoch=epoch,
            batch=done - self._first_step(epoch),
            reader_cost=read - started,
            seconds=ended - started,
            skipped=result.skipped,
            loss_scale=result.loss_scale,
            corpus_epochs=self.loader.corpus_epochs(done),
        )
        self.saving.after_step(record)
        self._notify(lambda callback: callback.after_step(record))

    def _evaluate(self, step: int) -> None:
        self._notify(lambda callback: callback.before_evaluation(step))
        record = evaluate(self.engine, self.loader, self.config.train.eval_batches, step)
        if record is None:  # a signal ended it
            return
        self._evaluation = record
        self.saving.after_evaluation(record)
        self._notify(lambda callback: callback.after_evaluation(record))

    def _save(self, step: int) -> bool:
        """Save if a checkpoint is due; returns whether it was."""
        path = self.saving.save(step, is_due(step, self.config.checkpoint.every, self.config.train.max_steps))
        if path is not None:
            self._notify(lambda callback: callback.after_checkpoint(step, path))
        return path is not None

    def _save_last(self, step: int) -> None:
        """Save the checkpoint after the last step of this process."""
        path = self.saving.save_last(step, lambda: self._loss_after(step))
        self._notify(lambda callback: callback.after_checkpoint(step, path))

    def _loss_after(self, step: int) -> float:
        """A loss of the weights after `step` updates: from the evaluation at this step, or of the last batch."""
        known = self._evaluation
        if known is not None and known.step == step and isfinite(known.loss):
            return known.loss
        loss, tokens = self.engine.evaluate(self.loader.batch(step - 1))
        return loss / max(1, tokens)

    def _begin_epoch(self, done: int) -> None:
        self._notify(lambda callback: callback.before_epoch(self._epoch(done)))

    def _end_epoch(self, done: int) -> None:
        self._notify(lambda callback: callback.after_epoch(self._epoch(done) - 1))

    def _epoch(self, done: int) -> int:
        return int(self.loader.epoch(done))

    def _begins_epoch(self, done: int) -> bool:
        return done > 0 and self._epoch(done) > self._epoch(done - 1)

    def _first_step(self, epoch: int) -> int:
        """Updates made before the first step that begins in `epoch`."""
        return -(-epoch * len(self.loader.train) // self.config.train.global_batch_size)

    def _notify(self, event: Callable[[Callback], None]) -> None:
        for callback in self.callbacks:
            event(callback)
