"""Checks of the pipeline's settings: the schedule, its stages and its number of micro-batches."""

from threefold.config.config_error import problem
from threefold.config.divisors import divisors
from threefold.config.schema import Config

PARTITIONS = ("cost", "uniform", "uniform-chunks")


def check_pipeline(config: Config) -> None:
    """Check the settings of the pipeline's stages.

    Raises:
        UserError: the first rule that is broken.
    """
    parallel, schedule = config.parallel, config.parallel.pipeline_schedule
    _check_partition(config)
    if parallel.pp == 1 and (schedule.ranks is not None or schedule.stages_per_rank != 1):
        rule = f"there is no pipeline where parallel.pp is 1; use 1f1b or parallel.pp {max(2, schedule.ranks or 2)}"
        raise problem(config, "parallel.schedule", rule)
    if schedule.ranks not in (None, parallel.pp):
        rule = f"parallel.schedule {schedule.name} has a line for each of {schedule.ranks} ranks; use {schedule.ranks}"
        raise problem(config, "parallel.pp", rule)
    _check_stages(config)


def check_micro_batches(config: Config) -> None:
    """Check that the schedule takes the number of micro-batches.

    Raises:
        UserError: it does not.
    """
    parallel, schedule = config.parallel, config.parallel.pipeline_schedule
    if parallel.pp > 1 and not schedule.accepts(parallel.pp, config.train.gradient_accumulation_steps):
        raise problem(config, "train.gradient_accumulation_steps", _micro_batch_rule(config))


def _check_partition(config: Config) -> None:
    partition = config.parallel.partition
    if isinstance(partition, str) and partition not in PARTITIONS and not partition.startswith("class:"):
        rule = "must be cost, uniform, uniform-chunks, class: and the name of a class, or a list of layers; use cost"
        raise problem(config, "parallel.partition", rule)


def _check_stages(config: Config) -> None:
    parallel, layers, schedule = config.parallel, config.model.blocks, config.parallel.pipeline_schedule
    needed = schedule.stages_per_rank
    if needed is not None and parallel.stage_chunks != needed:
        other = "interleaved" if needed == 1 else "zero-bubble"
        rule = f"parallel.schedule {schedule.name} has {needed} of them on each rank; use {needed} or schedule {other}"
        raise problem(config, "parallel.stage_chunks", rule)
    if layers is None:  # an own model, whose plan has the layers
        return
    if parallel.pp > layers:
        rule = f"each stage needs a layer and model.num_layers is {layers}; use at most {layers}"
        raise problem(config, "parallel.pp", rule)
    stages = len(schedule.stage_ranks(parallel.pp, parallel.stage_chunks))
    if stages > layers + 2:
        rule = (
            f"parallel.pp {parallel.pp} then has {stages} stages for {layers + 2} layers, the embedding "
            f"and the head among them; use {_fewer(config)} or model.num_layers {stages - 2}"
        )
        raise problem(config, "parallel.stage_chunks", rule)


def _fewer(config: Config) -> str:
    """A setting that leaves each stage a layer."""
    parallel, layers = config.parallel, config.model.num_layers + 2
    schedule = parallel.pipeline_schedule
    if schedule.stages_per_rank is None:
        return str(layers // parallel.pp)
    return f"parallel.pp {layers // 2}" if layers >= 4 and schedule.ranks is None else "schedule 1f1b"


def _micro_batch_rule(config: Config) -> str:
    """What the schedule needs, and the nearest number of micro-batches, with the same global batch if there is one."""
    train, schedule, pp, dp = config.train, config.parallel.pipeline_schedule, config.parallel.pp, config.parallel.dp
    given, share = train.gradient_accumulation_steps, train.global_batch_size // dp
    need = f"parallel.schedule {schedule.name} {schedule.micro_batch_rule(pp, given)}"
    fitting = [count for count in divisors(share) if schedule.accepts(pp, count)]
    if fitting:
        return f"{need}; use {min(fitting, key=lambda count: (abs(count - given), count))}"
    counts = [schedule.micro_batches] if schedule.micro_batches else range(given, 2 * pp + given)
    larger = next(count for count in counts if schedule.accepts(pp, count))
    return f"{need}; use {larger} with train.global_batch_size {larger * train.micro_batch_size * dp}"
