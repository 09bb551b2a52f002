"""The time of a training step of a config on a type of hardware, by cause: the sum of the parts in this room."""

from dataclasses import dataclass, replace
from math import log, sqrt
from typing import Final

from threefold.config import Config
from threefold.config.model import OWN
from threefold.config.schedules import is_schedule_file
from threefold.errors import UserError
from threefold.models.registry import model_plan
from threefold.parallel.pipeline.stage_map import stage_map
from threefold.plan.cost.block import NOTHING, Passes, Seconds, block_seconds
from threefold.plan.cost.collectives import Group, send_seconds
from threefold.plan.cost.ends import embedding_seconds, head_seconds
from threefold.plan.cost.gradients import gradient_seconds, update_seconds
from threefold.plan.cost.parameters import layer_elements
from threefold.plan.cost.pipeline import Pipeline, pipeline_seconds
from threefold.plan.cost.sizes import ITEMSIZES, EndShapes, axis_group, block_of
from threefold.plan.cost.system import System
from threefold.plan.hardware.entry import Hardware

VARIATION: Final = 0.004
"""Standard deviation of the speed of devices of one type; a step waits for the slowest of them."""
_STATES: Final = {"adamw": 2, "adam": 2, "muon": 2, "lion": 1, "sgd": 1}
"""Optimizer → tensors of its state for each weight, at most."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by cause; together they are `seconds`.

    Attributes:
        compute: of the slowest pipeline rank's micro-batches, by cause.
        bubble: in which the pipeline fills and drains.
        sends: between pipeline ranks.
        gradients: sums over replicas and gathers of weights that nothing hides, and what they slow down.
        optimizer: the update.
        fixed: of a step, whatever it computes.
        slowest_device: of waiting for the slowest of all devices.
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
        """Name of a cause → its seconds."""
        return {
            "matrix products": self.compute.matrix,
            "attention": self.compute.attention,
            "memory-bound work": self.compute.memory,
            "tensor parallelism": self.compute.tensor,
            "context parallelism": self.compute.context,
            "expert parallelism": self.compute.experts,
            "Python and autograd": self.compute.host,
            "pipeline bubble": self.bubble,
            "pipeline sends": self.sends,
            "gradients and weights": self.gradients,
            "optimizer": self.optimizer,
            "fixed": self.fixed,
            "slowest device": self.slowest_device,
        }


def waiting_share(world: int) -> float:
    """By which share of a step the slowest of so many devices is later than their mean: √(2 ln n) deviations."""
    return VARIATION * sqrt(2 * log(world)) if world > 1 else 0.0


def step_time(config: Config, hardware: Hardware, system: System) -> StepTime:
    """The time of a step.

    Args:
        config: resolved.
        hardware: that it runs on; of a CPU, as its ranks share it.
        system: whose kernels and overlap it has.

    Raises:
        UserError: the model is of one's own, of whose layers no costs are known; or the hardware has no matrix rate for
            the dtype.
    """
    if config.model.architecture == OWN:
        raise UserError(f"model.architecture is {OWN}, whose layers tell no costs to estimate by; use gpt or llama.")
    model, parallel, train = config.model, config.parallel, config.train
    passes, elements = layer_passes(config, hardware, system), layer_elements(config)
    ranks, held = [NOTHING] * parallel.pp, [0.0] * parallel.pp
    stages = stage_map(model_plan(model, config.data.sequence_length), config)
    of_stages = []
    for stage, place in enumerate(stages.ranks):
        own = range(*stages.layers(stage))
        of_stages.append(NOTHING.plus(*(passes[layer] for layer in own)))
        ranks[place] = ranks[place].plus(of_stages[-1])
        held[place] += sum(elements[layer] for layer in own)
    itemsize = ITEMSIZES[config.precision.dtype]
    summed = max(4, itemsize) if config.precision.master_weights else itemsize
    line = _pipeline(config, hardware, system, ranks, of_stages)
    slowest = max(ranks, key=lambda each: each.total)
    group = axis_group(config, "dp·cp", hardware.gpus_per_node, system)
    layers = max(1, model.num_layers // parallel.pp)
    exposed = max(
        gradient_seconds(
            hardware,
            system,
            group,
            elements=weights,
            forward=rank.forward.total,
            backward=rank.backward.total + rank.weight.total,
            micro_batches=train.gradient_accumulation_steps,
            zero=parallel.zero,
            itemsize=itemsize,
            gradient_bytes=summed,
            layers=layers,
        ).exposed
        for rank, weights in zip(ranks, held, strict=True)
    )
    share = group.ranks if parallel.zero or system.sharded_optimizer else 1
    states = optimizer_tensors(config)
    found = StepTime(
        compute=slowest.forward.plus(slowest.backward, slowest.weight).times(train.gradient_accumulation_steps),
        bubble=exposed_bubble(line.busy, line.bubble, hardware),
        sends=line.sends,
        gradients=exposed,
        optimizer=update_seconds(hardware, max(held) / share, states, itemsize, config.precision.master_weights),
        fixed=hardware.achievable.step,
    )
    world = parallel.dp * parallel.tp * parallel.pp * parallel.cp
    return replace(found, slowest_device=found.seconds * waiting_share(world))


def exposed_bubble(busy: float, bubble: float, hardware: Hardware) -> float:
    """The bubble as far as it lengthens a step: ranks that take turns on fewer cores leave them to others while they
    wait, up to the step that ranks with a core each would have.

    Args:
        busy: seconds of a rank's work, at the rate of its share of the cores.
        bubble: seconds that it waits beside that.
        hardware: of the ranks.
    """
    share = hardware.cores / hardware.gpus_per_node if hardware.cores else 1.0
    return max(0.0, (busy + bubble) * share - busy) if share < 1 else bubble


def optimizer_tensors(config: Config) -> int:
    """Tensors of the optimizer's state for each weight, at most."""
    return _STATES.get(config.optimizer.name, 2)


def layer_passes(config: Config, hardware: Hardware, system: System) -> list[Passes]:
    """The passes of each layer for one micro-batch: the embedding, the blocks, the head."""
    model, train, per_node = config.model, config.train, hardware.gpus_per_node
    blocks = {}
    found = []
    for layer in range(model.num_layers):
        kind = model.has_experts(layer), model.window(layer)
        if kind not in blocks:
            blocks[kind] = block_of(config, layer, per_node, system)
        treated = train.recompute if layer % train.recompute_every == 0 else "none"
        found.append(block_seconds(blocks[kind], hardware, system, treated))
    ends = EndShapes(model.vocab_size, next(iter(blocks.values())), train.loss_chunk_size)
    return [embedding_seconds(ends, hardware, system), *found, head_seconds(ends, hardware, system)]


def sent_bytes(config: Config, system: System) -> int:
    """Bytes that a stage sends to the next for a micro-batch. Some systems send a tensor rank's part of
    them and gather it there (Narayanan et al., arXiv 2104.04473, section 4.1)."""
    parallel, train = config.parallel, config.train
    tokens = train.micro_batch_size * config.data.sequence_length // parallel.cp
    parts = parallel.tp if parallel.sequence_parallel or system.scatters_sends else 1
    return tokens * config.model.hidden_size * ITEMSIZES[config.precision.dtype] // parts


def _pipeline(
    config: Config, hardware: Hardware, system: System, ranks: list[Passes], stages: list[Passes]
) -> Pipeline:
    parallel, micro_batches = config.parallel, config.train.gradient_accumulation_steps
    group: Group = axis_group(config, "pp", hardware.gpus_per_node, system)
    send = send_seconds(hardware, group, sent_bytes(config, system))
    if parallel.pp > 1 and is_schedule_file(parallel.schedule):
        return _simulated(config, ranks, stages, send)
    return pipeline_seconds(
        [each.forward.total for each in ranks],
        [each.backward.total for each in ranks],
        [each.weight.total for each in ranks],
        parallel.schedule,
        parallel.stage_chunks,
        micro_batches,
        send,
        system.overlap_sends,
    )


def _simulated(config: Config, ranks: list[Passes], stages: list[Passes], send: float) -> Pipeline:
    """Of a schedule from a file, action by action."""
    from threefold.plan.schedule.orders import program_of
    from threefold.plan.schedule.simulator import StageTimes, simulate

    parallel, micro_batches = config.parallel, config.train.gradient_accumulation_steps
    program = program_of(parallel.pipeline_schedule, parallel.pp, parallel.stage_chunks, micro_batches)
    times = StageTimes(
        tuple(each.forward.total for each in stages),
        tuple(each.backward.total for each in stages),
        tuple(each.weight.total for each in stages),
    )
    busy = micro_batches * max(each.total for each in ranks)
    alone = simulate(program, times, 0.0).length
    return Pipeline(busy, alone - busy, simulate(program, times, send).length - alone)
