"""What a step takes on a CPU beside its products: passes over memory, and Python between the ranks."""

from dataclasses import replace

import pytest

from tests.planner.ideal import GPT, config, ideal
from threefold.planner.block import block_shapes, describe_model
from threefold.planner.estimate import step_time
from threefold.planner.hardware import Hardware, Link
from threefold.planner.rank_block import rank_block
from threefold.planner.systems import SYSTEMS

BLOCKS = GPT["num_layers"] * 32
"""And micro-batches."""
SLOW = replace(ideal(), name="slow", device="cpu", gpus_per_node=2, cores=2, memory_bandwidth=1e6)


def test_what_layers_between_ranks_take_on_a_cpu() -> None:
    """Of tensor and context parallelism: Python, with the latency of collectives that a block waits for."""
    link = Link(1e30, 1e-3)
    host = replace(ideal(), device="cpu", gpus_per_node=2, cores=2, inside=link, between=link)
    known = replace(host, name="known", achievable=replace(host.achievable, tensor_block=5e-3, context_block=7e-3))

    rounds = 2  # of a collective

    def spent(hardware: Hardware, **layout: int) -> tuple[float, float, float]:
        found = step_time(config(GPT, **layout), hardware, SYSTEMS["own-cpu"]).compute
        return found.host, found.tensor, found.context

    of_head = 32 * 4 * rounds * 1e-3
    assert spent(known, tp=2)[:2] == pytest.approx((5e-3 * BLOCKS, of_head))
    assert spent(known, cp=2)[::2] == pytest.approx((7e-3 * BLOCKS, 0.0), abs=1e-6)
    assert spent(known, dp=2) == (0.0, 0.0, 0.0)
    assert spent(host, tp=2)[:2] == pytest.approx((0.0, 4 * rounds * 1e-3 * BLOCKS + of_head))
    assert spent(host, cp=2)[::2] == pytest.approx((0.0, 3 * rounds * 1e-3 * BLOCKS)), "two of them backward"


def test_a_cpu_adds_biases_in_passes_of_their_own() -> None:
    memory = [
        step_time(config(GPT), replace(SLOW, name=device, device=device), SYSTEMS["own-cpu"]).compute.memory
        for device in ("cpu", "cuda")
    ]
    shape = rank_block(config(GPT), block_shapes(describe_model(config(GPT).model, 256))[0])
    outputs = (3 + 1 + 1) * shape.hidden + shape.ffn  # queries, keys and values; what both halves put out; inside
    passes = 3 * shape.tokens * outputs * shape.itemsize  # read and written forward, read backward
    assert memory[0] - memory[1] == pytest.approx(passes * BLOCKS / 1e6)


def test_gathered_keys_are_put_in_order() -> None:
    """Where kernels are not fused, and nothing is passed around instead."""
    gathered, passed, fused = (
        step_time(config(GPT, cp=2, **settings), SLOW, SYSTEMS[system]).compute.memory
        for settings, system in (
            ({}, "own-cpu"),
            ({"cp_method": "ring"}, "own-cpu"),
            ({}, "megatron-core"),
        )
    )
    keys, queries = 2 * 256 * 512, 128 * 512
    copied = (2 / 2 + 2 + 12) * keys + (2 + 4) * queries
    assert gathered - passed == pytest.approx(copied * 2 * BLOCKS / 1e6)
    assert fused < passed
