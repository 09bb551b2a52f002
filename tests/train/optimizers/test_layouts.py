"""Every optimizer gives the same weights in every layout; Muon too, whose update needs whole matrices."""

from typing import Any

from tests.support.parity import Case, check
from tests.support.sweep import sweep

ZERO1, ZERO2, ZERO3 = ((("parallel.zero", stage),) for stage in (1, 2, 3))
LLAMA: dict[str, Any] = {"positions": "rope", "head_dim": 4, "model": (("architecture", "llama"),)}


def muon(**changes: Any) -> Case:
    """Six steps in fp64, which `departures` holds to 1e-12."""
    return Case(**{"optimizer": "muon", "dtype": "fp64", "steps": 6, **changes})


@sweep(
    "changes",
    [
        {"tp": 4, "update": (("optimizer.lr_scaling", "original"), ("optimizer.nesterov", False))},
        {"dp": 2, "tp": 2, "pp": 2},
        {"dp": 3, "tp": 2, "settings": ZERO3},
    ],
    slow=(0, 2),
    ids=str,
)
def test_muon(pool, expected, changes: dict[str, Any]) -> None:
    """Rows and columns that no number of ranks divides (36 × 60 over three replicas and two tensor ranks)."""
    check(pool, expected, muon(**changes))


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
