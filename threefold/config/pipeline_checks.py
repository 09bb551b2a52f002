"""Rules of the pipeline's schedules: their stages and micro-batches."""

from threefold.config.config_error import divisors, problem
from threefold.config.schema import Config, Schedule

ONE_STAGE: tuple[Schedule, ...] = ("1f1b", "gpipe")
IN_ROUNDS: tuple[Schedule, ...] = ("interleaved", "zero-bubble")
V_SHAPED: tuple[Schedule, ...] = ("zbv", "dualpipev")
PARTITIONS = ("cost", "uniform")


def accepts(schedule: Schedule, pp: int, micro_batches: int) -> bool:
    """Whether a schedule works with so many micro-batches a step.

    `interleaved` and `zero-bubble` run them in equal rounds of at least `pp`, as many rounds as fit; `dualpipev` keeps
    two for each rank under way.
    """
    if schedule in IN_ROUNDS:
        return micro_batches % max(1, micro_batches // pp) == 0
    return schedule != "dualpipev" or micro_batches >= 2 * pp


def check_pipeline(config: Config) -> None:
    """Check the settings of the pipeline.

    Raises:
        UserError: the first rule that is broken.
    """
    parallel = config.parallel
    _check_partition(config)
    if parallel.schedule not in ONE_STAGE and parallel.pp == 1:
        rule = "there is no pipeline where parallel.pp is 1; use 1f1b or parallel.pp 2"
        raise problem(config, "parallel.schedule", rule)
    _check_stages(config)
    if parallel.pp > 1 and not accepts(parallel.schedule, parallel.pp, config.train.gradient_accumulation_steps):
        raise problem(config, "train.gradient_accumulation_steps", _micro_batch_rule(config))


def _check_partition(config: Config) -> None:
    partition = config.parallel.partition
    if isinstance(partition, str) and partition not in PARTITIONS and not partition.startswith("class:"):
        rule = "must be cost, uniform, class: and the name of a class, or a list of layers; use cost"
        raise problem(config, "parallel.partition", rule)


def _check_stages(config: Config) -> None:
    parallel, layers = config.parallel, config.model.num_layers
    chunks, schedule = parallel.stage_chunks, parallel.schedule
    for schedules, needed in ((ONE_STAGE, 1), (V_SHAPED, 2)):
        if schedule in schedules and chunks != needed:
            other = "interleaved" if needed == 1 else "zero-bubble"
            rule = f"parallel.schedule {schedule} has {needed} of them on each rank; use {needed} or schedule {other}"
            raise problem(config, "parallel.stage_chunks", rule)
    if parallel.pp > layers:
        rule = f"each stage needs a layer and model.num_layers is {layers}; use at most {layers}"
        raise problem(config, "parallel.pp", rule)
    if parallel.pp * chunks > layers + 2:
        rule = (
            f"parallel.pp {parallel.pp} then has {parallel.pp * chunks} stages for {layers + 2} layers, the embedding "
            f"and the head among them; use {_fewer(config)} or model.num_layers {parallel.pp * chunks - 2}"
        )
        raise problem(config, "parallel.stage_chunks", rule)


def _fewer(config: Config) -> str:
    """A setting that leaves each stage a layer."""
    parallel, layers = config.parallel, config.model.num_layers + 2
    if parallel.schedule not in V_SHAPED:
        return str(layers // parallel.pp)
    return f"parallel.pp {layers // 2}" if layers >= 4 else "schedule 1f1b"


def _micro_batch_rule(config: Config) -> str:
    """What the schedule needs, and the nearest number of micro-batches, with the same global batch if there is one."""
    train, schedule, pp, dp = config.train, config.parallel.schedule, config.parallel.pp, config.parallel.dp
    given, share = train.gradient_accumulation_steps, train.global_batch_size // dp
    if schedule == "dualpipev":
        need = f"parallel.schedule dualpipev needs at least 2 for each of the {pp} pipeline ranks"
    else:
        need = f"parallel.schedule {schedule} runs them in {given // pp} equal rounds of at least parallel.pp {pp}"
    fitting = [count for count in divisors(share) if accepts(schedule, pp, count)]
    if fitting:
        return f"{need}; use {min(fitting, key=lambda count: (abs(count - given), count))}"
    larger = next(count for count in range(given, 2 * pp + given) if accepts(schedule, pp, count))
    return f"{need}; use {larger} with train.global_batch_size {larger * train.micro_batch_size * dp}"
