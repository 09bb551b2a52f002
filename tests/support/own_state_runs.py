"""Runs of a user's own model with a part that keeps state or draws, on its own rows."""

from pathlib import Path

from tests.support import own_state_models
from tests.train.support import Run, steps_of
from threefold.config import Config, resolve

CLASSES = {"split statistics": "Cut", "own forward": "Whole"}
"""Class by part, where it is not `Model`."""


class StateRun(Run):
    """Run of a model with a stateful part on its own rows; `data` is the name of the part."""

    @property
    def config(self) -> Config:
        file = own_state_models.__file__
        given = {
            "data": {"path": f"{file}:Sums", "sequence_length": own_state_models.LENGTH, "split": "80,20"},
            "model": {
                "architecture": "own",
                "file": f"{file}:{CLASSES.get(str(self.data), 'Model')}",
                "vocab_size": own_state_models.WORDS,
                "arguments": {"kind": str(self.data)},
            },
            "parallel": {"dp": self.dp, "tp": self.tp, "pp": self.pp},
            "train": {"max_steps": self.steps, "global_batch_size": 8, "eval_every": 0, "device": "cpu"},
            "optimizer": {"lr": 1e-2, "eps": 1e-5, "warmup_steps": 2, "decay_steps": 20},
            "checkpoint": {"every": 0},
            "log": {"every": 2},
        }
        for key, value in self.set:
            section, name = key.split(".")
            given.setdefault(section, {})[name] = value
        return resolve(Config.model_validate(given), own_state_models.WORDS)


def run_of(kind: str, **changes: object) -> StateRun:
    return StateRun(Path(kind)).but(**changes)


def losses(folder: Path) -> list[float]:
    return [step["loss"] for step in steps_of(folder).values()]


def micro_batches(count: int) -> tuple[tuple[str, object], ...]:
    return (("train.gradient_accumulation_steps", count),)
