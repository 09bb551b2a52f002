"""Warm start: whether a run may start from the weights of another one (`train.init_from`)."""

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from threefold.checkpoint.folder import TOKENIZER, Checkpoint
from threefold.checkpoint.resume import SHAPES
from threefold.checkpoint.selection import Damaged, select_checkpoint
from threefold.config import Config
from threefold.data.dataset import open_dataset
from threefold.errors import UserError

_NOT_OF_THE_FUNCTION = frozenset(
    ("preset", "file", "initializer_range", "hidden_dropout", "embedding_dropout", "attention_dropout")
)


@dataclass(frozen=True)
class WarmStart:
    """A checkpoint whose weights a run may start from.

    Attributes:
        checkpoint: where they are.
        warnings: a sentence for each setting with which the weights compute another function, and one for damaged
            checkpoints.
    """

    checkpoint: Checkpoint
    warnings: tuple[str, ...]


def find_warm_start(config: Config, damaged: Damaged | None = None) -> WarmStart | None:
    """The newest valid checkpoint of the run that `train.init_from` names, checked against the run's config.

    Args:
        config: resolved; its data is looked at.
        damaged: checkpoints that loading found damaged.

    Returns:
        None where the setting is empty.

    Raises:
        UserError: there is no checkpoint, its weights do not fit the model, or its tokenizer is not that of the data.
    """
    if not config.train.init_from:
        return None
    where = f"{config.origin('train.init_from')}train.init_from is {config.train.init_from}"
    choice = select_checkpoint(
        Path(config.train.init_from), lambda none: f"{where}, which has {none}; give the folder of a run.", damaged
    )
    checkpoint = choice.checkpoint
    before, now = choice.config.model.settings(), config.model.settings()
    changes = {
        key: (before.get(key), now.get(key))
        for key in {**before, **now}
        if before.get(key) != now.get(key) and key not in _NOT_OF_THE_FUNCTION
    }
    for key, (old, new) in changes.items():
        stretched = key == "max_position_embeddings" and config.model.position_embedding == "rope"
        if f"model.{key}" in SHAPES and not stretched:
            raise UserError(
                f"{config.origin(f'model.{key}')}model.{key} is {new!r} but {checkpoint.path}, which train.init_from "
                f"names, has {old!r}, whose weights do not fit another model; set it to {old!r}."
            )
    _check_tokenizer(checkpoint, config)
    changed = (f"model.{key} is {new!r}; {checkpoint.path} had {old!r}." for key, (old, new) in changes.items())
    return WarmStart(checkpoint, (*choice.warnings, *changed))


def _check_tokenizer(checkpoint: Checkpoint, config: Config) -> None:
    """Check that the data's tokenizer is the one the weights were trained with, where both are known."""
    stored, data = checkpoint.path / TOKENIZER, open_dataset(config)
    if data.tokenizer_file is None or checkpoint.facts.tokenizer_sha256 in (None, data.tokenizer_sha256):
        return
    known, given = (Tokenizer.from_file(str(path)) for path in (stored, data.tokenizer_file))
    if known.get_vocab() != given.get_vocab():
        raise UserError(
            f"The tokenizer of the data is {data.tokenizer_file}, which is not that of {checkpoint.path}, which "
            f"train.init_from names; prepare the data with --tokenizer {stored}."
        )
