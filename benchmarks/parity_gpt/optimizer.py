"""Adam and Muon over whole or sharded states, with fp32 copies of bf16 weights; the learning rate's schedule."""

import math
from typing import Any

import torch
from torch import Tensor

from .gradients import flat_part
from .grid import Axis, gathered
from .model import Stage, layout, named
from .run import Run


def learning_rate(run: Run, step: int) -> float:
    """Warm up over four steps, then fall along a cosine."""
    return run.options.lr * min((step + 1) / 4, 0.5 + 0.5 * math.cos(math.pi * step / 40))


class Optimizer(torch.optim.Optimizer):
    """Adam, or Muon for matrices of blocks; with ZeRO, each data rank updates its flat part and gathers the rest.

    Attributes:
        states: by parameter name, `exp_avg` and `exp_avg_sq` or `momentum`, and `master`, fp32 weights.
        steps: number of updates so far.
        skips: whether the next step changes nothing, as after an overflow.
    """

    def __init__(self, run: Run, stage: Stage) -> None:
        self.run, self.stage = run, stage
        self.steps = 0
        self.skips = False
        self.states: dict[str, dict[str, Tensor]] = {}
        self.names = {id(weight): name for name, weight in named(stage).items()}
        super().__init__(list(named(stage).values()), {"lr": run.options.lr})
        self.early: dict[str, Tensor] = {}
        for name, weight in named(stage).items():
            self.states[name] = self._new_state(name, weight)

    def sharded(self, name: str) -> bool:
        return self.run.options.zero > 0 and not self.is_muon(name)

    def is_muon(self, name: str) -> bool:
        weight = named(self.stage)[name]
        matrix = name.startswith("blocks") and weight.dim() >= 2 and not name.endswith("bias")
        return self.run.options.optimizer == "muon" and matrix

    def axis(self, name: str) -> Axis:
        grid = self.run.grid
        return grid.expert_data if layout(named(self.stage)[name]).expert else grid.data

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """Return what this rank's states cover, in fp32, or in fp64 of a model in fp64."""
        part = flat_part(tensor, self.axis(name)) if self.sharded(name) else tensor.detach().clone()
        return part.to(torch.promote_types(part.dtype, torch.float32))

    def _new_state(self, name: str, weight: Tensor) -> dict[str, Tensor]:
        master = self.part(name, weight)
        moments = ("momentum",) if self.is_muon(name) else ("exp_avg", "exp_avg_sq")
        state = {"master": master, **{moment: torch.zeros_like(master) for moment in moments}}
        self.state[named(self.stage)[name]] = state
        return state

    def keep_early(self) -> None:
        """Copy gradients into the optimizer's own buffer before they are reduced (a mistake)."""
        for name, weight in named(self.stage).items():
            assert weight.grad is not None
            self.early[name] = weight.grad.clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.skips:
            return
        if not self.run.mistake("olmo-skipstep") or self.steps == 0:
            self.steps += 1
        for name, weight in named(self.stage).items():
            assert weight.grad is not None
            gradient = self.part(name, self.early.get(name, weight.grad))
            state = self.states[name]
            change = self._muon(name, gradient, state) if self.is_muon(name) else self._adam(gradient, state)
            decay = 0.1 if weight.dim() >= 2 else 0.0
            rate = float(self.param_groups[0]["lr"])
            state["master"] -= rate * (change + decay * state["master"])
            weight.copy_(self._whole(name, state["master"], weight))

    def _whole(self, name: str, master: Tensor, weight: Tensor) -> Tensor:
        if not self.sharded(name):
            return master
        whole = torch.cat(gathered(master.to(weight.dtype), self.axis(name)))
        return whole[: weight.numel()].view_as(weight)

    def _adam(self, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        first, second = 0.9, 0.95
        state["exp_avg"].lerp_(gradient, 1 - first)
        state["exp_avg_sq"].lerp_(gradient.square(), 1 - second)
        mean = state["exp_avg"] / (1 - first**self.steps)
        square = state["exp_avg_sq"] / (1 - second**self.steps)
        return mean / (square.sqrt() + 1e-8)

    def _muon(self, name: str, gradient: Tensor, state: dict[str, Tensor]) -> Tensor:
        """Orthogonalise the momentum of the whole matrix, of which tp ranks hold shards."""
        state["momentum"].mul_(0.95).add_(gradient)
        at, tp = layout(named(self.stage)[name]), self.run.grid.tp
        cuts = [cut for cut in at.cuts if cut.axis is tp]
        if not cuts or self.run.mistake("deepspeed-8437"):
            return orthogonal(state["momentum"])
        parts = gathered(state["momentum"], tp)
        (cut,) = cuts
        # Blocks stacked along the dim are cut on their own: join block by block.
        blocks = zip(*(each.chunk(cut.blocks, cut.dim) for each in parts), strict=True)
        whole = orthogonal(torch.cat([torch.cat(each, cut.dim) for each in blocks], cut.dim))
        return torch.cat([each.chunk(tp.size, cut.dim)[tp.rank] for each in whole.chunk(cut.blocks, cut.dim)], cut.dim)


def orthogonal(matrix: Tensor) -> Tensor:
    """Return five Newton–Schulz steps towards the nearest orthogonal matrix, with Muon's scale."""
    x = matrix / (matrix.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    x = x.mT if tall else x
    return x * max(1, matrix.shape[-2] / matrix.shape[-1]) ** 0.5
