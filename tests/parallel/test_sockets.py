"""Layouts compute what one process computes also where no collective goes through shared memory, as between hosts."""

from dataclasses import replace

from tests.planner.golden_collectives import LAYOUTS, first_difference, read, record
from tests.support.parity import Case
from tests.support.sweep import sweep

AXES = [(2, 1, 1), (3, 1, 1), (1, 2, 1), (1, 3, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2), (2, 1, 3), (2, 2, 2), (1, 8, 1)]
CASES = {
    "dp{}-tp{}-pp{}".format(*layout): Case(
        layers=4, heads=24, ffn=72, dropout=0.2, dtype="fp64", shared_memory=False
    ).with_layout(*layout)
    for layout in AXES
}
CASES |= {
    name: replace(case, dtype="fp64", shared_memory=False)
    for name, case in LAYOUTS.items()
    if "compressed" not in name  # which rounds, and sums over sockets anyway
}


@sweep("name", LAYOUTS, quick=(20,), slow=slice(0, None, 8))
def test_a_step_enters_the_same_collectives(pool, name: str) -> None:
    """The record is of what was asked for, not of how it travels."""
    case = replace(LAYOUTS[name], shared_memory=False)
    assert first_difference(pool.run(case.world_size, record, case), read()[name]) is None
