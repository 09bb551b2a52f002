"""The first step of a custom loop is compared with one process, as a run is before its first step."""

import contextlib
import io
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import threefold as t3
from tests.support.custom_state_models import WORDS, Cut, Model, Whole, loss
from tests.support.sentences import sentence

LAYOUTS = {"dp": {"dp": 2}, "tp": {"tp": 2}, "pp": {"pp": 2}, "micro": {}}


def batch_of(mesh: t3.Mesh) -> tuple[Tensor, ...]:
    tokens = (torch.arange(8).unsqueeze(1) * 3 + torch.arange(17) * 5) % WORDS
    return tuple(each.chunk(mesh.dp.size)[mesh.dp.index] for each in (tokens[:, :-1], tokens[:, 1:]))


def first_step(kind: str, layout: str, verify: bool = True, refuses: bool = False) -> str:
    """The sentence of the first step, and of the same step again; or nothing."""
    mesh, made = t3.init_mesh(**LAYOUTS[layout]), {"split statistics": Cut, "own forward": Whole}.get(kind, Model)
    micro_batches = 2 if layout in ("pp", "micro") else 1
    arguments = {"kind": kind}
    model = t3.parallelize(made, mesh=mesh, arguments=arguments, micro_batches=micro_batches, verify=verify)
    state = model.state_dict()
    found = [sentence(lambda: model.train_batch(batch_of(mesh), loss)) for _ in range(2 if refuses else 1)]
    assert len(set(found)) == 1
    if found[0]:
        return found[0]
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
        ("batch norm by hand", "micro", "Model does not compute in 2 micro-batches what it computes in one process"),
        ("large batches", "dp", "Model does not compute in dp 2 · tp 1 · pp 1 what it computes in one process"),
        ("own forward", "pp", "Whole: its forward computes a loss of "),
        ("split statistics", "tp", "Cut does not compute in dp 1 · tp 2 · pp 1 what it computes in one process"),
        ("F.dropout", "pp", "'blocks.0.part' draws from torch, whose numbers depend on the layout, its micro-batches"),
        ("counter", "dp", "The attribute 'calls' of 'blocks.0.part' is not a buffer, forward changes it and the loss"),
    ],
)
def test_a_first_step_that_departs_is_one_sentence_on_every_rank(pool, kind: str, layout: str, sentence: str) -> None:
    ranks = 1 if layout == "micro" else 2
    found = pool.run(ranks, first_step, kind, layout, True, bool(sentence))
    assert len(set(found)) == 1
    assert found[0].startswith(sentence)
    assert bool(found[0]) == bool(sentence)
    if sentence:
        assert found[0].endswith("or give parallelize verify=False to train all the same.")
        assert pool.run(ranks, first_step, kind, layout, False) == [""] * ranks


def printed(call: Callable[[], object]) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        call()
    return said.getvalue()


def trained(sizes: dict[str, int], options: dict[str, Any]) -> tuple[list[Any], list[Any]]:
    """All bits of a loop, its generators, and the collectives after the first step."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    mesh = t3.init_mesh(**sizes)
    model = t3.parallelize(Model, mesh=mesh, arguments={"kind": "tracked"}, micro_batches=2, **options)
    optimizer, found = t3.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model), []
    found.append(model.train_batch(batch_of(mesh), loss))
    with mesh.recorder.recording() as events:
        for _ in range(2):
            optimizer.step()
            found += [model.train_batch(batch_of(mesh), loss), torch.rand(2), random.random(), np.random.rand()]
        optimizer.step()
    found += [(name, each.tolist()) for name, each in model.state_dict().items()]
    return [str(each) for each in found], events


@pytest.mark.parametrize("sizes", [{"dp": 2}, {"tp": 2}, {"pp": 2}])
def test_no_bit_or_later_collective_of_a_loop_depends_on_the_check(pool, sizes: dict[str, int]) -> None:
    checked, unchecked = (pool.run(2, trained, sizes, options) for options in ({}, {"verify": False}))
    assert checked == unchecked
    assert checked[0][1]


def with_barrier(output: Tensor, batch: Any) -> Tensor:
    dist.barrier()
    return loss(output, batch)


def summed(mesh: t3.Mesh) -> Any:
    def of_all(output: Tensor, batch: Any) -> Tensor:
        dist.all_reduce(torch.ones(3), group=mesh.dp.group)
        return loss(output, batch)

    return of_all


CASES = {
    "plain": "Verified dp 2 · tp 1 · pp 1 against one process: loss and gradients of 8 samples are equal (",
    "off": "",
    "barrier": "Not verified against one process: one process does not run it (RuntimeError: it calls a collective, ",
    "shared memory": "Not verified against one process: one process does not run it (RuntimeError: it calls a coll",
    "bf16": "Not verified against one process: the dtype is torch.bfloat16, whose rounding hides a departure.",
    "compressed": "Not verified against one process: gradients are summed in bf16, whose rounding hides a departure.",
    "large": "Not verified against one process: the model has 1,458 parameters, more than 1.",
    "lengths": "Not verified against one process: one process does not run it (RuntimeError: Sizes of tensors must ",
    "noted": "The attribute 'calls' of 'blocks.0.part' is a number that forward changes and no checkpoint has: ",
}


def said(case: str) -> tuple[str, str]:
    """The lines of the first step, and of the second."""
    mesh = t3.init_mesh(dp=2)
    options = {"bf16": {"precision": "bf16"}, "compressed": {"gradient_compression": "bf16"}, "off": {"verify": False}}
    arguments = {"kind": "noted" if case == "noted" else "plain"}
    model = t3.parallelize(Model, mesh=mesh, arguments=arguments, **options.get(case, {}))
    optimizer = t3.distributed_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    batch, of_loss = batch_of(mesh), {"barrier": with_barrier, "shared memory": summed(mesh)}.get(case, loss)
    if case == "lengths":
        batch = tuple(each[:, : 9 + mesh.dp.index] for each in batch)

    def step() -> None:
        with pytest.MonkeyPatch.context() as patch:
            if case == "large":
                patch.setattr("threefold.verify.run_verification.MOST_PARAMETERS", 1)
            model.train_batch(batch, of_loss)
        optimizer.step()

    return printed(step), printed(step)


@pytest.mark.parametrize("case", CASES)
def test_one_line_on_the_first_rank_says_what_was_found(pool, case: str) -> None:
    (first, later), *others = pool.run(2, said, case)
    assert first.startswith(CASES[case])
    assert bool(first) == bool(CASES[case])
    assert later == ""
    assert others == [("", "")]
