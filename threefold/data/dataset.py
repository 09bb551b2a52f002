"""The dataset of a run: one corpus or a mixture of several, and the samples of its splits."""

import os
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np

from threefold.config import Config, resolve
from threefold.config.data import DataConfig
from threefold.config.model import CUSTOM
from threefold.constants import IGNORE_INDEX
from threefold.data.conversations import ChatTemplate
from threefold.data.corpus import Corpus
from threefold.data.formats.custom_data import CustomData, is_custom_data
from threefold.data.formats.registry import holds_tokens, is_prepared, open_corpus
from threefold.data.packed import PackedSamples
from threefold.data.samples import HELD_OUT, MixedSamples, MixturePart, Samples
from threefold.data.sources import is_json_lines
from threefold.data.tokenizer import TextRule
from threefold.doors import needed
from threefold.errors import UserError
from threefold.files import shown
from threefold.output import SILENT, Progress

Source = Any
"""`Corpus`, `CustomData`, or a file of text that an attached room encodes (`json_lines` of its `HOOKS`)."""


@dataclass(frozen=True, eq=False)
class NamedCorpus:
    """One corpus of a run; its name is the path as in the config."""

    name: str
    weight: float
    data: Source


@dataclass(frozen=True, eq=False)
class Dataset:
    """Dataset that a config names: one source, or several that share a vocabulary, in the config's order.

    `validation` are validation data of its own (`data.validation`); without them, a part of the sources is held out.
    """

    sources: tuple[NamedCorpus, ...]
    settings: DataConfig  # which may not be resolved yet
    validation: NamedCorpus | None = None

    @property
    def vocab_size(self) -> int:
        return self.sources[0].data.vocab_size

    @property
    def eod(self) -> int | None:
        return next((eod for source in self.sources if (eod := source.data.eod) is not None), None)

    @property
    def is_nested(self) -> bool:
        """Whether the samples are nestings of tensors for a custom model instead of tokens."""
        return any(isinstance(source.data, CustomData) and source.data.is_nested for source in self.sources)

    @property
    def holds_chat(self) -> bool:
        return any(source.data.holds_chat for source in self.sources)

    @property
    def template(self) -> ChatTemplate | None:
        return next((template for source in self.sources if (template := source.data.template)), None)

    @property
    def rule(self) -> TextRule:
        rules = [source.data.rule for source in self.sources]
        return next((rule for rule in rules if not rule.is_assumed), rules[0])

    @property
    def tokenizer_file(self) -> Path | None:
        return next((file for source in self.sources if (file := source.data.tokenizer_file)), None)

    @property
    def tokenizer_sha256(self) -> str | None:
        return next((sha256 for source in self.sources if (sha256 := source.data.tokenizer_sha256)), None)

    def complete(self, config: Config) -> Config:
        """Return the config with defaults that follow from the data: the attention mask separates conversations."""
        if not self.holds_chat or "separate_documents" in config.data.model_fields_set:
            return config
        return config.model_copy(update={"data": config.data.model_copy(update={"separate_documents": True})})

    def sources_of(self, name: str) -> tuple[NamedCorpus, ...]:
        """Return the sources that the samples of a split come from."""
        return (self.validation,) if name == "valid" and self.validation is not None else self.sources

    def samples(self, name: str, settings: DataConfig | None = None, progress: Progress = SILENT) -> Samples:
        """Return the samples of a split, with the dataset's own settings if None are given."""
        settings, sources = settings or self.settings, self.sources_of(name)
        if sources != self.sources:
            settings = settings.model_copy(update={"split": HELD_OUT})
            _check_length(sources[0], settings.sequence_length, progress)
        parts = [
            MixturePart(source.name, _samples(source.data, name, settings, progress), source.weight)
            for source in sources
        ]
        return parts[0].samples if len(parts) == 1 else MixedSamples(parts)

    def require_labels(self, name: str, samples: Samples) -> None:
        """Check that each source has a label, other than a custom dataset, whose reading may take long."""
        for source, part in zip(sources := self.sources_of(name), samples.parts, strict=True):
            size, read_together = len(part.samples), 64
            chunks = (np.arange(first, min(first + read_together, size)) for first in range(0, size, read_together))
            if isinstance(source.data, CustomData) or any(
                (part.samples.labelled(chunk)[1] != IGNORE_INDEX).any() for chunk in chunks
            ):
                continue
            key = "data.path" if len(sources) == 1 else "data.mixture"
            key = key if sources is self.sources else "data.validation"
            raise UserError(
                f"{key} has {source.name}, where no token of the {name} split counts for the loss, as where each "
                "document is a single token; give data with documents of two tokens or more."
            )

    def sizes(self) -> tuple[tuple[int, int], ...]:
        """Return the number of tokens and documents of each source; needs resolved settings. Raises like `samples`."""
        length, found = self.settings.sequence_length, list[tuple[int, int]]()
        for source in self.sources:
            if isinstance(data := source.data, CustomData):
                found.append((len(data) * (1 if data.is_nested else length), len(data)))
            else:
                corpus = stored_corpus(data, length)
                found.append((len(corpus.tokens), corpus.document_count))
        return tuple(found)

    def contents(self) -> tuple[Corpus, ...]:
        """Return each source that has files; needs resolved settings. Raises like `samples`."""
        length = self.settings.sequence_length
        found = (source.data for source in self.sources)
        return tuple(stored_corpus(data, length) for data in found if not isinstance(data, CustomData))


def stored_corpus(data: Source, sequence_length: int, progress: Progress = SILENT) -> Corpus:
    """Return the tokens of a source, which for a file of text are those in its cache."""
    corpus: Corpus = data if isinstance(data, Corpus) else data.corpus(sequence_length, progress)
    return corpus


def _is_text(data: Source) -> bool:
    return not isinstance(data, Corpus | CustomData)


def open_dataset(config: Config) -> Dataset:
    """Open the dataset that a config names, resolved or not; its corpora must share a tokenizer."""
    sources = [NamedCorpus(name, weight, _open(name, config)) for name, weight in config.data.corpora.items()]
    for one, other in combinations(sources, 2):
        _check_shared(one, other)
    dataset = Dataset(tuple(sources), config.data, _open_validation(sources[0], config))
    _check_pairs(dataset, config)
    if dataset.is_nested and len(sources) > 1:
        raise UserError(
            f"data.mixture names {' and '.join(source.name for source in sources)}, of which one has other samples "
            "than tokens, which are not mixed; name one data set as data.path, such as one that joins them."
        )
    return dataset


def _open_validation(train: NamedCorpus, config: Config) -> NamedCorpus | None:
    """Open `data.validation`, whose text is encoded as the training data are."""
    if config.data.validation is None:
        return None
    name, settings, data = config.data.validation, config.data, train.data
    path, given = Path(name), f"{config.origin('data.validation')}data.validation is {shown(name)}"
    parts = 'a function that returns a mapping of data sets, {"train": …, "valid": …}'
    if is_custom_data(name) and not holds_tokens(path):
        raise UserError(f"{given}, a Python data set; have data.path name {parts}, instead.")
    if isinstance(data, CustomData) and data.is_nested:
        raise UserError(f"{given}, which holds no samples like those of data.path; have that name {parts}, instead.")
    if not os.path.lexists(path) and not holds_tokens(path):
        where = "" if path.is_absolute() else f" in {shown(Path.cwd())}"
        raise UserError(
            f"{given}, which does not exist{where}; give a JSON Lines file, or make token files with `threefold data "
            "prepare INPUT --out FOLDER`."
        )
    changes: dict[str, Any] = {"tokenizer": None, "special_tokens": None}
    if is_json_lines(path) or not is_prepared(path):
        changes["tokenizer"] = settings.tokenizer or (data.tokenizer_file and str(data.tokenizer_file))
        changes["special_tokens"] = settings.special_tokens or (
            None if data.rule.is_assumed else data.rule.special_tokens
        )
        changes["eod"] = data.eod if settings.eod is None else settings.eod
    opened = _open(name, config.model_copy(update={"data": settings.model_copy(update=changes)}), "data.validation")
    found = NamedCorpus(name, 1.0, opened)
    _check_shared(train, found, f"{'data.mixture' if settings.mixture else 'data.path'} and data.validation name")
    if opened.holds_chat != data.holds_chat:
        there, here = ("texts", "conversations") if data.holds_chat else ("conversations", "texts")
        raise UserError(f"{given}, which holds {there}, and the training data hold {here}; give {here}.")
    return found


def _check_length(source: NamedCorpus, length: int, progress: Progress) -> None:
    """Raise a `UserError` if validation data that are packed do not fill a sample."""
    if _is_text(source.data) or source.data.holds_chat:
        return  # whose samples are filled up
    if (tokens := len(stored_corpus(source.data, length, progress).tokens)) <= length:
        use = f"a data.sequence_length of at most {tokens - 1}, or longer texts" if tokens > 1 else "longer texts"
        raise UserError(
            f"data.validation is {shown(source.name)}, which holds {tokens:,} tokens, and one sample takes one more "
            f"than data.sequence_length, {length}; use {use}."
        )


def _check_pairs(dataset: Dataset, config: Config) -> None:
    beta = config.preference.beta
    validation = () if dataset.validation is None else (dataset.validation,)
    for name, holds_pairs in ((source.name, source.data.holds_pairs) for source in (*dataset.sources, *validation)):
        if holds_pairs and not beta:
            raise UserError(
                f"{shown(name)} holds pairs of a chosen and a rejected answer, and preference.beta is 0; set it, to "
                "0.1 say, or give data to learn from as it is."
            )
        if beta and not holds_pairs:
            raise UserError(
                f"{config.origin('preference.beta')}preference.beta is {beta:g} but {shown(name)} holds no pairs of a "
                "chosen and a rejected answer; prepare such lines, or leave preference.beta out."
            )
    if beta and len(dataset.sources) > 1:
        raise UserError("preference.beta is set but data.mixture names several data; name one data.path.")
    if beta and config.is_given("data.separate_documents") and not config.data.separate_documents:
        raise UserError("data.separate_documents is false but a pair's answers must not see each other; use true.")


def names_data(config: Config) -> bool:
    """Return whether there are files at a config's paths; `open_dataset` raises if they hold no data."""
    return any(is_custom_data(name) or Path(name).exists() or holds_tokens(Path(name)) for name in config.data.corpora)


def missing_data(name: str, config: Config) -> str:
    """Return the clause on a path of a config's data at which nothing is, with the folder where it was looked for."""
    setting = "data.path is" if config.data.mixture is None else "data.mixture has"
    where = "" if Path(name).is_absolute() else f" in {shown(Path.cwd())}"
    return f"{setting} {shown(name)}, which does not exist{where}"


def _open(name: str, config: Config, key: str = "data.path") -> Source:
    settings, path = config.data, Path(name)
    if is_custom_data(name) and not holds_tokens(path):
        return CustomData.open(name, config.model.vocab_size, config.model.architecture == CUSTOM)
    if not os.path.lexists(path) and not holds_tokens(path):
        raise UserError(
            f"{missing_data(name, config)}; make token files with `threefold data prepare INPUT --out {shown(name)}`."
        )
    tokenizer = None if settings.tokenizer is None else Path(settings.tokenizer)
    if not is_json_lines(path):
        return open_corpus(
            path,
            tokenizer=tokenizer,
            eod=settings.eod,
            vocab_size=config.model.vocab_size,
            special_tokens=settings.special_tokens,
        )
    if tokenizer is None:
        raise UserError(
            f"{path} holds text, which needs a tokenizer; set data.tokenizer to a tokenizer.json, or make token files "
            f"with `threefold data prepare {path} --out FOLDER`."
        )
    cache, template = (Path(each) if each else None for each in (settings.cache, settings.chat_template))
    text = needed("json_lines", f"{key} {shown(name)}, a file of text,", "convert")
    return text(path, tokenizer, settings.key, settings.eod, cache, settings.special_tokens or "parse", template)


def _check_shared(one: NamedCorpus, other: NamedCorpus, named: str = "data.mixture names") -> None:
    first, second = one.data, other.data
    what = None
    if first.tokenizer_sha256 and second.tokenizer_sha256 and first.tokenizer_sha256 != second.tokenizer_sha256:
        what = "were made with different tokenizers"
    elif first.vocab_size != second.vocab_size:
        what = f"have vocabularies of {first.vocab_size:,} and {second.vocab_size:,} tokens"
    if what:
        raise UserError(
            f"{named} {one.name} and {other.name}, which {what}, so their tokens mean different things; "
            "prepare one with the other's tokenizer.json (`threefold data prepare --tokenizer`)."
        )
    assumed = first.rule.is_assumed or second.rule.is_assumed
    if first.rule.special_tokens != second.rule.special_tokens and not assumed:
        remedy = "prepare one of them again with the other's --special-tokens"
        if _is_text(first) or _is_text(second):
            made = (second if _is_text(first) else first).rule.special_tokens
            remedy = f"set data.special_tokens to {made}, which JSON lines follow"
        raise UserError(
            f"{named} {one.name}, made with special_tokens {first.rule.special_tokens}, and "
            f"{other.name}, made with {second.rule.special_tokens}; {remedy}."
        )


def _samples(data: Source, name: str, settings: DataConfig, progress: Progress) -> Samples:
    length = settings.sequence_length
    if isinstance(data, CustomData):
        return data.samples(name, settings.split, length)
    corpus = stored_corpus(data, length, progress)
    if data.holds_pairs:
        pairs = needed("preference_pairs", "Data of preferences", "preference")
        opened_pairs: Samples = pairs.open(corpus, name, settings.split, length)
        return opened_pairs
    if data.holds_chat:
        packed = needed("packed_conversations", "Data of conversations", "huggingface")
        samples: Samples = packed.open(corpus, name, settings.split, length, settings.loss_tokens == "all")
        return samples
    opened = data.samples if _is_text(data) else PackedSamples.open
    texts: Samples = opened(corpus, name, settings.split, length)
    return texts


USUAL_VOCABULARY: Final = 50257  # GPT-2's


def vocabulary(config: Config) -> int | None:
    """Return the number of token ids of a config's data; None without data. Raises like `open_dataset`."""
    return open_dataset(config).vocab_size if names_data(config) else None


def resolve_without_data(config: Config) -> Config:
    """Resolve and check a config whose data may not exist yet, if the config gives the vocabulary size."""
    if config.model.vocab_size is not None:
        return resolve(config, vocab_size=1)
    found = vocabulary(config)
    if found is not None:
        return resolve(config, found)
    raise UserError(
        f"{missing_data(next(iter(config.data.corpora)), config)}, and model.vocab_size is not set, so nothing says "
        f"how many tokens there are; set it, to {USUAL_VOCABULARY} say, or use a model.preset."
    )
