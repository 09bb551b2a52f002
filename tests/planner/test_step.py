"""The time of a step: operations counted from the model's own table, and each cause where it belongs."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import pytest

from tests.planner.ideal import GPT, LLAMA, RATE, config, ideal
from tests.planner.step_traffic import step_traffic, wire_bytes
from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.config.schedules import SCHEDULES
from threefold.models.family import model_plan
from threefold.planner.cost import (
    all_to_all_seconds,
    axis_group,
    bandwidth,
    gradient_seconds,
    matrix_seconds,
    memory_seconds,
    pipeline_seconds,
    ring_seconds,
    send_seconds,
    update_seconds,
)
from threefold.planner.dry_run import dry_run
from threefold.planner.estimate import (
    StepTime,
    exposed_bubble,
    layer_elements,
    sent_bytes,
    step_time,
    waiting_share,
)
from threefold.planner.hardware import Link, find_hardware
from threefold.planner.layer_cost import BUSIEST, block_seconds, cost_block
from threefold.planner.model_size import described_blocks
from threefold.planner.rank_block import Group
from threefold.planner.schedule import Rounds, StageTimes, simulate
from threefold.planner.systems import SYSTEMS

CORE, BUILT_IN = SYSTEMS["megatron-core"], SYSTEMS["own"]
MIXTURE = {**LLAMA, "num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 512}


LATENT = {**GPT, "architecture": "deepseek", "query_rank": 192, "key_value_rank": 128, "ffn_hidden_size": 1024}
LATENT |= {"plain_head_dim": 64, "rope_head_dim": 32, "value_head_dim": 64}


def _of(given: Config, **changes: Any) -> StepTime:
    return step_time(given, ideal(**changes), CORE)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        (GPT, {}),
        (GPT, {"tp": 2}),
        (GPT, {"tp": 2, "sequence_parallel": True, "dp": 4}),
        (LLAMA, {"tp": 4}),
        (LLAMA, {"cp": 2}),
        ({**LLAMA, "sliding_window": 64}, {}),
        (MIXTURE, {}),
        (MIXTURE, {"dp": 4, "ep": 2, "tp": 2}),
        (LATENT, {}),
        (LATENT, {"dp": 2, "tp": 2, "sequence_parallel": True}),
        ({**LATENT, "mtp_layers": 2}, {}),
        ({**LLAMA, "mtp_layers": 1}, {"tp": 2, "sequence_parallel": True}),
    ],
)
def test_products_are_those_of_the_models_own_table(model: dict[str, Any], layout: dict[str, Any]) -> None:
    given = config(model, **layout)
    tokens = 32 * 256
    plan = model_plan(given.model, 256)
    own, window = given.model, min(given.model.sliding_window or 256, 256)
    value = getattr(own, "value_head_dim", own.head_dim)
    heads = own.num_attention_heads * (own.head_dim + value) / 2
    core = 4 * heads * window * (1 - window / 512)  # operations of two products, of the positions that are seen
    blocks = 4 + own.mtp_layers
    linear = sum(plan.costs[1:]) - blocks * heads * window
    if own.num_experts:  # the rank with the busiest experts is waited for
        linear += 4 * (BUSIEST - 1) * 3 * 512 * 512 * 2
    ranks = layout.get("dp", 1) * layout.get("tp", 1) * layout.get("cp", 1)
    found, again = _of(given).compute, (3 * own.head_dim + 2 * value) / (own.head_dim + value)
    assert found.matrix == pytest.approx(6 * linear * tokens / ranks / RATE, rel=1e-2 if own.num_experts else 1e-3)
    assert found.attention == pytest.approx(blocks * (1 + again) * core * tokens / ranks / RATE, rel=1e-6)


@pytest.mark.parametrize(("recompute", "every", "treated"), [("full", 1, 4), ("full", 2, 2), ("selective", 1, 4)])
def test_recompute_repeats_forward_passes(recompute: str, every: int, treated: int) -> None:
    without = _of(config()).compute
    found = _of(config(train={"recompute": recompute, "recompute_every": every})).compute
    block = without.attention / 3.5 / 4, (without.matrix - 3 * 2 * 512 * 1024 * 32 * 256 / RATE) / 3 / 4
    assert found.attention - without.attention == pytest.approx(treated * block[0])
    repeated = treated * block[1] if recompute == "full" else 0.0
    assert found.matrix - without.matrix == pytest.approx(repeated, abs=1e-9)


def test_causes_add_up() -> None:
    found = step_time(config(LLAMA, tp=2, pp=2, dp=2, zero=1), find_hardware("a100-80"), BUILT_IN)
    assert found.seconds == pytest.approx(sum(found.causes.values()))
    assert all(seconds >= 0 for seconds in found.causes.values())
    assert min(found.compute.tensor, found.bubble, found.sends, found.gradients, found.optimizer) > 0


def test_each_link_is_felt_by_its_axis_alone() -> None:
    slow = Link(1e9, 0.0)
    free = replace(BUILT_IN, overlap_gradients=False)
    for layout, cause in (
        ({"tp": 2}, "tensor parallelism"),
        ({"cp": 2}, "context parallelism"),
        ({"dp": 2}, "gradients and weights"),
        ({"pp": 2}, "pipeline sends"),
    ):
        given = config(**layout)
        before = step_time(given, ideal(), free).causes
        after = step_time(given, ideal(inside=slow), free).causes
        grown = {name for name in before if after[name] > before[name] + 1e-9} - {"slowest device"}
        assert grown - {"gradients and weights"} == {cause} - {"gradients and weights"}
        assert ("gradients and weights" in grown) == (cause in ("gradients and weights", "context parallelism"))


def test_bytes_of_tensor_collectives_are_those_that_are_counted() -> None:
    from threefold.comm.layout import Coordinates
    from threefold.parallel.pipeline.partition import stage_map

    given = config(tp=2)
    volumes = step_traffic(given, stage_map(model_plan(given.model, 256), given), Coordinates(0, 0, 0, 0))["tp"]
    counted = sum(wire_bytes(operation, volume.nbytes, 2) for operation, volume in volumes.items())
    found = step_time(given, ideal(inside=Link(1e9, 0.0)), BUILT_IN)
    assert found.compute.tensor == pytest.approx(counted / 1e9, rel=0.02)  # but for norms held whole, and the maximum


@pytest.mark.parametrize("model", [LATENT, {**LLAMA, "mtp_layers": 1}], ids=["latent", "further"])
def test_bytes_of_tensor_collectives_are_those_of_a_dry_run(model: dict[str, Any]) -> None:
    given = config({**model, "num_layers": 1}, {"global_batch_size": 2}, tp=2)
    counted = sum(wire_bytes(op, nbytes, 2) for (axis, op), nbytes in _traffic(given).items() if axis == "tp")
    found = step_time(given, ideal(inside=Link(1e9, 0.0)), replace(BUILT_IN, overlap_tensor_backward=False))
    assert found.compute.tensor == pytest.approx(counted / 1e9, rel=0.02)


def test_latents_are_gathered_and_not_keys_and_values() -> None:
    given = config({**LATENT, "num_layers": 1}, {"global_batch_size": 1}, cp=2)
    [block], slow = described_blocks(given), ideal(inside=Link(1e9, 0.0))
    found = block_seconds(cost_block(given, block, 8, BUILT_IN), slow, replace(BUILT_IN, overlap_context=False))
    gathered = wire_bytes("all_gather", _traffic(given)["cp", "all_gather"], 2)
    assert found.forward.context * 1e9 == pytest.approx(gathered)
    ring = config({**LATENT, "num_layers": 1}, {"global_batch_size": 1}, cp=2, cp_method="ring")
    of_ring = block_seconds(cost_block(ring, block, 8, BUILT_IN), slow, replace(BUILT_IN, overlap_context=False))
    assert of_ring.forward.context / found.forward.context == pytest.approx(8 * (64 + 32 + 64) / (128 + 32))


def _traffic(given: Config) -> dict[tuple[str, str], int]:
    return {(each.axis, each.operation): each.nbytes for each in dry_run(given).collectives}


def test_overlap_hides_but_never_adds() -> None:
    a100 = find_hardware("a100-80")
    given = config(LLAMA, tp=2, dp=4)
    plain = replace(CORE, overlap_tensor_backward=False, overlap_gradients=False, name="plain")
    over = replace(CORE, overlap_tensor=True, name="over")
    shown, some, most = (step_time(given, a100, system) for system in (plain, CORE, over))
    assert shown.compute.tensor > some.compute.tensor >= most.compute.tensor > 0
    assert shown.gradients > some.gradients > 0


def test_deferred_weight_gradients_fill_the_bubble() -> None:
    """Of (p - 1)(F + B + W), ZB-H1 leaves (p - 1)(F + B - W): Qi et al. (arXiv 2401.10241), table 1."""
    parts = [1.0] * 4, [1.5] * 4, [0.75] * 4
    for schedule, bubble in (("1f1b", 3 * 3.25), ("zero-bubble", 3 * 1.75)):
        assert pipeline_seconds(*parts, schedule, 1, 16).bubble == pytest.approx(bubble), schedule


@pytest.mark.parametrize(("schedule", "wait"), [("1f1b", None), ("zero-bubble", 1)])
def test_the_bubble_is_that_of_a_simulation_for_any_number_of_micro_batches(schedule: str, wait: int | None) -> None:
    """Of fewer micro-batches than ranks, too, where a rank has less to defer."""
    for ranks, micro_batches in product((2, 3, 4, 6), (1, 2, 3, 4, 5, 8, 16)):
        if not SCHEDULES[schedule].accepts(ranks, micro_batches):
            continue
        times = StageTimes((1.0,) * ranks, (1.5,) * ranks, (0.75,) * ranks)
        orders = [Rounds(hop=1, wait=wait).order(ranks, rank, 1, micro_batches) for rank in range(ranks)]
        found = pipeline_seconds(*times, schedule, 1, micro_batches).bubble
        assert found == pytest.approx(simulate(orders, times).length - 3.25 * micro_batches), (ranks, micro_batches)


def test_a_micro_batch_is_sent_to_the_last_rank_and_back() -> None:
    """With overlapped sends only the first way and the last way are waited for, as in a simulation."""
    found = pipeline_seconds([1.0] * 4, [1.0] * 4, [1.0] * 4, "interleaved", 2, 8, 0.25, overlapped=True)
    assert found.sends == pytest.approx(2 * 3 * 0.25)
    times = StageTimes((1.0,) * 4, (1.0,) * 4, (1.0,) * 4)
    orders = [Rounds(hop=1).order(4, rank, 1, 1) for rank in range(4)]
    waited = simulate(orders, times, 0.25).length - simulate(orders, times).length
    assert waited == pytest.approx(2 * 3 * 0.25)


def test_tokens_go_to_their_experts_and_back_in_both_passes() -> None:
    found = _of(config(MIXTURE, dp=2, ep=2), inside=Link(1e9, 0.0)).compute.experts
    sent = 256 * 2 * 512 * 2 / 2  # tokens, experts for each, width, bytes; half stay
    assert found == pytest.approx(4 * 16 * 2 * 2 * sent / 1e9)  # layers, micro-batches, passes, ways


def test_context_ranks_send_their_own_positions() -> None:
    assert 2 * sent_bytes(config(cp=2, pp=2), BUILT_IN) == sent_bytes(config(pp=2), BUILT_IN) == 256 * 512 * 2


def test_nodes_of_a_group_are_counted_up() -> None:
    assert [Group(*sizes).nodes for sizes in ((8, 1, 8), (9, 1, 8), (3, 4, 8), (5, 4, 8), (2, 8, 8))] == [1, 2, 2, 3, 2]


def test_the_update_reads_and_writes_each_state() -> None:
    """AdamW has one state more than SGD with momentum: 4 bytes that are read, and 4 that are written."""
    hardware, elements = ideal(memory_bandwidth=1e12), 10**9
    one, two = (update_seconds(hardware, elements, states) for states in (1, 2))
    assert two - one == pytest.approx(memory_seconds(hardware, 8 * elements, 0))
    weights = update_seconds(hardware, elements, 0) - update_seconds(hardware, elements, 0, itemsize=4, master=True)
    assert weights == pytest.approx(memory_seconds(hardware, 2 * elements, 0))  # the bf16 copies are written


@pytest.mark.parametrize(
    "axes", [{"dp": 4}, {"dp": 2, "cp": 4, "tp": 2}, {"cp": 8}, {"dp": 2, "pp": 4, "tp": 2}, {"pp": 2, "cp": 4}]
)
def test_groups_of_ranks_have_as_many_in_a_node_as_the_mesh(axes: dict[str, int]) -> None:
    given, layout = config(**axes), Layout(**axes)
    for axis, names in (("pp", ["pp"]), ("dp·cp", ["dp", "cp"])):
        group, ranks = axis_group(given, axis, 4, BUILT_IN), layout.groups(*names)[0]
        assert (group.ranks, group.in_node) == (len(ranks), sum(rank < 4 for rank in ranks)), axis


def test_elements_are_those_of_the_shards() -> None:
    from threefold.planner.model_size import ModelSize, ShardCoordinates

    for model, layout in ((GPT, {"tp": 2}), (LLAMA, {"tp": 2, "dp": 2}), (MIXTURE, {"dp": 2, "ep": 2})):
        given = config(model, **layout)
        held = ModelSize(given).largest_rank(0).parameters
        assert isinstance(ShardCoordinates(), ShardCoordinates)
        assert sum(layer_elements(given)) == pytest.approx(held, rel=0.12)  # norms, biases and positions aside


def test_the_slowest_of_more_devices_is_slower() -> None:
    shares = [waiting_share(world) for world in (1, 8, 64, 4096)]
    assert shares[0] == 0
    assert all(fewer < more < 0.02 for fewer, more in pairwise(shares))


def test_unequal_layers_and_schedules() -> None:
    given = {"pp": 4, "schedule": "interleaved", "stage_chunks": 2}
    deep = {**GPT, "num_layers": 16}
    plain, chunked = _of(config(deep, pp=4)), _of(config(deep, **given))
    assert 0 < chunked.bubble < plain.bubble
    assert _of(config(deep, pp=1)).bubble == 0


def test_ranks_that_take_turns_on_cores_do_not_wait_for_a_pipeline() -> None:
    own = replace(find_hardware("a100-80"), device="cpu", gpus_per_node=8)
    assert exposed_bubble(3.0, 1.0, own) == 1.0
    assert exposed_bubble(3.0, 1.0, replace(own, cores=16)) == 1.0
    assert exposed_bubble(3.0, 1.0, replace(own, cores=2)) == 0.0
    assert exposed_bubble(3.0, 3.0, replace(own, cores=6)) == pytest.approx(6.0 * 6 / 8 - 3.0)


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
    chunk = sums / 12  # exposed; the others slow the computation
    assert hidden == pytest.approx(chunk + (sums - chunk) / 4)
    sharded = gradient_seconds(hardware, core, group, 1e9, 1.0, 2.0, micro_batches=4, zero=3)
    assert sharded > sums
    assert gradient_seconds(hardware, core, Group(1, 1, 8), 1e9, 1.0, 2.0) == 0


def test_the_update_is_bound_by_memory() -> None:
    hardware = ideal(memory_bandwidth=1e9)
    assert update_seconds(hardware, 1e6) == pytest.approx((4 * 7 + 2 + 12) * 1e6 / 1e9)
    assert update_seconds(hardware, 1e6, states=1) < update_seconds(hardware, 1e6)
