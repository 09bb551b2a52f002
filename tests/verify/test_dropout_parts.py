"""Dropout between the sharded layers of a user's model drops what one process drops, or is refused by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threefold as t3
from tests.support.sweep import sweep
from tests.verify.support import config, task, verify
from threefold import doors
from threefold.config import ParallelConfig
from threefold.data.loader import Batch
from threefold.errors import UserError
from threefold.models.layers.decoder import SampleInfo
from threefold.models.source import ObjectSource
from threefold.parallel.parallelize import TrainingSettings
from threefold.random.dropout import sample_keys
from threefold.train.step import GradientStep
from threefold.verify.verifier import EQUAL

WORDS, WIDTH, HEAD, LENGTH, SEED = 23, 12, 3, 5, 7


class Block(nn.Module):
    """Attention and MLP by hand, with dropout of weights, heads, features, a gated part, and the residual stream."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)  # 17: no tp divides it
        names = ("weights", "heads", "features", "residual")
        self.drops = nn.ModuleDict({each: t3.Dropout(0.3, f"{name}.{each}") for each in names})

    def forward(self, x: Tensor, samples: Any) -> Tensor:
        def drop(which: str, y: Tensor) -> Tensor:
            return self.drops[which](y, samples.keys)

        q, k, v = (each.unflatten(-1, (-1, HEAD)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        weights = drop("weights", (q @ k.transpose(-1, -2)).softmax(-1))
        x = x + self.out(drop("heads", (weights @ v).transpose(1, 2)).flatten(2))
        return x + drop("residual", self.down(drop("features", F.gelu(self.up(x)))))


class Model(nn.Module):
    plan = t3.Plan(
        layers=["embed", "blocks.*", "head"],
        shard={
            "embed": t3.Vocab(),
            "blocks.*.qkv": t3.Column(heads=4, groups=3),
            "blocks.*.out": t3.Row(heads=4),
            "blocks.*.up": t3.Column(),
            "blocks.*.down": t3.Row(),
            "head": t3.Vocab(),
        },
        recompute={"blocks": ("blocks.*",)},
    )

    def __init__(self, block: Callable[[str], nn.Module] = Block) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(block(f"blocks.{number}") for number in range(3))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, samples: Any) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, samples)
        return self.head(x)


def batch_of(step: int) -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(step)
    tokens = torch.randint(WORDS, (8, LENGTH + 1), generator=made)
    return tokens[:, :-1], tokens[:, 1:]


def loss_fn(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def trained(sizes: dict[str, int], options: dict[str, Any]) -> tuple[list[float], dict[str, Tensor], float]:
    """Losses of steps, the final state, and a loss in evaluation."""
    mesh = t3.init_mesh(**sizes)
    model = t3.parallelize(Model, mesh=mesh, dtype=torch.float64, seed=SEED, **options)
    optimizer, losses = t3.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.5), model), []
    for step in range(3):
        batch = tuple(each.chunk(mesh.dp.size)[mesh.dp.index] for each in batch_of(step))
        losses.append(model.train_batch(batch, loss_fn))
        optimizer.step()
    evaluated = model.eval_batch(tuple(each.chunk(mesh.dp.size)[mesh.dp.index] for each in batch_of(9)), loss_fn)
    return losses, model.state_dict(), evaluated


def plain() -> tuple[list[float], dict[str, Tensor], float]:
    model = Model().double()
    model.load_state_dict(t3.parallelize(Model, dtype=torch.float64, seed=SEED).state_dict())
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.5), []
    for step in range(3):
        keys = sample_keys(SEED, step, torch.arange(8))
        loss = loss_fn(model(batch_of(step)[0], SampleInfo(keys)), batch_of(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return losses, model.state_dict(), loss_fn(model(batch_of(9)[0], SampleInfo()), batch_of(9)).item()


@sweep(
    ("sizes", "options"),
    [
        ({"tp": 2}, {}),
        ({"tp": 4}, {"micro_batches": 2}),
        ({"tp": 2, "pp": 2}, {"micro_batches": 2, "recompute": "blocks"}),
        ({"dp": 2, "tp": 2}, {"zero": 3}),
        ({"tp": 2}, {"compile": True}),
    ],
    quick=(0,),
    slow=(1, 2, 3),
)
def test_dropout_of_parts_is_that_of_one_process(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    losses, state, evaluated = plain()
    ranks = sizes.get("dp", 1) * sizes.get("tp", 1) * sizes.get("pp", 1)
    for found, weights, loss in pool.run(ranks, trained, sizes, options):
        assert found == pytest.approx(losses, rel=1e-12)
        assert loss == pytest.approx(evaluated, rel=1e-12)
        for name, value in state.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-11, atol=1e-13)


class Head(nn.Module):
    """Head that computes the loss."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, vocab_size)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.out(x)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


class OfTokens(Model):
    """Model that computes the loss, so that its sequences may be split."""

    plan = t3.Plan(
        layers=Model.plan.layers, shard={**Model.plan.shard, "head": t3.Replicated(), "head.out": t3.Vocab()}
    )

    def __init__(self, vocab_size: int = WORDS, block: Callable[[str], nn.Module] = Block) -> None:
        super().__init__(block)
        self.embed, self.head = nn.Embedding(vocab_size, WIDTH), Head(vocab_size)

    def forward(self, tokens: Tensor, labels: Tensor, samples: Any) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x, samples)
        return self.head(x, labels)


SPLIT = ("tp2 sp", "dp2·tp2 zero3 sp", "tp2·pp2 sp")


@pytest.mark.slow
def test_dropout_of_shares_of_sequences_is_that_of_one_process(pool, tmp_path: Path) -> None:
    given = config(
        model={"architecture": "own", "vocab_size": WORDS},
        data={"sequence_length": 12},
        train={"global_batch_size": 8},
    )
    todo = task(*SPLIT, given=given, source=ObjectSource(OfTokens))
    for result in verify(pool, todo, tmp_path, *SPLIT):
        assert result.verdict == EQUAL, (str(result.spec), result.first, result.message)


class Fused(Block):
    """Drops queries, keys and values before they are separated."""

    def forward(self, x: Tensor, samples: Any) -> Tensor:
        return x + self.out(self.drops["heads"](self.qkv(x), samples.keys).chunk(3, -1)[0])


class Twice(Block):
    """Calls one layer on a part and on the whole."""

    def forward(self, x: Tensor, samples: Any) -> Tensor:
        drop = self.drops["features"]
        return x + drop(self.down(drop(self.up(x), samples.keys)), samples.keys)


class Reading(Block):
    """Reads a value in its forward pass."""

    def forward(self, x: Tensor, samples: Any) -> Tensor:
        return super().forward(x, samples) if x.abs().max().item() < 1e9 else x


class Turned(Block):
    """Drops an activation whose positions are not dim 1."""

    def forward(self, x: Tensor, samples: Any) -> Tensor:
        return super().forward(self.drops["residual"](x.transpose(1, 2), samples.keys).transpose(1, 2), samples)


def refused_in_shares(with_room: bool) -> str:
    settings = TrainingSettings(parallel=ParallelConfig(sequence_parallel=True))
    plan = OfTokens.plan.build(OfTokens())
    step = GradientStep(lambda: OfTokens(block=Turned), plan, t3.init_mesh(tp=2), settings)
    tokens = torch.arange(20).view(2, 10) % WORDS
    room = patch.object(doors, "hook", doors.hook if with_room else lambda name: None)
    with room, pytest.raises(UserError) as caught:
        step.train_batch(Batch(tokens, tokens, torch.arange(2)), 0)
    return str(caught.value)


UNKNOWN = (
    "'blocks.0.drops.residual' is a threefold.Dropout whose input is [2, 12, 10] in one process, and which of its "
    "positions a rank gets is not known, as sequences of 10 are split over 2 ranks; call it on an activation of the "
    "shape [samples, positions, …]."
)


def test_dropout_of_unknown_positions_is_refused_by_name(pool) -> None:
    assert pool.run(2, refused_in_shares, True) == [UNKNOWN] * 2


def test_dropout_whose_parts_follow_from_layers_needs_the_room(pool) -> None:
    found = pool.run(2, refused_in_shares, False)
    assert found[0] == found[1]
    assert found[0].startswith("dropout between the sharded layers of a custom model needs threefold.verify, which is")


REFUSED = {
    Fused: "'blocks.0.drops.heads' is a threefold.Dropout whose input is [8, 5, 36] in one process and [8, 5, 18] on a "
    "rank of tp 2, which is no run of features or heads; call it where the activation is whole, after a Row() layer, "
    "or for a Column(groups=…) after chunk, on one group.",
    Twice: "'blocks.0.drops.features' is a threefold.Dropout that gets different parts of its inputs with tp 2, as it "
    "is called before and after a Column() layer; use a layer for each.",
    Reading: "'blocks.0.drops.features' is a threefold.Dropout, and which part of its input a rank of tp 2 gets is not "
    "known, as the forward pass fails without values (RuntimeError: Tensor.item() cannot be called on meta tensors); "
    "have it read no values, or call the dropout where the activation is whole, after a Row() layer, and name it in "
    "shard as Replicated().",
}


def refused(block: type[Block]) -> str:
    model = t3.parallelize(lambda: Model(block), Model.plan, t3.init_mesh(tp=2))
    with pytest.raises(UserError) as caught:
        model.train_batch(batch_of(0), loss_fn)
    return str(caught.value)


@pytest.mark.parametrize("block", REFUSED)
def test_dropout_of_unknown_parts_is_refused_by_name(pool, block: type[Block]) -> None:
    assert pool.run(2, refused, block) == [REFUSED[block]] * 2
