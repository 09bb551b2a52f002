"""The first step of a custom loop is compared with one process on request, as a run is before its first step."""

import pytest
import torch
from torch import Tensor

import threefold as t3
from tests.support.own_state_models import WORDS, Cut, Model, loss
from threefold.errors import UserError

LAYOUTS = {"dp": {"dp": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}, "micro": {}}


def batch_of(mesh: t3.Mesh) -> tuple[Tensor, ...]:
    tokens = (torch.arange(8).unsqueeze(1) * 3 + torch.arange(17) * 5) % WORDS
    return tuple(each.chunk(mesh.dp.size)[mesh.dp.index] for each in (tokens[:, :-1], tokens[:, 1:]))


def first_step(kind: str, layout: str, verify: bool = True) -> str:
    """The sentence of the first step, or nothing."""
    mesh, made = t3.init_mesh(**LAYOUTS[layout]), Cut if kind == "split statistics" else Model
    micro_batches = 2 if layout in ("pp", "micro") else 1
    arguments = {"kind": kind}
    model = t3.parallelize(made, mesh=mesh, arguments=arguments, micro_batches=micro_batches, verify=verify)
    state = model.state_dict()
    try:
        model.train_batch(batch_of(mesh), loss)
    except UserError as error:
        return str(error)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items() if "part" not in name)
    return ""


@pytest.mark.parametrize(
    ("kind", "layout", "sentence"),
    [
        ("plain", "dp", ""),
        ("tracked", "tp", ""),
        ("tracked", "pp", ""),
        (
            "batch norm by hand",
            "dp",
            "Model does not compute in dp 2 · tp 1 · pp 1 what it computes in one process: the first departure is in "
            "the gradient of ",
        ),
        ("batch norm by hand", "micro", "Model does not compute in dp 1 · tp 1 · pp 1 what it computes in one process"),
        ("split statistics", "tp", "Cut does not compute in dp 1 · tp 2 · pp 1 what it computes in one process"),
        ("F.dropout", "pp", "'blocks.0.part' draws from torch, whose numbers depend on the layout, its micro-batches"),
        ("counter", "dp", "The attribute 'calls' of 'blocks.0.part' is not a buffer, forward changes it and the loss"),
    ],
)
def test_a_first_step_that_departs_is_one_sentence_on_every_rank(pool, kind: str, layout: str, sentence: str) -> None:
    ranks = 1 if layout == "micro" else 2
    found = pool.run(ranks, first_step, kind, layout)
    assert len(set(found)) == 1
    assert found[0].startswith(sentence)
    assert bool(found[0]) == bool(sentence)
    if sentence:
        assert found[0].endswith("or give parallelize verify=False to train all the same.")
        assert pool.run(ranks, first_step, kind, layout, False) == [""] * ranks
