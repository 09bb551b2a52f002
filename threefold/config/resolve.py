"""From what the user gave to what the run is: every setting filled, every rule checked."""

from typing import Any

from threefold.config.batch import batch_sizes
from threefold.config.checks import check
from threefold.config.loading import config_of
from threefold.config.schema import Config

DEFAULT_SEQUENCE_LENGTH = 256
LONGEST_DEFAULT_WARMUP = 100
LARGEST_LOGITS = 128 << 20
"""Bytes of fp32 logits that a micro-batch may take on a rank before they are computed in chunks."""
_LIKELY_VOCABULARY = 50257
PINNED = frozenset(("train.global_batch_size",))
"""Derived settings that are stored as if they had been given: from another layout another model would follow."""


def resolve(config: Config, vocab_size: int) -> Config:
    """Fill what was not given and check that the settings go together.

    Args:
        config: as given, or already resolved (resolving twice changes nothing).
        vocab_size: tokens of the data's tokenizer.

    Raises:
        UserError: settings that cannot go together; the sentence names the nearest value that works.
    """
    filled = {name: dict(values) for name, values in config.sections().items()}
    for key, value in _derived(config, vocab_size).items():
        section, name = key.split(".")
        filled[section].setdefault(name, value)
    filled["train"].update(batch_sizes(config)._asdict())
    filled["train"].setdefault("loss_chunk_size", loss_chunk_size(config_of(filled)))
    resolved = config_of(filled)
    resolved._origins = config._origins
    given = {f"{section}.{key}" for section, values in config.sections().items() for key in values}
    stored = {f"{section}.{key}" for section, values in resolved.sections().items() for key in values}
    resolved._derived = (frozenset(stored - given) | config._derived) - PINNED
    check(resolved, vocab_size)
    return resolved


def check_settings(config: Config) -> None:
    """Check what can be known of a config before its data is opened.

    Raises:
        UserError: as `resolve`, whatever the data is.
    """
    tp = config.parallel.tp
    unknown = -(-_LIKELY_VOCABULARY // tp) * tp  # one that no rule about the vocabulary refuses
    resolve(config, 1 if config.model.vocab_size else unknown)


def loss_chunk_size(config: Config) -> int:
    """Columns of the logits that take `LARGEST_LOGITS` on a rank, or 0 where all of them take no more.

    Args:
        config: all else filled.
    """
    tokens = config.train.micro_batch_size * -(-config.data.sequence_length // config.parallel.cp)
    fitting = max(1, LARGEST_LOGITS // (4 * tokens))
    return 0 if -(-config.model.vocab_size // config.parallel.tp) <= fitting else fitting


def _derived(config: Config, vocab_size: int) -> dict[str, Any]:
    """Values of the settings that follow from others."""
    model, optimizer = config.model, config.optimizer
    sequence = config.data.sequence_length or model.max_position_embeddings or DEFAULT_SEQUENCE_LENGTH
    decay_steps = optimizer.decay_steps or config.train.max_steps
    warmup = optimizer.warmup_steps
    if warmup is None:
        warmup = min(LONGEST_DEFAULT_WARMUP, decay_steps // 10)
    stable = max(0, decay_steps * 4 // 5 - warmup) if optimizer.decay == "wsd" else 0
    return {
        **{f"model.{name}": value for name, value in model.filled(sequence).items()},
        "model.vocab_size": vocab_size,
        "data.sequence_length": sequence,
        "parallel.stage_chunks": 1 if config.parallel.schedule in ("1f1b", "gpipe") else 2,
        "parallel.zero_shards": config.parallel.dp,
        "optimizer.min_lr": float(f"{optimizer.lr / 10:.12g}"),  # no 5.9999999999999995e-05
        "optimizer.warmup_steps": warmup,
        "optimizer.decay_steps": decay_steps,
        "optimizer.stable_steps": stable,
    }
