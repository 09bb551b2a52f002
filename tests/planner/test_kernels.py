"""Single kernels and collectives: roofline, tiles, topology."""

from dataclasses import replace

import pytest

from tests.planner.ideal import RATE, ideal
from threefold.planner.cost import (
    all_to_all_seconds,
    bandwidth,
    gradient_seconds,
    matrix_seconds,
    memory_seconds,
    ring_seconds,
    send_seconds,
    update_seconds,
)
from threefold.planner.hardware import Link, find_hardware
from threefold.planner.model_size import Group
from threefold.planner.systems import SYSTEMS


def test_a_product_is_its_operations_or_its_bytes() -> None:
    assert matrix_seconds(ideal(), "bf16", 100, 200, 300) == pytest.approx(2 * 100 * 200 * 300 / RATE)
    narrow = ideal(memory_bandwidth=1e9)
    nbytes = 2 * (100 * 300 + 300 * 200 + 100 * 200)
    assert matrix_seconds(narrow, "bf16", 100, 200, 300) == pytest.approx(nbytes / 1e9)
    assert memory_seconds(narrow, 1e6) == pytest.approx(1e-3)
    both = nbytes / 1e9 + 2 * 100 * 200 * 300 / RATE
    assert matrix_seconds(replace(narrow, device="cpu"), "bf16", 100, 200, 300) == pytest.approx(both)


def test_small_and_shallow_products_reach_less_of_the_peak() -> None:
    a100 = find_hardware("a100-80")

    def reached(rows: int, columns: int, depth: int) -> float:
        return (
            2 * rows * columns * depth / matrix_seconds(a100, "bf16", rows, columns, depth) / a100.matrix_rate("bf16")
        )

    assert 0.7 < reached(8192, 8192, 8192) < 0.85
    assert reached(8192, 8192, 8192) > reached(8192, 8192, 512) > reached(8192, 8192, 64)
    assert reached(8192, 8192, 8192) > reached(1024, 1024, 8192) > reached(128, 128, 8192)
    # 108 multiprocessors: one tile more than fills them takes another wave.
    full, more = (matrix_seconds(a100, "bf16", 128 * rows, 128 * 108, 4096) for rows in (8, 9))
    assert more > full


def test_groups_inside_and_between_nodes() -> None:
    hardware = replace(ideal(), inside=Link(100.0, 0.0), between=Link(10.0, 0.0))
    inside, spread, alone = Group(8, 1, 8), Group(16, 1, 8), Group(16, 8, 8)
    assert (inside.nodes, spread.nodes, alone.nodes) == (1, 2, 16)
    assert bandwidth(hardware, inside) == 100
    assert bandwidth(hardware, spread) == 80  # eight adapters of a node together
    assert bandwidth(hardware, alone) == 10
    assert ring_seconds(hardware, inside, "all_reduce", 800) == pytest.approx(2 * 800 * 7 / 8 / 100)
    assert ring_seconds(hardware, alone, "all_gather", 800) == pytest.approx(800 * 15 / 16 / 10)
    assert ring_seconds(hardware, Group(1, 1, 8), "all_reduce", 800) == 0
    assert all_to_all_seconds(hardware, spread, 1600) == pytest.approx(800 / 10)
    assert send_seconds(hardware, alone, 100) == 10
    assert send_seconds(hardware, Group(2, 4, 8), 100) == 1


def test_latency_counts_steps() -> None:
    hardware = replace(ideal(), inside=Link(1e30, 1.0), between=Link(1e30, 10.0))
    assert ring_seconds(hardware, Group(8, 1, 8), "all_gather", 1) == pytest.approx(3)
    assert ring_seconds(hardware, Group(32, 1, 8), "all_reduce", 1) == pytest.approx(2 * (3 + 2 * 10))


def test_sums_of_gradients() -> None:
    hardware = replace(ideal(), inside=Link(1e9, 0.0))
    group, core = Group(8, 1, 8), SYSTEMS["megatron-core"]
    plain = replace(core, overlap_gradients=False, name="plain")
    sums = gradient_seconds(hardware, plain, group, 1e9, 1.0, 2.0, micro_batches=4)
    assert sums == pytest.approx((4 + 2) * 7 / 8)  # fp32 gradients scattered, bf16 weights gathered
    hidden = gradient_seconds(hardware, core, group, 1e9, 100.0, 200.0, micro_batches=4)
    assert hidden < sums / 2
    piece = sums / 12  # exposed; the others slow the computation
    assert hidden == pytest.approx(piece + (sums - piece) / 4)
    sharded = gradient_seconds(hardware, core, group, 1e9, 1.0, 2.0, micro_batches=4, zero=3)
    assert sharded > sums
    assert gradient_seconds(hardware, core, Group(1, 1, 8), 1e9, 1.0, 2.0) == 0


def test_the_update_is_bound_by_memory() -> None:
    hardware = ideal(memory_bandwidth=1e9)
    assert update_seconds(hardware, 1e6) == pytest.approx((4 * 7 + 2 + 12) * 1e6 / 1e9)
    assert update_seconds(hardware, 1e6, states=1) < update_seconds(hardware, 1e6)
