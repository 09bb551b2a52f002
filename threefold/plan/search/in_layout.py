"""A config in another layout: for the cost model, for the search's start, and as a file."""

from typing import Any, Final

from threefold.config.loading import config_of
from threefold.config.resolve import is_derived, logits_chunk
from threefold.config.rules.batch import DEFAULT_GLOBAL_BATCH_SIZE
from threefold.config.schema import Config
from threefold.plan.search.choice import FOLLOWING, KEYS, LayoutChoice

_GLOBAL_BATCH: Final = "train.global_batch_size"


def without_layout(config: Config) -> dict[str, dict[str, Any]]:
    """What a config gives beside its layout, by section, with its global batch.

    Args:
        config: as loaded.
    """
    given = config.given()
    for key in (*KEYS.values(), *FOLLOWING):
        section, name = key.split(".")
        given[section].pop(name, None)
    given["train"][_GLOBAL_BATCH.split(".")[1]] = _global_batch(config)
    return given


def alone(config: Config) -> Config:
    """A config on one rank, not resolved.

    Args:
        config: as loaded.
    """
    changed = config_of(without_layout(config))
    chosen = (*KEYS.values(), *FOLLOWING)  # a sentence about another layout is not about the config's line
    changed._origins = {key: origin for key, origin in config._origins.items() if key not in chosen}
    return changed


def in_layout(config: Config, choice: LayoutChoice) -> Config:
    """A resolved config in another layout; as `resolve` makes it, in a fraction of its time.

    Args:
        config: on one rank, resolved.
        choice: the layout, which must be sound.
    """
    parallel: dict[str, Any] = {"zero_shards": choice.dp}
    train: dict[str, Any] = {}
    for key, value in choice.settings().items():
        section, name = key.split(".")
        (parallel if section == "parallel" else train)[name] = value
    if is_derived(config, "train.loss_chunk_size"):
        tokens = choice.micro_batch_size * -(-config.data.sequence_length // choice.cp)
        train["loss_chunk_size"] = logits_chunk(tokens, -(-config.model.vocab_size // choice.tp))
    return config.model_copy(
        update={"parallel": _copied(config.parallel, parallel), "train": config.train.model_copy(update=train)}
    )


def _copied(parallel: Any, update: dict[str, Any]) -> Any:
    """A copy without what was computed from other settings."""
    copy = parallel.model_copy(update=update)
    copy.__dict__.pop("pipeline_schedule", None)
    return copy


def _global_batch(config: Config) -> int:
    train = config.train
    if train.global_batch_size:
        return train.global_batch_size
    if train.micro_batch_size and train.gradient_accumulation_steps:
        return train.micro_batch_size * train.gradient_accumulation_steps * config.parallel.dp
    return DEFAULT_GLOBAL_BATCH_SIZE
