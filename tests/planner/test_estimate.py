"""Estimates: throughput, utilisation, memory, systems, and one sentence for what cannot be estimated."""

from dataclasses import replace

import pytest

from benchmarks.planner.steps import usual_system
from tests.planner.ideal import GPT, LLAMA, config, ideal
from threefold.errors import UserError
from threefold.planner.block import model_flops_per_token
from threefold.planner.estimate import estimate, layer_elements, step_time
from threefold.planner.hardware import Hardware, Link, find_hardware
from threefold.planner.systems import SYSTEMS


def test_figures_follow_from_the_time() -> None:
    given = config(LLAMA, dp=2, pp=2)
    found = estimate(given, find_hardware("h100"))
    assert found.tokens_per_second == pytest.approx(32 * 256 / found.step_seconds)
    flops = model_flops_per_token(given.model, 256) * 32 * 256
    assert found.mfu == pytest.approx(flops / (found.step_seconds * 4 * 989.4e12))
    low, high = found.error_band
    assert low < found.step_seconds < high
    assert len(found.peak_bytes) == 2
    assert found.fits
    values = found.as_json()
    wanted = {"step_seconds", "tokens_per_second", "mfu", "peak_bytes", "fits", "error_band"}
    assert wanted <= values.keys()
    assert values["step_seconds"] == pytest.approx(sum(values["seconds"].values()))
    assert values["peak_bytes"] == [sum(stage.values()) for stage in values["memory"]]


@pytest.mark.parametrize(("recompute", "hardware"), [("none", 1.0), ("full", 4 / 3)])
def test_model_and_hardware_flops(recompute: str, hardware: float) -> None:
    found = estimate(config({**GPT, "vocab_size": 16}, train={"recompute": recompute}), ideal())
    assert found.hardware_flops == pytest.approx(hardware * found.model_flops, rel=2e-3)


def test_recompute_of_every_second_block_repeats_half() -> None:
    again = [
        found.hardware_flops - found.model_flops
        for found in (estimate(config(train={"recompute": "full", "recompute_every": n}), ideal()) for n in (1, 2, 3))
    ]
    assert again == pytest.approx([again[0], again[0] / 2, again[0] / 2])  # of four blocks, two at every third


def test_a_layout_fits_if_its_largest_stage_does() -> None:
    found = estimate(config(LLAMA, pp=2), find_hardware("h100"))
    low, high = sorted(found.needed_bytes)
    assert low < high
    fits = [replace(found, usable_bytes=usable).fits for usable in (low - 1, low, high - 1, high)]
    assert fits == [False, False, False, True]


def test_selective_recompute_repeats_the_core() -> None:
    found = estimate(config(train={"recompute": "selective"}), ideal())
    core = 4 * 4 * 512 * 256  # four layers, two products of two operations
    assert found.hardware_flops - found.model_flops == pytest.approx(core * 32 * 256)


def test_usual_systems() -> None:
    a100, h100 = find_hardware("a100-80"), find_hardware("h100")
    assert usual_system(config(LLAMA), a100).name == "llama-2023"
    assert usual_system(config(GPT), a100).name == "megatron-2022"
    assert usual_system(config(GPT), h100).name == "nemo"
    assert usual_system(config(LLAMA, dp=2, zero=3), h100).name == "fsdp"


def test_without_a_name_it_is_this_package() -> None:
    h100 = find_hardware("h100")
    assert estimate(config(GPT), h100).system.name == "own"
    assert estimate(config(GPT, train={"compile": True}), h100).system.name == "own-compiled"
    assert estimate(config(GPT), replace(ideal(), device="cpu")).system.name == "own-cpu"


def test_ranks_share_a_cpu() -> None:
    host = replace(ideal(), device="cpu", gpus_per_node=8)
    one, four = host.shared_by(1), host.shared_by(4)
    assert one.matrix_rate("bf16") == 8 * host.matrix_rate("bf16")
    assert (four.gpus_per_node, four.memory_bytes) == (4, 2 * host.memory_bytes)
    assert replace(host, device="cuda").shared_by(4).matrix_rate("bf16") == host.matrix_rate("bf16")
    whole, split = estimate(config(GPT), host), estimate(config(GPT, dp=4), host)
    assert split.step_seconds == pytest.approx(whole.step_seconds, rel=0.05)


def test_ranks_that_take_turns_on_cores_take_longer_for_all_that_one_does_alone() -> None:
    link = Link(1e9, 1e-5)
    host = replace(ideal(), device="cpu", gpus_per_node=8, cores=2, inside=link, between=link)
    host = replace(host, achievable=replace(host.achievable, kernel=8e-6, block=4e-3))
    one, two, four = (host.shared_by(ranks) for ranks in (1, 2, 4))
    assert [each.achievable.block for each in (one, two, four)] == pytest.approx([1e-3, 1e-3, 2e-3])
    assert [each.achievable.kernel for each in (one, two, four)] == pytest.approx([2e-6, 2e-6, 4e-6])
    assert (two.inside.bandwidth, four.between.latency) == pytest.approx((4e9, 5e-6))


def test_the_host_lengthens_what_its_kernels_do_not_hide() -> None:
    cpu = replace(ideal(), device="cpu")
    slow = {
        device: [
            replace(cpu, name=f"{device} {block}", device=device, achievable=replace(cpu.achievable, block=block))
            for block in (0.0, 1e-4, 10.0)
        ]
        for device in ("cpu", "cuda")
    }
    times = {
        device: [step_time(config(GPT), each, SYSTEMS["own"]).compute for each in entries]
        for device, entries in slow.items()
    }
    blocks = GPT["num_layers"] * 32  # and micro-batches
    assert [each.host for each in times["cpu"]] == pytest.approx([0.0, 1e-4 * blocks, 10.0 * blocks])
    hidden, short, long = times["cuda"]
    assert hidden.host == short.host == 0.0, "kernels take longer"
    assert long.host == pytest.approx(10.0 * blocks - (long.total - long.host), rel=0.2), "but for embedding and head"


def test_what_sharding_takes_on_a_cpu() -> None:
    """Each block's hooks and waits in each micro-batch with `zero` 3, else once a step; and copies of all weights."""
    link = Link(1e30, 1e-3)
    host = replace(ideal(), device="cpu", gpus_per_node=4, cores=4, inside=link, between=link)
    host = replace(host, achievable=replace(host.achievable, sharded_block=5e-3))
    layers, micro_batches = GPT["num_layers"], 8

    def waits(hardware: Hardware) -> list[float]:
        return [step_time(config(GPT, dp=4, zero=zero), hardware, SYSTEMS["own-cpu"]).gradients for zero in (1, 2, 3)]

    assert waits(host) == pytest.approx([5e-3 * layers, 5e-3 * layers, 5e-3 * layers * micro_batches])
    slow = replace(host, name="slow", memory_bandwidth=1e9)
    copies = [found - fast for found, fast in zip(waits(slow), waits(host), strict=True)]
    elements = sum(layer_elements(config(GPT)))
    gathered, summed = 2 * 2 * elements / 1e9, 2 * 4 * elements / 1e9  # bf16 weights, fp32 gradients
    expected = [gathered + summed, gathered + micro_batches * summed, micro_batches * (2 * gathered + summed)]
    assert copies == pytest.approx(expected)


def test_an_entry_with_too_little_memory_is_named() -> None:
    with pytest.raises(UserError, match=r"^The hardware ideal has memory_bytes 1000000000 but a GPU needs more"):
        estimate(config(LLAMA), ideal(memory_bytes=10**9))
