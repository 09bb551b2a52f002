"""Estimated time, memory and utilisation of a training step, from a config and a hardware entry alone."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import log, sqrt
from typing import Any, Final

from threefold.comm.layout import Coordinates, Layout
from threefold.config import Config
from threefold.config.resolve import on_device
from threefold.config.schedules import is_custom_schedule
from threefold.config.section import nearest_multiple
from threefold.errors import UserError
from threefold.parallel.pipeline.partition import stage_map
from threefold.planner import cost, layer_cost
from threefold.planner.block import block_shapes, describe_model, further_blocks
from threefold.planner.cost import Number, Pipeline
from threefold.planner.hardware import Hardware
from threefold.planner.layer_cost import Passes, Seconds
from threefold.planner.model_size import (
    ZERO_WEIGHTS,
    average_states,
    described_blocks,
    flops_per_token,
    model_weights,
    optimizer_states,
    shard_coordinates,
)
from threefold.planner.stage_memory import RESERVE, StageMemory, as_executed, stage_memory
from threefold.planner.systems import SYSTEMS, System, find_system


def layer_elements(config: Config) -> list[float]:
    """Count each layer's weight elements on a tensor- and expert-parallel rank, without norms and biases (some 0.1
    %); of frozen weights none."""
    model, parallel = config.model, config.parallel
    if config.adapter.rank or config.optimizer.frozen:
        weights, place = model_weights(config), shard_coordinates(parallel, Coordinates(0, 0, 0, 0)).unshared
        return [float(weights.held([layer], place).trained) for layer in weights.plan.layers]
    table = model.vocab_size * model.hidden_size / parallel.tp
    found = [table]
    for block in described_blocks(config):
        attention, whole = block.hidden * block.head_dim * 2 * (block.heads + block.key_heads), 0
        if latents := block.latents:
            keys = latents.keys * (block.head_dim - latents.rotary + latents.value)
            of_head = block.head_dim * (latents.queries or block.hidden) + keys + latents.value * block.hidden
            attention, whole = block.heads * of_head, block.hidden * (latents.queries + latents.shared)
        inner: float = block.ffn
        if block.experts is not None:
            inner = block.experts.count / parallel.ep * block.experts.inner + block.experts.shared
        found.append((attention + (3 if block.gated else 2) * block.hidden * inner) / parallel.tp + whole)
    head = 0.0 if model.tie_embeddings and parallel.pp == 1 else table
    if depths := model.mtp_layers:
        head += depths * (found[-1] + 2 * model.hidden_size**2)
        head += 0.0 if model.tie_embeddings or parallel.pp == 1 else table  # that of the embeddings
    return [*found, head]


_CAUSES: Final = (
    *("matrix products", "attention", "memory-bound work", "tensor parallelism", "context parallelism"),
    *("expert parallelism", "Python and autograd", "pipeline bubble", "pipeline sends", "gradients and weights"),
    *("optimizer", "fixed", "slowest device"),
)
"""Names of the parts of `StepTime`, those of its computation first."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause, which add up to `seconds`.

    `compute` is that of the slowest pipeline rank; `sends` and `gradients` are exposed transfers, sums and gathers,
    with the slowdown that hidden ones cause; `slowest_device` is waiting for the slowest of all devices.
    """

    compute: Seconds
    bubble: float
    sends: float
    gradients: float
    optimizer: float
    fixed: float
    slowest_device: float = 0.0

    @property
    def seconds(self) -> float:
        return sum(self.causes.values())

    @property
    def causes(self) -> dict[str, float]:
        """Seconds by name of the cause."""
        others = self.bubble, self.sends, self.gradients, self.optimizer, self.fixed, self.slowest_device
        return dict(zip(_CAUSES, (*self.compute, *others), strict=True))


def waiting_share(world: int) -> float:
    """Return the fraction of a step that the slowest of `world` devices lags behind their mean: √(2 ln n) deviations,
    with a relative standard deviation of 0.4 %."""
    return 0.004 * sqrt(2 * log(world)) if world > 1 else 0.0


def step_time(config: Config, hardware: Hardware, system: System) -> StepTime:
    """Estimate the time of a step on hardware; a CPU is given as its ranks share it."""
    model, parallel, train = config.model, config.parallel, config.train
    elements, of_stages = layer_elements(config), stage_passes(config, hardware, system)
    ranks, held = [layer_cost.NOTHING] * parallel.pp, [0.0] * parallel.pp
    stages = stage_map(describe_model(model, config.data.sequence_length).plan, config)
    for stage, place in enumerate(stages.ranks):
        ranks[place] = ranks[place].plus(of_stages[stage])
        held[place] += sum(elements[layer] for layer in range(*stages.layers(stage)))
    line = _pipeline(config, hardware, system, ranks, of_stages)
    slowest, count = max(ranks, key=lambda each: each.total), train.gradient_accumulation_steps
    exposed = []
    for rank, weights in zip(ranks, held, strict=True):
        passes = rank.forward.total, rank.backward.total + rank.weight.total
        exposed.append(gradient_time(config, hardware, system, parallel.zero, weights, *passes, count))
    if parallel.zero == ZERO_WEIGHTS and (config.adapter.rank or config.optimizer.frozen):
        exposed.append(_frozen_gathers(config, hardware, system, slowest))
    found = StepTime(
        compute=slowest.forward.plus(slowest.backward, slowest.weight).times(count),
        bubble=exposed_bubble(line.busy, line.bubble, hardware),
        sends=line.sends,
        gradients=max(exposed),
        optimizer=update_time(config, hardware, system, parallel.zero, max(held)),
        fixed=hardware.achievable.step,
    )
    world = Layout.from_config(parallel).world_size
    return replace(found, slowest_device=found.seconds * waiting_share(world))


def _frozen_gathers(config: Config, hardware: Hardware, system: System, slowest: Passes) -> float:
    """Return the exposed seconds in which ZeRO 3 gathers all weights, frozen ones too, without sums of gradients."""
    weights, place = model_weights(config), shard_coordinates(config.parallel, Coordinates(0, 0, 0, 0)).unshared
    whole = weights.held(weights.plan.layers, place).all / config.parallel.pp
    group = cost.axis_group(config, "dp·cp", hardware.gpus_per_node, system)
    passes = slowest.forward.total, slowest.backward.total + slowest.weight.total
    count, layers = config.train.gradient_accumulation_steps, max(1, config.model.num_layers // config.parallel.pp)
    step = whole, *passes, count, ZERO_WEIGHTS
    return cost.gradient_seconds(hardware, system, group, *step, config.precision.itemsize, 0, layers)


def gradient_time(
    config: Config,
    hardware: Hardware,
    system: System,
    zero: int,
    elements: Number,
    forward: Number,
    backward: Number,
    micro_batches: Number,
) -> Number:
    """Return the exposed seconds of a step's gradient sums and weight gathers, for a rank with some weight elements and
    the seconds of one micro-batch's passes through them; `zero` replaces the config's."""
    group = cost.axis_group(config, "dp·cp", hardware.gpus_per_node, system)
    sizes = config.precision.itemsize, config.precision.master_itemsize
    layers = max(1, config.model.num_layers // config.parallel.pp)
    step = elements, forward, backward, micro_batches, zero
    return cost.gradient_seconds(hardware, system, group, *step, *sizes, layers)


def update_time(config: Config, hardware: Hardware, system: System, zero: int, elements: Number) -> Number:
    """Return the seconds of the update of a rank with some weights; see `gradient_time`."""
    precision, parallel = config.precision, config.parallel
    ranks = parallel.dp * parallel.cp if zero or system.sharded_optimizer else 1
    states = max(optimizer_states(config.optimizer)) + average_states(config)
    return cost.update_seconds(hardware, elements / ranks, states, precision.itemsize, precision.master_weights)


def exposed_bubble(busy: float, bubble: float, hardware: Hardware) -> float:
    """Return the part of the bubble that lengthens a step in which a rank is busy. Ranks that share cores yield them
    while they wait, down to the step time of ranks with a core each."""
    fraction = hardware.cores / hardware.gpus_per_node if hardware.cores else 1.0
    return max(0.0, (busy + bubble) * fraction - busy) if fraction < 1 else bubble


def stage_passes(config: Config, hardware: Hardware, system: System) -> list[Passes]:
    """Estimate the passes of each pipeline stage, its layers' together, for one micro-batch."""
    model, train = config.model, config.train
    described = described_blocks(config)
    sizes = {block: layer_cost.cost_block(config, block, hardware.gpus_per_node, system) for block in set(described)}
    outer = sizes[described[0]]
    weights = model_weights(config)
    passes = [layer_cost.embedding_passes(outer, hardware, weights.trains(weights.plan.layers[0]))]
    for layer, block in enumerate(described):
        treated = train.recompute if layer % train.recompute_every == 0 else "none"
        passes.append(layer_cost.block_seconds(sizes[block], hardware, system, treated))
    logits = model.vocab_size, train.loss_chunk_size
    treated = train.recompute if len(described) % train.recompute_every == 0 else "none"
    of_depths = model.mtp_layers, treated, *logits
    further = layer_cost.further_passes(sizes[described[-1]], *of_depths, hardware, system)
    passes.append(layer_cost.head_passes(outer, *logits, hardware, system, weights.trains_head[0]).plus(further))
    stages = stage_map(describe_model(model, config.data.sequence_length).plan, config)
    bounds = (stages.layers(stage) for stage in range(len(stages.ranks)))
    return [layer_cost.NOTHING.plus(*passes[first:end]) for first, end in bounds]


def sent_bytes(config: Config, system: System) -> int:
    """Return the bytes that a stage sends to the next for one micro-batch. Some systems send only each tensor-parallel
    rank's part and gather it there (Narayanan et al., arXiv 2104.04473, section 4.1)."""
    parallel, train = config.parallel, config.train
    tokens = train.micro_batch_size * config.data.sequence_length // parallel.cp
    parts = parallel.tp if parallel.sequence_parallel or system.scatters_sends else 1
    return tokens * config.model.hidden_size * config.precision.itemsize // parts


def send_time(config: Config, hardware: Hardware, system: System) -> float:
    """Return the seconds in which a stage's output reaches the next stage, for one micro-batch."""
    group = cost.axis_group(config, "pp", hardware.gpus_per_node, system)
    return cost.send_seconds(hardware, group, sent_bytes(config, system))


def _pipeline(
    config: Config, hardware: Hardware, system: System, ranks: list[Passes], stages: list[Passes]
) -> Pipeline:
    parallel, micro_batches = config.parallel, config.train.gradient_accumulation_steps
    send = send_time(config, hardware, system)
    is_custom = parallel.pp > 1 and is_custom_schedule(parallel.schedule)
    # The seconds of all forward passes, of the backward passes for inputs, and of those for weights.
    passes = zip(*(stages if is_custom else ranks), strict=True)
    forward, backward, weight = (tuple(part.total for part in parts) for parts in passes)
    if not is_custom:
        step = parallel.schedule, parallel.stage_chunks, micro_batches
        return cost.pipeline_seconds(forward, backward, weight, *step, send, system.overlap_sends)
    from threefold.planner.schedule import StageTimes, program_of, simulate

    program = program_of(parallel.pipeline_schedule, parallel.pp, parallel.stage_chunks, micro_batches)
    of_stages, busy = StageTimes(forward, backward, weight), micro_batches * max(each.total for each in ranks)
    alone = simulate(program, of_stages, 0.0).length
    return Pipeline(busy, alone - busy, simulate(program, of_stages, send).length - alone)


@dataclass(frozen=True)
class Estimate:
    """Estimated time of a training step by cause, and memory of each pipeline rank."""

    config: Config
    hardware: Hardware
    system: System
    time: StepTime
    stages: tuple[StageMemory, ...]
    usable_bytes: int

    @property
    def step_seconds(self) -> float:
        return self.time.seconds

    @property
    def ranks(self) -> int:
        return Layout.from_config(self.config.parallel).world_size

    @property
    def tokens_per_step(self) -> int:
        return self.config.train.global_batch_size * self.config.data.sequence_length

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks together."""
        return self.tokens_per_step / self.step_seconds

    @cached_property
    def model_flops(self) -> float:
        """Operations of a step over all ranks that the model needs, however it is computed."""
        return (flops_per_token(self.config) or 0.0) * self.tokens_per_step

    @cached_property
    def hardware_flops(self) -> float:
        """Operations of a step that are executed: the model's, plus those that recompute repeats."""
        train, model, length = self.config.train, self.config.model, self.config.data.sequence_length
        described, again = describe_model(model, length), 0.0
        blocks, further = block_shapes(described), further_blocks(described)
        chosen = -(-len(blocks) // train.recompute_every)
        if len(blocks) % train.recompute_every == 0:  # the turn of the last layer
            chosen += len(further)
        treated = chosen / (len(blocks) + len(further))
        if train.recompute == "selective":
            seen = (
                block.heads * (block.head_dim + block.value_dim) * min(block.window or length, length)
                for block in (*blocks, *further)
            )
            again = 2 * sum(seen) * treated
        elif train.recompute != "none":
            head = (1 + len(further)) * model.vocab_size + len(further) * 2 * model.hidden_size
            again = (model_weights(self.config).forward_flops_per_token - 2 * model.hidden_size * head) * treated
        return self.model_flops + again * self.tokens_per_step

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: the fraction of the peak matrix rate that the model's operations take."""
        return self.model_flops / self._most_flops

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: the fraction of the peak matrix rate that all executed operations take."""
        return self.hardware_flops / self._most_flops

    @property
    def _most_flops(self) -> float:
        """Operations of a step at the peak matrix rate of all ranks."""
        return self.step_seconds * self.ranks * self.hardware.matrix_rate(self.config.precision.dtype)

    @property
    def peak_bytes(self) -> list[int]:
        """Peak bytes of each pipeline rank."""
        return [stage.peak for stage in self.stages]

    @property
    def needed_bytes(self) -> list[int]:
        """Peak bytes of each pipeline rank, without what an allocator releases when memory runs out."""
        return [stage.needed for stage in self.stages]

    @property
    def fits(self) -> bool:
        return max(self.needed_bytes) <= self.usable_bytes

    @property
    def error_band(self) -> tuple[float, float]:
        """Seconds between which nine in ten steps are expected."""
        error = self.hardware.uncertainty
        return self.step_seconds / (1 + error), self.step_seconds * (1 + error)

    def as_json(self) -> dict[str, Any]:
        """Return plain values: seconds, bytes and operations."""
        flops = "mfu", "hfu", "model_flops", "hardware_flops"
        memory = "peak_bytes", "needed_bytes", "usable_bytes", "fits"
        causes = {name: seconds for name, seconds in self.time.causes.items() if seconds}
        names = "step_seconds", "error_band", "tokens_per_second", *flops, *memory
        return {
            **{name: getattr(self, name) for name in names},
            "hardware": self.hardware.name,
            "system": self.system.name,
            "ranks": self.ranks,
            "limited_by": max(causes, key=causes.__getitem__),
            "seconds": causes,
            "memory": [stage.causes for stage in self.stages],
            "causes": [stage.by_dry_run for stage in self.stages],
        }


def built_in_system(config: Config, hardware: Hardware) -> System:
    """Return this package as a training system, for the time and memory of `threefold train` itself."""
    if hardware.device == "cpu":
        return SYSTEMS["own-cpu"]
    return SYSTEMS["own-compiled" if config.train.compile else "own"]


def estimate(config: Config, hardware: Hardware, system: System | str | None = None) -> Estimate:
    """Estimate the time and memory of one training step under a training system, by default this package."""
    parallel, world = config.parallel, Layout.from_config(config.parallel).world_size
    if not hardware.fills_nodes(world):
        per_node, rest = hardware.gpus_per_node, world // parallel.dp
        fitting = (dp for dp in range(parallel.dp, 0, -1) if dp * rest % per_node == 0)
        raise UserError(
            f"parallel.dp is {parallel.dp}, which with the other axes makes {world:,} ranks, but nodes of "
            f"{hardware.name} have {per_node} and are rented whole; use "
            f"{next(fitting, nearest_multiple(parallel.dp, per_node))}."
        )
    hardware, config = hardware.shared_by(world), as_executed(on_device(config, hardware.device))
    if system is None:
        system = built_in_system(config, hardware)
    elif isinstance(system, str):
        system = find_system(system)
    time, stages = step_time(config, hardware, system), stage_memory(config, hardware.device, system.name)
    return Estimate(config, hardware, system, time, tuple(stages), usable_memory(hardware))


def usable_memory(hardware: Hardware) -> int:
    """Return the bytes of a device that a rank may use."""
    usable = hardware.memory_bytes - (RESERVE if hardware.device == "cuda" else 0)
    if usable <= 0:
        raise UserError(
            f"The hardware {hardware.name} has memory_bytes {hardware.memory_bytes} but a GPU needs more than the "
            f"{RESERVE} that CUDA and NCCL take; give it at least 8e9."
        )
    return usable
