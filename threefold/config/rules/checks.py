"""Rules between settings, each one sentence when broken."""

from collections.abc import Callable
from math import lcm, log2

from threefold.config.config_error import problem
from threefold.config.divisors import divisors, nearest_divisor, nearest_multiple
from threefold.config.optimizer import BUILT_IN, HYPER_PARAMETERS, OPTIMIZERS, hyper_parameters
from threefold.config.rules.compatibility import check_together
from threefold.config.rules.model_checks import check_division, check_model
from threefold.config.rules.pipeline_checks import check_micro_batches, check_pipeline
from threefold.config.schema import Config

LEAST_TIMEOUT = 2
"""Seconds: ranks show twice in a second that they run."""


def check(config: Config, vocab_size: int) -> None:
    """Check a config whose settings are all filled.

    Raises:
        UserError: the first rule that is broken.
    """
    check_model(config, vocab_size)
    for rule in rules():
        rule(config)


def rules() -> tuple[Callable[[Config], None], ...]:
    """The rules between settings, in the order in which they are checked; each raises a `UserError` where it is broken.

    A rule reads settings of the config alone, as its attributes, so that one that holds of a config holds of every
    config with the same values of those that it reads: `plan.search` asks each only once for all of these.
    """
    return (
        _check_data,
        check_division,
        check_pipeline,
        check_micro_batches,
        _check_sequence,
        _check_zero,
        _check_optimizer,
        _check_precision,
        _check_recompute,
        _check_checkpoints,
        _check_timeout,
        check_together,
        _check_device,
    )


def _check_data(config: Config) -> None:
    longest = config.model.max_position_embeddings
    if config.data.sequence_length > longest:
        rule = f"model.max_position_embeddings is {longest}; use {longest} or raise the latter"
        raise problem(config, "data.sequence_length", rule)
    if config.data.skipped.next_outside(1) > config.train.max_steps:
        rule = f"leaves none of the {config.train.max_steps} steps of train.max_steps; leave one of them out of it"
        raise problem(config, "data.skip_steps", rule)


def _check_zero(config: Config) -> None:
    parallel = config.parallel
    if parallel.zero == 0:
        return
    if parallel.dp * parallel.cp == 1:
        raise problem(config, "parallel.zero", "parallel.dp is 1 and ZeRO needs dp > 1; use 0 or dp 2")
    if parallel.dp % parallel.zero_shards:
        nearest = nearest_divisor(parallel.zero_shards, parallel.dp)
        raise problem(config, "parallel.zero_shards", f"must divide parallel.dp {parallel.dp}; use {nearest}")
    if parallel.zero_shards % parallel.ep and parallel.ep % parallel.zero_shards:
        rule = (
            f"must be a multiple or a divisor of parallel.ep {parallel.ep}, whose replicas share a copy of the experts"
        )
        raise problem(config, "parallel.zero_shards", f"{rule}; use {_nearest_shards(config)}")
    if parallel.zero_shards * parallel.cp == 1:
        rule = f"zero_shards 1 disables sharding and parallel.zero is {parallel.zero}; use {parallel.dp}, or zero 0"
        raise problem(config, "parallel.zero_shards", rule)
    copies = max(1, parallel.zero_shards // parallel.ep) * parallel.cp
    if parallel.ep > 1 and config.model.hidden_size % copies:
        rule = f"the {copies} ranks with the same experts must divide model.hidden_size {config.model.hidden_size}"
        nearest = nearest_multiple(config.model.hidden_size, copies)
        raise problem(config, "parallel.zero", f"{rule}; use 0 or model.hidden_size {nearest}")
    vocab, before_last = config.model.vocab_size, parallel.tp - 1
    if before_last and before_last * (rows := -(-vocab // parallel.tp)) >= vocab:  # fully_shard takes no empty tensor
        rule = f"parallel.tp {parallel.tp} leaves a rank without rows of the {vocab} of model.vocab_size"
        raise problem(config, "parallel.zero", f"{rule}; use 0 or model.vocab_size {before_last * rows + 1}")


def _nearest_shards(config: Config) -> int:
    """The number of replicas nearest to `parallel.zero_shards` that can share a copy beside shared experts."""
    ep, cp, given = config.parallel.ep, config.parallel.cp, config.parallel.zero_shards
    fitting = (
        count for count in divisors(config.parallel.dp) if count % ep == 0 or (ep % count == 0 and count * cp > 1)
    )
    return min(fitting, key=lambda count: (abs(count - given), count))


def _check_sequence(config: Config) -> None:
    length, parallel = config.data.sequence_length, config.parallel
    if parallel.sequence_parallel and parallel.tp == 1:
        rule = "the tensor-parallel ranks share the sequence and parallel.tp is 1; use false or tp 2"
        raise problem(config, "parallel.sequence_parallel", rule)
    chunks = 2 * parallel.cp if parallel.cp > 1 else 1
    shares = parallel.cp * parallel.tp if parallel.sequence_parallel else parallel.cp
    unit = lcm(chunks, shares)
    if length % unit:
        key = "parallel.cp" if length % chunks else "parallel.sequence_parallel"
        rule = f"the ranks share each sequence in {unit} equal parts; use data.sequence_length"
        raise problem(config, key, f"{rule} {nearest_multiple(length, unit)} instead of {length}")


def _check_precision(config: Config) -> None:
    precision = config.precision
    if not precision.master_weights and precision.dtype != "bf16":
        rule = f"precision.dtype is {precision.dtype} and only bf16 goes without; use true or precision.dtype bf16"
        raise problem(config, "precision.master_weights", rule)
    if config.parallel.gradient_compression != "none" and precision.dtype == "fp64":
        rule = "precision.dtype is fp64, of whose digits it would drop all but three; use none or precision.dtype fp32"
        raise problem(config, "parallel.gradient_compression", rule)
    if (nearest := 2.0 ** round(log2(precision.loss_scale))) != precision.loss_scale:
        raise problem(config, "precision.loss_scale", f"must be a power of two; use {nearest:g}")


def _check_recompute(config: Config) -> None:
    train, layers = config.train, config.model.blocks
    if train.recompute_every > 1 and train.recompute != "full":
        rule = f"train.recompute is {train.recompute}, which does not count blocks; use 1 or train.recompute full"
        raise problem(config, "train.recompute_every", rule)
    if layers is not None and train.recompute_every > layers:
        raise problem(config, "train.recompute_every", f"model.num_layers is {layers}; use at most {layers}")


def _check_checkpoints(config: Config) -> None:
    every, kept = config.checkpoint.every, config.checkpoint.keep_every
    if kept is None:
        return
    if not every:
        raise problem(config, "checkpoint.keep_every", "checkpoint.every is 0; leave it out or give every, too")
    if kept % every:
        rule = f"must be a multiple of checkpoint.every {every}; use {nearest_multiple(kept, every)}"
        raise problem(config, "checkpoint.keep_every", rule)


def _check_optimizer(config: Config) -> None:
    optimizer = config.optimizer
    for beta in optimizer.betas:
        if not 0 <= beta < 1:
            raise problem(config, "optimizer.betas", "each must be at least 0 and below 1; use [0.9, 0.95]")
    _check_hyper_parameters(config)
    if optimizer.min_lr > optimizer.lr:
        rule = f"must be at most optimizer.lr {optimizer.lr:g}; use {optimizer.lr / 10:g}"
        raise problem(config, "optimizer.min_lr", rule)
    if optimizer.warmup_steps > optimizer.decay_steps:
        rule = f"must be at most optimizer.decay_steps {optimizer.decay_steps}; use {optimizer.decay_steps}"
        raise problem(config, "optimizer.warmup_steps", rule)
    if optimizer.stable_steps and optimizer.decay != "wsd":
        rule = f"optimizer.decay is {optimizer.decay}, which has no stable part; leave it out or use decay wsd"
        raise problem(config, "optimizer.stable_steps", rule)
    room = optimizer.decay_steps - optimizer.warmup_steps
    if optimizer.stable_steps > room:
        raise problem(config, "optimizer.stable_steps", f"warm-up and decay_steps leave room for {room}; use {room}")


def _check_hyper_parameters(config: Config) -> None:
    optimizer = config.optimizer
    if optimizer.arguments and optimizer.name in BUILT_IN:
        rule = f"optimizer.name is {optimizer.name}, whose settings are those of this section; leave it out"
        raise problem(config, "optimizer.arguments", rule)
    own = OPTIMIZERS.is_path(optimizer.name)
    read = hyper_parameters(optimizer.name)
    for key in HYPER_PARAMETERS:
        default = type(optimizer).model_fields[key].default
        if key in read or getattr(optimizer, key) == default or (optimizer.name, key) in _ACCEPTED:
            continue
        if own:
            rule = f"optimizer.name is {optimizer.name}; give its arguments in optimizer.arguments instead"
            raise problem(config, f"optimizer.{key}", rule)
        rule = f"optimizer.name is {optimizer.name}, which does not read it; leave it out"
        users = [name for name, row in BUILT_IN.items() if key in row.reads]
        raise problem(config, f"optimizer.{key}", f"{rule} or use optimizer.name {users[0]}")
    if optimizer.nesterov and not optimizer.momentum:
        rule = "optimizer.momentum is 0, and Nesterov's needs one; use false or momentum 0.9"
        raise problem(config, "optimizer.nesterov", rule)


def _check_timeout(config: Config) -> None:
    if 0 < config.train.timeout < LEAST_TIMEOUT:
        raise problem(config, "train.timeout", f"must be at least {LEAST_TIMEOUT} seconds, or 0; use {LEAST_TIMEOUT}")


def _check_device(config: Config) -> None:
    if config.precision.dtype == "fp64" and config.train.device == "cuda":
        raise problem(config, "precision.dtype", "works on the CPU only; use fp32 or bf16, or set train.device to cpu")


_ACCEPTED = {("sgd", "betas"), ("sgd", "eps")}
"""Optimizer and setting that it does not read, which configs of earlier versions may give together."""
