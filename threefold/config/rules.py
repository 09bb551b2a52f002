"""Rules between settings: compatible features, divisibility, and the error sentences."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import gcd, lcm, log2
from typing import Final

from threefold.config.by_step import entries_of, parts_by_step, sum_before, value_at
from threefold.config.loading import problem
from threefold.config.model import CUSTOM, FAMILIES
from threefold.config.optimizer import BUILT_IN, EMA, HYPER_PARAMETERS, OPTIMIZERS, OptimizerConfig, hyper_parameters
from threefold.config.schema import Config, section_types
from threefold.config.section import divisors, nearest_divisor, nearest_multiple
from threefold.doors import added, imported, require_installed

Broken = Iterator[tuple[str, str]]
"""Settings that break a rule, as `section.key`, with the rule, as it follows 'but' in the sentence about it."""


@dataclass(frozen=True)
class Rule:
    """Two features of `reference.FEATURES` that cannot be combined.

    `reason` follows 'but' in the error about `key`; its `{config}` fields are filled in.
    """

    first: str
    second: str
    key: str
    broken: Callable[[Config], bool]
    reason: str


RULES: tuple[Rule, ...] = (
    Rule(
        "zero",
        "zero-bubble",
        "parallel.zero",
        lambda config: config.parallel.zero > 0 and config.parallel.pipeline_schedule.defers_weight_gradients,
        "parallel.schedule {config.parallel.schedule} defers weight gradients until after their layer's backward pass, "
        "at whose end fully_shard reduce-scatters them; use 0 or schedule interleaved",
    ),
    Rule(
        "compression",
        "zero",
        "parallel.gradient_compression",
        lambda config: config.parallel.gradient_compression != "none" and config.parallel.zero > 0,
        "parallel.zero is {config.parallel.zero}, which would also add the micro-batches up in 16 bits; use none or "
        "parallel.zero 0",
    ),
    Rule(
        "compression",
        "pure-bf16",
        "parallel.gradient_compression",
        lambda config: config.parallel.gradient_compression != "none" and not config.precision.master_weights,
        "precision.master_weights is false, so the gradients have 16 bits already; use none or master_weights true",
    ),
    Rule(
        "fp8",
        "fp16",
        "precision.fp8",
        lambda config: config.precision.fp8 and config.precision.dtype not in ("bf16", "fp32"),
        "precision.dtype is {config.precision.dtype} and float8 products are of bf16 or fp32 numbers; use false or "
        "precision.dtype bf16",
    ),
)


DEFAULT_GLOBAL_BATCH_SIZE = 32


def batch_sizes(config: Config, largest: int) -> dict[str, int]:
    """Derive the batch sizes that were not given; raise a `UserError` if they disagree or do not divide each other.

    The global batch size is never derived from the layout alone, because a different dp would then train a different
    model: it defaults to 32, and a layout that does not divide it is refused. A micro-batch whose size is not given has
    at most `largest` sequences.
    """
    train, dp = config.train, config.parallel.dp
    total, micro, steps = train.global_batch_size, train.micro_batch_size, train.gradient_accumulation_steps
    if micro and steps:
        product = micro * steps * dp
        if total and int(total) != product:
            rule = f"must be micro_batch_size {micro} · gradient_accumulation_steps {steps} · dp {dp} = {product}"
            rule = f"{rule}; set it to {product} or leave one of the three out"
            raise problem(config, "train.global_batch_size", rule)
        total = total or product
    else:
        total = total or DEFAULT_GLOBAL_BATCH_SIZE
        _check_multiples(config, total, dp, f"parallel.dp {dp}")
        samples = total // dp
        if (factor := micro or steps) and samples % factor and not (micro and len(entries_of(total)) > 1):
            works = nearest_divisor(factor, samples)
            rule = f"must divide global_batch_size {total:d} / dp {dp} = {samples}; use {works}"
            raise problem(config, f"train.{'micro_batch_size' if micro else 'gradient_accumulation_steps'}", rule)
        if not factor:
            sizes = default_micro_batches(config, total)
            micro = next((size for size in sizes if size <= largest), sizes[-1])
        micro, steps = micro or samples // steps, steps or max(1, samples // micro)
    _check_multiples(config, total, micro * dp, f"train.micro_batch_size {micro} · parallel.dp {dp} = {micro * dp}")
    return {"global_batch_size": total, "micro_batch_size": micro, "gradient_accumulation_steps": steps}


def _check_multiples(config: Config, total: int, unit: int, named: str) -> None:
    for step, size in entries_of(total):
        if size % unit:
            use = f"must be a multiple of {named}; use {nearest_multiple(size, unit)}"
            raise problem(config, "train.global_batch_size", f"{_of_entry(total, step, size)}{use}", value=total)


def _of_entry(value: int, step: int, each: int) -> str:
    """Return the beginning of a rule about one entry of a setting; empty for a setting that does not change."""
    return "" if len(entries_of(value)) == 1 else f"its entry {step}: {each} "


def default_micro_batches(config: Config, total: int | None = None) -> list[int]:
    """Return the possible default micro-batch sizes, largest first, for a global batch size or the config's.

    They fit the schedule and keep it busy; if none does, there is only the smallest.
    """
    parallel, schedule = config.parallel, config.parallel.pipeline_schedule
    counts = [size // parallel.dp for _, size in entries_of(total or config.train.global_batch_size)]
    wanted = 2 * parallel.pp if parallel.pp > 1 else 1
    sizes = divisors(gcd(*counts))[::-1]
    taken = [s for s in sizes if all(schedule.accepts(parallel.pp, samples // s) for samples in counts)] or sizes
    return [size for size in taken if min(counts) // size >= wanted] or [taken[-1]]


def _division_rules(config: Config) -> Broken:
    model, tp = config.model, config.parallel.tp
    if model.architecture != CUSTOM:  # importing that takes seconds; `parallel.layout_check` checks it later
        plan = FAMILIES.load(model.architecture).make_plan(model, 1)
        units = plan.units("tp")
        heads = [key for key in units if key.endswith("_heads")]
        for key, unit in units.items():
            if unit.fits(tp):
                continue
            if key in heads:
                multiple = " or be a multiple of it" if unit.repeated else ""
                nearest = plan.nearest_size("tp", tp, heads)
                yield "parallel.tp", f"must divide model.{key} {unit.count}{multiple}; use {nearest}"
            yield f"model.{key}", f"must be a multiple of parallel.tp {tp}; use {nearest_multiple(unit.count, tp)}"
        if tp > model.vocab_size:
            yield "parallel.tp", f"model.vocab_size is {model.vocab_size}; use at most {model.vocab_size}"
    ep, dp, experts = config.parallel.ep, config.parallel.dp, config.model.num_experts
    if ep == 1:
        return
    if experts == 0:
        yield "parallel.ep", "model.num_experts is 0, so there are none to share; use 1"
    works = nearest_divisor(ep, gcd(dp, experts))
    if dp % ep:
        yield "parallel.ep", f"must divide parallel.dp {dp}; use {works}"
    if experts % ep:
        yield "parallel.ep", f"must divide model.num_experts {experts}; use {works}"


def _pipeline_rules(config: Config) -> Broken:
    parallel, schedule, partition = config.parallel, config.parallel.pipeline_schedule, config.parallel.partition
    known = ("cost", "uniform", "uniform-chunks")
    if isinstance(partition, str) and partition not in known and not partition.startswith("class:"):
        rule = "must be cost, uniform, uniform-chunks, class: and the name of a class, or a list of layers; use cost"
        yield "parallel.partition", rule
    if parallel.pp == 1 and (schedule.ranks is not None or schedule.stages_per_rank != 1):
        rule = f"there is no pipeline where parallel.pp is 1; use 1f1b or parallel.pp {max(2, schedule.ranks or 2)}"
        yield "parallel.schedule", rule
    if schedule.ranks not in (None, parallel.pp):
        rule = f"parallel.schedule {schedule.name} has a line for each of {schedule.ranks} ranks; use {schedule.ranks}"
        yield "parallel.pp", rule
    layers, needed = config.model.blocks, schedule.stages_per_rank
    if needed is not None and parallel.stage_chunks != needed:
        other = "interleaved" if needed == 1 else "zero-bubble"
        rule = f"parallel.schedule {schedule.name} has {needed} of them on each rank; use {needed} or schedule {other}"
        yield "parallel.stage_chunks", rule
    if layers is None:  # layers of a custom model are known from its plan
        return
    if parallel.pp > layers:
        yield "parallel.pp", f"each stage needs a layer and model.num_layers is {layers}; use at most {layers}"
    stages, whole = len(schedule.stage_ranks(parallel.pp, parallel.stage_chunks)), layers + 2
    if stages > whole:
        if needed is None:
            fewer = str(whole // parallel.pp)
        else:
            fewer = f"parallel.pp {whole // 2}" if whole >= 4 and schedule.ranks is None else "schedule 1f1b"
        rule = (
            f"parallel.pp {parallel.pp} then has {stages} stages for {whole} layers, the embedding "
            f"and the head among them; use {fewer} or model.num_layers {stages - 2}"
        )
        yield "parallel.stage_chunks", rule


def _micro_batches_rules(config: Config) -> Broken:
    train, schedule, pp, dp = config.train, config.parallel.pipeline_schedule, config.parallel.pp, config.parallel.dp
    given = train.gradient_accumulation_steps
    if pp > 1 and len(entries_of(train.global_batch_size)) > 1:
        yield from _changing_micro_batches_rules(config)
    if pp == 1 or schedule.accepts(pp, given):
        return
    use = "another number"  # a schedule in Python may support few
    if fitting := [count for count in divisors(train.global_batch_size // dp) if schedule.accepts(pp, count)]:
        use = str(min(fitting, key=lambda count: (abs(count - given), count)))
    else:
        counts = [schedule.micro_batches] if schedule.micro_batches else range(given, 2 * pp + given)
        if larger := next((count for count in counts if schedule.accepts(pp, count)), 0):
            use = f"{larger} with train.global_batch_size {larger * train.micro_batch_size * dp}"
    rule = f"parallel.schedule {schedule.name} {schedule.micro_batch_rule(pp, given)}; use {use}"
    yield "train.gradient_accumulation_steps", rule


def _changing_micro_batches_rules(config: Config) -> Broken:
    schedule, pp, total = config.parallel.pipeline_schedule, config.parallel.pp, config.train.global_batch_size
    unit = config.train.micro_batch_size * config.parallel.dp
    for step, size in entries_of(total):
        if not schedule.accepts(pp, count := size // unit):
            counts = (schedule.micro_batches,) if schedule.micro_batches else range(1, count + 2 * pp)
            fitting = (each for each in counts if schedule.accepts(pp, each))
            nearest = min(fitting, key=lambda each: abs(each - count), default=None)
            use = "another number" if nearest is None else str(nearest * unit)
            rule = f"is in {count} micro-batches, and parallel.schedule {schedule.name}"
            rule = f"{rule} {schedule.micro_batch_rule(pp, count)}; use {use}"
            yield "train.global_batch_size", f"{_of_entry(total, step, size)}{rule}"


def check(config: Config, vocab_size: int) -> None:
    """Check a config whose settings are all filled; raise a `UserError` for the first rule that is broken."""
    model = config.model
    for name, broken in model.broken_rules():
        raise problem(config, f"model.{name}", broken, model.value_of(name))
    if model.vocab_size < vocab_size:
        reason = f"the tokenizer of the data has {vocab_size} tokens; use {vocab_size}"
        raise problem(config, "model.vocab_size", reason)
    for rule in rules():
        rule(config)


def rules() -> tuple[Callable[[Config], None], ...]:
    """Return the rules between settings in checking order; each raises a `UserError` if it is broken.

    A rule reads only settings, as attributes of the config. Its result therefore holds for all configs with the same
    values of these settings, and `planner.search` evaluates it once for all of them. Attached rooms add theirs.
    """
    found = [_data_rules, _division_rules, _pipeline_rules, _micro_batches_rules, _sequence_rules, _zero_rules]
    found += [_optimizer_rules, _precision_rules, _recompute_rules, _checkpoints_rules, _machine_rules]
    found += [*map(imported, added("RULES").values()), _together_rules]
    return tuple(partial(_require, rule) for rule in found)


def _require(rule: Callable[[Config], Broken], config: Config) -> None:
    for key, broken in rule(config):
        raise problem(config, key, broken)


OF_ROOMS: Final = {
    "exact": "train.exact train.grain_leaf train.grain_samples train.grain_tensor train.grain_context",
    "report": "log.layers",
    "resilience": (
        "train.watch_every train.spike_factor train.on_nan train.max_restarts parallel.fallbacks data.skip_steps "
        "checkpoint.async_save checkpoint.remote checkpoint.memory_every"
    ),
}
"""Attached room → settings that only it follows. They are declared in the schema, so that a config that a run has
stored with their defaults can be read where the room is not there."""


def require_rooms(config: Config) -> None:
    """Refuse settings that only an attached room follows, unless they have their default, where it is not there."""
    for room, keys in OF_ROOMS.items():
        for section, name in (key.split(".") for key in keys.split()):
            value = getattr(getattr(config, section), name)
            if value and value != section_types()[section].model_fields[name].default:
                require_installed(room, f"{section}.{name}")


def executed_micro_batches(config: Config) -> tuple[int, int]:
    """Return the number and size of the micro-batches, in an exact run the sample groups, of a replica's step."""
    train = config.train
    if not train.exact:
        return train.gradient_accumulation_steps, train.micro_batch_size
    return train.global_batch_size // config.parallel.dp // train.grain_leaf, train.grain_leaf


def _data_rules(config: Config) -> Broken:
    yield from _changing_length_rules(config)
    weights = config.data.corpora.values()
    for step in {step for weight in weights for step, _ in entries_of(weight)}:
        if not any(value_at(weight, step) for weight in weights):
            yield "data.mixture", f"no corpus has a weight above 0 from entry {step} on; give one"
    longest = config.model.max_position_embeddings
    if config.data.sequence_length > longest:
        yield "data.sequence_length", f"model.max_position_embeddings is {longest}; use {longest} or raise the latter"


def _changing_length_rules(config: Config) -> Broken:
    key, lengths, sizes = "data.sequence_length", config.data.sequence_length, config.train.global_batch_size
    if len(entries := entries_of(lengths)) == 1:
        return
    if config.data.mixture is not None:
        yield key, f"data.mixture assigns samples of one length to its corpora; use {lengths:d}"
    if config.model.architecture == CUSTOM:
        yield key, f"samples of a custom model have one length; use {lengths:d}"
    read, _ = parts_by_step(sizes, lengths)
    unit = gcd(*(length for _, length in entries))
    for step, length in entries:
        if lengths % length:
            nearest = nearest_divisor(length, int(lengths))
            yield key, f"{_of_entry(lengths, step, length)}must divide the largest, {lengths:d}; use {nearest}"
        if (tokens := sum_before(read, step) * unit) % length:
            each = value_at(read, step - 1) * unit
            works = next((step + k for k in range(length) if (tokens + k * each) % length == 0), None)
            rule = f"begins after {tokens:,} tokens, which must be a multiple of it"
            use = "another global batch size" if works is None else f"entry {works}"
            yield key, f"{_of_entry(lengths, step, length)}{rule}; use {use}"


def _zero_rules(config: Config) -> Broken:
    parallel = config.parallel
    if parallel.zero == 0:
        return
    if parallel.dp * parallel.cp == 1:
        yield "parallel.zero", "parallel.dp is 1 and ZeRO needs dp > 1; use 0 or dp 2"
    if parallel.dp % parallel.zero_shards:
        nearest = nearest_divisor(parallel.zero_shards, parallel.dp)
        yield "parallel.zero_shards", f"must divide parallel.dp {parallel.dp}; use {nearest}"
    if parallel.zero_shards % parallel.ep and parallel.ep % parallel.zero_shards:
        ep, given = parallel.ep, parallel.zero_shards
        counts = [n for n in divisors(parallel.dp) if n % ep == 0 or (ep % n == 0 and n * parallel.cp > 1)]
        rule = f"must be a multiple or a divisor of parallel.ep {ep}, whose replicas share a copy of the experts"
        nearest = min(counts, key=lambda count: (abs(count - given), count))
        yield "parallel.zero_shards", f"{rule}; use {nearest}"
    if parallel.zero_shards * parallel.cp == 1:
        rule = f"zero_shards 1 disables sharding and parallel.zero is {parallel.zero}; use {parallel.dp}, or zero 0"
        yield "parallel.zero_shards", rule
    copies = max(1, parallel.zero_shards // parallel.ep) * parallel.cp
    if parallel.ep > 1 and config.model.hidden_size % copies:
        rule = f"the {copies} ranks with the same experts must divide model.hidden_size {config.model.hidden_size}"
        nearest = nearest_multiple(config.model.hidden_size, copies)
        yield "parallel.zero", f"{rule}; use 0 or model.hidden_size {nearest}"
    vocab, before_last = config.model.vocab_size, parallel.tp - 1
    if before_last and before_last * (rows := -(-vocab // parallel.tp)) >= vocab:  # fully_shard takes no empty tensor
        rule = f"parallel.tp {parallel.tp} leaves a rank without rows of the {vocab} of model.vocab_size"
        yield "parallel.zero", f"{rule}; use 0 or model.vocab_size {before_last * rows + 1}"


def _sequence_rules(config: Config) -> Broken:
    length, parallel = config.data.sequence_length, config.parallel
    if parallel.sequence_parallel and parallel.tp == 1:
        rule = "the tensor-parallel ranks share the sequence and parallel.tp is 1; use false or tp 2"
        yield "parallel.sequence_parallel", rule
    chunks = 2 * parallel.cp if parallel.cp > 1 else 1
    ranks = parallel.cp * parallel.tp if parallel.sequence_parallel else parallel.cp
    unit = lcm(chunks, ranks)
    for _, each in entries_of(length):
        if each % unit:
            key = "parallel.cp" if each % chunks else "parallel.sequence_parallel"
            rule = f"the ranks share each sequence in {unit} equal parts; use data.sequence_length"
            yield key, f"{rule} {nearest_multiple(each, unit)} instead of {each}"


def _precision_rules(config: Config) -> Broken:
    precision = config.precision
    if not precision.master_weights and precision.dtype != "bf16":
        rule = f"precision.dtype is {precision.dtype} and only bf16 goes without; use true or precision.dtype bf16"
        yield "precision.master_weights", rule
    if precision.fp8 and config.train.compile and config.parallel.pipeline_schedule.defers_weight_gradients:
        rule = "defers the gradients of weights, as compiled float8 layers cannot; use false or train.compile false"
        yield "precision.fp8", f"parallel.schedule {config.parallel.schedule} {rule}"
    if config.parallel.gradient_compression != "none" and precision.dtype == "fp64":
        rule = "precision.dtype is fp64, of whose digits it would drop all but three; use none or precision.dtype fp32"
        yield "parallel.gradient_compression", rule
    if (nearest := 2.0 ** round(log2(precision.loss_scale))) != precision.loss_scale:
        yield "precision.loss_scale", f"must be a power of two; use {nearest:g}"


def _recompute_rules(config: Config) -> Broken:
    train, layers = config.train, config.model.blocks
    if train.recompute_every > 1 and train.recompute != "full":
        rule = f"train.recompute is {train.recompute}, which does not count blocks; use 1 or train.recompute full"
        yield "train.recompute_every", rule
    if layers is not None and train.recompute_every > layers:
        yield "train.recompute_every", f"model.num_layers is {layers}; use at most {layers}"
    if config.log.layers and train.compile:
        rule = "train.compile is true, and compiled layers show no activations; use 0 or train.compile false"
        yield "log.layers", rule


def _checkpoints_rules(config: Config) -> Broken:
    every, kept = config.checkpoint.every, config.checkpoint.keep_every
    if kept and not every:
        yield "checkpoint.keep_every", "checkpoint.every is 0; leave it out or give every, too"
    elif kept and kept % every:
        rule = f"must be a multiple of checkpoint.every {every}; use {nearest_multiple(kept, every)}"
        yield "checkpoint.keep_every", rule
    best = config.checkpoint.keep_best
    if best and not config.train.evaluates:
        rule = "train.eval_every is 0, so that no loss is measured; leave it out or use train.eval_every 100"
        yield "checkpoint.keep_best", rule
    if best == "valid_loss_average" and not config.optimizer.ema_decay:
        yield "checkpoint.keep_best", "optimizer.ema_decay is not given, so there is no average; use valid_loss"


def _optimizer_rules(config: Config) -> Broken:
    optimizer = config.optimizer
    for number, part in enumerate(optimizer.parts):
        for key, rule in _hyper_parameters_rules(part.config):
            if not number:
                yield f"optimizer.{key}", rule
            elif not any(key == other for other, _ in _hyper_parameters_rules(optimizer)):
                yield "optimizer.groups", f"of the {key} in group {number}, {rule}"
    for key in () if optimizer.ema_decay else EMA:
        if getattr(optimizer, key) is not None:
            rule = "optimizer.ema_decay is not given, so there is no average of weights; leave it out or give ema_decay"
            yield f"optimizer.{key}", f"{rule} 0.999"
    if config.model.width_base and not optimizer.is_built_in:
        name = next(part.config.name for part in optimizer.parts if part.config.name not in BUILT_IN)
        rule = f"the optimizer {name} has no rule for µP; use width_base 0, or one of {', '.join(BUILT_IN)}"
        yield "model.width_base", rule
    if optimizer.warmup_steps > optimizer.decay_steps:
        rule = f"must be at most optimizer.decay_steps {optimizer.decay_steps}; use {optimizer.decay_steps}"
        yield "optimizer.warmup_steps", rule
    if optimizer.stable_steps and optimizer.decay != "wsd":
        rule = f"optimizer.decay is {optimizer.decay}, which has no stable part; leave it out or use decay wsd"
        yield "optimizer.stable_steps", rule
    room = optimizer.decay_steps - optimizer.warmup_steps
    if optimizer.stable_steps > room:
        yield "optimizer.stable_steps", f"warm-up and decay_steps leave room for {room}; use {room}"


def _hyper_parameters_rules(optimizer: OptimizerConfig) -> Broken:
    """Yield the settings of one optimizer, without their section, that break a rule."""
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield "betas", "each must be at least 0 and below 1; use [0.9, 0.95]"
    if optimizer.arguments and optimizer.name in BUILT_IN:
        rule = f"optimizer.name is {optimizer.name}, whose settings are those of this section; leave it out"
        yield "arguments", rule
    read = hyper_parameters(optimizer.name)
    for key in HYPER_PARAMETERS:
        default = type(optimizer).model_fields[key].default
        if key in read or getattr(optimizer, key) == default or (optimizer.name == "sgd" and key in ("betas", "eps")):
            continue  # a config of Adam's is tried with optimizer.name=sgd, which ignores them
        if OPTIMIZERS.is_path(optimizer.name):
            rule = f"optimizer.name is {optimizer.name}; give its arguments in optimizer.arguments instead"
            yield key, rule
        rule = f"optimizer.name is {optimizer.name}, which does not read it; leave it out"
        users = [name for name, row in BUILT_IN.items() if key in row.reads]
        yield key, f"{rule} or use optimizer.name {users[0]}"
    if optimizer.nesterov and not optimizer.momentum:
        yield "nesterov", "optimizer.momentum is 0, and Nesterov's needs one; use false or momentum 0.9"


def _together_rules(config: Config) -> Broken:
    yield from ((rule.key, rule.reason.format(config=config)) for rule in RULES if rule.broken(config))


def _machine_rules(config: Config) -> Broken:
    for key in () if config.train.init_from else ("init_step", "init_average"):
        if getattr(config.train, key) is not None:
            yield f"train.{key}", "train.init_from is not given; leave it out, or name the folder of a run there"
    if 0 < config.train.timeout < 2:  # ranks send a heartbeat twice a second
        yield "train.timeout", "must be at least 2 seconds, or 0; use 2"
    if config.precision.dtype == "fp64" and config.train.device == "cuda":
        yield "precision.dtype", "works on the CPU only; use fp32 or bf16, or set train.device to cpu"
