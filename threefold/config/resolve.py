"""From what the user gave to what the run is: every setting filled, every rule checked."""

from typing import Any

from threefold.config.batch import batch_sizes
from threefold.config.checks import check
from threefold.config.schema import Config

DEFAULT_SEQUENCE_LENGTH = 256
LONGEST_DEFAULT_WARMUP = 100


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
    resolved = Config.model_validate(filled)
    resolved._origins = config._origins
    check(resolved, vocab_size)
    return resolved


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
