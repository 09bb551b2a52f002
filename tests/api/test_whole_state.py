"""Whole state and outputs of a distributed model, schedules of its optimizer, and ties that only the plan makes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CyclicLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR

import threefold as t3
from tests.support.sentences import sentence
from tests.support.sweep import sweep

WORDS, WIDTH, LENGTH = 23, 10, 5
LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"dp": 2, "tp": 2}, {"zero": 1}),
    ({"tp": 2, "pp": 2}, {"micro_batches": 2}),
    ({"dp": 2, "pp": 2}, {"zero": 2, "micro_batches": 3}),
    ({"dp": 2, "tp": 2}, {"zero": 3}),
    ({"dp": 4}, {"zero": 3}),
    ({"pp": 4}, {"micro_batches": 4, "dtype": torch.float32}),
    ({"pp": 2}, {"micro_batches": 4, "schedule": "dualpipev"}),
]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 13), nn.Linear(13, WIDTH)
        self.register_buffer("size", torch.full((WIDTH,), 1.5))
        self.register_buffer("seen", torch.tensor(True))

    def forward(self, x: Tensor) -> Tensor:
        scaled = x / self.size.clone()
        if self.training:
            self.size.mul_(0.9).add_(0.1 * x.detach().abs().mean((0, 1)))
        return x + self.down(F.gelu(self.up(scaled)))


class Model(nn.Module):
    """Model whose head and embedding only the plan ties; the owner comes last."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


PLAN = t3.Plan(
    layers=["embed", "blocks.*", "head"],
    shard={"embed": t3.Vocab(), "blocks.*.up": t3.Column(), "blocks.*.down": t3.Row(), "head": t3.Vocab()},
    tied=[("embed.weight", "head.weight")],
)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (24, LENGTH + 1), generator=made)
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(output: Any, batch: Any) -> Tensor:
    return F.cross_entropy(output["logits"].flatten(0, 1), batch[1].flatten())


class Named(Model):
    """`Model` whose head returns its logits in a mapping, with their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return super().forward(tokens)  # type: ignore[return-value]


class Head(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WORDS)

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        logits = super().forward(x)
        return {"logits": logits, "mean": logits.mean()}


NAMED = t3.Plan(
    layers=PLAN.layers, shard={**PLAN.shard, "embed": t3.Replicated(), "head": t3.Replicated()}, tied=PLAN.tied
)


def mine(batch: tuple[Tensor, Tensor], mesh: t3.Mesh) -> tuple[Tensor, Tensor]:
    return tuple(each.chunk(mesh.dp.size)[mesh.dp.index] for each in batch)


def made(sizes: dict[str, int], options: dict[str, Any], seed: int = 3) -> tuple[Any, Any]:
    mesh = t3.init_mesh(**sizes)
    model = t3.parallelize(Named, NAMED, mesh, seed=seed, **{"dtype": torch.float64, **options})
    return model, t3.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model)


def trained(sizes: dict[str, int], options: dict[str, Any]) -> dict[str, Any]:
    """Whole state before and after two steps, and outputs, as each rank has them."""
    model, optimizer = made(sizes, options)
    found: dict[str, Any] = {"initial": model.state_dict(), "losses": [], "outputs": []}
    for step in range(2):
        loss, outputs = model.train_batch(mine(batch_of(step), model.mesh), loss_fn, return_outputs="all")
        optimizer.step()
        found["losses"].append(loss)
        found["outputs"].append(outputs)
    found["evaluated"] = model.eval_batch(mine(batch_of(5), model.mesh), loss_fn, return_outputs=True)
    found["last"] = model.gradient_step.parallelism.stages.ranks[-1] == model.mesh.pp.index
    found["state"], found["dp"] = model.state_dict(), model.mesh.dp.index
    other, others_optimizer = made(sizes, options, seed=4)
    assert not torch.equal(other.state_dict()["head.weight"], found["state"]["head.weight"])
    loaded = other.load_state_dict(found["state"])
    assert loaded.missing_keys == loaded.unexpected_keys == []
    again = other.state_dict()
    assert all(torch.equal(again[name], value) for name, value in found["state"].items())
    found["next"] = other.train_batch(mine(batch_of(2), model.mesh), loss_fn)
    others_optimizer.step()
    found["updated"] = other.state_dict()
    return found


def plain(initial: dict[str, Tensor]) -> dict[str, Any]:
    """The same in plain torch, from the whole initial state."""
    model = Named().to(initial["head.weight"].dtype)
    model.embed.weight = model.head.weight
    model.load_state_dict(initial)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    found: dict[str, Any] = {"losses": [], "outputs": []}

    def step(number: int) -> float:
        output = model(batch_of(number)[0])
        loss = loss_fn(output, batch_of(number))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found["outputs"].append(output["logits"].detach())
        return loss.item()

    found["losses"] = [step(0), step(1)]
    model.eval()
    found["evaluated"] = model(batch_of(5)[0])["logits"].detach()
    model.train()
    found["state"] = {name: value.clone() for name, value in model.state_dict().items()}
    found["next"], found["updated"] = step(2), dict(model.state_dict())
    return found


def evaluated_of_loaded(options: dict[str, Any]) -> tuple[float, float, float]:
    """A loss before, after other weights are loaded, and of a model that begins with those."""
    mesh = t3.init_mesh(dp=2)
    model, other = (t3.parallelize(Model, PLAN, mesh, seed=seed, **options) for seed in (1, 2))
    tokens = torch.arange(4 * LENGTH).view(4, LENGTH) % WORDS

    def loss(output: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(output.float().flatten(0, 1), batch[1].flatten())

    before = model.eval_batch((tokens, tokens), loss)
    model.load_state_dict(other.state_dict())
    return before, model.eval_batch((tokens, tokens), loss), other.eval_batch((tokens, tokens), loss)


@pytest.mark.parametrize("options", [{"dtype": torch.bfloat16}, {"zero": 3}, {"zero": 1}], ids=str)
def test_loaded_weights_are_computed_with_at_once(pool, options: dict[str, Any]) -> None:
    """Also where those that are updated are copies, in another dtype or sharded."""
    for before, loaded, expected in pool.run(2, evaluated_of_loaded, options):
        assert loaded == expected != before


@sweep(("sizes", "options"), LAYOUTS, quick=(1,), slow=(3, 4, 6))
def test_state_and_outputs_are_those_of_the_unsplit_model(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    ranks = pool.run(4 if "dualpipev" not in options.values() else 2, trained, sizes, options)
    expected = plain(ranks[0]["initial"])
    close = {"rtol": 1e-5, "atol": 1e-6} if "dtype" in options else {"rtol": 1e-12, "atol": 1e-13}
    for found in ranks:
        dp = sizes.get("dp", 1)
        assert [*found["state"]] == [*expected["state"]]
        assert found["losses"] == pytest.approx(expected["losses"], rel=close["rtol"])
        assert found["next"] == pytest.approx(expected["next"], rel=close["rtol"])
        for got, wanted in zip(found["outputs"], expected["outputs"], strict=False):
            torch.testing.assert_close(got["logits"], wanted.chunk(dp)[found["dp"]], **close)
            assert got["mean"].numel() == options.get("micro_batches", 1)
            assert not got["logits"].requires_grad
        for which in ("state", "updated"):
            for name, value in expected[which].items():
                torch.testing.assert_close(found[which][name], value, **close)
        _, outputs = found["evaluated"]
        assert (outputs is not None) == found["last"]
        if outputs is not None:
            torch.testing.assert_close(outputs["logits"], expected["evaluated"].chunk(dp)[found["dp"]], **close)


def in_one_process(sizes: dict[str, int]) -> list[str]:
    """Sentences of wrong calls, and results of one process."""
    model, optimizer = made(sizes, {})
    state = model.state_dict()
    wrong: list[Any] = [
        lambda: model.load_state_dict({**state, "head.bias": torch.zeros(3)}),
        lambda: model.load_state_dict({**state, "embed.weight": state["embed.weight"] + 1}),
        lambda: model.load_state_dict({name: state[name] for name in state if name != "head.bias"}),
        lambda: model.load_state_dict({**state, "mine": torch.zeros(3)}),
        lambda: model.eval_batch(mine(batch_of(0), model.mesh), return_outputs=True),
        lambda: model.eval_batch(mine(batch_of(0), model.mesh), loss_fn, return_outputs="first"),
        optimizer.state_dict,
        lambda: optimizer.load_state_dict({}),
        lambda: optimizer.add_param_group({}),
        lambda: optimizer.step(lambda: 1.0),
    ]
    told = [sentence(call) for call in wrong]
    assert model.load_state_dict({}, strict=False).missing_keys == [*state]
    assert model.load_state_dict({name: state[name] for name in state if name != "embed.weight"}).missing_keys == []
    return told


def test_wrong_calls_are_one_sentence_on_every_rank(pool) -> None:
    first, second = pool.run(2, in_one_process, {"pp": 2})
    assert first == second
    begins = [
        "The state has 'head.bias' of the shape [3] but the model's has [23]; pass that of the same model.",
        "The state has two values for 'head.weight' and 'head.weight', which are one weight of the model; leave one",
        "The state lacks 'head.bias'; pass that of the same model, or strict=False.",
        "The state has 'mine', which the model does not have; pass that of the same model, or strict=False.",
        "return_outputs is True but without loss_fn the last layer returns the loss alone; give loss_fn, and",
        "return_outputs is 'first' but must be False, True or 'all'; use True.",
        "state_dict was called on a distributed optimizer, whose state is sharded; use threefold.save(folder, step,",
        "load_state_dict was called on a distributed optimizer, whose state is sharded; use threefold.load(folder,",
        "add_param_group was called on a distributed optimizer; add the group before distributed_optimizer.",
        "optimizer.step was given a closure, which it cannot run; call model.train_batch(batch, loss_fn) and then",
    ]
    assert len(first) == len(begins)
    for told, begin in zip(first, begins, strict=True):
        assert told.startswith(begin)


SCHEDULES: dict[str, Any] = {
    "StepLR": lambda optimizer: StepLR(optimizer, 2, 0.5),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.5, total_steps=6),
    "CyclicLR": lambda optimizer: CyclicLR(optimizer, 0.1, 0.5, step_size_up=2),
    "SequentialLR": lambda optimizer: SequentialLR(
        optimizer, [LambdaLR(optimizer, lambda step: (step + 1) / 3), StepLR(optimizer, 1, 0.7)], [3]
    ),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=0, threshold=10.0),
}


def rates(optimizer: Any, name: str, step: Any) -> list[float]:
    schedule, found = SCHEDULES[name](optimizer), []
    for number in range(5):
        loss = step(number)
        optimizer.step()
        schedule.step(loss) if name == "ReduceLROnPlateau" else schedule.step()
        found += [loss, *(group["lr"] for group in optimizer.param_groups)]
    return found


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedules_of_torch_change_the_rates_of_a_distributed_optimizer(name: str) -> None:
    def groups(parameters: Any) -> torch.optim.Optimizer:
        weights = list(parameters)
        some = [each for each in weights if each.dim() == 2]
        others = [each for each in weights if each.dim() != 2]
        return torch.optim.SGD([{"params": some, "lr": 0.3}, {"params": others}], lr=0.5, momentum=0.9)

    model = t3.parallelize(Named, NAMED, dtype=torch.float64)
    alone = Named().double()
    alone.embed.weight = alone.head.weight
    alone.load_state_dict(model.state_dict())
    plain_optimizer = groups(alone.parameters())

    def backward(number: int) -> float:
        plain_optimizer.zero_grad()
        loss = loss_fn(alone(batch_of(number)[0]), batch_of(number))
        loss.backward()
        return loss.item()

    optimizer = t3.distributed_optimizer(groups(model.parameters()), model)
    found = rates(optimizer, name, lambda number: model.train_batch(batch_of(number), loss_fn))
    assert found == pytest.approx(rates(plain_optimizer, name, backward), rel=1e-12)
