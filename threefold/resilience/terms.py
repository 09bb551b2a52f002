"""Terms of a run: everything that decides its numbers, compared over all ranks before the run starts.

One stale checkout, one edited config or one half-copied data folder on one node would otherwise train a model that no
config describes, without an error.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import numpy as np

from threefold.checkpoint.code import checksum_of_code, code_of
from threefold.checksums import checksum_of_blocks, short
from threefold.comm.heartbeat import Heartbeat
from threefold.config import Config
from threefold.data.corpus import Corpus
from threefold.data.dataset import Dataset, stored_corpus
from threefold.data.formats.custom_data import CustomData
from threefold.data.samples import Samples
from threefold.models.source import ModelSource
from threefold.parallel.arithmetic import arithmetic_of
from threefold.resilience.agreement import facts_of_process, processor, require_same

NOT_COMPARED: Final = {
    "data.path": "each host may keep the data elsewhere; its content is compared",
    "data.mixture": "as data.path; contents and weights are compared",
    "data.validation": "as data.path",
    "data.tokenizer": "a path; the tokens are compared",
    "data.chat_template": "a path; the tokens are compared",
    "data.cache": "a folder that holds only what follows from other files",
    "model.file": "a path; the source is compared",
    "train.device": "the kind of processor is compared",
}
"""Settings that may differ between ranks, with the reason."""
_AGREED: Final = ("train.micro_batch_size", "train.gradient_accumulation_steps", "train.loss_chunk_size")
"""Settings that each rank derives from its host's memory unless they are given, and that ranks agree on afterwards."""
_REMEDY: Final = "start every rank with the same config, data, code and environment"


def agree_on_terms(
    config: Config,
    dataset: Dataset,
    parts: Iterable[Samples | None],
    source: ModelSource,
    heartbeat: Heartbeat,
) -> list[str]:
    """Compare everything that decides a run's numbers over all ranks, and return lines about what else differs.

    Collective over the process group: four numbers pass a tree of ranks if nothing differs. Raises a `UserError` on
    every rank, which names the first difference with the hosts and ranks.
    """
    facts = settings_of(config) | code(config, source) | data_of(dataset, parts) | facts_of_process()
    kind = {"the processor": processor("cuda" if config.train.device == "cuda" else "cpu")}
    if arithmetic_of(config).is_bitwise:  # on equal machines only
        facts, kind = facts | kind, {}
    others = require_same(facts, kind, _REMEDY, heartbeat)
    return [f"{each}; the last digits of losses depend on it." for each in others]


def settings_of(config: Config) -> dict[str, str]:
    """Return the settings of a resolved config that all ranks must have alike, as text."""
    agreed = (key for key in _AGREED if {"train.micro_batch_size", key} <= config.derived)
    sections, named = config.sections(), [(key.split("."), name) for key, name in code_of(config)]
    alone = (f"{section}.{key}" for (section, key), name in named if sections[section].get(key) == name)
    left_out = {*NOT_COMPARED, *agreed, *alone}
    found = {
        f"{section}.{key}": value if isinstance(value, str) else json.dumps(value)
        for section, values in sections.items()
        for key, value in values.items()
        if f"{section}.{key}" not in left_out
    }
    for key, name in code_of(config):  # in a list, of which the rest is compared as it is
        if key in found:
            place, colon, attribute = name.rpartition(":")
            found[key] = found[key].replace(name, f"{Path(place).name}{colon}{attribute}")
    return found


def code(config: Config, source: ModelSource) -> dict[str, str]:
    """Return the names and checksums of the code that a config names, and of the model's and the loss's files."""
    found = dict[str, str]()
    for key, name in code_of(config):
        place, colon, attribute = name.rpartition(":")
        file, before = _file_of(place or attribute), found.get(f"the code of {key}")
        text = f"{file.name}{colon}{attribute} with the checksum {checksum_of_code([file])}" if file else name
        found[f"the code of {key}"] = f"{before}, {text}" if before else text
    if files := source.files(config):
        found["the code of the model"] = f"{files[0].name} with the checksum {checksum_of_code(files)}"
    return found


def data_of(dataset: Dataset, parts: Iterable[Samples | None]) -> dict[str, str]:
    """Return what this rank sees of the data: sizes, checksums, tokenizer, and the number of samples of each part."""
    found, several = {}, len(dataset.sources) > 1
    named = [f"the data of data.mixture {number}" for number, _ in enumerate(dataset.sources, start=1)]
    named = named if several else ["the data at data.path"]
    for number, each in enumerate(dataset.sources if several else (), start=1):
        found[f"the weight of data.mixture {number}"] = repr(each.weight)
    validation = (("the data at data.validation", dataset.validation),) if dataset.validation else ()
    for name, each in (*zip(named, dataset.sources, strict=True), *validation):
        if not isinstance(each.data, CustomData):  # which `require_same_custom_data` compares, with advice of its own
            corpus = stored_corpus(each.data, dataset.settings.sequence_length)
            tokenizer = corpus.tokenizer_sha256
            found[name] = _content(corpus)
            found[f"{name}, its vocabulary,"] = f"{corpus.vocab_size:,} with end of document {corpus.eod}"
            found[f"{name}, its tokenizer,"] = (
                f"{short(tokenizer) if tokenizer else 'none'} with special tokens as {corpus.rule.special_tokens}"
            )
    for name, part in zip(("training", "validation"), parts, strict=True):
        if part is not None and not any(isinstance(each.data, CustomData) for each in dataset.sources):
            found[f"the number of {name} samples"] = f"{len(part):,}"
    return found


def _content(corpus: Corpus) -> str:
    written, documents = corpus.content.tokens, short(corpus.content.documents)
    known = f"{short(written)}, " if written else ""
    size = f"{len(corpus.tokens):,} tokens of {corpus.tokens.dtype.name} in {corpus.document_count:,} documents"
    return f"{size} with the checksums {known}{documents} and {_sketch(corpus)}"


_BLOCKS, _BLOCK = 64, 1024


def _sketch(corpus: Corpus) -> str:
    """Return a checksum of evenly spaced blocks of the tokens, and of which of them count for the loss.

    It finds a folder that was half copied; `TokenCheck` reads all tokens in the background.
    """
    last = max(0, len(corpus.tokens) - _BLOCK)
    starts = np.linspace(0, last, _BLOCKS, dtype=np.int64) if last else [0]
    arrays: list[Any] = [corpus.tokens] if corpus.loss_mask is None else [corpus.tokens, corpus.loss_mask]
    return short(
        checksum_of_blocks(
            np.ascontiguousarray(array[start : start + _BLOCK]).tobytes() for array in arrays for start in starts
        )
    )


def _file_of(place: str) -> Path | None:
    """Return the source file of a module or of a path to one; None if it cannot be found."""
    if place.endswith((".py", ".csv")):
        return Path(place)
    with suppress(ImportError, ValueError, AttributeError):
        spec = find_spec(place)
        return None if spec is None or not spec.origin else Path(spec.origin)
    return None
