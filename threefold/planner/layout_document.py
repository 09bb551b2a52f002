"""One document of a layout: ranks, shards of each weight, schedule, memory and collectives, from training's own tables.

`threefold show` prints it as JSON and puts it into its page; docs/show.md describes its members.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from math import inf, isfinite, prod
from typing import Any, Final

from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.config.model import CUSTOM
from threefold.config.resolve import on_device
from threefold.errors import UserError
from threefold.host import memory
from threefold.models.sharding import Split
from threefold.models.source import ConfigSource
from threefold.parallel.pipeline.partition import StageMap, covers, stage_map
from threefold.planner.block import WeightShape
from threefold.planner.dry_run import Tell, run_stages
from threefold.planner.estimate import Estimate, estimate, send_time, stage_passes
from threefold.planner.hardware import Hardware
from threefold.planner.model_size import (
    ZERO_WEIGHTS,
    described_blocks,
    local_bounds,
    model_weights,
    shard_coordinates,
)
from threefold.planner.schedule import simulated
from threefold.planner.stage_memory import StageMemory, as_executed, stage_memory

FORMAT: Final = "threefold layout"
VERSION: Final = 1
"""Version of the document; it grows when a member changes its meaning or goes away, not when one is added."""
MOST_RANKS: Final = 256
"""Largest world size for which all ranks are described; for a larger one, only those of one copy of the model are."""
_MOST_OF_A_COPY: Final = 2048
_MOST_SPANS: Final = 4000
_PER_NODE: Final = 8
"""Ranks per node where no hardware is given."""

Bounds = tuple[tuple[int, int], ...]
"""Start and end of a shard in each dim of the whole weight."""


def layout_document(
    config: Config, hardware: Hardware | None = None, *, traffic: bool = True, tell: Tell = lambda *_: None
) -> dict[str, Any]:
    """Return the document of a config's layout, as JSON values; the data of the config need not exist.

    Without hardware, the times of the passes are in proportion to the layers' costs, and on a CPU the limit is this
    machine's memory. `traffic` dry-runs each stage for its collectives, which takes seconds, minutes for long
    pipelines.
    """
    model, why = ModelShards(config), ""
    try:
        described_blocks(config)
    except UserError as error:  # memory and time have no formulas
        why = str(error)
    estimated = None if hardware is None or why else estimate(config, hardware)
    return {
        "format": FORMAT,
        "version": VERSION,
        "model": {
            "name": ConfigSource().describe(config),
            "preset": config.model.preset,
            "parameters": sum(prod(kind.shape) * len(kind.layers) for kind in model.kinds),
            "layers": model.plan.layers,
            "costs": model.plan.costs,
        },
        "layout": _mesh(config, model.layout, hardware),
        "stages": model.stages_as_json(),
        "tensors": model.as_json(),
        "schedule": _schedule(config, model, estimated),
        "memory": _memory(config, hardware, estimated, why),
        "collectives": _collectives(config, tell) if traffic else {"ranks": None, "why": "they were not asked for"},
    }


def shown_ranks(layout: Layout) -> Sequence[int]:
    """Return the ranks that the document describes: all of them, or those of one copy of the model."""
    if layout.world_size <= MOST_RANKS:
        return range(layout.world_size)
    copy = layout.model_groups()[0]
    return copy if len(copy) <= _MOST_OF_A_COPY else range(layout.world_size // layout.dp)


def _mesh(config: Config, layout: Layout, hardware: Hardware | None) -> dict[str, Any]:
    ranks, parallel = shown_ranks(layout), config.parallel
    per_node = _PER_NODE if hardware is None else hardware.shared_by(layout.world_size).gpus_per_node
    present = set(ranks)
    whole = {axis: layout.groups(axis) for axis in ("dp", "tp", "pp", "cp")} | {"ep": layout.expert_groups()}
    groups = {
        axis: [kept for group in every if (kept := [rank for rank in group if rank in present])]
        for axis, every in whole.items()
    }
    return {
        "name": str(layout),
        "world": layout.world_size,
        "axes": {axis: layout.size(axis) for axis in groups},
        "ranks": [{"rank": rank, **layout.coordinates(rank)._asdict(), "node": rank // per_node} for rank in ranks],
        "groups": groups,
        "ranks_per_node": per_node,
        "hardware": None if hardware is None else hardware.title,
        "dtype": config.precision.dtype,
        "settings": {
            "zero": parallel.zero,
            "sequence_parallel": parallel.sequence_parallel,
            "recompute": config.train.recompute,
            "exact": config.train.exact,
        },
    }


@dataclass(frozen=True)
class WeightKind:
    """Weights of equal name (with `*` for the layer's number), shape and rule in several layers, all `frozen` or none,
    or one weight that `tied` layers share."""

    name: str
    shape: tuple[int, ...]
    split: Split
    layers: tuple[int, ...]
    tied: tuple[int, ...] = ()
    frozen: bool = False


class ModelShards:
    """Shards of a model's weights on each rank of a layout; the kinds are in the order of the model."""

    def __init__(self, config: Config) -> None:
        of_model = model_weights(config)
        self.plan = of_model.plan
        self.stages: StageMap = stage_map(self.plan, config)
        self.layout = Layout.from_config(config.parallel)
        self._parallel = config.parallel
        weights: dict[WeightShape, list[int]] = {}
        for layer, of_layer in enumerate(of_model.layers.values()):
            for weight in of_layer:
                weights.setdefault(weight, []).append(layer)
        kinds: dict[tuple[object, ...], WeightKind] = {}
        for (name, split, shape), layers in weights.items():
            first, *tied = dict.fromkeys(layers)
            owner = self.plan.layers[first]
            pattern = re.sub(r"\d+$", "*", owner) + name.removeprefix(owner) if covers(owner, name) else name
            frozen = of_model.is_frozen(name)
            key = pattern, shape, split, tuple(tied), frozen
            before = kinds[key].layers if key in kinds else ()
            kinds[key] = WeightKind(pattern, shape, split, (*before, first), tuple(tied), frozen)
        self.kinds = tuple(kinds.values())

    def bounds(self, kind: WeightKind, rank: int) -> Bounds:
        """Return the shard of a weight on a rank of a stage that has it."""
        place = shard_coordinates(self._parallel, self.layout.coordinates(rank))
        if kind.frozen and self._parallel.zero < ZERO_WEIGHTS:
            place = place.unshared
        return local_bounds(kind.shape, kind.split, kind.name.rpartition(".")[2], place)

    def holders(self, kind: WeightKind, layer: int) -> tuple[int, ...]:
        """Return the coordinates on the pp axis of the ranks that hold the weight of this kind in a layer."""
        uses = (layer, *kind.tied)
        return tuple(dict.fromkeys(self.stages.ranks[self.stages.stage_of(each)] for each in uses))

    def stages_as_json(self) -> list[dict[str, Any]]:
        """Return the stages in order: rank on the pp axis, first and past-the-last layer."""
        names = "pp_rank", "first_layer", "end_layer"
        places = ((pp_rank, *self.stages.layers(stage)) for stage, pp_rank in enumerate(self.stages.ranks))
        return [dict(zip(names, place, strict=True)) for place in places]

    def as_json(self) -> list[dict[str, Any]]:
        """Return each kind of weight with its distinct shards, and which of them the shown ranks hold.

        A shard does not depend on a rank's coordinate on the pp axis, so the other coordinates are listed instead of
        ranks.
        """
        places = [rank for rank in shown_ranks(self.layout) if self.layout.coordinates(rank).pp == 0]
        found = []
        for kind in self.kinds:
            held = [self.bounds(kind, rank) for rank in places]
            numbers = {bounds: number for number, bounds in enumerate(dict.fromkeys(held))}
            found.append(
                {
                    "name": kind.name,
                    "shape": kind.shape,
                    "rule": type(kind.split).__name__,
                    "cuts": kind.split.cuts(kind.name.rpartition(".")[2]),
                    "layers": kind.layers,
                    "tied_layers": kind.tied,
                    "shards": list(numbers),
                    "shard_of_place": [numbers[bounds] for bounds in held],
                }
            )
        return found


def _size(bounds: Bounds | None) -> int:
    return 0 if bounds is None else prod(max(0, end - start) for start, end in bounds)


def _schedule(config: Config, model: ModelShards, estimated: Estimate | None) -> dict[str, Any]:
    """Simulate the pipeline of a layout.

    Times are ms if there is an estimate. Otherwise, each of the three passes of a stage takes as long as its
    layers cost, in units of the mean over the stages, as in `threefold simulate` with forward passes alone.
    """
    run = as_executed(config)
    parallel, transfer, after = run.parallel, 0.0, {}
    if estimated is None:
        bounds = (model.stages.layers(stage) for stage in range(len(model.stages.ranks)))
        costs = [sum(model.plan.costs[first:end]) for first, end in bounds]
        mean = sum(costs) / len(costs)
        times, unit = [[cost / mean if mean else 1.0 for cost in costs]] * 3, "mean forward passes"
    else:
        of, entry, system, cause = estimated.config, estimated.hardware, estimated.system, estimated.time
        passes = zip(*stage_passes(of, entry, system), strict=True)
        times, unit = [[1e3 * part.total for part in parts] for parts in passes], "ms"
        transfer = 1e3 * send_time(of, entry, system)
        after = {"gradients": 1e3 * cause.gradients, "update": 1e3 * (cause.optimizer + cause.fixed)}
    sizes = parallel.pp, parallel.stage_chunks, run.train.gradient_accumulation_steps
    found = simulated(parallel.pipeline_schedule, *sizes, times, [transfer])
    timeline = found.timeline
    starts = sorted(start for order in timeline.spans for _, start, _ in order)
    until = starts[_MOST_SPANS] if len(starts) > _MOST_SPANS else inf
    spans = [
        [(*action, _short(start), _short(end)) for action, start, end in order if start < until]
        for order in timeline.spans
    ]
    return {
        "name": found.schedule.name,
        "micro_batches": found.micro_batches,
        "unit": unit,
        "bubble": timeline.bubble,
        "length": _short(timeline.length),
        "longest": _short(timeline.longest),
        "busy": [_short(time) for time in timeline.busy],
        "held": found.peaks,
        "after": {name: _short(time) for name, time in after.items()},
        "complete_until": _short(until) if isfinite(until) else None,
        "actions": spans,
    }


def _short(time: float) -> float:
    return float(f"{time:.6g}")


def _memory(config: Config, hardware: Hardware | None, estimated: Estimate | None, why: str) -> dict[str, Any]:
    """Return the memory of each rank of the pp axis by cause, and the memory of its device; or why it is unknown."""
    limit, limit_of = None, None
    stages: Sequence[StageMemory] = ()
    if estimated is not None and hardware is not None:
        stages, limit, limit_of = estimated.stages, estimated.usable_bytes, hardware.title
    elif not why:
        device = "cpu" if config.train.device == "cpu" else "cuda"
        stages = stage_memory(on_device(config, device), device)
        if device == "cpu":
            world = Layout.from_config(config.parallel).world_size
            limit, limit_of = memory() // world, f"this machine, {world} rank{'s' * (world > 1)}"
    causes = None if why else [stage.causes for stage in stages]
    return {"stages": causes, "why": why or None, "limit": limit, "limit_of": limit_of}


_WITHIN: Final = ("tp", "cp", "ep", "tp shares")
_WITH_ZERO: Final = {"all_gather": (3, "pass", "start"), "reduce_scatter": (2, "backward", "end")}
"""Collectives of ZeRO: a stage, when a step makes them at this stage or above, and when below it."""


def when(axis: str, operation: str, zero: int) -> str:
    """Return when a step makes a collective, as recorded (docs/parallel/traffic.md): in each `pass` or `backward` pass,
    after it (`send`), at `start` or `end`."""
    if axis in _WITHIN:
        return "pass"
    if axis == "pp":
        return "send"
    least, then, otherwise = _WITH_ZERO.get(operation, (0, "end", "end"))
    return then if zero >= least else otherwise


def _collectives(config: Config, tell: Tell) -> dict[str, Any]:
    """Return a step's collectives of the first rank at each pp coordinate, or why a dry run cannot count them."""
    if config.model.architecture == CUSTOM and config.parallel.pp > 1:
        return {"ranks": None, "why": "a dry run cannot know what the stages of a model of your own send"}
    names, ranks = ("axis", "operation", "count", "bytes", "when"), []
    for report in run_stages(config, tell):
        totals = [
            dict(zip(names, (*astuple(each), when(each.axis, each.operation, config.parallel.zero)), strict=True))
            for each in report.collectives
        ]
        ranks.append({"pp_rank": report.coordinates["pp"], "rank": report.rank, "collectives": totals})
    return {"ranks": ranks, "why": None}


def moves(before: Config, after: Config) -> dict[str, Any]:
    """Return what moves when a run continues in another layout of one model, rank by rank and weight by weight.

    A rank keeps the elements that it has in both layouts, and receives the others that it needs.
    """
    old, new = ModelShards(before), ModelShards(after)
    shapes, others = ({(kind.name, kind.layers): kind.shape for kind in each.kinds} for each in (old, new))
    if shapes != others:
        differing = next(key for key in {**shapes, **others} if shapes.get(key) != others.get(key))
        both = ("×".join(map(str, each[differing])) if differing in each else "none" for each in (shapes, others))
        raise UserError(
            f"The two layouts are of different models: {differing[0]} is {' and '.join(both)}; compare layouts of one "
            "model, such as --compare dp4,tp2."
        )
    ranks = {rank: [0, 0, 0] for rank in shown_ranks(new.layout)}
    tensors = []
    for number, kind in enumerate(new.kinds):
        routes: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
        for layer in kind.layers:
            routes.setdefault((old.holders(kind, layer), new.holders(kind, layer)), []).append(layer)
        for (sources, targets), layers in routes.items():
            of_ranks = []
            for rank, total in ranks.items():
                had = _held(old, kind, rank, sources)
                needs = _held(new, kind, rank, targets)
                kept = _overlap(had, needs)
                counts = kept, _size(needs) - kept, _size(had) - kept
                for place, count in enumerate(counts):
                    total[place] += count * len(layers)
                if needs is not None:
                    of_ranks.append((rank, *counts[:2]))
            tensors.append({"tensor": number, "layers": layers, "ranks": of_ranks})
    names = "rank", "kept", "received", "dropped"
    return {
        "layout": {"name": str(new.layout), "world": new.layout.world_size, "ranks": list(ranks)},
        "coordinates": [new.layout.coordinates(rank)._asdict() for rank in ranks],
        "stages": new.stages_as_json(),
        "shards": [{name: kind[name] for name in ("shards", "shard_of_place")} for kind in new.as_json()],
        "ranks": [dict(zip(names, (rank, *total), strict=True)) for rank, total in ranks.items()],
        "tensors": tensors,
        "itemsize": after.precision.master_itemsize,
    }


def _held(model: ModelShards, kind: WeightKind, rank: int, holders: Sequence[int]) -> Bounds | None:
    """Return a rank's shard of a weight that some pp coordinates hold; None if it has none."""
    has_it = rank < model.layout.world_size and model.layout.coordinates(rank).pp in holders
    return model.bounds(kind, rank) if has_it else None


def _overlap(one: Bounds | None, other: Bounds | None) -> int:
    if one is None or other is None:
        return 0
    return _size(tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other, strict=True)))


def proof(report: Any, called: str, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the worst error of each parameter in each layout of a report of `threefold verify --json`.

    An error that is not finite is `inf` in words, as JSON has no such number. The report is `called` in messages; it
    may have fewer layers of the model than the document of a layout.
    """
    try:
        layouts = [(each["layout"], each["verdict"], dict(each["worst_by_parameter"])) for each in report["layouts"]]
        facts = {name: report[name] for name in ("model", "dtype", "steps", "full")}
        facts["tolerance"] = float(report["tolerance"])
        errors = [{name: float(error) for name, error in worst.items()} for _, _, worst in layouts]
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        lacks = f" (it has no {error})" if isinstance(error, KeyError) else ""
        raise UserError(
            f"{called} is not a report of threefold verify{lacks}; write one with threefold verify CONFIG --json."
        ) from None
    names = {re.sub(r"\.\d+\.", ".*.", kind["name"]) for kind in document["tensors"]}
    parameters = list(dict.fromkeys(name for worst in errors for name in worst))
    if foreign := [name for name in parameters if re.sub(r"\.\d+\.", ".*.", name) not in names]:
        raise UserError(
            f"{called} has errors of {foreign[0]}, which this config's model does not have; give a report of the same "
            "model."
        )
    shown = [{name: error if isfinite(error) else "inf" for name, error in worst.items()} for worst in errors]
    return {
        **facts,
        "layouts": [{"name": name, "verdict": verdict} for name, verdict, _ in layouts],
        "parameters": parameters,
        "errors": [[worst.get(name) for worst in shown] for name in parameters],
    }
