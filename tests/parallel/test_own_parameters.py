"""Unusual parameters and buffers of a user's model: gradients and weights of each are those of plain PyTorch in one
process, with an optimizer whose kernel goes by the order in memory."""

from typing import Any

import torch

from tests.support.odd_parameters import STEPS, Recurrent, Strided, Tables, departures, in_layout, plain, prepared
from tests.support.sweep import sweep
from threefold import Column, Row, Sharded

LAYOUTS = [
    ({}, {}),
    ({}, {"micro_batches": 2}),
    ({"dp": 2}, {}),
    ({"tp": 2}, {}),
    ({"pp": 2}, {"micro_batches": 2, "schedule": "zero-bubble"}),
    ({"dp": 2}, {"zero": 1}),
    ({"dp": 2, "tp": 2}, {"zero": 3, "micro_batches": 2}),
]


@sweep(("sizes", "options"), LAYOUTS, quick=(0, 4, 6))
def test_weights_in_any_order_in_memory(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    ranks = sizes.get("dp", 1) * sizes.get("tp", 1) * sizes.get("pp", 1)
    assert departures(plain(Strided), pool.run(ranks, in_layout, Strided, sizes, options, {})) == []


@sweep(("sizes", "options"), LAYOUTS, quick=(6,))
def test_recurrent_weights(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    ranks = sizes.get("dp", 1) * sizes.get("tp", 1) * sizes.get("pp", 1)
    assert departures(plain(Recurrent), pool.run(ranks, in_layout, Recurrent, sizes, options, {})) == []


@sweep(("sizes", "options"), [({}, {}), ({"dp": 2}, {}), ({"dp": 2}, {"zero": 3})], quick=(2,))
def test_prepared_weights_in_any_order_in_memory(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    after = {name: each for name, each in plain(Strided)[STEPS - 1].items() if name.startswith("weight ")}
    for found in pool.run(sizes.get("dp", 1), prepared, Strided, sizes, options):
        assert {f"weight {name}" for name in found} == set(after)
        for name, weight in found.items():
            torch.testing.assert_close(weight, after[f"weight {name}"], rtol=1e-11, atol=1e-12)


HEADS = {
    "heads": Column(heads=4),
    "out": Row(heads=4),
    "slopes": Sharded(0, heads=4),
    "shifts": Sharded(1, heads=4),
    "on": Sharded(0),
}


@sweep(
    ("sizes", "options"),
    [({"tp": 2}, {}), ({"tp": 4}, {}), ({"dp": 2, "tp": 2}, {"zero": 2}), ({"tp": 2, "pp": 2}, {"micro_batches": 2})],
    quick=(0, 3),
)
def test_buffers_of_a_value_for_each_head_are_cut(pool, sizes: dict[str, int], options: dict[str, Any]) -> None:
    found = pool.run(sizes.get("dp", 1) * sizes["tp"] * sizes.get("pp", 1), in_layout, Tables, sizes, options, HEADS)
    assert departures(plain(Tables), found) == []
