"""Muon: orthogonalised momentum for the hidden weight matrices (Jordan et al., https://kellerjordan.github.io/posts/muon).

The matrix is the whole weight as the unsplit model stores it, such as queries, keys and values together, and of experts
each expert's, so the update does not depend on the layout. Tensor parallelism and ZeRO shard a matrix: its
momentum-updated gradient is all-gathered and orthogonalised on every rank that holds a shard, and each rank keeps its
shard of the result. Cost for a step and weight:

- traffic: one all-gather for each axis that shards its matrix, of as many bytes as the weight has in the width that it
  is updated in. Pipeline stages, expert parallelism and replicas without ZeRO shard no matrix and send nothing;
- memory: the whole weight, for one weight at a time, and up to four times as much within the iteration; of experts, all
  that the rank holds;
- arithmetic: at most 4 · steps · m · n · min(m, n) multiply-adds for an m × n matrix, on every rank that gathers it.

The iteration runs in fp32 (fp64 in an fp64 run), not in bf16 as in `torch.optim.Muon`: rounded to bf16, the products of
two layouts would differ in the third digit.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.config.optimizer import BUILT_IN
from threefold.train.optimizers.adamw import AdamW
from threefold.train.optimizers.base import Entry, UpdateRule, zeros

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial: chosen for a steep slope at 0; singular values end between about 0.7 and 1.2."""
EPS = 1e-7
"""Least norm that a matrix is divided by."""


class Muon(UpdateRule):
    """Reads `momentum`, `nesterov`, `newton_schulz_steps` and `lr_scaling`, and for the other weights (embeddings, the
    head, norms, biases) what `AdamW` reads.

    Keeps `momentum_buffer` of hidden matrices, and of the other weights what `AdamW` keeps. The defaults are those of
    `torch.optim.Muon`, but for `lr_scaling`.
    """

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        self._momentum = {entry.name: zeros(entry.master) for entry in self.entries if entry.hidden_matrix}
        self._others = AdamW([entry for entry in self.entries if not entry.hidden_matrix], config)

    def step(self, lr: float) -> None:
        for entry in self.entries:
            self._step_matrix(entry, lr)
        if self._others.entries:
            self._others.step(lr)

    def _step_matrix(self, entry: Entry, lr: float) -> None:
        matrix, config = entry.hidden_matrix, self.config
        if matrix is None:
            return
        gradient, momentum = entry.gradient, self._momentum[entry.name]
        momentum.lerp_(gradient, 1 - config.momentum)
        update = gradient.lerp(momentum, config.momentum) if config.nesterov else momentum
        whole = newton_schulz(matrix.gather(update), config.newton_schulz_steps)
        entry.master.mul_(1 - lr * self.weight_decay(entry))
        entry.master.add_(
            matrix.shard(whole, entry.master), alpha=-lr * lr_scale(entry.parameter.shape, config.lr_scaling)
        )

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        return {"momentum_buffer": self._momentum[entry.name]} if entry.hidden_matrix else self._others.state(entry)

    @classmethod
    def states_per_element(cls, config: OptimizerConfig, is_hidden_matrix: bool) -> int:
        return BUILT_IN["muon"].states(config, is_hidden_matrix)


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Each matrix with its singular values replaced by values near 1, by Newton–Schulz iterations.

    Args:
        matrices: [..., m, n].
        steps: iterations.

    Returns:
        the same shape, in fp32 at least.
    """
    x = matrices.to(torch.promote_types(matrices.dtype, torch.float32))
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=EPS)
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


def lr_scale(shape: Sequence[int], scaling: str) -> float:
    """What the learning rate is multiplied by for matrices of the last two dims of `shape`.

    `original` is that of Keller Jordan's implementation; `match_rms_adamw` makes updates as large as AdamW's usually
    are (Liu et al., "Muon is scalable for LLM training", arXiv 2502.16982).
    """
    rows, columns = shape[-2:]
    if scaling == "original":
        return max(1.0, rows / columns) ** 0.5
    return 0.2 * max(rows, columns) ** 0.5
