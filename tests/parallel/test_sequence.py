"""Sequence parallelism inside the tp group computes what one process computes, with a tp-th of the activations."""

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.support import shared
from tests.support.parity import Case, check, in_layout, make_engine, shard_of
from tests.support.sweep import sweep
from threefold.comm.axis import Event
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.parallel.context import sum_over_shares_
from threefold.parallel.leaf import local
from threefold.parallel.parameter import whole
from threefold.parallel.tensor import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from threefold.train.step import Engine

LAYOUTS = [
    {"tp": 2},
    {"tp": 3},
    {"tp": 4},
    {"tp": 2, "dp": 2},
    {"tp": 2, "pp": 2},
    {"tp": 3, "pp": 2},
    {"tp": 2, "dp": 2, "pp": 2},
]


@sweep("layout", LAYOUTS, ids=str, quick=(2, 5))
def test_layout(pool, expected, layout: dict) -> None:
    """With dropout, accumulation, uneven masks and tied embeddings."""
    check(pool, expected, shared(dtype="fp64", dropout=0.2, **layout))


@pytest.mark.slow
def test_ranks_agree_bit_for_bit(pool) -> None:
    """What all tensor ranks hold whole, norms and biases among it, is the same bits on them after twenty steps."""
    case = shared(steps=20, dropout=0.1, tp=3, dp=2, batch=12)
    traces = pool.run(6, in_layout, case)
    for trace in traces[1:]:
        assert trace.losses == traces[0].losses
        assert trace.norms == traces[0].norms
        assert all(trace.final[name].equal(weight) for name, weight in traces[0].final.items())


def activations_between_layers(case: Case) -> tuple[set[tuple[int, ...]], set[str], list[Event]]:
    engine = make_engine(case)
    seen: set[tuple[int, ...]] = set()
    for name, module in engine.stages[0].named_modules():
        if name.endswith(("norm", "dropout.attn", "dropout.mlp", "attn.proj", "mlp.down", "embed.tokens")):
            module.register_forward_hook(lambda module, args, out: seen.add(tuple(out.shape)))
    with engine.mesh.recorder.recording() as events:
        engine.compute_gradients(shard_of(case, 0, 0), 0)
    return seen, {event.operation for event in events if event.axis == "tp"}, events


def test_activations_between_the_layers_are_shares(pool) -> None:
    case = shared(tp=3, batch=4)
    seen, _, events = pool.run(3, activations_between_layers, case)[0]
    assert seen == {(2, 4, 36)}
    # Only the loss and the gradients of what is held whole are still summed: no activation is.
    activation = 2 * 12 * 36 * 4
    assert {event.operation for event in events if event.nbytes == activation} == {"all_gather", "reduce_scatter"}


def kept_by_a_block(case: Case) -> int:
    """Bytes that a block keeps between its passes, beside the weights and what attention needs inside."""
    engine = make_engine(case)
    block = engine.stages[0].get_submodule("blocks.0")
    weights = {local(p).untyped_storage().data_ptr() for p in block.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage._cdata] = storage
        return tensor

    attention = block.get_submodule("attn")
    attention.core.forward = lambda q, k, v, samples: q.flatten(2)  # type: ignore[assignment]
    x = torch.randn(4, case.sequence // (case.tp if case.settings else 1), 36, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = block(x)
    total = sum(storage.nbytes() for storage in kept.values())
    out.sum().backward()
    return total


def test_what_a_block_keeps_for_the_backward_pass(pool) -> None:
    """Korthikanti et al., table 2: what tensor parallelism alone leaves whole on every rank is divided too."""
    tokens, tp = 4 * 12, 3
    whole = 2 * (2 * 36 + 2)  # per norm and token: input, output, mean and deviation
    features = 36 + 2 * 60  # the input of the projection, and around the GELU
    usual = pool.run(tp, kept_by_a_block, shared(tp=tp, settings=()))[0]
    ours = pool.run(tp, kept_by_a_block, shared(tp=tp))[0]
    assert usual == tokens * (whole + features // tp) * 4
    assert ours == tokens * (whole + features) // tp * 4


def chain() -> None:
    """The public layers with a sequence dim, against plain ones: dim 0, a bias, and an id table of 7 rows."""
    axis = Mesh(Layout(tp=torch.distributed.get_world_size())).tp
    torch.manual_seed(3)
    table, up, down = nn.Embedding(7, 5).double(), nn.Linear(5, 11).double(), nn.Linear(11, 5).double()
    norm, own_norm = nn.LayerNorm(5).double(), nn.LayerNorm(5).double()
    ids = torch.randint(0, 7, (6, 2))
    grad = torch.randn(6, 2, 5, dtype=torch.float64)
    down(up(norm(table(ids)))).backward(grad)

    split_table = VocabParallelEmbedding.from_embedding(table, axis, sequence_dim=0)
    split_up = ColumnParallelLinear.from_linear(up, axis, gather_output=False, sequence_dim=0)
    copy = nn.Linear(11, 5).double()
    copy.load_state_dict(down.state_dict())
    split_down = RowParallelLinear.from_linear(copy, axis, input_is_parallel=True, sequence_dim=0)
    out = split_down(split_up(own_norm(split_table(ids))))
    out.backward(grad.chunk(axis.size)[axis.index])
    torch.testing.assert_close(out, down(up(norm(table(ids)))).chunk(axis.size)[axis.index])
    assert split_down.bias is not None
    sum_over_shares_([_grad(split_down.bias), _grad(own_norm.weight), _grad(own_norm.bias)], axis)
    pairs = [
        (split_table.weight, table.weight),
        (split_up.weight, up.weight),
        (split_up.bias, up.bias),
        (split_down.weight, down.weight),
        (split_down.bias, down.bias),
        (own_norm.weight, norm.weight),
        (own_norm.bias, norm.bias),
    ]
    for got, expected in pairs:
        torch.testing.assert_close(whole(_grad(got)), expected.grad, rtol=1e-12, atol=1e-12)


def _grad(parameter: Tensor) -> Tensor:
    found = parameter.grad
    assert found is not None
    return found


@pytest.mark.parametrize("ranks", [2, 3])
def test_layers_of_their_own(pool, ranks: int) -> None:
    pool.run(ranks, chain)


@pytest.mark.parametrize(
    ("case", "sentence"),
    [
        (shared(tp=1), "parallel.sequence_parallel is true but .* parallel.tp is 1; use false or tp 2."),
        (shared(tp=4, sequence=11), "parallel.sequence_parallel is true but .* use data.sequence_length 12 instead of"),
    ],
    ids=["tp 1", "length"],
)
def test_what_cannot_be_shared_is_refused(case: Case, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        _ = case.config


def evaluated(case: Case) -> tuple[float, int]:
    engine: Engine = make_engine(case)
    return engine.evaluate(shard_of(case, 0, engine.mesh.dp.index))


def test_evaluation(pool) -> None:
    alone = pool.run(1, evaluated, shared(dtype="fp64", settings=()))[0]
    for loss, tokens in pool.run(4, evaluated, shared(dtype="fp64", tp=2, pp=2)):
        assert loss == pytest.approx(alone[0], rel=1e-12)
        assert tokens == alone[1]
