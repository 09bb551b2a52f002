"""fp16 in a loop of one's own: near fp32, the same in a layout as in one process, and overflows that all ranks skip.

The batch is a mapping, of which a lone `nn.Embedding` takes the entry that its parameter is called."""

from inspect import signature
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threefold
from threefold.parallel.shard_modules import GroupedHeadsLinear

WORDS, ROWS = 11, 8
SHARD = {"0": threefold.Vocab(), "1": threefold.Column(), "3": threefold.Row()}
OVERFLOWS = 1
"""The step in which a sample of the first replica has a loss beyond fp16."""


def layers() -> threefold.PipelineLayers:
    made = [lambda: nn.Embedding(WORDS, 6), lambda: nn.Linear(6, 10), nn.GELU, lambda: nn.Linear(10, WORDS)]
    return threefold.PipelineLayers(made, shard=SHARD)


def batch(step: int, mesh: threefold.Mesh) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    words = torch.randint(WORDS, (ROWS, 5), generator=generator)
    factor = torch.ones(ROWS)
    if step == OVERFLOWS:
        factor[1] = 1e8
    whole = {"input": words, "labels": (words * 3 + 1) % WORDS, "factor": factor}
    rows = ROWS // mesh.dp.size
    return {name: part[mesh.dp.index * rows : (mesh.dp.index + 1) * rows] for name, part in whole.items()}


def loss_fn(output: Tensor, of: Any) -> Tensor:
    each = F.cross_entropy(output.flatten(0, 1), of["labels"].flatten(), reduction="none").view_as(of["labels"])
    return (each.mean(1) * of["factor"]).mean()


def trained(sizes: dict[str, int], options: dict[str, Any], folder: Path | None = None) -> dict[str, list[Any]]:
    mesh = threefold.init_mesh(**sizes)
    model = threefold.parallelize(layers(), mesh=mesh, **options)
    optimizer = threefold.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    found: dict[str, list[Any]] = {"losses": [], "skipped": [], "scales": [], "good steps": [], "kept": []}
    for step in range(4):
        before = [weight.detach().clone() for weight in model.parameters()]
        found["losses"].append(model.train_batch(batch(step, mesh), loss_fn))
        optimizer.step()
        found["skipped"].append(optimizer.step_was_skipped)
        found["kept"].append(all(map(torch.equal, before, model.parameters())))
        assert model.loss_scale is not None
        found["scales"].append(model.loss_scale.value)
        found["good steps"].append(model.loss_scale.good_steps)
    if folder is not None:
        threefold.save(folder, 4, model=model, optimizer=optimizer)
        again = threefold.parallelize(layers(), mesh=mesh, **options)
        threefold.load(folder, model=again)
        assert again.loss_scale is not None
        found["scales"].append(again.loss_scale.value)
        found["good steps"].append(again.loss_scale.good_steps)
    return found


@pytest.mark.parametrize(
    "sizes", [{"dp": 2, "tp": 2}, pytest.param({"dp": 2, "pp": 2}, marks=pytest.mark.slow)], ids=str
)
def test_fp16_skips_an_overflow_on_all_ranks_and_is_that_of_one_process(
    pool, tmp_path: Path, sizes: dict[str, int]
) -> None:
    (alone,) = pool.run(1, trained, {}, {"precision": "fp16"})
    assert alone["skipped"] == [False, True, False, False]
    options = {"precision": "fp16", "zero": 1, "micro_batches": 2 if "pp" in sizes else 1}
    for found in pool.run(4, trained, sizes, options, tmp_path):
        assert found["skipped"] == found["kept"] == [False, True, False, False]
        first, *rest = found["scales"]
        assert rest == [first / 2] * 4
        assert found["good steps"] == [1, 0, 1, 2, 2]
        assert [found["losses"][step] for step in (0, 2, 3)] == pytest.approx(
            [alone["losses"][step] for step in (0, 2, 3)], rel=5e-3
        )
        assert found["losses"][3] < found["losses"][0]


def near_fp32() -> float:
    mesh, found = threefold.init_mesh(), {}
    for precision in ("fp32", "fp16"):
        model = threefold.parallelize(layers(), mesh=mesh, precision=precision)
        model.train_batch(batch(0, mesh), loss_fn)
        step = model.gradient_step
        found[precision] = torch.cat([step.gradients[weight.leaf].flatten().float() for weight in step.model.weights])
    return float((found["fp16"] - found["fp32"]).norm() / found["fp32"].norm())


def test_its_gradients_are_near_those_of_fp32(pool) -> None:
    assert 1e-6 < pool.run(1, near_fp32)[0] < 0.01


def in_fp64(sizes: dict[str, int]) -> list[float]:
    mesh = threefold.init_mesh(**sizes)
    model = threefold.parallelize(layers(), mesh=mesh, dtype=torch.float64)
    optimizer = threefold.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)
    found = []
    for step in (0, 2, 3):
        found.append(model.train_batch(batch(step, mesh), loss_fn))
        optimizer.step()
    return found


def test_a_mapping_reaches_a_layer_alone_that_the_tensor_axis_cuts(pool) -> None:
    (alone,) = pool.run(1, in_fp64, {})
    for found in pool.run(3, in_fp64, {"tp": 3}):
        assert found == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize(
    ("layer", "of"),
    [
        (threefold.ColumnParallelLinear, nn.Linear),
        (threefold.RowParallelLinear, nn.Linear),
        (threefold.VocabParallelEmbedding, nn.Embedding),
        (GroupedHeadsLinear, nn.Linear),
    ],
)
def test_parallel_layers_call_their_input_as_torch_does(layer: Any, of: Any) -> None:
    assert list(signature(layer.forward).parameters) == list(signature(of.forward).parameters)
