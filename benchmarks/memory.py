"""Measure the memory that a rank holds, beside the planner's formulas.

    python benchmarks/memory.py

Activations: bytes that autograd keeps of one block and one micro-batch (`threefold.planner.activations`). Pipeline: the
most micro-batches whose activations a stage holds at once; 1F1B holds at most pp − stage. ZeRO: bytes of weights,
gradients and optimizer state that a rank keeps, without temporarily gathered tensors.
"""

from typing import Any

import shape
import torch
from rich.console import Console
from rich.table import Table

from tests.support.saved_tensors import recording_saved
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.parallel.leaf import local
from threefold.parallel.pipeline.runner import PipelineRunner
from threefold.planner.activations import block_bytes
from threefold.planner.block import describe_model
from threefold.planner.rank_block import rank_block
from threefold.train.step import Engine
from threefold.verify.worker_pool import WorkerPool

LENGTH, MICRO_BATCH, MICRO_BATCHES = 256, 2, 8
MIB = 1 << 20


def config(parallel: dict[str, Any], **train: Any) -> Config:
    given = {
        "model": {
            "num_layers": shape.LAYERS,
            "hidden_size": shape.HIDDEN,
            "num_attention_heads": shape.HEADS,
            "vocab_size": shape.VOCAB,
        },
        "data": {"path": "none", "sequence_length": LENGTH},
        "parallel": parallel,
        "train": {"gradient_accumulation_steps": MICRO_BATCHES, "micro_batch_size": MICRO_BATCH, "device": "cpu"}
        | train,
    }
    return resolve(Config.model_validate(given), shape.VOCAB)


def make_engine(settings: Config) -> Engine:
    mesh = Mesh(Layout.from_config(settings.parallel))
    return Engine(lambda: GPT(settings.model), gpt_plan(settings.model, LENGTH), mesh, settings)


def batch(engine: Engine) -> Batch:
    rows = torch.arange(MICRO_BATCH * MICRO_BATCHES)
    tokens = torch.zeros(len(rows), LENGTH, dtype=torch.int64)
    return Batch(tokens, tokens, rows + len(rows) * engine.mesh.dp.index)


def block_kept(settings: Config) -> int:
    """Return the bytes that the first block of this rank keeps."""
    engine = make_engine(settings)
    positions = LENGTH // engine.parallelism.context.cut.shares
    x = torch.randn(MICRO_BATCH, positions, shape.HIDDEN, requires_grad=True) * 1
    stage = engine.stages[0]
    with recording_saved([local(parameter) for parameter in stage.parameters()]) as saved:
        out = stage.get_submodule("blocks.0")(x)
    kept = saved.nbytes
    del out
    return kept


def most_alive(settings: Config) -> list[tuple[int, int]]:
    """Return the number of each of this rank's stages, and the most micro-batches that it held at once."""
    engine = make_engine(settings)
    assert isinstance(engine.runner, PipelineRunner)
    with engine.runner.timing() as log:
        engine.compute_gradients(batch(engine), 0)
    most: dict[int, int] = {}
    alive: dict[int, int] = {}
    for action, _, _ in log:
        change = {"F": 1, "B": -1, "I": -1}.get(action.kind, 0)
        alive[action.stage] = alive.get(action.stage, 0) + change
        most[action.stage] = max(most.get(action.stage, 0), alive[action.stage])
    return sorted(most.items())


def zero_held(settings: Config) -> dict[str, int]:
    """Return the bytes by purpose, after the backward pass of a first step and its update."""
    engine = make_engine(settings)
    loss, tokens = engine.compute_gradients(batch(engine), 0)
    gradients = sum(entry.gradient.nbytes for entry in engine.optimizer.entries)
    engine.update(loss, tokens, 0)
    return {
        "weights": sum(entry.master.nbytes for entry in engine.optimizer.entries),
        "gradients": gradients,
        "optimizer": sum(value.nbytes for _, _, value in engine.optimizer.states()),
    }


def activations(pool: WorkerPool) -> Table:
    table = Table("layout", "recompute", title="One block, one micro-batch: bytes kept", title_justify="left")
    for heading in ("measured, MiB", "formula, MiB"):
        table.add_column(heading, justify="right")
    for tp, sequence_parallel in ((1, False), (2, False), (2, True), (4, True)):
        for mode in ("none", "selective", "full"):
            settings = config({"tp": tp, "sequence_parallel": sequence_parallel}, recompute=mode)
            block = describe_model(settings.model, LENGTH).blocks[0]
            sizes = rank_block(settings, block)
            kept, formula = pool.run(tp, block_kept, settings)[0], block_bytes(sizes, mode)
            layout = f"tp {tp}" + (", sequence parallel" if sequence_parallel else "")
            table.add_row(layout, mode, f"{kept / MIB:.3f}", f"{formula / MIB:.3f}")
    return table


def pipeline(pool: WorkerPool) -> Table:
    table = Table("schedule", title=f"Micro-batches of {MICRO_BATCHES} that each stage holds at most, pp 4")
    table.title_justify = "left"
    table.add_column("measured, stage 0, 1, 2, …", no_wrap=True)
    table.add_column("bound")
    bounds = {"gpipe": "all of them", "1f1b": "4, 3, 2, 1"}
    for schedule in ("gpipe", "1f1b", "interleaved", "looped-bfs", "zero-bubble", "zbv", "dualpipev"):
        ranks = pool.run(4, most_alive, config({"pp": 4, "schedule": schedule}))
        stages = sorted(stage for rank in ranks for stage in rank)
        table.add_row(schedule, ", ".join(str(most) for _, most in stages), bounds.get(schedule, ""))
    return table


def sharding(pool: WorkerPool) -> Table:
    table = Table("dp 4, zero", title="Bytes that a rank keeps for its weights, MiB", title_justify="left")
    kinds = ("weights", "gradients", "optimizer")
    for kind in kinds:
        table.add_column(kind, justify="right")
    table.add_column("whole model / 4", justify="right")
    whole = pool.run(4, zero_held, config({"dp": 4}))[0]
    for stage in range(4):
        held = pool.run(4, zero_held, config({"dp": 4, "zero": stage}))[0] if stage else whole
        quarter = " · ".join(f"{whole[kind] / 4 / MIB:.2f}" for kind in kinds)
        table.add_row(str(stage), *(f"{held[kind] / MIB:.2f}" for kind in kinds), quarter)
    return table


def main() -> None:
    console = Console()
    with WorkerPool(4) as pool:
        for make in (activations, pipeline, sharding):
            console.print(make(pool))


if __name__ == "__main__":
    main()
