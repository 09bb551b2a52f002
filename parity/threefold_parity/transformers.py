"""Callback of `transformers.Trainer` that records its first steps.

trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[ParityCallback()])
"""

from contextlib import suppress
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from threefold_parity.accelerate import AccelerateAdapter
from threefold_parity.recorder import Recorder


class ParityCallback(TrainerCallback):
    """Records the first steps of a Trainer; does nothing without a folder, like `Recorder`.

    Args:
        options: keyword arguments of `Recorder`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._recorder: Recorder | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        adapter = AccelerateAdapter(copies=True)
        options = dict(self._options)
        with suppress(KeyError, TypeError):  # a loader without a length
            passes = len(kwargs["train_dataloader"])
            options.setdefault("epoch_steps", -(-passes // args.gradient_accumulation_steps))
        self._recorder = Recorder(kwargs["model"], kwargs["optimizer"], adapter, **options)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Remove the hooks, if the Trainer ended before the last step to record."""
        if self._recorder is not None:
            self._recorder.close()
