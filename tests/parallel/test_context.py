"""A sequence spread over ranks trains as a whole one does, with RoPE, learned positions and packed documents."""

from itertools import pairwise

import pytest
import torch

from tests.parallel.support import case
from tests.support.parity import Case, check, make_engine, shard_of
from tests.support.sweep import sweep
from threefold.comm.axis import Event
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.models.layers.decoder import SampleInfo
from threefold.parallel.context import SequenceCut
from threefold.parallel.parameter import draw_


@sweep("cp", [2, 3, 4], quick=(0, 1))
@sweep("positions", ["learned", "rope"], quick=(1,), slow=())
@sweep("documents", [False, True], ids=["packed", "separate"], quick=(1,), slow=())
def test_cp(pool, expected, cp: int, positions: str, documents: bool) -> None:
    check(pool, expected, case(cp=cp, positions=positions, documents=documents))


@sweep(
    "changes",
    [
        {"dropout": 0.0},
        {"dropout": 0.0, "documents": True, "positions": "rope"},
        {"dropout": 0.0, "dtype": "fp32", "positions": "rope"},
        {"dropout": 0.0, "dtype": "fp32", "documents": True, "tp": 2},
        {"counted": (6, 18)},  # rank 0 of cp 2 has no label that counts, and the others have a chunk without
        {"counted": (0, 3), "pp": 2},
        {"accumulation": 4, "tie": False, "positions": "rope"},
        {"optimizer": "sgd", "clip": 0.0, "positions": "rope"},
        {"sequence": 4},
        {"schedule": "zero-bubble", "pp": 2, "accumulation": 3, "layers": 4, "positions": "rope"},
        {"schedule": "dualpipev", "pp": 2, "accumulation": 4, "layers": 4, "documents": True},
    ],
    ids=str,
    quick=(1, 4, 9),
    slow=slice(0, None, 2),
)
@pytest.mark.parametrize("cp", [2])
def test_variant(pool, expected, cp: int, changes: dict) -> None:
    check(pool, expected, case(cp=cp, **changes))


RING = (("parallel.cp_method", "ring"),)


@sweep(
    "changes",
    [
        {"cp": 2},
        {"cp": 3, "positions": "rope", "documents": True},
        {"cp": 4, "dropout": 0.0, "documents": True},
        {"cp": 2, "dropout": 0.0, "dtype": "fp32", "positions": "rope"},
        {"cp": 2, "tp": 2, "positions": "rope"},
        {"cp": 2, "pp": 2, "schedule": "zero-bubble", "layers": 4, "documents": True},
        {"cp": 2, "tp": 3, "settings": (*RING, ("parallel.sequence_parallel", True))},
        {"cp": 3, "counted": (4, 8), "settings": (*RING, ("train.recompute", "full"))},
    ],
    ids=str,
    quick=(1, 6),
    slow=slice(0, None, 2),
)
def test_ring(pool, expected, changes: dict) -> None:
    """Keys and values that come one rank's after the other."""
    check(pool, expected, case(**{"settings": RING, **changes}))


def bytes_of_a_step(spread: Case) -> list[Event]:
    engine = make_engine(spread)
    with engine.mesh.recorder.recording() as events:
        engine.compute_gradients(shard_of(spread, 0, 0), 0)
    return [event for event in events if event.operation in ("all_gather", "reduce_scatter")]


def test_keys_and_values_are_what_travels(pool) -> None:
    """2 · b · S · H / tp · itemsize for each layer and micro-batch, once forward and once backward."""
    spread = case(cp=2, tp=2, dtype="fp32", dropout=0.0)
    nbytes = 2 * (spread.batch // spread.accumulation) * spread.sequence * spread.heads * spread.head_dim // 2 * 4
    events = pool.run(4, bytes_of_a_step, spread)[0]
    times = spread.layers * spread.accumulation
    assert sorted(event.operation for event in events) == ["all_gather"] * times + ["reduce_scatter"] * times
    assert {(event.axis, event.nbytes) for event in events} == {("cp", nbytes)}


def test_every_position_is_held_once_and_the_work_is_equal() -> None:
    for cp in (2, 3, 5):
        held = [SequenceCut(cp, index).indices(6, torch.device("cpu")) for index in range(cp)]
        assert torch.cat(held).sort().values.tolist() == list(range(6 * cp))
        assert len({int((places + 1).sum()) for places in held}) == 1


def model_of(settings: Case) -> GPT:
    config = settings.config
    model = GPT(config.model).double()
    plan = gpt_plan(config.model, settings.sequence)
    for name, parameter in model.named_parameters():
        draw_(parameter, parameter, name, plan, seed=1)
    return model


def test_separate_documents_are_computed_as_if_each_were_alone() -> None:
    """With RoPE only distances count, so a document in the middle of a sample gives what it gives by itself."""
    model = model_of(case(positions="rope"))
    tokens = torch.randint(0, 67, (3, 24), generator=torch.Generator().manual_seed(3))
    bounds = [[0, 24], [0, 1, 9, 10, 24], [0, 13, 23, 24]]
    documents = torch.stack([torch.bucketize(torch.arange(24), torch.tensor(row[1:]), right=True) for row in bounds])
    logits = model(tokens, samples=SampleInfo(documents=documents))
    for row, places in enumerate(bounds):
        for first, end in pairwise(places):
            torch.testing.assert_close(logits[row, first:end], model(tokens[row : row + 1, first:end])[0])
    assert not torch.isclose(logits[1:], model(tokens)[1:]).all()
