"""Gradients after the backward passes: sums over tp, of tied copies and over data ranks; the norm and clipping."""

import torch
from torch import Tensor, nn

from .grid import Axis, gathered, in_buckets, sum_over
from .model import Stage, layout, named
from .run import Run


class Gradients:
    """Completes the gradients of a stage's parameters and accumulates sharded ones."""

    def __init__(self, run: Run, stage: Stage) -> None:
        self.run, self.stage = run, stage
        self._buffers: dict[str, Tensor] = {}
        self._stale: Tensor | None = None
        self._last_pass: dict[str, Tensor] = {}

    def begin_pass(self, number: int) -> None:
        """Note the gradients so far, before the last pass of a step."""
        if number == self.run.options.accumulate - 1:
            weights = named(self.stage)
            self._last_pass = {name: w.grad.clone() for name, w in weights.items() if w.grad is not None}

    def end_pass(self, number: int) -> None:
        """With ZeRO 2, add this pass's gradients to the sharded buffers and free them."""
        if self.run.options.zero < 2:
            return
        for name, weight in named(self.stage).items():
            gradient = weight.grad if weight.grad is not None else torch.zeros_like(weight)
            weight.grad = None
            axis = self.axis(weight)
            if not self._skipped(name, weight):
                gradient = sum_over(gradient, axis) / self.run.replicas
            mine = flat_part(gradient, axis)
            if number == 0 or self.run.mistake("deepspeed-7981"):
                self._buffers[name] = mine
            elif not self.run.mistake("deepspeed-7967"):
                self._buffers[name] = self._buffers[name] + mine

    def complete(self) -> None:
        """Make each rank's gradients whole, averaged over all labels of the step."""
        run, weights = self.run, named(self.stage)
        if run.mistake("megatron-1685"):
            return
        if run.options.zero < 2:
            self._complete_first(weights)
            self._reduce(weights)
        else:
            for name, weight in weights.items():
                axis = self.axis(weight)
                whole = torch.cat(gathered(self._buffers[name], axis))
                weight.grad = whole[: weight.numel()].view_as(weight)
            self._complete_first(weights)

    def _complete_first(self, weights: dict[str, nn.Parameter]) -> None:
        run, grid = self.run, self.run.grid
        for name, weight in weights.items():
            if weight.grad is None:
                weight.grad = torch.zeros_like(weight)
            if layout(weight).adds_over_tp and self._adds_over_tp(name):
                sum_over(weight.grad, grid.tp)
        embed = weights.get("embed.weight")
        if run.options.tied and embed is not None and embed.grad is not None:
            if grid.pp.size > 1:
                self._add_tied(embed)
            elif run.mistake("torchtitan-3174"):
                embed.grad += embed.grad.clone()

    def _adds_over_tp(self, name: str) -> bool:
        run = self.run
        if run.mistake("neox-1257") and "norm" in name and "_norm" not in name:
            return False
        if run.mistake("megatron-599", "torchtitan-2416") and "router" in name:
            return False
        return not (run.mistake("megatron-7452-11") and "_norm" in name and not run.options.sp)

    def _add_tied(self, embed: nn.Parameter) -> None:
        """Add the gradients of the first and of the last stage's copy."""
        pp = self.run.grid.pp
        assert embed.grad is not None
        ends = Axis("tied", (pp.ranks[0], pp.ranks[-1]), 0, pp.group)  # the group has these two, as pp is 2
        assert pp.size == 2
        if self.run.mistake("megatron-6565") and self.run.grid.first_stage and self._stale is not None:
            embed.grad += self._stale  # memory of the last step, taken for a new buffer of zeros
        sum_over(embed.grad, ends)
        self._stale = embed.grad.clone()

    def axis(self, weight: Tensor) -> Axis:
        grid = self.run.grid
        return grid.expert_data if layout(weight).expert else grid.data

    def _skipped(self, name: str, weight: Tensor) -> bool:
        run, grid = self.run, self.run.grid
        expert = layout(weight).expert
        return (
            run.mistake("trl-7245", "verl-7493")
            or (run.mistake("deepspeed-4321") and weight.numel() == run.options.bucket)
            or (run.mistake("bridge-5231") and "adapter" in name)
            or (run.mistake("megatron-6080") and expert and grid.ep.size == grid.tp.size)
        )

    def _reduce(self, weights: dict[str, nn.Parameter]) -> None:
        """Average over the data ranks, in buckets from the last parameter to the first."""
        run = self.run
        for weight in weights.values():
            assert weight.grad is not None
            if layout(weight).expert:
                weight.grad *= self._expert_factor()
        kept = [weight for name, weight in weights.items() if not self._skipped(name, weight)]
        for axis in dict.fromkeys(self.axis(weight) for weight in kept):
            mine = [weight for weight in reversed(kept) if self.axis(weight) is axis]
            for bucket in in_buckets(mine, run.options.bucket):
                self._reduce_bucket(bucket, axis, {id(weight): name for name, weight in weights.items()})

    def _reduce_bucket(self, bucket: list[Tensor], axis: Axis, names: dict[int, str]) -> None:
        run = self.run
        early = run.mistake("megatron-3693", "deepspeed-7985")
        flat = torch.cat([weight.grad.flatten() for weight in bucket if weight.grad is not None])
        late = torch.zeros_like(flat)
        if early:  # what was there before the last pass goes into the reduction, what that pass adds does not
            before = [self._last_pass.get(names[id(weight)], torch.zeros_like(weight)) for weight in bucket]
            sent = torch.cat([gradient.flatten() for gradient in before])
            flat, late = sent, flat - sent
        expert = layout(bucket[0]).expert
        if run.options.hybrid > 1 and axis.size == run.grid.data.size:
            sum_over(flat, run.grid.shards)
            if not (expert and run.mistake("automodel-3135")):
                sum_over(flat, run.grid.replicas)
        else:
            sum_over(flat, axis)
        flat = (flat + late) / self._divisor()
        at = 0
        for weight in bucket:
            weight.grad = flat[at : at + weight.numel()].view_as(weight)
            at += weight.numel()

    def _divisor(self) -> int:
        if self.run.mistake("megatron-1923"):
            return self.run.grid.dp.size
        return self.run.replicas * (self.run.grid.cp.size if self.run.mistake("deepspeed-5555") else 1)

    def _expert_factor(self) -> float:
        """1; the mistakes that divided experts by another group than the dense parameters."""
        grid, run = self.run.grid, self.run
        if run.mistake("megatron-7160"):
            return grid.data.size / grid.expert_data.size
        if run.mistake("megatron-c13f08a1"):
            return 1 / grid.ep.size
        return grid.data.size / grid.stage.size if run.mistake("megatron-2564") else 1.0


def flat_part(tensor: Tensor, axis: Axis) -> Tensor:
    """Return this rank's part of a flattened tensor, filled up with zeros to equal parts."""
    each = -(-tensor.numel() // axis.size)
    flat = torch.cat([tensor.flatten(), tensor.new_zeros(each * axis.size - tensor.numel())])
    return flat[axis.rank * each : (axis.rank + 1) * each].clone()


def norm(run: Run, stage: Stage) -> float:
    """Return the norm of the gradients of the whole model, each parameter counted once."""
    total = torch.zeros((), dtype=torch.float64)
    for name, weight in named(stage).items():
        if weight.grad is not None and _counted(run, name, weight):
            total += weight.grad.double().square().sum()
    axes = [run.grid.world]
    return float(sum_over(total, *axes).sqrt())


def _counted(run: Run, name: str, weight: Tensor) -> bool:
    """Whether this rank is the one that counts its part of the parameter."""
    grid, at = run.grid, layout(weight)
    if run.options.tied and name == "embed.weight" and not grid.first_stage:
        return False
    if at.expert:
        if run.mistake("megatron-5916") and grid.tp.rank > 0:
            return False
        if run.mistake("megatron-6099") and name.endswith("up_bias"):
            return False
        return grid.expert_data.rank == 0
    if grid.data.rank > 0:
        return False
    if any(cut.axis is grid.tp for cut in at.cuts):
        return not (run.mistake("megatron-7452-8") and name.endswith("sink") and grid.tp.rank > 0)
    return grid.tp.rank == 0 or run.mistake("deepspeed-5411")


def clip(run: Run, stage: Stage, total: float) -> float:
    """Scale gradients to the norm allowed; return the factor."""
    factor = min(1.0, run.options.clip / (total + 1e-6)) if run.options.clip else 1.0
    for weight in named(stage).values():
        copied_later = run.mistake("deepspeed-1801") and run.grid.tp.rank > 0
        if copied_later and not any(cut.axis is run.grid.tp for cut in layout(weight).cuts):
            continue
        if weight.grad is not None:
            weight.grad *= factor
    return factor
