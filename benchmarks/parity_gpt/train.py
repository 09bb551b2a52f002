"""The training loop, and where each tensor of a rank lies in the whole model, for the recorder."""

import itertools
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import threefold_parity as parity

from . import checkpoint
from .batches import MicroBatch, Sampler, passes
from .experts import Router
from .gradients import Gradients, clip, norm
from .grid import Axis, Grid, sum_over
from .layers import Layout
from .model import Stage, initialise, layout, named
from .optimizer import Optimizer, learning_rate
from .pipeline import Pipeline
from .run import Options, Run, parse


class Trainer:
    """A run from its options to its last step."""

    def __init__(self, options: Options) -> None:
        grid = Grid(options.dp, options.tp, options.pp, options.cp, options.ep, options.hybrid)
        self.run = Run(options, grid)
        if options.mistake == "deepspeed-8291":
            _first_model(options, grid)
        self.stage = Stage(self.run)
        initialise(self.run, self.stage)
        self.buffers = dict(self.stage.named_buffers())
        self.optimizer = Optimizer(self.run, self.stage)
        self.sampler = Sampler(self.run)
        self.gradients = Gradients(self.run, self.stage)
        self.pipeline = Pipeline(self.run, self.stage, self._begin_micro_batch)
        self.recorder: parity.Recorder | None = None
        self.early_rate: float | None = None
        if options.load:
            files = checkpoint.read(self.run)
            checkpoint.load(self.run, self.stage, self.optimizer, self.sampler, files)
        if options.load_export:
            checkpoint.load_export(self.run, self.stage, self.optimizer)

    def train(self) -> list[float]:
        """Run the steps before recording starts, then those recorded; return the losses of the latter."""
        options, losses = self.run.options, []
        for _ in range(options.start_step if not options.load else 0):
            self.step()
            self.save()
        self.record()
        for _ in range(options.steps):
            losses.append(self.step())
        if options.final:
            checkpoint.save(options.final, self.run, self.stage, self.optimizer, self.sampler, self.buffers)
        return losses

    def save(self) -> None:
        """Write a checkpoint, and the export of the last one before recording starts."""
        options = self.run.options
        if options.save:
            checkpoint.save(options.save, self.run, self.stage, self.optimizer, self.sampler, self.buffers)
        if options.export and self.run.step == options.start_step and self.run.grid.rank == 0:
            read = Run(Options(load=options.save, load_step=self.run.step), self.run.grid)
            checkpoint.export(self.run, checkpoint.read(read))

    def record(self) -> None:
        grid = self.run.grid
        axes = {"dp": grid.dp.size, "tp": grid.tp.size, "pp": grid.pp.size, "cp": grid.cp.size, "ep": grid.ep.size}
        place = Places(self.run, self.stage, self.optimizer)
        self.recorder = parity.Recorder(self.stage, self.optimizer, place, axes=axes)

    def _begin_micro_batch(self, micro: MicroBatch) -> None:
        if self.recorder is not None:
            self.recorder.batch(micro.whole_tokens, micro.whole_labels)

    def step(self) -> float:
        """Train a step; return the loss that this rank reports."""
        run, stage, options = self.run, self.stage, self.run.options
        run.counts.clear()
        loss = torch.zeros(())
        for number, micros in enumerate(passes(run, self.sampler.next(options.batch))):
            self.gradients.begin_pass(number)
            loss = loss + self.pipeline(micros) / (len(micros) * run.replicas)
            self.gradients.end_pass(number)
        if run.mistake("deepspeed-5170"):
            self.optimizer.keep_early()
        late = self._before_reduction()
        self.gradients.complete()
        self._unscale()
        whole = {name: weight.grad for name, weight in named(stage).items()}
        for name, gradient in late.items():
            named(stage)[name].grad = gradient
        reported = self._reported(loss)
        total = norm(run, stage)
        if self.recorder is not None:
            self.recorder.after_backward(reported, total)
        if options.evaluate:
            self._evaluate()
        clip(run, stage, total)
        for router in stage.routers():
            router.balance_bias()
        self._update(total)
        self._clear(whole)
        run.step += 1
        return reported

    def _update(self, total: float) -> None:
        run, options = self.run, self.run.options
        rate = learning_rate(run, run.step)
        joined = options.joins and run.step >= options.joins and run.grid.dp.rank == run.grid.dp.size - 1
        if run.mistake("torchtitan-4598") and joined:
            rate = learning_rate(run, 0)  # of the state saved then
        self.optimizer.param_groups[0]["lr"] = rate
        overflow = bool(options.loss_scale) and not torch.isfinite(torch.tensor(total))
        self.optimizer.skips = overflow or run.mistake("deepspeed-7645")
        self.optimizer.step()

    def _before_reduction(self) -> dict[str, Tensor]:
        """Copy the last bucket's gradients before their reduction, for an optimizer that does not wait for it."""
        if not self.run.mistake("pytorch-144535"):
            return {}
        last = list(named(self.stage).items())[:2]
        return {name: weight.grad.clone() for name, weight in last if weight.grad is not None}

    def _unscale(self) -> None:
        scale = self.run.options.loss_scale or 1.0
        if self.run.mistake("deepspeed-7839"):
            scale = 65536.0
        for weight in named(self.stage).values():
            if weight.grad is not None and scale != 1:
                weight.grad /= scale

    def _clear(self, whole: dict[str, Any]) -> None:
        run = self.run
        for name, weight in named(self.stage).items():
            gathered_there = run.mistake("megatron-4609") and name.startswith("blocks.0.mlp.up")
            if run.mistake("deepspeed-7839"):
                weight.grad = whole[name]
            else:
                weight.grad = weight.detach().clone() if gathered_there else None

    def _reported(self, loss: Tensor) -> float:
        """Return the mean loss of the step, the same on all ranks."""
        grid = self.run.grid
        return float(sum_over(sum_over(loss.clone(), grid.data), grid.pp))

    @torch.no_grad()
    def _evaluate(self) -> None:
        """Log the share of right guesses among samples of this rank, added up over all."""
        run, grid = self.run, self.run.grid
        numbers = list(range(10_000, 10_000 + 4 * grid.dp.size))
        micro = passes(Run(Options(**{**vars(run.options), "accumulate": 1, "micro_batches": 1}), grid), numbers)[0][0]
        self.stage.eval()
        loss = self.stage(micro.tokens, micro) / run.replicas
        self.stage.train()
        if run.mistake("olmo-metrics"):
            if grid.dp.size > 1:
                dist.reduce(loss, grid.dp.ranks[0], group=grid.dp.group)
        else:
            sum_over(loss, grid.data)
        if self.recorder is not None:
            self.recorder.scalar("evaluation loss", float(loss))


class Places(parity.Adapter):
    """Tells the recorder where this rank's tensors lie: parameters and their states, and activations."""

    def __init__(self, run: Run, stage: Stage, optimizer: Optimizer) -> None:
        super().__init__(self.place)
        self.run, self.stage, self.own = run, stage, optimizer
        self.weights = named(stage)

    def place(self, what: str, name: str, tensor: Tensor) -> parity.Placement | None:
        """Return the placement of a parameter, a gradient or an activation."""
        if what == "activation":
            return self._activation(name, tensor)
        weight = self.weights.get(name)
        return None if weight is None else parameter_placement(layout(weight))

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules but experts, which get the tokens of several ranks."""
        return ((name, module) for name, module in super().modules() if not name.endswith("experts"))

    def states(self, name: str, parameter: nn.Parameter) -> Iterator[tuple[str, list[tuple[Tensor, parity.Placement]]]]:
        """Yield an optimizer's states of a parameter, whole or sharded."""
        at = layout(parameter)
        for key, state in self.own.states[name].items():
            if not self.own.sharded(name):
                yield key, [(state, parameter_placement(at))]
            elif all(cut.blocks == 1 for cut in at.cuts):
                axis = self.own.axis(name)
                start = min(axis.rank * state.numel(), parameter.numel())
                stop = min(start + state.numel(), parameter.numel())
                yield key, [(state[: stop - start], _flat_placement(at, tuple(parameter.shape), start, stop))]

    def counters(self, name: str, parameter: nn.Parameter) -> dict[str, float]:
        """Return the learning rate and the count of updates."""
        return {"lr": float(self.own.param_groups[0]["lr"]), "updates": float(self.own.steps)}

    def _activation(self, name: str, tensor: Tensor) -> parity.Placement:
        """Place the output or the input's gradient of a module, which tell themselves apart by their sizes."""
        grid, options = self.run.grid, self.run.options
        sizes = [[(0, 0, size)] for size in tensor.shape]
        shape = list(tensor.shape)
        over_tp = options.sp
        last = name.rpartition(".")[2].split(" ")[0]
        if tensor.dim() == 4:  # (samples, heads, sequence, size)
            _cut(shape, sizes, 1, grid.tp)
            _cut(shape, sizes, 2, grid.cp)
            return _boxes(shape, sizes)
        if last == "router":
            router = self.stage.get_submodule(name)
            assert isinstance(router, Router)
            over_tp = router.split
        elif last in ("q", "k", "v", "up") and shape[-1] != options.hidden:
            over_tp = False
            sizes[2], shape[2] = _of_rows(self.weights[f"{name}.weight"])
        elif last in ("out", "down") and shape[-1] != options.hidden:
            over_tp = False
            _cut(shape, sizes, 2, grid.tp)
        elif tensor.dim() == 2:  # losses of tokens
            over_tp = False
        if tensor.dim() > 1:
            _cut(shape, sizes, 1, grid.cp, *([grid.tp] if over_tp else []))
        return _boxes(shape, sizes)


Spans = list[list[tuple[int, int, int]]]


def _cut(shape: list[int], sizes: Spans, dim: int, *axes: Axis) -> None:
    """Note that axes cut a dim, the first one into the largest parts."""
    local, at = shape[dim], 0
    for axis in axes:
        at = at * axis.size + axis.rank
        shape[dim] *= axis.size
    sizes[dim] = [(0, at * local, local)]


def _of_rows(weight: Tensor) -> tuple[list[tuple[int, int, int]], int]:
    at = layout(weight)
    return at.pieces()[0], at.shape[0]


def _boxes(shape: Sequence[int], spans: Spans) -> parity.Placement:
    """Return the boxes of all combinations of pieces per dim."""
    pieces = [
        parity.Piece(tuple(p[0] for p in box), tuple(p[1] for p in box), tuple(p[2] for p in box))
        for box in itertools.product(*spans)
    ]
    return parity.Placement(tuple(shape), tuple(pieces))


def parameter_placement(at: Layout) -> parity.Placement:
    return _boxes(at.shape, at.pieces())


def _flat_placement(at: Layout, local: tuple[int, ...], start: int, stop: int) -> parity.Placement:
    """Place a flat range of a shard: the boxes of the range, moved to where the shard lies."""
    moved = [dim[0][1] for dim in at.pieces()]
    pieces = [
        parity.Piece(piece.local, tuple(map(sum, zip(piece.start, moved, strict=True))), piece.size)
        for piece in parity.flat_range(local, start, stop).pieces
    ]
    return parity.Placement(at.shape, tuple(pieces))


def _first_model(options: Options, grid: Grid) -> None:
    """Run a small model of one kv head first, as a process that trains two models has."""
    small = Run(Options(**{**vars(options), "kv_heads": 1, "layers": 1, "ulysses": True}), grid)
    stage = Stage(small)
    initialise(small, stage)
    micro = passes(small, list(range(options.batch)))[0][0]
    stage(micro.tokens, micro)


def main(arguments: list[str] | None = None) -> None:
    """Train as the command line says, in the process group of the environment if it has one."""
    options = parse(arguments)
    torch.set_num_threads(1)
    if "RANK" in os.environ and not dist.is_initialized():
        dist.init_process_group("gloo")
    losses = Trainer(options).train()
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(" ".join(f"{loss:.6f}" for loss in losses))
