"""A loop of one's own: its losses, gradients, norms and weights against the plain model in one process, and its
checkpoints in another layout."""

from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import threefold
from tests.support.custom_models import MaskedModel, masked_batch, masked_loss, plan_of
from tests.support.parity import whole_tensors
from tests.support.sentences import sentence
from tests.support.sweep import sweep
from threefold.models.layers.decoder import SampleInfo
from threefold.models.sharding import Normal
from threefold.random.dropout import sample_keys
from threefold.random.rng import fill_normal_, stream_key
from threefold.verify.compare import TOLERANCE, relative_error

PLAN, STEPS, SEED, CLIP = plan_of(3), 3, 4, 0.7
SAMPLES = 24 * STEPS


class Masked(Dataset):
    """The samples of a few batches."""

    def __init__(self) -> None:
        batches = [masked_batch(step) for step in range(STEPS)]
        self.parts = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: part[index] for name, part in self.parts.items()}


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """One that the package does not have, whose updates do not depend on rounding noise much."""
    return torch.optim.Adagrad(parameters, lr=0.05, eps=1e-2, weight_decay=0.01)


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    evaluated: float = 0.0


def plain(dtype: torch.dtype, clip: float = CLIP) -> Trained:
    """The model in one process, with torch alone: one pass over the global batch, torch's clip and optimizer."""
    model = MaskedModel().to(dtype)
    for name, parameter in model.named_parameters():
        initial = PLAN.initial(name)
        with torch.no_grad():
            if isinstance(initial, Normal):
                key = stream_key("weights", SEED, name)
                fill_normal_(parameter, initial.std, key, tuple(parameter.shape), (0,) * parameter.dim())
            else:
                parameter.fill_(initial.value)
    optimizer, found = optimizer_of(model.parameters()), Trained()
    for step, batch in enumerate(threefold.DistributedDataLoader(Masked(), 24, seed=SEED)):
        keys = sample_keys(SEED, step, torch.arange(24))
        loss = mean_of(model(batch["ids"], batch["keep"], SampleInfo(keys)), batch)
        optimizer.zero_grad()
        loss.backward()
        found.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        found.norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), clip)))
        optimizer.step()
        found.losses.append(loss.item())
    model.eval()
    found.weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    batch = masked_batch(9)
    found.evaluated = mean_of(model(batch["ids"], batch["keep"], SampleInfo(None)), batch).item()
    return found


def mean_of(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    terms, counts = masked_loss.terms(output, batch), masked_loss.counts(batch)
    size = terms["size"]
    assert isinstance(size, tuple)
    return terms["tokens"] / counts["tokens"] + size.weight * size.sum / counts["size"]


def whole(model: threefold.types.DistributedModel, optimizer: threefold.types.ModelOptimizer, attribute: str) -> Any:
    """An attribute of each parameter, unsharded, of this rank's stages."""
    seen: Any = SimpleNamespace(
        optimizer=optimizer,
        mesh=model.mesh,
        model=model.gradient_step.model,
        parallelism=model.gradient_step.parallelism,
    )
    return {name: tensor.clone() for name, tensor in whole_tensors(seen, attribute).items()}


def made(sizes: dict[str, int], options: dict[str, Any], clip: float = CLIP) -> Any:
    mesh = threefold.init_mesh(**sizes)
    model = threefold.parallelize(MaskedModel, PLAN, mesh, seed=SEED, **options)
    optimizer = threefold.distributed_optimizer(optimizer_of(model.parameters()), model, clip_grad_norm=clip)
    return model, optimizer, threefold.DistributedDataLoader(Masked(), 24, mesh, seed=SEED)


def loop(sizes: dict[str, int], options: dict[str, Any], clip: float = CLIP) -> Trained:
    model, optimizer, loader = made(sizes, options, clip)
    found = Trained()
    for batch in loader:
        found.losses.append(model.train_batch(batch, masked_loss))
        found.gradients.append(whole(model, optimizer, "gradient"))
        found.norms.append(optimizer.step())
        optimizer.zero_grad()
    found.weights = whole(model, optimizer, "master")
    dp, rows = model.mesh.dp, 24 // model.mesh.dp.size
    mine = {name: part[dp.index * rows : (dp.index + 1) * rows] for name, part in masked_batch(9).items()}
    found.evaluated = model.eval_batch(mine, masked_loss)
    return found


DEEP = {"dp": 2, "tp": 2, "pp": 2}
CASES: list[tuple[dict[str, int], dict[str, Any]]] = [
    (DEEP, {"zero": 1, "micro_batches": 2, "dtype": torch.float64}),
    (DEEP, {"zero": 1, "micro_batches": 2}),
    ({"dp": 3, "tp": 2}, {"zero": 3, "dtype": torch.float64}),
    ({"dp": 2, "tp": 3}, {"zero": 2, "micro_batches": 3, "dtype": torch.float64, "recompute": "full"}),
    ({"pp": 3, "dp": 2}, {"micro_batches": 4, "dtype": torch.float64, "schedule": "gpipe"}),
    ({}, {"dtype": torch.float64}),
]


@sweep(("sizes", "options"), CASES, quick=(0,))
def test_a_loop_computes_what_the_plain_model_does(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    dtype = options.get("dtype", torch.float32)
    limit = TOLERANCE["fp64" if dtype == torch.float64 else "fp32"]
    (expected,) = pool.run(1, plain, dtype)
    ranks = 1
    for size in sizes.values():
        ranks *= size
    found = pool.run(ranks, loop, sizes, options)
    assert {name for each in found for name in each.weights} == expected.weights.keys()
    assert expected.norms[0] > CLIP  # the clip matters
    for each in found:
        assert (each.losses, each.norms) == (found[0].losses, found[0].norms)  # the same floats on every rank
        assert each.losses == pytest.approx(expected.losses, rel=limit)
        assert each.norms == pytest.approx(expected.norms, rel=limit)
        assert each.evaluated == pytest.approx(expected.evaluated, rel=limit)
        for step, gradients in enumerate(each.gradients):
            for name, gradient in gradients.items():
                assert relative_error(gradient, expected.gradients[step][name]) <= limit, (step, name)
        for name, weight in each.weights.items():
            assert relative_error(weight, expected.weights[name]) <= limit, name


def test_a_norm_below_the_limit_clips_nothing(pool) -> None:
    (expected,) = pool.run(1, plain, torch.float64, 1e3)
    (found,) = pool.run(1, loop, {}, {"dtype": torch.float64}, 1e3)
    assert max(found.norms) < 1e3
    for name, weight in found.weights.items():
        assert relative_error(weight, expected.weights[name]) <= TOLERANCE["fp64"], name


def begun(sizes: dict[str, int], options: dict[str, Any], folder: Path) -> list[float]:
    model, optimizer, loader = made(sizes, options)
    losses = []
    for step, batch in enumerate(loader):
        losses.append(model.train_batch(batch, masked_loss))
        optimizer.step()
        if step == 0:
            optimizer.param_groups[0]["lr"] = 0.03
            threefold.save(folder, 1, model=model, optimizer=optimizer, loader=loader)
    return losses


def resumed(sizes: dict[str, int], options: dict[str, Any], folder: Path) -> tuple[int, list[float], float]:
    model, optimizer, loader = made(sizes, options)
    step = threefold.load(folder, model=model, optimizer=optimizer, loader=loader)
    losses = []
    for batch in loader:
        losses.append(model.train_batch(batch, masked_loss))
        optimizer.step()
    return step, losses, optimizer.param_groups[0]["lr"]


@sweep(
    ("before", "after"),
    [((DEEP, {"zero": 1, "micro_batches": 2}), ({"dp": 3, "tp": 2}, {"zero": 3})), (({}, {}), (DEEP, {}))],
    quick=(0,),
)
def test_a_checkpoint_continues_in_another_layout(pool, tmp_path: Path, before: Any, after: Any) -> None:
    """Weights, optimizer state, learning rate, dropout and place in the data."""
    wide = {"dtype": torch.float64}
    if after[0] == DEEP:
        after = (DEEP, {"micro_batches": 2})
    ranks = {str(DEEP): 8, str({"dp": 3, "tp": 2}): 6, "{}": 1}
    (losses, *_) = pool.run(ranks[str(before[0])], begun, before[0], {**before[1], **wide}, tmp_path)
    for step, rest, lr in pool.run(ranks[str(after[0])], resumed, after[0], {**after[1], **wide}, tmp_path):
        assert (step, lr) == (1, 0.03)
        assert rest == pytest.approx(losses[1:], rel=1e-9)
    assert len(losses) == STEPS


class OfItsWeights(nn.Module):
    """A layer that computes with the weights of a linear layer and of a table itself."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(5, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.of = "up"

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(F.linear(self.table(x), self.up.weight) if self.of == "up" else self.up(self.table(x)))
        return F.linear(y, self.table.weight) if self.of == "table" else y


def weights_themselves(zero: int) -> list[str]:
    mesh, said = threefold.init_mesh(tp=2), []
    shard = {"0.table": threefold.Vocab(), "0.up": threefold.Column(), "0.down": threefold.Row()}
    plan = threefold.Plan(layers=["0"], shard=shard)
    for of in ("up", "table"):

        def make(of: str = of) -> nn.Module:
            layer = OfItsWeights()
            layer.of = of
            return nn.Sequential(layer)

        model = threefold.parallelize(make, plan, mesh, zero=zero)  # type: ignore[arg-type]
        batch = torch.arange(4), torch.zeros(4)
        said.append(sentence(model.train_batch, batch, lambda output, batch: output.square().mean()))
    return said


@pytest.mark.parametrize("zero", [0, 1])
def test_a_weight_that_is_computed_with_outside_of_its_layer_is_one_sentence(pool, zero: int) -> None:
    for of_up, of_table in pool.run(2, weights_themselves, zero):
        assert of_up.startswith("Column cuts '0.up' for tp, so that a rank has a part of its weight, but the model ")
        assert of_table.startswith("Vocab cuts '0.table' for tp, so that a rank has a part of its weight, but the ")
