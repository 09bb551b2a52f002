"""Muon: orthogonalized momentum for hidden weight matrices (Jordan et al., https://kellerjordan.github.io/posts/muon).

The matrix is the whole weight as the unsplit model stores it (queries, keys and values together, for example; each
expert's own for experts), so the update does not depend on the layout. If tensor parallelism or ZeRO shards a matrix,
its momentum-updated gradient is all-gathered and orthogonalized on every rank that holds a shard, and each rank keeps
its shard of the result. Cost per step and weight:

- traffic: one all-gather for each axis that shards its matrix, of the weight's size in the dtype of the update.
  Pipeline stages, expert parallelism and replicas without ZeRO shard no matrix and send nothing;
- memory: the whole weight, one weight at a time, and up to four times as much within the iteration; for experts, all
  experts of the rank;
- arithmetic: at most 4 · steps · m · n · min(m, n) multiply-adds for an m × n matrix, on every rank that gathers it.

The iteration runs in fp32 (fp64 in an fp64 run), not in bf16 as in `torch.optim.Muon`: rounded to bf16, the products of
two layouts would differ in the third digit.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from threefold.config import OptimizerConfig
from threefold.train.optim import Entry, UpdateRule, zeros
from threefold.train.optimizers.adamw import AdamW

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the quintic polynomial, steep at 0; singular values end up between about 0.7 and 1.2."""
EPS = 1e-7
"""Smallest norm that a matrix is divided by."""


class Muon(UpdateRule):
    """Muon: reads `momentum`, `nesterov`, `newton_schulz_steps` and `lr_scaling`; AdamW for the other weights.

    Embeddings, the head, norms and biases are updated by `AdamW`, with its settings and its state. Hidden matrices keep
    `momentum_buffer`. The defaults are those of `torch.optim.Muon`, except `lr_scaling`.
    """

    def __init__(self, entries: Sequence[Entry], config: OptimizerConfig) -> None:
        super().__init__(entries, config)
        self._momentum = {entry.name: zeros(entry.master) for entry in self.entries if entry.hidden_matrix}
        self._others = AdamW([entry for entry in self.entries if not entry.hidden_matrix], config)

    def step(self, lr: float) -> None:
        config = self.config
        for entry in self.entries:
            matrix = entry.hidden_matrix
            if matrix is None:
                continue
            gradient, momentum = entry.gradient, self._momentum[entry.name]
            momentum.lerp_(gradient, 1 - config.momentum)
            update = gradient.lerp(momentum, config.momentum) if config.nesterov else momentum
            whole = newton_schulz(matrix.gather(update), config.newton_schulz_steps)
            entry.master.mul_(1 - lr * self.weight_decay(entry))
            entry.master.add_(
                matrix.shard(whole, entry.master), alpha=-lr * lr_scale(entry.parameter.shape, config.lr_scaling)
            )
        if self._others.entries:
            self._others.step(lr)

    def state(self, entry: Entry) -> Mapping[str, Tensor]:
        return {"momentum_buffer": self._momentum[entry.name]} if entry.hidden_matrix else self._others.state(entry)


def newton_schulz(matrices: Tensor, steps: int) -> Tensor:
    """Move the singular values of matrices [..., m, n] near 1 by Newton–Schulz iterations, at least in fp32."""
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
    """Return the learning-rate factor for matrices of the last two dims of `shape`.

    `original` follows Keller Jordan's implementation; `match_rms_adamw` makes updates about as large as AdamW's (Liu et
    al., "Muon is scalable for LLM training", arXiv 2502.16982).
    """
    rows, columns = shape[-2:]
    if scaling == "original":
        return max(1.0, rows / columns) ** 0.5
    return 0.2 * max(rows, columns) ** 0.5
