"""Settings of exact runs: the defaults of `train.grain_*`, and the rules between `train.exact` and other settings."""

from collections.abc import Mapping
from math import gcd
from typing import Any

from threefold.config import Config
from threefold.config.by_step import entries_of
from threefold.config.loading import config_of
from threefold.config.model import CUSTOM, FAMILIES
from threefold.config.optimizer import BUILT_IN
from threefold.config.rules import Broken, executed_micro_batches
from threefold.config.section import nearest_divisor

GRAIN = ("grain_leaf", "grain_samples", "grain_tensor", "grain_context")
"""Settings of `train` that only an exact run has."""


def default_grain(given: Config, filled: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """Return the default `train.grain_*` settings of an exact run; only the model and the global batch affect them.

    `filled` has the settings that are given, and those that the core has derived.
    """
    if not given.train.exact:
        return {}
    config = config_of(filled, (), given.origins, given.derived)
    cut, train = [count for _, count in _cut_by_tensor_axis(config)], config.train
    samples = train.grain_samples or gcd(8, train.global_batch_size)
    group = gcd(1 << 30, train.global_batch_size // samples)
    while group > 1 and group * config.data.sequence_length > 1024:  # more tokens make no product faster
        group //= 2
    return {
        "train.grain_leaf": group if _runs_several(config) else 1,
        "train.grain_samples": samples,
        "train.grain_tensor": gcd(8, *cut),
        "train.grain_context": 1,
    }


def takes_context_pieces(config: Config) -> bool:
    """Return whether an exact run's sums over positions may be in context pieces."""
    return _is_of_this_package(config) and not config.model.num_experts


def exact_rules(config: Config) -> Broken:
    """Yield settings that an exact run excludes, or whose values it cannot have."""
    train, parallel, precision, optimizer = config.train, config.parallel, config.precision, config.optimizer
    samples, tensor = train.grain_samples, train.grain_tensor
    if not train.exact:
        for key in GRAIN:
            if getattr(train, key):
                yield f"train.{key}", "train.exact is false; leave it out or use train.exact true"
        return
    of_part, ours = train.global_batch_size // samples, _is_of_this_package(config)
    along, mixture = takes_context_pieces(config), config.model.num_experts > 0
    for key, broken, use in (
        ("model.architecture", config.model.key_value_rank > 0, "llama"),  # latent attention
        ("parallel.sequence_parallel", parallel.sequence_parallel and not ours, "false"),
        ("parallel.cp", parallel.cp > 1 and not along, "1"),
        ("train.grain_context", train.grain_context > 1 and not along, "1"),
        ("train.grain_leaf", train.grain_leaf > 1 and not _runs_several(config), "1"),
        ("precision.dtype", precision.dtype not in ("fp32", "bf16"), "fp32 or bf16"),
        ("precision.master_weights", precision.dtype == "bf16" and not precision.master_weights, "true"),
        ("model.qk_norm_over", config.model.qk_norm_over != "head", "head"),
        ("precision.fp8", precision.fp8, "false"),
        ("model.expert_bias", mixture and config.model.expert_bias, "false"),
        ("model.expert_gate_limit", mixture and config.model.expert_gate_limit > 0, "0"),
        ("model.attention_softcap", config.model.attention_softcap > 0, "0"),
        ("model.attention_sinks", config.model.attention_sinks, "false"),
        ("model.mtp_layers", config.model.mtp_layers > 0, "0"),
        ("adapter.rank", config.adapter.rank > 0, "0"),
        ("preference.beta", config.preference.beta > 0, "0"),
        ("optimizer.name", optimizer.name not in BUILT_IN, "adamw"),
        ("optimizer.groups", not optimizer.is_built_in, "built-in optimizers"),
        ("train.compile", train.compile, "false"),
        ("parallel.cp_method", parallel.cp > 1 and parallel.cp_method != "all-gather", "all-gather"),
        ("parallel.gradient_compression", parallel.gradient_compression != "none", "none"),
        ("data.sequence_length", len(entries_of(config.data.sequence_length)) > 1, f"{config.data.sequence_length:d}"),
        ("train.global_batch_size", len(entries_of(train.global_batch_size)) > 1, f"{train.global_batch_size:d}"),
    ):
        if broken:
            yield key, f"train.exact is true, whose sums do not go together with it yet; use {use}"
    for name, grain, counts in (
        ("grain_samples", samples, [("train.global_batch_size", train.global_batch_size)]),
        ("grain_leaf", train.grain_leaf, [("the samples of a part of the batch,", max(1, of_part))]),
        ("grain_tensor", tensor, _cut_by_tensor_axis(config)),
    ):
        powers = gcd(1 << 30, *(count for _, count in counts))  # its divisors are the powers of two that divide all
        if powers % grain:
            key, count = next(each for each in counts if gcd(1 << 30, each[1]) % grain)
            rule = f"must be a power of two that divides {key} {count}"
            yield f"train.{name}", f"{rule}; use {nearest_divisor(grain, powers)}"
    if samples % parallel.dp:
        works = nearest_divisor(parallel.dp, samples)
        yield "parallel.dp", f"must divide train.grain_samples {samples}; use {works}"
    yield from _schedule_rules(config)
    yield from _context_rules(config)
    rows = config.data.sequence_length // train.grain_context
    positions = gcd(tensor, rows) if parallel.sequence_parallel else tensor
    if tensor % parallel.tp or positions % parallel.tp:
        works = nearest_divisor(parallel.tp, positions)
        which = f"train.grain_tensor {tensor}" if tensor % parallel.tp else f"the {positions} pieces of a sequence"
        yield "parallel.tp", f"must divide {which}, since train.exact is true; use {works}"


def _is_of_this_package(config: Config) -> bool:
    return config.model.architecture != CUSTOM and config.model.architecture in FAMILIES.built_in


def _runs_several(config: Config) -> bool:
    return takes_context_pieces(config) and (config.train.grain_context or 1) == 1


def _cut_by_tensor_axis(config: Config) -> list[tuple[str, int]]:
    """Return the settings whose values the tensor axis divides, with these values."""
    model = config.model
    if model.architecture == CUSTOM:
        return []
    units = FAMILIES.load(model.architecture).make_plan(model, 1).units("tp")
    cut = [("model.vocab_size", model.vocab_size)]
    for key, unit in units.items():
        shared = bool(unit.repeated) and unit.count & (unit.count - 1) == 0  # by any larger power of two
        cut.append((f"model.{key}'s rows", unit.count * unit.size) if shared else (f"model.{key}", unit.count))
    return cut


def _schedule_rules(config: Config) -> Broken:
    schedule, pp, (count, group) = config.parallel.pipeline_schedule, config.parallel.pp, executed_micro_batches(config)
    if pp == 1:
        return
    if not schedule.accepts(pp, count):
        smaller = (group >> bit for bit in range(1, group.bit_length()))
        works = (f"train.grain_leaf {each}" for each in smaller if schedule.accepts(pp, count * group // each))
        rule = f"train.exact runs the {count} sample groups of a replica one by one, but {schedule.name}"
        yield "parallel.schedule", f"{rule} {schedule.micro_batch_rule(pp, count)}; use {next(works, '1f1b')}"
    last: dict[tuple[int, bool], int] = {}  # for a class of torch, the arithmetic asks for ascending micro-batches
    for action in (each for order in schedule.orders(pp, count) or () for each in order if each.kind != "F"):
        passed = action.stage, action.kind == "W"
        if action.micro_batch < last.get(passed, 0):
            rule = "has backward passes of a later micro-batch before those of an earlier one, and train.exact is true"
            yield "parallel.schedule", f"{rule}; use interleaved"
        last[passed] = action.micro_batch


def _context_rules(config: Config) -> Broken:
    pieces, length, cp = config.train.grain_context, config.data.sequence_length, config.parallel.cp
    most = max(1, gcd(1 << 30, length) // 2)  # its divisors are the numbers of pieces that work
    if most % pieces:
        rule = f"must be 1, or a power of two, twice which divides data.sequence_length {length}"
        yield "train.grain_context", f"{rule}; use {nearest_divisor(pieces, most)}"
    if pieces % cp:
        works = str(nearest_divisor(cp, pieces)) if most % cp else f"train.grain_context {cp}"
        yield "parallel.cp", f"must divide train.grain_context {pieces}, since train.exact is true; use {works}"
