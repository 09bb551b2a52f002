"""Lion: the sign of an interpolated momentum, with decoupled weight decay (Chen et al., arXiv 2302.06675)."""

from collections.abc import Mapping, Sequence

from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.train.optim import Entry, UpdateRule, zeros


class Lion(UpdateRule):
    """Lion: reads `betas`; keeps `exp_avg`.

    The sign turns a gradient that is only rounding noise (such as a key bias's) into a full step, so such a weight
    depends on the layout and on the machine.
    """

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        self._averages = {entry.name: zeros(entry.master) for entry in self.entries}

    def step(self, lr: float) -> None:
        in_update, kept = self.config.betas
        for entry in self.entries:
            gradient, average = entry.gradient, self._averages[entry.name]
            update = average.lerp(gradient, 1 - in_update).sign_()
            entry.master.mul_(1 - lr * self.weight_decay(entry)).sub_(update, alpha=lr)
            average.lerp_(gradient, 1 - kept)

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        return {"exp_avg": self._averages[entry.name]}
