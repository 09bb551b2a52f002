"""Resolving a config: fill every default, check every rule."""

from collections.abc import Mapping
from typing import Any

from threefold.config.by_step import parts_by_step, steps_to_sum
from threefold.config.loading import config_of, problem
from threefold.config.optimizer import EMA, hyper_parameters
from threefold.config.rules import batch_sizes, check
from threefold.config.schema import Config, ParallelConfig
from threefold.config.section import MOST_STEPS
from threefold.constants import LOGITS_OF_A_CHUNK
from threefold.doors import added, imported

LARGEST_LOGITS = {"cpu": 128 << 20, "cuda": 4 * LOGITS_OF_A_CHUNK}
"""Limit on the bytes of the fp32 logits that a rank holds at once; more are computed in chunks."""
KEPT_LOGITS = 16 * LARGEST_LOGITS["cuda"]
"""Limit on a micro-batch's logits, in fp32 bytes, that a GPU keeps in the dtype of its products, because computing them
again takes 3 to 9 % of a step. Not for a pipeline, which may keep the logits of several micro-batches."""
PINNED = frozenset(("train.global_batch_size",))
"""Derived settings that are stored as if given: derived for another layout, they would train a different model."""
LARGEST_TOKENS = {"cpu": 8192, "cuda": 32768}
"""Largest default micro-batch, in tokens of a rank. More is no faster: measured on a CPU
(docs/training.md); on a GPU, matrices with this many rows fill it, and more rows would cut the logits into
thinner chunks."""


def resolve(
    config: Config, vocab_size: int, largest_micro_batch: int | None = None, samples: int | None = None
) -> Config:
    """Fill every setting that is not given, and check that the settings are compatible; raise a `UserError` if not.

    Resolving twice changes nothing. With `train.epochs`, each epoch reads every sample, and samples of the next epoch
    fill up the last step, so their order does not depend on where a run ends. If the number of training `samples` is
    not known yet, the run has the maximum number of steps.

    `vocab_size` is that of the data's tokenizer. If no setting determines the micro-batch size, it is at most
    `largest_micro_batch`, the sequences that fit into a rank's memory; None for the default of a CPU.
    """
    given = {f"{section}.{key}" for section, values in config.sections().items() for key in values}
    steps, derived = config.train.max_steps, set(config.derived)
    if config.train.epochs is not None:
        steps = _steps_of_epochs(config, config.train.epochs, samples)
        if not config.is_given("train.max_steps"):
            derived.add("train.max_steps")
    filled = config.sections()
    filled["train"]["max_steps"] = steps
    if config.train.eval_every_epochs is not None:
        if config.train.eval_every and config.is_given("train.eval_every"):
            rule = f"train.eval_every_epochs is {config.train.eval_every_epochs} too; leave one of the two out"
            raise problem(config, "train.eval_every", rule)
        filled["train"]["eval_every"] = 0
    _fill(filled, _derived(config, vocab_size, steps))
    length = config.data.sequence_length or filled["data"]["sequence_length"]
    sizes = filled["model"]["vocab_size"], length, config.parallel
    largest = largest_micro_batch or default_largest(*sizes, config.train.loss_chunk_size is not None)
    filled["train"].update(batch_sizes(config, largest))
    for room in map(imported, added("DEFAULTS").values()):
        _fill(filled, room(config, filled))
    columns, tokens = _of_rank(*sizes)
    chunk = logits_chunk(filled["train"]["micro_batch_size"] * tokens, columns, config.train.device, config.parallel.pp)
    filled["train"].setdefault("loss_chunk_size", chunk)
    stored = {f"{section}.{key}" for section, values in filled.items() for key in values}
    resolved = config_of(filled, (), config.origins, (stored - given | derived) - PINNED)
    check(resolved, vocab_size)
    return resolved


def _fill(filled: dict[str, dict[str, Any]], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        section, name = key.split(".")
        filled[section].setdefault(name, value)


def _steps_of_epochs(config: Config, epochs: int, samples: int | None) -> int:
    is_given = config.is_given("train.max_steps")
    if samples is None:
        return config.train.max_steps if is_given or "train.max_steps" in config.derived else MOST_STEPS
    total = batch_sizes(config, largest=1)["global_batch_size"]
    read, parts = parts_by_step(total, config.data.sequence_length or 1)
    steps = steps_to_sum(read, epochs * samples * parts)
    if is_given and config.train.max_steps != steps:
        rule = f"train.epochs is {epochs} too, and {epochs} · {samples:,} samples in batches of {total} are"
        raise problem(config, "train.max_steps", f"{rule} {steps} steps; leave one of the two out")
    return steps


def check_settings(config: Config) -> None:
    """Check everything about a config that does not depend on its data; raises as `resolve` does."""
    tp = config.parallel.tp
    unknown = -(-50257 // tp) * tp  # a size that no rule about the vocabulary refuses
    resolve(config, 1 if config.model.vocab_size else unknown)


def default_largest(
    vocab_size: int, sequence_length: int, parallel: ParallelConfig, chunk_given: bool, device: str = "cpu"
) -> int:
    """Return the largest default micro-batch in sequences, at least 1, regardless of memory."""
    columns, of_sequence = _of_rank(vocab_size, sequence_length, parallel)
    tokens = LARGEST_TOKENS[device]
    if device == "cpu" and not chunk_given:
        at_once = LARGEST_LOGITS[device] // (4 * columns)
        # Above 1024 tokens, a CPU loses less to small micro-batches than to chunked logits, which are computed twice.
        tokens = min(tokens, at_once) if at_once >= 1024 else tokens
    return max(1, tokens // of_sequence)


def _of_rank(vocab_size: int, sequence_length: int, parallel: ParallelConfig) -> tuple[int, int]:
    """Return the maximum number of columns of the logits, and of tokens of a sequence, on a rank."""
    return -(-vocab_size // parallel.tp), -(-sequence_length // parallel.cp)


def with_micro_batch(config: Config, size: int) -> Config:
    """Return a resolved config with another default micro-batch size, and everything derived from it."""
    given = config.sections()
    for key in ("micro_batch_size", "gradient_accumulation_steps", "loss_chunk_size"):
        if f"train.{key}" in config.derived:
            del given["train"][key]
    return resolve(config_of(given, (), config.origins, config.derived), config.model.vocab_size, size)


def on_device(config: Config, device: str) -> Config:
    """Return a resolved config on another device, with the loss chunk size of that device unless one was given."""
    train: dict[str, Any] = {"device": device}
    if "train.loss_chunk_size" in config.derived:
        columns, tokens = _of_rank(config.model.vocab_size, config.data.sequence_length, config.parallel)
        tokens *= config.train.micro_batch_size
        train["loss_chunk_size"] = logits_chunk(tokens, columns, device, config.parallel.pp)
    return config.model_copy(update={"train": config.train.model_copy(update=train)})


def logits_chunk(tokens: int, columns: int, device: str, pp: int) -> int:
    """Return the loss chunk size for a micro-batch's tokens and the logits' columns on a rank; 0 if all fit."""
    device = "cuda" if device == "cuda" else "cpu"
    limit = KEPT_LOGITS if device == "cuda" and pp == 1 else LARGEST_LOGITS[device]
    return 0 if 4 * tokens * columns <= limit else max(1, LARGEST_LOGITS[device] // (4 * tokens))


def _derived(config: Config, vocab_size: int, steps: int) -> dict[str, Any]:
    model, optimizer = config.model, config.optimizer
    sequence = config.data.sequence_length or model.max_position_embeddings or 256
    decay_steps = optimizer.decay_steps or steps
    warmup = min(100, decay_steps // 10) if optimizer.warmup_steps is None else optimizer.warmup_steps
    stable = max(0, decay_steps * 4 // 5 - warmup) if optimizer.decay == "wsd" else 0
    return {
        **{f"model.{name}": value for name, value in model.filled(sequence).items()},
        "model.vocab_size": vocab_size,
        "data.sequence_length": sequence,
        "parallel.stage_chunks": config.parallel.pipeline_schedule.default_stages_per_rank,
        "parallel.zero_shards": config.parallel.dp,
        "optimizer.min_lr": float(f"{optimizer.lr / 10:.12g}"),  # not 5.9999999999999995e-05
        "optimizer.warmup_steps": warmup,
        "optimizer.decay_steps": decay_steps,
        "optimizer.stable_steps": stable,
        **{f"optimizer.{key}": value for key, value in hyper_parameters(optimizer.name).items() if value is not None},
        **({f"optimizer.{key}": value for key, value in EMA.items()} if optimizer.ema_decay else {}),
    }
