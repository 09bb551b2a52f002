"""Layers of each pipeline stage, and the ranks that hold the stages, computed without tensors."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import lru_cache
from itertools import accumulate, combinations, pairwise

from threefold.config.schedules import StageSchedule, find_schedule
from threefold.config.schema import Config
from threefold.errors import UserError
from threefold.models.sharding import ModelPlan, matches


@dataclass(frozen=True)
class StageMap:
    """Stages of a pipeline, with their layers and ranks."""

    bounds: tuple[int, ...]
    """First layer of each stage, then the number of layers."""
    ranks: tuple[int, ...]
    """Coordinate on the pp axis of the rank that holds each stage."""

    def held_by(self, rank: int) -> list[int]:
        """Return the numbers of the stages on `rank` of the pp axis, ascending."""
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]

    def layers(self, stage: int) -> tuple[int, int]:
        """Return the first and the past-the-last layer of a stage."""
        return self.bounds[stage], self.bounds[stage + 1]

    def stage_of(self, layer: int) -> int:
        """Return the number of the stage that holds `layer`."""
        return next(stage for stage in range(len(self.ranks)) if self.bounds[stage] <= layer < self.bounds[stage + 1])


BY_CLASS = "class:"


def stage_bounds(
    costs: Sequence[float],
    kinds: Sequence[str],
    stages: int,
    partition: str | Sequence[int] = "cost",
    pp: int | None = None,
) -> list[int]:
    """Return the first layer of each stage, then the number of layers, from each layer's cost and class name.

    `partition` is `cost`, `uniform`, `uniform-chunks` (over `pp` ranks, by default as many as stages), `class:NAME`, or
    the stage split points.
    Raises a `UserError` if the layers cannot be partitioned like that.
    """
    count = len(costs)
    if partition == "cost":
        return partition_by_cost(costs, stages)
    if partition == "uniform":
        return partition_uniform(count, stages)
    if partition == "uniform-chunks":
        ranks = pp or stages
        if stages % ranks:
            raise UserError(
                f"parallel.partition is uniform-chunks but {stages} stages are not equally many for each of {ranks} "
                "pipeline ranks; use uniform."
            )
        return partition_uniform_chunks(count, ranks, stages // ranks)
    if not isinstance(partition, str):
        _require_bounds(partition, count, stages)
        return [0, *partition, count]
    kind = partition.removeprefix(BY_CLASS)
    found = kinds.count(kind)
    if found < stages:
        enough = [name for name in dict.fromkeys(kinds) if kinds.count(name) >= stages]
        other = get_close_matches(kind, enough, 1, cutoff=0) or [""]
        instead = f"{BY_CLASS}{other[0]} or cost" if other[0] else "cost"
        raise UserError(
            f"parallel.partition is {partition} but the model has {found} layer{'s' * (found != 1)} of that class "
            f"and {stages} stages; use {instead}."
        )
    return partition_by_class(kinds, kind, stages)


def partition_uniform(items: int, pp: int, chunks: int = 1) -> list[int]:
    """Return the bounds of pp · chunks stages whose lengths differ by one at most; the longer ones come last.

    Args:
        items: number of layers.
        pp: number of pipeline ranks.
        chunks: number of stages per rank.

    Returns:
        pp · chunks + 1 ascending numbers, from 0 to `items`.

    Raises:
        UserError: there are fewer layers than stages, so that one would be empty.
    """
    parts = pp * chunks
    _require_enough(items, parts)
    size, longer = divmod(items, parts)
    return [part * size + max(0, part - (parts - longer)) for part in range(parts + 1)]


def partition_uniform_chunks(items: int, pp: int, chunks: int) -> list[int]:
    """Return stage bounds by Colossal-AI's rule: layers in `chunks` equal parts, each divided over all `pp` ranks.

    A remainder makes the later parts longer, and within each part the later stages. So every pass through the ranks has
    about as many layers as the others, where `partition_uniform` gives the remainder to the last pass.

    Args:
        items: number of layers.
        pp: number of pipeline ranks.
        chunks: number of stages per rank.

    Returns:
        pp · chunks + 1 ascending numbers, from 0 to `items`.

    Raises:
        UserError: a part has fewer layers than there are ranks, so that a stage would be empty.

    Example:
        >>> threefold.pipeline.partition_uniform_chunks(10, 2, 2)
        [0, 2, 5, 7, 10]
        >>> threefold.pipeline.partition_uniform(10, 2, 2)
        [0, 2, 4, 7, 10]
    """
    _require_enough(items, pp * chunks)
    parts = pairwise(partition_uniform(items, chunks))
    return [0, *(start + bound for start, end in parts for bound in partition_uniform(end - start, pp)[1:])]


def layers_by_rank(bounds: Sequence[int], pp: int, schedule: str = "interleaved") -> list[list[tuple[int, int]]]:
    """Return the layers of each pipeline rank.

    Args:
        bounds: bounds of the stages, as from `partition_uniform`.
        pp: number of pipeline ranks.
        schedule: `parallel.schedule`, which places the stages: stage n on rank n modulo `pp`, or folded in a V.

    Returns:
        for each rank, the first and the past-the-last layer of each of its stages.

    Raises:
        UserError: the schedule has another number of stages or ranks.

    Example:
        >>> threefold.pipeline.layers_by_rank([0, 2, 5, 7, 10], pp=2)
        [[(0, 2), (5, 7)], [(2, 5), (7, 10)]]
    """
    try:
        found = find_schedule(schedule)
    except ValueError as error:
        raise UserError(f"schedule is {schedule} but must be {error}.") from None
    count = len(bounds) - 1
    ranks = found.stage_ranks(pp, found.stages_per_rank or max(1, count // pp))
    if found.ranks not in (None, pp):
        raise UserError(f"pp is {pp} but schedule {found.name} has a line for each of {found.ranks} ranks; use those.")
    if len(ranks) != count:
        raise UserError(
            f"bounds has {count} stages but schedule {found.name} has {len(ranks)} on {pp} ranks; partition the layers "
            f"into {len(ranks)}."
        )
    stages = StageMap(tuple(bounds), ranks)
    return [[stages.layers(stage) for stage in stages.held_by(rank)] for rank in range(pp)]


def partition_by_class(kinds: Sequence[str], kind: str, pp: int) -> list[int]:
    """Return bounds that divide the layers of class `kind` evenly; layers before them are on the first stage.

    Args:
        kinds: class name of each layer, in order.
        kind: class to count.
        pp: number of stages.

    Raises:
        UserError: there are fewer layers of that class than stages.
    """
    places = [place for place, name in enumerate(kinds) if name == kind]
    if len(places) < pp:
        raise UserError(
            f"parallel.pp is {pp} but the model has {len(places)} layers of class {kind}, and each stage needs one; "
            f"set parallel.pp to {max(1, len(places))} at most."
        )
    inner = [places[bound] for bound in partition_uniform(len(places), pp)[1:-1]]
    return [0, *inner, len(kinds)]


def partition_by_cost(costs: Sequence[float], pp: int) -> list[int]:
    """Return the bounds that minimise the cost of the most expensive stage (the linear partition problem).

    Of equally good answers, it takes the one with lighter earlier stages, which hold the most activations. Time is
    proportional to layers · stages.

    Args:
        costs: cost of each layer, in any unit; not negative.
        pp: number of stages.

    Raises:
        UserError: there are fewer layers than stages.
    """
    count = len(costs)
    _require_enough(count, pp)
    return list(_bounds_by_cost(tuple(costs), pp))


@lru_cache(maxsize=2048)
def _bounds_by_cost(costs: tuple[float, ...], pp: int) -> tuple[int, ...]:
    for stages in range(1, pp):  # ascending, so that no call recurses deeply
        _last_stages(costs, stages)
    bounds = [len(costs)]
    for stages in range(pp, 0, -1):
        bounds.append(_last_stages(costs, stages)[1][bounds[-1]])
    return tuple(reversed(bounds))


@lru_cache(maxsize=2048)
def _last_stages(costs: tuple[float, ...], stages: int) -> tuple[list[float], list[int]]:
    """Return the best partitions of the first n layers, for each n; cached, since those into more stages build on them.

    The first list has the cost of the most expensive stage, infinite if there are fewer layers than stages; the second
    one the first layer of the last stage.
    """
    count, sums = len(costs), [0.0, *accumulate(costs)]
    worst = _last_stages(costs, stages - 1)[0] if stages > 1 else [0.0] + [float("inf")] * count
    peaks, begins = [float("inf")] * (count + 1), [0] * (count + 1)
    low, crossing = stages - 1, stages - 1
    for end in range(stages, count + 1):
        # A later start makes the last stage cheaper and the stages before it more expensive: the best start is where
        # the two cross.
        while crossing < end - 1 and worst[crossing] < sums[end] - sums[crossing]:
            crossing += 1
        peak = max(worst[crossing], sums[end] - sums[crossing])
        if crossing > low:
            peak = min(peak, sums[end] - sums[crossing - 1])
        begin = bisect_left(sums, sums[end] - peak, low, crossing)
        while begin > low and sums[end] - sums[begin - 1] <= peak:  # where the difference above was rounded
            begin -= 1
        while sums[end] - sums[begin] > peak:
            begin += 1
        peaks[end], begins[end] = peak, begin
    return peaks, begins


def _require_bounds(bounds: Sequence[int], layers: int, stages: int) -> None:
    _require_enough(layers, stages)
    ends = [0, *bounds, layers]
    if len(bounds) == stages - 1 and all(a < b for a, b in pairwise(ends)):
        return
    nearest = partition_uniform(layers, stages)[1:-1]
    if len(bounds) == stages - 1:  # the nearest ascending numbers that leave no stage empty
        up: list[int] = []
        for bound in bounds:
            up.append(max(bound, up[-1] + 1 if up else 1))
        nearest = [min(bound, layers - len(up) + place) for place, bound in enumerate(up)]
    raise UserError(
        f"parallel.partition is {list(bounds)} but {stages} stages of {layers} layers need {stages - 1} ascending "
        f"numbers from 1 to {layers - 1}; use {nearest}."
    )


def _require_enough(items: int, parts: int) -> None:
    if items < parts:
        raise UserError(f"parallel.pp makes {parts} stages but there are {items} layers; use {items} at most.")


def stage_map(plan: ModelPlan, config: Config) -> StageMap:
    """Return the stages of a model's layers; raise a `UserError` if they cannot be divided as a config says."""
    parallel = config.parallel
    if parallel.pp == 1:
        return StageMap((0, len(plan.layers)), (0,))
    return partitioned(
        plan, parallel.pp, parallel.pipeline_schedule, parallel.stage_chunks, parallel.partition, parallel.zero
    )


def partitioned(
    plan: ModelPlan, pp: int, schedule: StageSchedule, chunks: int, partition: str | Sequence[int], zero: int
) -> StageMap:
    ranks = schedule.stage_ranks(pp, chunks)
    stages = StageMap(tuple(stage_bounds(plan.costs, plan.kinds, len(ranks), partition, pp)), ranks)
    for group in plan.tied_groups() if zero else ():
        for one, other in combinations(group, 2):
            first, second = (_stage_of(name, plan, stages) for name in (one, other))
            if first != second and ranks[first] == ranks[second]:
                raise UserError(
                    f"parallel.zero is {zero} but {one} and {other} share weights and are on two stages of pp rank "
                    f"{ranks[first]}; use 0 or a parallel.schedule of one stage a rank, such as 1f1b."
                )
    return stages


def shared_between(plan: ModelPlan, stages: StageMap) -> dict[str, tuple[int, ...]]:
    """Map the owner of each tied weight on several pp ranks to those ranks, the owner's first."""
    used: dict[str, tuple[int, ...]] = {}
    for owner, *users in plan.tied_groups():
        places = [stages.ranks[_stage_of(name, plan, stages)] for name in (owner, *users)]
        ranks = tuple(dict.fromkeys(places))
        if len(ranks) > 1:
            used[owner] = ranks
    return used


def covers(owner: str, name: str) -> bool:
    """Return whether the parameter `name` is called `owner`, or is in the module of that name."""
    return name == owner or name.startswith(owner + ".")


def first_trained_stage(parameters: Iterable[str], plan: ModelPlan, stages: StageMap) -> int:
    """Return the first stage with a parameter that is not frozen; no gradient of activations goes below it."""
    trained = (name for name in parameters if plan.whole_name(name) not in plan.frozen)
    return min((_stage_of(name, plan, stages) for name in trained), default=0)


def _stage_of(name: str, plan: ModelPlan, stages: StageMap) -> int:
    return stages.stage_of(next(place for place, layer in enumerate(plan.layers) if covers(layer, name)))


def chosen_layers(layers: Sequence[str], patterns: Mapping[str, Sequence[str]], mode: str, every: int = 1) -> list[str]:
    """Return the layers in which `mode` recomputes something, every `every`-th; `patterns` as in `ModelPlan`."""
    if mode == "none":
        return []

    def is_chosen(layer: str) -> bool:
        depth = layer.count(".") + 1
        return any(matches(layer, ".".join(pattern.split(".")[:depth])) for pattern in patterns[mode])

    return list(filter(is_chosen, layers))[::every]
