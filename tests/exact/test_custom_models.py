"""Exact runs of a user's own model and loss: what is known has the bits of one process, and the rest is named."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.custom_models import CustomBatches, CustomCase, make_engine
from tests.support.exact import EXACT, differences, slow_but
from tests.support.parity import Case, Trace, trained
from threefold.config import Config
from threefold.config.resolve import resolve
from threefold.errors import UserError
from threefold.exact.arithmetic import check_grain
from threefold.models.loss_terms import CountedLoss, LossTerm
from threefold.models.plan import Plan
from threefold.models.sharding import Column, Replicated, Row, Sharded, Vocab
from threefold.verify.worker_pool import WorkerPool

WORDS, WIDTH, LENGTH, INNER, HEADS, SAMPLES = 40, 24, 9, 40, 4, 16


class Start(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.1)

    def forward(self, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(ids) + self.places, keep


class Block(nn.Module):
    """Attention by hand or by torch's function, norms, a gate of each head, and a mean over positions."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gate = nn.Parameter(torch.linspace(0.5, 1.5, HEADS))
        self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH, bias=False)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        y = self.norm(x)
        q, k, v = (each(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v))
        if self.number % 2:
            scores = (q @ k.mT * (WIDTH // HEADS) ** -0.5).masked_fill(~keep[:, None, None, :], -1e4)
            mixed = scores.softmax(-1) @ v
        else:
            mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
        x = x + self.out((mixed * self.gate.view(1, -1, 1, 1)).transpose(1, 2).flatten(2))
        x = x + self.mix(x.mean(1, keepdim=True)).sigmoid()
        inner = self.up(self.other(x))
        return x + self.scale * self.down(F.gelu(inner) if self.number % 2 else F.silu(inner)), keep


class End(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.scores(self.norm(x))


class Mine(nn.Module):
    block: type[nn.Module] = Block

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.start, self.end = Start(), End()
        self.blocks = nn.ModuleList(self.block(number) for number in range(blocks))
        self.end.scores.weight = self.start.words.weight


PLAN = Plan(
    layers=["start", "blocks.*", "end"],
    shard={
        "start.words": Vocab(),
        "start.places": Replicated(),
        "blocks.*.q": Column(heads=HEADS),
        "blocks.*.k": Column(heads=HEADS),
        "blocks.*.v": Column(heads=HEADS),
        "blocks.*.out": Row(heads=HEADS),
        "blocks.*.gate": Sharded(0, heads=HEADS),
        "blocks.*.up": Column(),
        "blocks.*.down": Row(),
        "blocks.*.mix": Replicated(),
        "end.scores": Vocab(),
    },
)


def batch_of(step: int) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(900 + step)
    ids = torch.randint(WORDS, (SAMPLES, LENGTH), generator=made)
    keep = torch.rand(ids.shape, generator=made) < 0.7
    keep[:, 0] = True
    labels = torch.randint(WORDS, ids.shape, generator=made).masked_fill(~keep, -100)
    return {"ids": ids, "keep": keep, "labels": labels}


def _terms(output: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor | LossTerm]:
    tokens = F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return {"tokens": tokens, "size": LossTerm(output.square().mean((1, 2)).sum(), 0.3)}


def _counts(batch: dict[str, Tensor]) -> dict[str, Tensor | float]:
    return {"tokens": (batch["labels"] != -100).sum(), "size": float(len(batch["labels"]))}


def mean_loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(output.mT, batch["labels"]) + 0.1 * output.square().mean()


def own(make: Callable[[], nn.Module] = Mine, loss: Any = None, **settings: Any) -> CustomCase:
    """Return a case of two steps; a setting `a__b` is `a.b`, others are the case's."""
    given = tuple((key.replace("__", "."), value) for key, value in settings.items() if "__" in key)
    layout = {key: value for key, value in settings.items() if "__" not in key}
    case = Case(vocab=48, heads=8, ffn=64, batch=SAMPLES, accumulation=1, steps=2, settings=(EXACT, *given))
    case = case.with_layout(layout.pop("dp", 1), layout.pop("tp", 1), layout.pop("pp", 1), **layout)
    torch.manual_seed(4)
    return CustomCase(make, PLAN.build(make()), batch_of, loss or CountedLoss(_terms, _counts), case)


def run_custom(own: CustomCase, threads: int = 1) -> tuple[Trace, list[str], list[float]]:
    """Train; return the trace, what is named, and losses of evaluation and the terms of each step."""
    torch.manual_seed(5)  # of the constructor's values
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine, batches = make_engine(own), CustomBatches(own.batches)
        dp, config = engine.mesh.dp, own.case.config
        trace = trained(engine, own.case.steps, lambda step: batches.batch(config, step, dp.index, dp.size))
        found = engine.eval_batch(batches.batch(config, 9, dp.index, dp.size), own.loss)
        return trace, engine.arithmetic.take_notes(), [found.loss, *found.terms.values()]
    finally:
        torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone(pool: WorkerPool) -> Callable[[CustomCase], tuple[Trace, list[str], list[float]]]:
    known: dict[Any, tuple[Trace, list[str], list[float]]] = {}

    def run(case: CustomCase) -> tuple[Trace, list[str], list[float]]:
        key = case.make, str(case.loss)
        if key not in known:
            (known[key],) = pool.run(1, run_custom, case)
        return known[key]

    return run


LAYOUTS: dict[str, dict[str, Any]] = {
    "micro-batch": {"accumulation": 4},
    "recompute": {"train__recompute": "full"},
    "dp 2": {"dp": 2},
    "dp 8": {"dp": 8},
    "dp 4 zero 2": {"dp": 4, "parallel__zero": 2},
    "dp 2 zero 3": {"dp": 2, "parallel__zero": 3},
    "tp 2": {"tp": 2},
    "tp 4": {"tp": 4},
    "pp 2": {"pp": 2, "accumulation": 4},
    "pp 3": {"pp": 3, "accumulation": 4, "train__recompute": "full"},
    "zero-bubble": {"pp": 2, "accumulation": 4, "schedule": "zero-bubble"},
    "dp 2 tp 2 pp 2": {"dp": 2, "tp": 2, "pp": 2, "accumulation": 4},
}


@pytest.mark.parametrize("name", slow_but(LAYOUTS, "dp 2 tp 2 pp 2", sweep=[*LAYOUTS][::2]))
def test_bits_are_those_of_one_process(pool: WorkerPool, alone: Any, name: str) -> None:
    expected, named, evaluated = alone(own())
    assert named == []
    case = own(**LAYOUTS[name])
    for found, others, of_rank in pool.run(case.case.world_size, run_custom, case):
        assert not differences(expected, found)[:6]
        assert (others, of_rank) == ([], evaluated)


@pytest.mark.parametrize("layout", slow_but(["dp 8", "tp 2", "pp 2"], sweep=["dp 8"]))
def test_bits_with_a_mean_for_a_loss(pool: WorkerPool, alone: Any, layout: str) -> None:
    expected, named, evaluated = alone(own(loss=mean_loss))
    assert named == []
    case = own(loss=mean_loss, **LAYOUTS[layout])
    for found, _, of_rank in pool.run(case.case.world_size, run_custom, case):
        assert not differences(expected, found)[:6]
        assert of_rank == evaluated


@pytest.mark.parametrize("threads", slow_but([2, 4], sweep=[4]))
def test_bits_do_not_depend_on_threads(pool: WorkerPool, alone: Any, threads: int) -> None:
    (found,) = pool.run(1, run_custom, own(), threads)
    assert not differences(alone(own())[0], found[0])[:6]


REPLICATED = Plan(layers=PLAN.layers)
"""No rule replaces embedding and head, which share a weight."""


@pytest.mark.slow
@pytest.mark.parametrize("pp", [2])
def test_a_tied_weight_of_layers_that_nothing_cuts(pool: WorkerPool, pp: int) -> None:
    def case(pp: int) -> CustomCase:
        made = own(pp=pp, accumulation=4)
        return CustomCase(made.make, REPLICATED.build(Mine()), made.batches, made.loss, made.case)

    (expected,) = pool.run(1, run_custom, case(1))
    for found, _, _ in pool.run(pp, run_custom, case(pp)):
        assert not differences(expected[0], found)[:6]


class Odd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class OddBlock(Block):
    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        x, keep = super().forward(x, keep)
        return x + Odd.apply(torch.einsum("bsw->bsw", x)) * 0.1 + F.softplus(x) * 0.1, keep


class OddModel(Mine):
    block = OddBlock


class Running(Block):
    """With a running mean, which micro-batches and replicas take the mean of."""

    seen: Tensor

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        self.seen.mul_(0.9).add_(x.detach().mean((0, 1)) * 0.1)
        return super().forward(x, keep)


class RunningModel(Mine):
    block = Running


def fractions(batch: dict[str, Tensor]) -> dict[str, Tensor | float]:
    return {"tokens": (batch["labels"] != -100).sum() * 0.7, "size": float(len(batch["labels"]))}


@pytest.mark.parametrize("pp", slow_but([1, 2], 1))
def test_what_is_not_known_is_named_once(pool: WorkerPool, pp: int) -> None:
    case = own(OddModel, pp=pp, accumulation=4)
    for _, named, _ in pool.run(pp, run_custom, case):
        assert named == [f"{__name__}.Odd", "torch.functional.einsum", "torch.nn.functional.softplus"]


def test_sums_outside_the_passes_are_named(pool: WorkerPool) -> None:
    ((_, named, _),) = pool.run(1, run_custom, own(RunningModel, CountedLoss(_terms, fractions)))
    assert named == [
        "counts of the loss that are not whole numbers",
        *(f"the buffer blocks.{number}.seen, a mean over samples" for number in range(3)),
    ]


class Shared(Mine):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = self.blocks[0]


def test_a_module_in_two_places_is_refused() -> None:
    model, plan = Shared(), PLAN.build(Shared())
    with pytest.raises(UserError, match=r"'blocks.0' and 'blocks.1' are one module, .*; use two modules"):
        check_grain(model, plan, 8, 1)


def test_sizes_that_do_not_divide_are_refused_with_the_nearest() -> None:
    error = "parallel.tp is 8 but must divide the 4 pieces of 'blocks.*.q', .*its 4 features or heads.*; use 4"
    with pytest.raises(UserError, match=error):
        check_grain(Mine(), PLAN.build(Mine()), 8, 8)


def test_sequence_parallelism_is_refused() -> None:
    given = {"model": {"architecture": "own", "file": "x.py:X"}, "data": {"path": "x"}, "train": {"exact": True}}
    parallel = {"tp": 2, "sequence_parallel": True}
    with pytest.raises(UserError, match=r"parallel.sequence_parallel is true but train.exact is true"):
        resolve(Config.model_validate(given | {"parallel": parallel}), 40)
