"""Every optimizer gives the same weights in every layout; Muon too, whose update needs whole matrices."""

from typing import Any

import pytest

from tests.support.parity import Case, check, in_layout
from tests.support.sweep import sweep

ZERO1, ZERO2, ZERO3 = ((("parallel.zero", stage),) for stage in (1, 2, 3))
EXPERTS = (("num_experts", 4), ("experts_per_token", 2), ("expert_ffn_hidden_size", 12), ("router_aux_loss", 0.01))
LLAMA: dict[str, Any] = {"positions": "rope", "head_dim": 4, "model": (("architecture", "llama"),)}


def muon(**changes: Any) -> Case:
    """Six steps in fp64, which `departures` holds to 1e-12."""
    return Case(**{"optimizer": "muon", "dtype": "fp64", "steps": 6, **changes})


@sweep(
    "changes",
    [
        {"dp": 2},
        {"tp": 3},
        {"tp": 4, "update": (("optimizer.lr_scaling", "original"), ("optimizer.nesterov", False))},
        {"pp": 3},
        {"dp": 2, "tp": 2, "pp": 2},
        {"dp": 3, "settings": ZERO1},
        {"dp": 2, "settings": ZERO2, "tie": False},
        {"dp": 4, "settings": ZERO3},
        {"dp": 4, "settings": (*ZERO3, ("parallel.zero_shards", 2))},
        {"dp": 3, "tp": 2, "settings": ZERO3},
        {"dp": 2, "tp": 2, "pp": 2, "settings": ZERO1},
        {"cp": 2, "dp": 2, "sequence": 16, "settings": ZERO3},
        {"dp": 2, "tp": 2, "sequence": 12, "settings": (("parallel.sequence_parallel", True),)},
    ],
    slow=(4, 9, 12),
    ids=str,
)
def test_muon(pool, expected, changes: dict[str, Any]) -> None:
    """Rows and columns that no number of ranks divides (36 × 60 over three replicas and two tensor ranks)."""
    check(pool, expected, muon(**changes))


@sweep(
    "changes",
    [
        {"tp": 2},
        {"dp": 2, "settings": (("parallel.ep", 2),)},
        {"dp": 2, "tp": 2, "settings": (("parallel.ep", 2),)},
        {"dp": 4, "settings": (("parallel.ep", 2), *ZERO3)},
        {"dp": 3, "tp": 2, "settings": ZERO1},
        {"dp": 4, "tp": 2, "settings": (("parallel.ep", 2), *ZERO1)},
        {"dp": 2, "pp": 2, "settings": (("parallel.ep", 2),)},
        {"dp": 2, "cp": 2, "sequence": 12, "settings": (("parallel.ep", 2), *ZERO3)},
    ],
    slow=(0, 5, 6),
    ids=str,
)
def test_muon_of_a_mixture(pool, expected, changes: dict[str, Any]) -> None:
    """Each expert's matrices are orthogonalised for themselves, wherever the expert and its parts are."""
    check(pool, expected, muon(**{**LLAMA, "model": (*LLAMA["model"], *EXPERTS), **changes}))


@pytest.mark.slow
def test_muon_in_single_precision(pool, expected) -> None:
    case = muon(dtype="fp32", steps=20).with_layout(2, 2, 2)
    traces = pool.run(8, in_layout, case)
    assert traces[0].losses == pytest.approx(expected(case).losses, rel=1e-5)
    for name in {name for trace in traces for name in trace.final}:
        copies = [trace.final[name] for trace in traces if name in trace.final]
        assert all(copy.equal(copies[0]) for copy in copies), "every rank has the same bits"


@pytest.mark.slow
def test_adam_adds_its_decay_to_the_gradient(pool, expected) -> None:
    """`torch.optim.Adam(weight_decay=…)` in one process: a decay large enough that AdamW's would be far off."""
    update = (("optimizer.weight_decay", 0.7), ("optimizer.betas", (0.9, 0.999)), ("optimizer.lr", 1e-3))
    case = Case(optimizer="adam", dtype="fp64", steps=5, update=update, dp=2, tp=2, pp=2, settings=ZERO1)
    check(pool, expected, case)


@sweep(
    "changes",
    [{"dp": 2, "tp": 2, "pp": 2}, {"dp": 3, "settings": ZERO1}, {"dp": 2, "tp": 2, "settings": ZERO3}],
    quick=(2,),
    slow=(0,),
    ids=str,
)
@sweep(
    ("optimizer", "update"),
    [
        ("adam", ()),
        ("sgd", (("optimizer.momentum", 0.9),)),
        ("sgd", (("optimizer.momentum", 0.8), ("optimizer.nesterov", True))),
        ("lion", ()),
    ],
    quick=(1,),
    ids=str,
)
def test_elementwise(pool, expected, optimizer: str, update: tuple, changes: dict[str, Any]) -> None:
    """A llama, as it has no biases: Lion steps by the sign of a gradient, and a key bias has one of rounding alone."""
    lr = (("optimizer.lr", 0.1),) if optimizer == "sgd" else (("optimizer.lr", 1e-3),)
    check(pool, expected, Case(optimizer=optimizer, dtype="fp64", steps=5, update=(*update, *lr), **LLAMA, **changes))
