"""The vocabulary size of a config's data, where it must be known before a run, or without any data."""

from typing import Final

from threefold.config import Config, resolve
from threefold.data.dataset import names_data, open_dataset
from threefold.errors import UserError

USUAL_VOCABULARY: Final = 50257  # GPT-2's


def vocabulary(config: Config) -> int | None:
    """Token ids of a config's data; None where its paths name nothing.

    Raises:
        UserError: what is there is damaged, or does not go with the config.
    """
    return open_dataset(config).vocab_size if names_data(config) else None


def resolve_without_data(config: Config) -> Config:
    """Fill and check a config whose data need not be there yet, if it says how large the vocabulary is.

    Raises:
        UserError: settings that cannot go together; or there is no vocabulary, neither in the config nor in its data.
    """
    if config.model.vocab_size is not None:
        return resolve(config, vocab_size=1)
    found = vocabulary(config)
    if found is not None:
        return resolve(config, found)
    raise UserError(
        "model.vocab_size is not set and data.path names no data that says how many tokens there are; set it, to "
        f"{USUAL_VOCABULARY} say, or use a model.preset."
    )
