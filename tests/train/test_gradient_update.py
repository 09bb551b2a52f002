"""One code path from gradients to the update: a run's step, a loop's around `parallelize`, and a prepared model's."""

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import threefold as t3
from tests.compat.prepared.scripts import gradient as prepared_gradient
from threefold.comm.layout import Layout
from threefold.config.loading import config_of
from threefold.parallel.parameter import whole
from threefold.parallel.whole_state import whole_state
from threefold.train.gradient_update import GradientUpdate
from threefold.train.step import Engine

PACKAGE = Path(t3.__file__).parent
HOME = "train/gradient_update.py"


class Place(NamedTuple):
    """A place in the source that does a part of what leads from gradients to the update."""

    what: str
    file: str
    function: str


def parts_of(call: ast.Call) -> Iterator[str]:
    """Yield which part of a step a call is, if it is one."""
    name = ast.unparse(call.func)
    last, given = name.rpartition(".")[2], [ast.unparse(each) for each in call.args]
    if name.endswith("gradients.scale_"):
        yield "multiply gradients"
    if last in ("clip_grad_norm_", "clip_grads_with_norm_", "clip_grad_value_", "unscale_") and name.startswith(
        "torch"
    ):
        yield "clip with torch"
    if last == "isfinite" and any("norm" in each for each in given):
        yield "is the norm finite"
    if last == "update" and "scale" in name:
        yield "adapt the loss scale"
    if last == "undo":
        yield "undo buffers"
    if last == "all_reduce_" and any("square" in each for each in given):
        yield "sum the norm"


def places() -> Counter[Place]:
    """Count the places of the core and of the call-alikes; tests and verification compute the same on their own."""
    found: Counter[Place] = Counter()
    for room in ("api", "compat", "parallel", "train"):
        for path in sorted((PACKAGE / room).rglob("*.py")):
            text = path.read_text()
            if not any(word in text for word in ("norm", "scale", "undo")):
                continue
            for function in (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef)):
                for node in ast.walk(function):
                    for what in parts_of(node) if isinstance(node, ast.Call) else ():
                        found[Place(what, str(path.relative_to(PACKAGE)), function.name)] += 1
    return found


def test_each_part_from_gradients_to_the_update_is_written_once() -> None:
    assert places() == {
        Place("multiply gradients", HOME, "unscale_"): 1,
        Place("multiply gradients", HOME, "clip_"): 1,
        Place("is the norm finite", HOME, "decide"): 1,
        Place("adapt the loss scale", HOME, "decide"): 1,
        Place("undo buffers", HOME, "decide"): 1,
        Place("sum the norm", HOME, "squared_norm"): 1,
    }


ROWS, STEPS, LIMIT, OVERFLOWS = 7, 4, 0.1, 1
"""Rows of a global batch, updates, the norm to clip to, and the step in which a sample's loss is beyond fp16."""
SHARD = {"up": t3.Column(), "down": t3.Row()}


class Small(nn.Module):
    """Two linear layers of odd sizes, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


PLAN = t3.Plan(layers=["up", "act", "down"], shard={**SHARD, "**": t3.Replicated()})


def batch(step: int, dtype: torch.dtype) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ROWS, size, generator=made, dtype=torch.float64) for size in (3, 5))
    factor = torch.ones(ROWS, dtype=torch.float64)
    factor[2] = 1e8 if step == OVERFLOWS and dtype == torch.float16 else 3.0
    wide = torch.float32 if dtype == torch.float16 else dtype
    return {"input": x.to(wide), "y": y.to(wide), "factor": factor.to(wide)}


def loss_of(output: Tensor, of: Any) -> Tensor:
    wide = output.float() if output.dtype == torch.float16 else output
    return (wide - of["y"]).square().mean(1).mul(of["factor"]).mean()


class Update(NamedTuple):
    """Gradients before the clip, norm, whether the step was skipped, loss scale and its count, and the new weights."""

    gradients: dict[str, Tensor]
    norm: float
    skipped: bool
    scale: tuple[float, int] | None
    weights: dict[str, Tensor]


def copied(named: Any) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in dict(named).items()}


def scale_of(step: GradientUpdate) -> tuple[float, int] | None:
    return None if step.loss_scale is None else (step.loss_scale.value, step.loss_scale.good_steps)


def own_rows(mesh: t3.Mesh, of: dict[str, Tensor]) -> dict[str, Tensor]:
    own = slice(ROWS * mesh.dp.index // mesh.dp.size, ROWS * (mesh.dp.index + 1) // mesh.dp.size)
    return {name: each[own] for name, each in of.items()}


def whole_gradients(step: Engine) -> dict[str, Tensor]:
    return {each.name: whole(each.stored(step.gradients[each.leaf])).clone() for each in step.model.trained}


def of_a_run(mesh: t3.Mesh, dtype: torch.dtype, weights: dict[str, Tensor]) -> list[Update]:
    names = {torch.float64: "fp64", torch.float32: "fp32", torch.float16: "fp16"}
    optimizer = {
        "name": "sgd",
        "lr": 0.1,
        "momentum": 0.9,
        "nesterov": False,
        "weight_decay": 0.0,
        "clip_grad_norm": LIMIT,
    }
    optimizer |= {"decay": "constant", "warmup_steps": 0}
    model = {"architecture": "own", "file": f"{__file__}:Small"}
    parallel = {"dp": mesh.dp.size, "tp": mesh.tp.size}
    sections = {"model": model, "optimizer": optimizer, "precision": {"dtype": names[dtype]}, "parallel": parallel}
    train = {"global_batch_size": mesh.dp.size, "gradient_accumulation_steps": 1}
    sections |= {"data": {"path": "unused", "sequence_length": 1}, "train": train}
    plan = PLAN.build(Small())
    engine = Engine(Small, plan, mesh, config_of(sections), loss=loss_of)
    weights.update(copied(whole_state(engine.model)))
    found = []
    for step in range(STEPS):
        loss, samples = engine.compute_gradients(own_rows(mesh, batch(step, dtype)), step)
        gradients = whole_gradients(engine)
        result = engine.update(loss, samples, step)
        now = copied(whole_state(engine.model))
        found.append(Update(gradients, result.grad_norm, result.skipped, scale_of(engine), now))
    return found


def of_a_loop(mesh: t3.Mesh, dtype: torch.dtype, weights: dict[str, Tensor]) -> list[Update]:
    model = t3.parallelize(Small, PLAN, mesh, dtype=dtype, verify=False)
    model.load_state_dict(weights)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer = t3.distributed_optimizer(inner, model, clip_grad_norm=LIMIT)
    found = []
    for step in range(STEPS):
        model.train_batch(own_rows(mesh, batch(step, dtype)), loss_of)
        gradients = whole_gradients(model.gradient_step)  # type: ignore[arg-type]
        norm, now = optimizer.step(), copied(model.state_dict())
        found.append(Update(gradients, norm, optimizer.step_was_skipped, scale_of(model.gradient_step), now))
    return found


def of_a_prepared_model(mesh: t3.Mesh, dtype: torch.dtype, weights: dict[str, Tensor]) -> list[Update]:
    module = Small().to(torch.float32 if dtype == torch.float16 else dtype)
    module.load_state_dict(weights)
    model, optimizer = t3.prepare(
        module,
        torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9),
        mesh=mesh,
        precision="fp16" if dtype == torch.float16 else "fp32",
        tensor_parallel=SHARD if mesh.tp.size > 1 else None,
    )
    rows = [torch.cat([batch(step, dtype)[name] for step in range(STEPS)]) for name in ("input", "y", "factor")]
    loader, _ = t3.prepare(DataLoader(TensorDataset(*rows), batch_size=ROWS), model)
    found = []
    for x, y, factor in loader:
        t3.backward(loss_of(model(x), {"y": y, "factor": factor}))
        gradients = {name: prepared_gradient(each) for name, each in model.named_parameters()}
        norm = t3.clip_grad_norm_(model, LIMIT)
        optimizer.step()
        now, scale = copied(model.state_dict()), scale_of(model.sync)
        found.append(Update(gradients, float(norm), optimizer.step_was_skipped, scale, now))
    return found


def of_plain_pytorch(dtype: torch.dtype, weights: dict[str, Tensor]) -> list[Update]:
    """The whole batch and unsplit weights on one process; fp16 is in fp32, and its overflow is skipped."""
    model = Small().to(torch.float32 if dtype == torch.float16 else dtype)
    model.load_state_dict(weights)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    found = []
    for step in range(STEPS):
        of, skipped = batch(step, dtype), dtype == torch.float16 and step == OVERFLOWS
        optimizer.zero_grad()
        loss_of(model(of["input"]), of).backward()
        gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
        norm = nn.utils.clip_grad_norm_(model.parameters(), LIMIT)
        if not skipped:
            optimizer.step()
        found.append(Update(gradients, float(norm), skipped, None, copied(model.state_dict())))
    return found


KINDS: dict[str, Callable[[t3.Mesh, torch.dtype, dict[str, Tensor]], list[Update]]] = {
    "a run": of_a_run,
    "a loop": of_a_loop,
    "a prepared model": of_a_prepared_model,
}


def updates(layout: Layout, dtype: torch.dtype, without: str = "") -> dict[str, list[Update]]:
    """Return the updates of each kind of step, and of plain PyTorch; a method of `GradientUpdate` may do nothing."""
    torch.set_num_threads(1)
    mesh, weights = t3.init_mesh(dp=layout.dp, tp=layout.tp), dict[str, Tensor]()
    with pytest.MonkeyPatch.context() as patch:
        if without:
            patch.setattr(GradientUpdate, without, lambda *_: False)
        found = {kind: make(mesh, dtype, weights) for kind, make in KINDS.items()}
    return {**found, "plain PyTorch": of_plain_pytorch(dtype, weights)}


def error(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    errors = [((one[name] - other[name]).abs().max() / other[name].abs().max()).item() for name in other]
    return max(errors)


LAYOUTS = [Layout(), Layout(dp=2, tp=2), pytest.param(Layout(tp=3), marks=pytest.mark.slow)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_three_kinds_of_steps_are_those_of_one_process(pool, layout: Layout, dtype: torch.dtype, bound: float) -> None:
    for found in pool.run(layout.world_size, updates, layout, dtype):
        expected = found.pop("plain PyTorch")
        assert max(each.norm for each in expected) > LIMIT
        for kind, seen in found.items():
            assert len(seen) == STEPS, kind
            for step, (got, wanted) in enumerate(zip(seen, expected, strict=True)):
                assert error(got.gradients, wanted.gradients) <= bound, (kind, step)
                assert got.norm == pytest.approx(wanted.norm, rel=bound), (kind, step)
                assert error(got.weights, wanted.weights) <= bound, (kind, step)
                assert (got.skipped, got.scale) == (False, None)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_an_overflow_in_fp16_is_skipped_by_each_kind_of_step(pool, layout: Layout) -> None:
    for found in pool.run(layout.world_size, updates, layout, torch.float16):
        expected = found.pop("plain PyTorch")
        for kind, seen in found.items():
            assert [each.skipped for each in seen] == [step == OVERFLOWS for step in range(STEPS)], kind
            assert [each.scale for each in seen] == [(65536.0, 1), (32768.0, 0), (32768.0, 1), (32768.0, 2)], kind
            assert error(seen[OVERFLOWS].weights, seen[OVERFLOWS - 1].weights) == 0, kind
            for got, wanted in zip(seen, expected, strict=True):
                if not wanted.skipped:
                    assert error(got.gradients, wanted.gradients) < 0.02, kind
                assert error(got.weights, wanted.weights) < 0.02, kind


@pytest.mark.parametrize(("method", "dtype"), [("clip_", torch.float64), ("unscale_", torch.float16)])
def test_each_kind_of_step_goes_through_the_same_methods(pool, method: str, dtype: torch.dtype) -> None:
    """Without the method, each kind of step departs from one process."""
    (found,) = pool.run(1, updates, Layout(), dtype, method)
    expected = found.pop("plain PyTorch")
    for kind, seen in found.items():
        departures = zip(seen[0][::4], expected[0][::4], strict=True)  # of gradients and weights
        assert max(error(*pair) for pair in departures) > 0.05, kind
