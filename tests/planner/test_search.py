"""The search finds what an evaluation of every layout finds."""

from collections.abc import Callable

import numpy as np
import pytest

from tests.planner.small_searches import base, every_layout, rules_of, space_of
from threefold.config import Config
from threefold.planner.bounds import Array, Evaluated, Mask
from threefold.planner.hardware import Hardware
from threefold.planner.planning import OBJECTIVES
from threefold.planner.search import BEST, Found, points_of, search
from threefold.planner.space import LayoutChoice, MeshSizes, Options


class ToyCosts:
    """Times and sizes that depend on every part of a layout.

    Args:
        memory: bytes of a device.
        loose: fraction by which its time bounds stay below the exact time.
        loose_bytes: fraction by which its memory bounds stay below the exact memory.
    """

    def __init__(self, config: Config, memory: int = 4000, loose: float = 0.1, loose_bytes: float = 0) -> None:
        self.batch, self.memory, self.loose = config.train.global_batch_size, memory, loose
        self.loose_bytes = loose_bytes
        self.evaluated = 0
        self.tokens = self.batch * config.data.sequence_length

    @classmethod
    def of(cls, config: Config, hardware: Hardware) -> "ToyCosts":
        return cls(config, hardware.memory_bytes)

    def usable_bytes(self, gpus: int) -> int:
        return self.memory

    def seconds(self, choice: LayoutChoice) -> float:
        waits = 1 + (choice.pp - 1) / (choice.accumulation * choice.stage_chunks)
        work = {"none": 3.0, "selective": 3.1, "full": 4.0}[choice.recompute]
        shared = 1 + 0.1 * np.log2(choice.tp) * (0.9 if choice.sequence_parallel else 1) + 0.05 * np.log2(choice.cp)
        return float(
            self.batch / (choice.dp * choice.tp * choice.cp * choice.pp) * work * shared * waits
            + 0.01 * choice.zero * np.log2(choice.dp * choice.cp)
            + 0.001 * len(choice.schedule)
            + 0.5 / choice.micro_batch_size
        )

    def bytes_of(self, choice: LayoutChoice) -> int:
        whole = 8000 // (choice.tp * choice.pp)
        shared = [0, 5, 6, 8][choice.zero] * whole // 8
        kept = {"none": 40, "selective": 30, "full": 4}[choice.recompute] * choice.micro_batch_size
        held = (
            min(choice.pp, choice.accumulation) * kept // (choice.cp * (choice.tp if choice.sequence_parallel else 1))
        )
        return whole - shared + shared // (choice.dp * choice.cp) + held

    def least_bytes(self, mesh: MeshSizes, options: Options) -> Array:
        return self._all(self.bytes_of, mesh, options) * (1 - self.loose_bytes)

    def least_seconds(self, mesh: MeshSizes, options: Options, wanted: Mask) -> Array:
        return np.where(wanted, self._all(self.seconds, mesh, options) * (1 - self.loose), np.nan)

    def _all(self, of: Callable[[LayoutChoice], float], mesh: MeshSizes, options: Options) -> Array:
        found = np.zeros(options.shape)
        for place in np.ndindex(options.shape):
            found[place] = of(options.choice(mesh, place))
        return found

    def evaluate(self, choice: LayoutChoice) -> Evaluated:
        self.evaluated += 1
        seconds = self.seconds(choice)
        return Evaluated(choice, seconds, self.tokens / seconds, 0.5, (self.bytes_of(choice),), (("toys", 0.1),))

    def largest_part(self, choice: LayoutChoice) -> str:
        return f"weights {8000 // (choice.tp * choice.pp)} bytes"


ENOUGH, SCARCE = 10**6, 1500


def searched(name: str, gpus: int, costs: ToyCosts, objective: str = "throughput", **fixed: object) -> Found:
    config = base(name)
    settings = {key.replace("__", "."): value for key, value in fixed.items()}
    row = OBJECTIVES[objective]
    return search(space_of(config, settings), rules_of(config), costs, row.counts(gpus), row.weight)


def exhaustive(name: str, gpus: int, costs: ToyCosts, objective: str) -> list[LayoutChoice]:
    row = OBJECTIVES[objective]
    every = (layout for count in row.counts(gpus) for layout in every_layout(space_of(base(name)), count))
    fitting = [choice for choice, sound in every if sound and costs.bytes_of(choice) <= costs.memory]
    return sorted(fitting, key=lambda each: (costs.seconds(each) * row.weight(each.gpus), costs.bytes_of(each), each))


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("usable", [ENOUGH, SCARCE])
@pytest.mark.parametrize("loose", [0.0, 0.3])
def test_the_best_ten_are_those_of_an_exhaustive_evaluation(objective: str, usable: int, loose: float) -> None:
    costs = ToyCosts(base("gpt"), usable, loose)
    found = searched("gpt", 6, costs, objective)
    best = exhaustive("gpt", 6, costs, objective)
    assert [each.choice for each in found.ranked] == best[:BEST]
    assert found.fitting == len(best)
    assert found.evaluated == costs.evaluated < len(best)


def test_every_layout_is_counted_once() -> None:
    costs = ToyCosts(base("experts"), SCARCE)
    found = searched("experts", 8, costs)
    layouts = list(every_layout(space_of(base("experts")), 8))
    assert found.considered == len(layouts)
    assert found.sound == sum(sound for _, sound in layouts)
    assert sum(refusal.count for refusal in found.refusals) == found.considered - found.sound
    assert found.misfit is not None
    assert found.misfit.count == found.sound - found.fitting
    assert found.misfit.peak == min(
        costs.bytes_of(choice) for choice, sound in layouts if sound and costs.bytes_of(choice) > SCARCE
    )
    for refusal in found.refusals:
        assert refusal.sentence.startswith(refusal.key)


def test_fixed_settings_hold_in_every_layout() -> None:
    found = searched("gpt", 8, ToyCosts(base("gpt"), ENOUGH), parallel__tp=2, train__recompute="full", parallel__zero=0)
    assert {(each.choice.tp, each.choice.recompute, each.choice.zero) for each in found.ranked} == {(2, "full", 0)}


def test_throughput_uses_all_gpus_and_cost_may_use_fewer() -> None:
    costs = ToyCosts(base("gpt"), ENOUGH)
    assert {each.choice.gpus for each in searched("gpt", 8, costs).ranked} == {8}
    assert searched("gpt", 8, costs, "cost").ranked[0].choice.gpus == 1  # the toy's communication only costs


@pytest.mark.parametrize("loose", [0.0, 0.2])
def test_the_points_of_the_picture_do_not_contradict_the_ranking(loose: float) -> None:
    costs = ToyCosts(base("gpt"), SCARCE, loose=loose, loose_bytes=0.2)
    found = searched("gpt", 6, costs)
    points = points_of(found, costs, step=1 - 1e-9, most=10**6)
    best = found.ranked[0]
    assert points.front[-1].seconds == best.seconds
    every = [choice for choice, sound in every_layout(space_of(base("gpt")), 6) if sound]
    fitting = [(costs.bytes_of(each), costs.seconds(each)) for each in every if costs.bytes_of(each) <= SCARCE]
    front: list[tuple[int, float]] = []
    for peak, seconds in sorted(fitting):
        if not front or seconds < front[-1][1]:
            front.append((peak, seconds))
    assert [(each.peak, each.seconds) for each in points.front] == front
    assert points.seconds.min() >= best.seconds * (1 - loose) - 1e-9


def test_layouts_that_turn_out_too_large_are_not_ranked() -> None:
    loose = searched("gpt", 6, ToyCosts(base("gpt"), SCARCE, loose_bytes=0.3))
    exact = searched("gpt", 6, ToyCosts(base("gpt"), SCARCE))
    assert [each.choice for each in loose.ranked] == [each.choice for each in exact.ranked]
    assert loose.unfit
    assert loose.fitting > exact.fitting
