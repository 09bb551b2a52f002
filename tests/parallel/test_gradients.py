"""Gradients in buckets, one all-reduce per step, started while the backward pass is running."""

from itertools import groupby, product

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.support import narrow_sum
from tests.support.parity import Case, make_engine, shard_of
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.compat.prepared.gradients import buckets_by_dtype
from threefold.parallel.gradients import GradientBuckets, JoinedGradients


def ordered_events() -> list[str]:
    """The order in which layers run backward and buckets are summed, with two micro-batches."""
    mesh = Mesh(Layout(dp=torch.distributed.get_world_size()))
    layers = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    events: list[str] = []
    for place, layer in enumerate(layers):
        layer.register_full_backward_pre_hook(lambda _module, _grad, place=place: events.append(f"backward {place}"))
    buckets = GradientBuckets(list(layers.parameters()), mesh.dp, torch.float32, bucket_bytes=1)
    start = buckets._start

    def record(bucket: object) -> None:
        events.append("sum")
        start(bucket)  # type: ignore[arg-type]

    buckets._start = record  # type: ignore[method-assign]
    buckets.begin(2)
    for _ in range(2):
        layers(torch.ones(1, 3)).sum().backward()
    buckets.finish()
    return events


def test_each_bucket_is_summed_once_as_soon_as_it_is_complete(pool) -> None:
    backward = ["backward 2", "backward 1", "backward 0"]
    for events in pool.run(2, ordered_events):
        assert events == [*backward, "backward 2", "sum", "backward 1", "sum", "backward 0", "sum"]


def step_events(case: Case) -> list[str]:
    engine = make_engine(case)
    with engine.mesh.recorder.recording() as events:
        engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
    gradients = sum(entry.gradient.numel() * entry.gradient.element_size() for entry in engine.optimizer.entries)
    return [event.operation for event in events if event.axis == "dp" and event.nbytes == gradients]


def test_one_gradient_sync_per_step_whatever_the_accumulation(pool) -> None:
    for accumulation in (1, 3):
        case = Case(accumulation=accumulation, steps=1).with_layout(2, 1, 1)
        assert pool.run(2, step_events, case) == [["all_reduce"]] * 2


def unused_parameter() -> tuple[Tensor, Tensor]:
    mesh = Mesh(Layout(dp=torch.distributed.get_world_size()))
    used, maybe = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3))
    buckets = GradientBuckets([used, maybe], mesh.dp, torch.float32)
    buckets.begin(1)
    loss = used.sum() + (maybe.sum() if mesh.rank == 1 else 0)
    loss.backward()
    buckets.finish()
    return buckets[used].clone(), buckets[maybe].clone()


def test_a_parameter_that_one_replica_did_not_use_is_summed_all_the_same(pool) -> None:
    for used, maybe in pool.run(2, unused_parameter):
        assert used.tolist() == [2.0, 2.0]
        assert maybe.tolist() == [1.0, 1.0, 1.0]


def buckets_complete_in_another_order() -> list[list[float]]:
    """Three buckets of different sizes; the first rank does not use the last weight, so its first bucket waits."""
    mesh = Mesh(Layout(dp=torch.distributed.get_world_size()))
    weights = [nn.Parameter(torch.ones(size)) for size in (2, 3, 5)]
    buckets = GradientBuckets(weights, mesh.dp, torch.float32, bucket_bytes=1)
    buckets.begin(1)
    sum(weight.sum() for weight in weights[: 2 + mesh.rank]).backward()  # type: ignore[union-attr]
    buckets.finish()
    return [buckets[weight].tolist() for weight in weights]


def test_buckets_are_summed_in_one_order_whatever_each_replica_used(pool) -> None:
    for summed in pool.run(2, buckets_complete_in_another_order):
        assert summed == [[2.0] * 2, [2.0] * 3, [1.0] * 5]


def test_narrow_gradients_are_added_up_wide(pool) -> None:
    assert pool.run(1, narrow_sum)[0].item() == 1000.0


def sums_of_several_dtypes() -> list[float]:
    mesh = Mesh(Layout())
    weights = [nn.Parameter(torch.zeros(1, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32, torch.float64)]
    buckets = buckets_by_dtype(weights, mesh.dp)
    buckets.begin(1000)
    for _ in range(1000):
        for weight in weights:
            weight.sum().backward()
    buckets.finish()
    return [buckets[weight].item() for weight in weights]


def test_narrow_gradients_beside_wide_ones_are_added_up_wide(pool) -> None:
    assert pool.run(1, sums_of_several_dtypes)[0] == [1000.0] * 3


def gradients_of_steps(dtype: torch.dtype) -> list[list[list[float]]]:
    """Gradients after steps in which autograd gives each weight two, the first alone one, and some are added by hand.

    Each step ends with gradients that are not numbers, and so does one that stops in its middle.
    """
    mesh = Mesh(Layout(dp=torch.distributed.get_world_size()))
    first, second, third = weights = [nn.Parameter(torch.ones(2, dtype=dtype)) for _ in range(3)]
    # Of each 5 elements 3 are beside the shard, where there are three replicas or more.
    buckets = GradientBuckets(weights, mesh.dp, torch.float32, longest=dict.fromkeys(weights, 5))
    joined = JoinedGradients([(weights, buckets)])
    summed: list[Tensor] = []
    found = []

    def finish() -> None:
        joined.finish()
        assert [each.grad is joined[each] for each in weights] == [dtype == torch.float32] * 3
        found.append([joined[each].tolist() for each in weights])
        joined.scale_(float("nan"))

    joined.observe(lambda flat: summed.append(flat.clone()))
    joined.begin(2)
    for _ in range(2):
        torch.cat([first, 2 * second, 3 * third]).sum().backward()
    finish()
    joined.begin(None)
    (5 * first).sum().backward()
    finish()
    joined.begin(2)
    torch.cat([first, second]).sum().backward()
    joined.scale_(float("nan"))
    joined.begin(None)
    joined.add_(second, torch.tensor([7.0, 8.0]))
    joined.add_(second, torch.tensor([1.0, 1.0]))
    third.sum().backward()
    joined.add_(third, torch.tensor([1.0, 1.0]))
    finish()
    assert len(summed) == 3
    assert torch.stack(summed).isfinite().all()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_gradient_of_a_step_is_left_in_the_next(pool, dtype) -> None:
    for steps in pool.run(3, gradients_of_steps, dtype):
        assert steps == [
            [[6, 6], [12, 12], [18, 18]],
            [[15, 15], [0, 0], [0, 0]],
            [[0, 0], [24, 27], [6, 6]],
        ]


def scaled_buckets() -> list[list[float]]:
    mesh = Mesh(Layout(dp=torch.distributed.get_world_size()))
    weights = [nn.Parameter(torch.ones(size)) for size in (2, 3, 5)]
    buckets = GradientBuckets(weights, mesh.dp, torch.float32, bucket_bytes=1)
    buckets.begin(1)
    torch.cat(weights).sum().backward()
    buckets.finish()
    buckets.scale_(0.25)
    return [buckets[weight].tolist() for weight in weights]


def test_every_bucket_is_summed_and_scaled(pool) -> None:
    for scaled in pool.run(2, scaled_buckets):
        assert scaled == [[0.5] * 2, [0.5] * 3, [0.5] * 5]


SIZES = (1, 2, 1, 2, 1)


def joined_gradients() -> list[tuple[list[int], list[float]]]:
    """Of each choice of leaves, in two buckets with room for longer shards: the flat tensors' sizes and values."""
    mesh = Mesh(Layout(dp=torch.distributed.get_world_size()))
    leaves = [nn.Parameter(torch.ones(size)) for size in SIZES]
    longest = {leaf: leaf.numel() + 1 for leaf in leaves}
    buckets = GradientBuckets(leaves, mesh.dp, torch.float32, bucket_bytes=32, longest=longest)
    joined = JoinedGradients([(leaves, buckets)])
    assert [len(bucket.places) for bucket in buckets._buckets] == [4, 1]
    joined.begin(None)
    for place, leaf in enumerate(leaves):
        joined.add_(leaf, torch.full_like(leaf, 10.0**place))
    joined.finish()
    found = []
    for choice in product([False, True], repeat=len(leaves)):
        parts = joined.joined([leaf for leaf, chosen in zip(leaves, choice, strict=True) if chosen])
        found.append(([len(part) for part in parts], sorted(torch.cat([torch.zeros(0), *parts]).tolist())))
    return found


def test_gradients_of_some_leaves_are_joined_without_others(pool) -> None:
    found = pool.run(3, joined_gradients)[0]
    for choice, (lengths, values) in zip(product([False, True], repeat=len(SIZES)), found, strict=True):
        chosen = [place for place, is_chosen in enumerate(choice) if is_chosen]
        assert [value for value in values if value] == [
            3 * 10.0**place for place in chosen for _ in range(SIZES[place])
        ]
        assert len(values) == sum(SIZES[place] + 1 for place in chosen)
        assert len(lengths) == choice[0] + sum(is_chosen for is_chosen, _ in groupby(choice[1:]))


def sparse_gradients() -> list[float]:
    mesh = Mesh(Layout())
    table = nn.Parameter(torch.ones(3, 1))
    buckets = GradientBuckets([table], mesh.dp, torch.float32)
    for _ in range(2):
        buckets.begin(2)
        for row in (1, 2):
            nn.functional.embedding(torch.tensor([row, 2]), table, sparse=True).sum().backward()
        buckets.finish()
    return buckets[table].flatten().tolist()


def test_sparse_gradients_are_added_up_dense(pool) -> None:
    assert pool.run(1, sparse_gradients)[0] == [0, 1, 3]
