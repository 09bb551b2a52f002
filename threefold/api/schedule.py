"""The schedule of a config, for custom training loops (`Schedule`)."""

from typing import Any

import torch

from threefold.api.trainer import read_config
from threefold.config import Config, OptimizerConfig, resolve
from threefold.config.by_step import value_at
from threefold.errors import UserError, require_whole
from threefold.train.optim import learning_rate


class Schedule:
    """Learning rate, global batch size and sequence length of each step of a config, as a run of it has them.

    Steps count from 1, as in the metrics of a run. Made by `of`.

    Args:
        config: resolved config.

    Example:
        >>> schedule = threefold.Schedule.of("my.yaml")
        >>> for step in range(1, schedule.steps + 1):
        ...     schedule.apply(optimizer, step)
        ...     model.train_batch(batch, loss_fn)
        ...     optimizer.step()
    """

    def __init__(self, config: Config) -> None:
        self._config = config

    @classmethod
    def of(cls, config: Any) -> "Schedule":
        """Read the schedule of a config, whose data need not exist.

        Args:
            config: result of `load_config`, path of a YAML file, or mapping of sections, such as
                `{"data": {"path": "none"}, "optimizer": {"lr": 1e-3}, "train": {"max_steps": 500}}`.

        Raises:
            UserError: a setting is wrong, or the number of steps follows from data (`train.epochs`).
        """
        given = read_config(config, {})
        if (
            given.train.epochs is not None
            and not given.is_given("train.max_steps")
            and given.optimizer.decay_steps is None
        ):
            raise UserError(
                f"train.epochs is {given.train.epochs} and a schedule does not read the data, so that nothing says how "
                "many steps there are; set optimizer.decay_steps, or train.max_steps instead of train.epochs."
            )
        return cls(resolve(given, vocab_size=1))

    @property
    def steps(self) -> int:
        """Number of steps, `train.max_steps`."""
        return self._config.train.max_steps

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, warm-up and decay included."""
        require_whole("step", step, least=1)
        settings: OptimizerConfig = self._config.optimizer
        return learning_rate(step, settings)

    def global_batch_size(self, step: int) -> int:
        """Return the number of samples of a step over all replicas."""
        require_whole("step", step, least=1)
        return int(value_at(self._config.train.global_batch_size, step - 1))

    def sequence_length(self, step: int) -> int:
        """Return the number of tokens of a sample of a step."""
        require_whole("step", step, least=1)
        return int(value_at(self._config.data.sequence_length, step - 1))

    def apply(self, optimizer: torch.optim.Optimizer, step: int) -> float:
        """Set the learning rates of an optimizer's groups for a step; return the rate of a group without a factor.

        Call it before `optimizer.step()`. A group with an `lr_scale` (`DistributedModel.parameter_groups`) gets that
        multiple. Resumed loops call it with the step that follows, without a state of its own.
        """
        rate = self.learning_rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate * float(group.get("lr_scale", 1.0))
        return rate
