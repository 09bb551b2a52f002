"""Measure the idle time of a pipeline, beside the theoretical bubble of its schedule.

    python benchmarks/pipeline.py [--rounds 5] [--micro-batches 8]

Two measurements of the real engine and schedules. `waiting`: layers sleep instead of computing, so that four ranks run
side by side on any machine; the loss beyond theory is the overhead of the schedule. `computing`: a GPT on two ranks of
one thread each, which needs two idle cores. Theory is the schedule's order of work with each stage's own measured
costs, every action starting as early as possible and communication free.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from hardware import hardware_line
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.config.schedules import SCHEDULES, Action
from threefold.data.loader import Batch
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.sharding import Constant, ModelPlan, Replicated
from threefold.ops.kernels import gradient_store
from threefold.parallel.pipeline.runner import PipelineRunner
from threefold.parallel.pipeline.scheduled_stage import TimedAction
from threefold.planner.schedule import simulate
from threefold.train.step import Engine
from threefold.verify.worker_pool import WorkerPool

BLOCKS, PASS_SECONDS, WIDTH, VOCAB = 8, 0.008, 8, 64
GOAL = 1.10  # for 1f1b, relative to theory


class _Wait(torch.autograd.Function):
    """Sleep as long as a layer's pass would take, deferring the weight gradient where the schedule does so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        time.sleep(PASS_SECONDS)
        ctx.weight = weight
        return x + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        time.sleep(PASS_SECONDS)

        def of_weight() -> Tensor:
            time.sleep(PASS_SECONDS)
            return grad.sum((0, 1))

        store = gradient_store(ctx.weight)
        if store is None:
            return grad, of_weight()
        store.defer(ctx.weight, of_weight)
        return grad, None


class WaitingLayer(nn.Module):
    """Layer [B, S, H] → [B, S, H] that takes a known time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        out: Tensor = _Wait.apply(x, self.weight)
        return out


class First(nn.Embedding):
    def forward(self, tokens: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        return super().forward(tokens)


class Last(nn.Linear):
    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        return super().forward(x).square().sum()


class WaitingModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.entry, self.exit = First(VOCAB, WIDTH), Last(WIDTH, 1)
        self.blocks = nn.ModuleList(WaitingLayer() for _ in range(BLOCKS))


def waiting_plan() -> ModelPlan:
    names = ("entry", *(f"blocks.{number}" for number in range(BLOCKS)), "exit")
    costs = (0.0, *[1.0] * BLOCKS, 0.0)
    return ModelPlan(dict.fromkeys(names, Replicated()), names, costs, lambda _: Constant(0.5))


class Measured(NamedTuple):
    """Measurement of one rank: its order of work, and the times of its actions in each step."""

    order: list[Action]
    steps: list[list[TimedAction]]


def config(schedule: str, pp: int, micro_batches: int, **sections: dict[str, Any]) -> Config:
    given: dict[str, Any] = {
        "model": {"num_layers": BLOCKS, "hidden_size": WIDTH, "num_attention_heads": 1},
        "data": {"path": "none", "sequence_length": 4},
        "parallel": {"pp": pp, "schedule": schedule},
        "train": {"gradient_accumulation_steps": micro_batches, "micro_batch_size": 1, "device": "cpu"},
    }
    return resolve(Config.model_validate({**given, **sections}), VOCAB)


def computing_config(schedule: str, pp: int, micro_batches: int) -> Config:
    model = {"num_layers": BLOCKS, "hidden_size": 256, "num_attention_heads": 8, "vocab_size": 1024}
    train = {"gradient_accumulation_steps": micro_batches, "micro_batch_size": 4, "device": "cpu"}
    return config(schedule, pp, micro_batches, model=model, data={"path": "none", "sequence_length": 128}, train=train)


def measure(settings: Config, waits: bool, rounds: int) -> Measured:
    """Measure `rounds` steps on this rank, after a warm-up step."""
    mesh = Mesh(Layout(pp=settings.parallel.pp))
    length = settings.data.sequence_length
    make: Callable[[], nn.Module] = WaitingModel if waits else lambda: GPT(settings.model)
    engine = Engine(make, waiting_plan() if waits else gpt_plan(settings.model, length), mesh, settings)
    assert isinstance(engine.runner, PipelineRunner)
    rows = torch.arange(settings.train.global_batch_size)
    tokens = torch.randint(
        0, settings.model.vocab_size, (len(rows), length), generator=torch.Generator().manual_seed(3)
    )
    steps = []
    for number in range(1 + rounds):
        mesh.world.barrier()
        with engine.runner.timing() as log:
            engine.compute_gradients(Batch(tokens, tokens, rows), number)
        steps.append(log)
    return Measured(engine.runner.actions(), steps[1:])


class Result(NamedTuple):
    """Medians over the steps: length in seconds, shares of idle time."""

    length: float
    idle: float
    theory_length: float
    theory_idle: float
    ratio: float


def compare(ranks: Sequence[Measured]) -> Result:
    """Compare each step with the theory for that step's own costs, so that a slow step is slow on both sides."""
    results = []
    for step in zip(*(rank.steps for rank in ranks), strict=True):
        spans = [timed for log in step for timed in log]
        length = max(timed.end for timed in spans) - min(timed.start for timed in spans)
        costs = _costs(spans)
        busy = sum(timed.end - timed.start for timed in spans)
        theory = simulate([rank.order for rank in ranks], lambda action, costs=costs: costs[action.stage, action.kind])
        idle = 1 - busy / (length * len(ranks))
        results.append(Result(length, idle, theory.length, theory.idle, length / theory.length))
    return Result(*(statistics.median(values) for values in zip(*results, strict=True)))


def _costs(spans: Sequence[TimedAction]) -> dict[tuple[int, str], float]:
    """Return the mean cost over the micro-batches of each kind of action on each stage."""
    found: dict[tuple[int, str], list[float]] = {}
    for action, start, end in spans:
        found.setdefault((action.stage, action.kind), []).append(end - start)
    return {key: statistics.fmean(values) for key, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="steps of each, of which the medians are printed")
    parser.add_argument("--micro-batches", type=int, default=8)
    arguments = parser.parse_args()
    console = Console()
    console.print(f"{arguments.micro_batches} micro-batches\n{hardware_line()}", highlight=False, soft_wrap=True)
    table = Table(title=f"Idle time of the ranks (goal for 1f1b: a step within {GOAL:.2f} of its theory)")
    for heading in ("layers", "pp", "schedule"):
        table.add_column(heading, no_wrap=True)
    for heading in ("step, ms", "theory, ms", "ratio", "idle", "theory"):
        table.add_column(heading, justify="right")
    with WorkerPool(4) as pool:
        for waits, pp in ((True, 2), (True, 4), (False, 2)):
            for schedule in SCHEDULES:
                settings = (config if waits else computing_config)(schedule, pp, arguments.micro_batches)
                result = compare(pool.run(pp, measure, settings, waits, arguments.rounds))
                table.add_row("waiting" if waits else "computing", str(pp), schedule, *_cells(result))
    console.print(table)


def _cells(result: Result) -> list[str]:
    length, theory = f"{1000 * result.length:,.0f}", f"{1000 * result.theory_length:,.0f}"
    return [length, theory, f"{result.ratio:.3f}", f"{result.idle:.1%}", f"{result.theory_idle:.1%}"]


if __name__ == "__main__":
    main()
