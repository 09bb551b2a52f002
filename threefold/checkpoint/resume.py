"""Resuming and warm starts: whether a run may continue from a checkpoint, and warnings about what will differ."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from threefold.checkpoint.errors import MODEL, DamagedCheckpoint
from threefold.checkpoint.folder import (
    TOKENIZER,
    Damaged,
    SelectedCheckpoint,
    check_whole,
    code_text,
    folders,
    model_files,
    newest,
    select_checkpoint,
    stored_config,
)
from threefold.checkpoint.manifest import Checkpoint, read_writer
from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.config.by_step import entries_of, value_at
from threefold.config.section import Section
from threefold.data.corpus import Content, Corpus
from threefold.data.dataset import open_dataset
from threefold.data.order import Blend, ConsumedSamples, read_by_step, weights_by_step
from threefold.data.tokenizer import TextRule, load_tokenizer, loaded
from threefold.doors import needed
from threefold.errors import UserError
from threefold.files import shown
from threefold.foreign import FolderFiles

_FREE = ("parallel.", "checkpoint.", "log.", "train.eval_")  # prefixes of settings that change no result
_FREE_KEYS = frozenset(
    f"{section}.{name}"
    for section, names in (
        # Contents are compared instead of paths and keys, the text rule instead of special_tokens and chat_template.
        ("data", "path validation tokenizer key cache special_tokens chat_template"),
        # The file's content is compared; initializer_range affects only the initial weights.
        ("model", "file preset initializer_range"),
        # max_steps is derived from epochs; policies take effect, and are reported, only at an anomalous step.
        ("train", "init_from init_step init_average max_steps epochs max_seconds micro_batch_size device verify"),
        ("train", "gradient_accumulation_steps"),
        ("train", "timeout max_restarts compile recompute recompute_every loss_chunk_size on_nan on_spike"),
        ("train", "max_skipped_steps max_consecutive_skips max_rollbacks rollback_steps"),
        ("precision", "loss_scale"),  # the checkpoint has its current value
    )
    for name in names.split()
)
_ROUNDING = "parallel.gradient_compression"  # setting under `_FREE` that changes rounding, and so the results slightly
_WHOLE_RUN = (
    "model.initializer_range",
    "train.init_from",
    "train.init_step",
    "train.init_average",
    "train.max_steps",
    "train.epochs",
)
"""Settings under `_FREE_KEYS` that a resumed run may change, but that give other results from the start of a run."""
_REPORTS = "train.callbacks"
"""Setting whose change is reported at a resume, and that does not decide a run's results."""
SHAPES = frozenset(
    f"model.{name}"
    for name in (
        *("architecture", "num_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("ffn_hidden_size", "vocab_size", "max_position_embeddings", "position_embedding", "tie_embeddings"),
        *("qkv_bias", "qk_norm", "num_experts", "expert_ffn_hidden_size", "shared_expert_ffn_hidden_size"),
        *("shared_expert_gate", "moe_every", "dense_layers", "router", "router_bias_rate"),
        *("router_bias", "expert_bias"),
        *("query_rank", "key_value_rank", "plain_head_dim", "rope_head_dim", "value_head_dim"),
        *("qk_norm_over", "attention_gate", "proj_bias", "norm_position", "mtp_layers"),
    )
)
"""Settings that determine the shapes of the weights."""
_OF_ADAPTER = ("adapter.rank", "adapter.targets", "adapter.dora")
_ORDER = ("train.seed", "data.sequence_length", "data.split")
_BATCH, _MIXTURE = "train.global_batch_size", "data.mixture"

Resume = bool | Literal["auto"]  # whether a run resumes from its own checkpoint; "auto" resumes if there is one


def copies_of(config: Config, run_dir: Path) -> Any:
    """Return the copies of a run's checkpoints at `checkpoint.remote` (`RemoteCopies` of `threefold.resilience`).

    None if the config names no address.
    """
    if config.checkpoint.remote is None:
        return None
    return needed("remote_copies", "checkpoint.remote", "resilience")(config, run_dir)


def continues(run_dir: Path, resume: Resume) -> bool:
    """Return whether a run resumes; "auto" does so even if all checkpoints are damaged, so as not to overwrite them."""
    return bool(folders(run_dir)) if resume == "auto" else resume


def has_all_steps(run_dir: Path, steps: int) -> bool:
    """Return whether a run's newest checkpoint is of its last step, with every byte intact."""
    with suppress(DamagedCheckpoint):
        if (saved := newest(run_dir)) is not None and saved.step == steps:
            check_whole(saved)
            return True
    return False


def is_finished(run_dir: Path, config: Config) -> bool:
    """Return whether a run has made all steps of the config, as `has_all_steps`, with the config's settings.

    Raises a `UserError` if it made them with others, apart from those that change no result: nothing would be trained
    with the config's.
    """
    if not has_all_steps(run_dir, config.train.max_steps):
        return False
    saved = newest(run_dir)
    assert saved is not None  # it has the last step
    for key, before, now in _allowed_changes(saved, stored_config(saved.path), config):
        raise UserError(
            f"{config.origin(key)}{key} is {now!r} but {run_dir} has completed all its {saved.step} steps with "
            f"{before!r}; set it to {before!r}, or start a new run in another folder."
        )
    return True


def find_resumption(run_dir: Path, config: Config, damaged: Damaged | None = None) -> SelectedCheckpoint:
    """Return the newest valid checkpoint of a run, checked against the run's resolved config.

    The layout and everything else that changes no result may differ. Settings that change later results, such as the
    learning rate, give a warning. Another model, optimizer or order of samples is an error.
    """
    advice = " to resume from; start without --resume in an empty folder"
    choice = select_checkpoint(run_dir, str(run_dir), advice, damaged)
    checkpoint = choice.checkpoint
    if checkpoint.step == 0 or read_writer(checkpoint.path).weights_only:
        raise UserError(
            f"{checkpoint.path} has a model and no optimizer state to resume; start a run in another folder with "
            f"train.init_from {run_dir}."
        )
    changes = _allowed_changes(checkpoint, choice.config, config)
    if checkpoint.step >= config.train.max_steps:
        try:
            check_whole(checkpoint)  # as its tensors will not be read
        except DamagedCheckpoint as damage:
            return find_resumption(run_dir, config, {**(damaged or {}), damage.path: damage.reason})
        if config.train.epochs is not None:
            raise UserError(
                f"train.epochs is {config.train.epochs}, which are {config.train.max_steps} steps, and "
                f"{checkpoint.path} is at step {checkpoint.step} already; use {config.train.epochs + 1} to resume."
            )
        raise UserError(
            f"train.max_steps is {config.train.max_steps} and {checkpoint.path} is at step {checkpoint.step} already; "
            f"set it to {checkpoint.step + 1} at least to resume."
        )
    consequences = {
        _BATCH: lambda: f": {_other_batch(checkpoint, choice.config, config)}",
        _MIXTURE: lambda: ": each corpus is read on from where it stands",
        "optimizer.frozen": lambda: ": the optimizer's state of weights that were frozen begins at zero",
    }
    warnings = [
        f"{key} is {now!r} from here on; up to now it was {before!r}{consequences.get(key, str)()}."
        for key, before, now in changes
    ]
    warnings += _changed_model(checkpoint, config)
    decay, last = config.optimizer.decay_steps, config.train.max_steps
    if decay == choice.config.train.max_steps < last and config.optimizer.decay != "constant":
        warnings.append(
            f"optimizer.decay_steps is {decay}, which train.max_steps was up to now, and train.max_steps is {last}: "
            f"the steps after {decay} are made at optimizer.min_lr {config.optimizer.min_lr:g}; "
            "--set optimizer.decay_steps=null makes it follow train.max_steps again."
        )
    warnings += _restarted_streams(checkpoint, config)
    return replace(choice, warnings=(*choice.warnings, *warnings), is_resumed=True)


def _allowed_changes(checkpoint: Checkpoint, stored: Config, config: Config) -> list[tuple[str, Any, Any]]:
    """Return the settings that a resumed run may change; raise a `UserError` for one that it may not, or other data."""
    changes = list(_changes(stored, config))
    if config.optimizer.groups or stored.optimizer.groups:
        _check_optimizers(checkpoint, stored, config)
    for key, before, now in changes:
        if reason := _forbidden(key, before, now, config):
            raise UserError(
                f"{config.origin(key)}{key} is {now!r} but {checkpoint.path} was made with {before!r}, {reason}; "
                f"set it to {before!r}, or start a new run in another folder."
            )
    _check_data(checkpoint, config)
    _check_epochs(checkpoint, config)
    return changes


def _check_optimizers(checkpoint: Checkpoint, stored: Config, config: Config) -> None:
    """Raise UserError if a weight's optimizer changed, by the groups."""
    from threefold.checkpoint.tensors import stored_tensors
    from threefold.models.groups import optimizer_changes

    names = [name.removeprefix(MODEL) for name in stored_tensors(checkpoint.path) if name.startswith(MODEL)]
    if change := optimizer_changes(names, stored.optimizer, config.optimizer):
        before, now = (list(each.optimizer.groups or ()) for each in (stored, config))
        raise UserError(
            f"{config.origin('optimizer.groups')}optimizer.groups is {now!r} but in {checkpoint.path} {change}; set it "
            f"to {before!r}, or start a new run in another folder."
        )


def _other_batch(checkpoint: Checkpoint, stored: Config, config: Config) -> str:
    """Describe the effect of another global batch size, as a clause."""
    consumed, train = consumed_by(checkpoint, config), config.train
    sizes = train.global_batch_size, stored.train.global_batch_size
    ratio = value_at(sizes[0], checkpoint.step) / value_at(sizes[1], checkpoint.step - 1)
    before = stored.optimizer.lr
    return (
        f"step {checkpoint.step + 1:,} reads on after the {consumed.samples:,} samples consumed, and as steps count "
        f"updates, warm-up, decay and train.max_steps {train.max_steps:,} keep their steps, up to which "
        f"{consumed.before(train.max_steps):,} samples are consumed; optimizer.lr is {config.optimizer.lr:g} (that of "
        f"before is {before * ratio:.3g} when scaled linearly, {before * ratio**0.5:.3g} by the square root)"
    )


def consumed_by(checkpoint: Checkpoint, config: Config) -> ConsumedSamples:
    """Return the training samples consumed before each step of a run resumed from a checkpoint."""
    facts, blend = checkpoint.facts, checkpoint.facts.blend
    if len(config.data.corpora) > 1 and not blend:  # of a version whose weights did not change
        weights = list(stored_config(checkpoint.path).data.corpora.values())
        blend = Blend(weights).standing(facts.consumed_samples)
    return ConsumedSamples(read_by_step(config), facts.step, facts.consumed_samples, blend)


def _check_epochs(checkpoint: Checkpoint, config: Config) -> None:
    """Raise UserError if `train.epochs` no longer gives `train.max_steps`, after a change of the global batch size."""
    consumed, epochs = consumed_by(checkpoint, config), config.train.epochs
    if epochs is None or consumed.has_one_size:
        return
    last = consumed.steps_until(epochs * len(open_dataset(config).samples("train")))
    if last != config.train.max_steps:
        raise UserError(
            f"train.epochs is {epochs}, from which train.max_steps follows only while {_BATCH} stays as it is, and "
            f"{checkpoint.path} has consumed {consumed.samples:,} samples in {consumed.step:,} steps; give "
            f"train.max_steps {max(last, consumed.step + 1):,} in its place."
        )


def _changed_model(checkpoint: Checkpoint, config: Config) -> Iterator[str]:
    """Yield a warning for each changed file of a custom model; raise UserError if its weights changed too."""
    if not config.model.file:
        return
    from threefold.checkpoint.index import require_match

    require_match(config, checkpoint.path)
    stored = FolderFiles(checkpoint.path)
    for name, file in model_files(Path(config.model.file.partition(":")[0])).items():
        if not stored.holds(name) or code_text(file) != stored.text(name):
            yield f"{shown(file)} has changed since {checkpoint.path}; it is used as it is now."


def _restarted_streams(checkpoint: Checkpoint, config: Config) -> Iterator[str]:
    """Yield a warning if the model draws from per-rank random streams, which resume only in the same layout."""
    # These import torch, which errors that need no tensor should not wait for.
    from threefold.checkpoint.tensors import stored_tensors
    from threefold.random.rng import STREAMS, is_of_process, stored_as

    layout = Layout.from_config(config.parallel)
    stored = [name for name in stored_tensors(checkpoint.path) if name.startswith(STREAMS)]
    if stored and not any(name.startswith(stored_as(layout.shape)) for name in stored):
        if any(not is_of_process(name) for name in stored):
            yield "The random streams that the model draws from belong to another layout; they start anew from here on."
        if any(is_of_process(name) for name in stored):
            yield (
                "The states of the generators of torch, random and numpy.random belong to another layout; they follow "
                "from train.seed and the step from here on."
            )


def _changes(stored: Config, config: Config) -> Iterator[tuple[str, Any, Any]]:
    before, now = stored.sections(), config.sections()
    stored_weights, weights = list(stored.data.corpora.values()), list(config.data.corpora.values())
    for section in {**before, **now}:
        for name in {**before.get(section, {}), **now.get(section, {})}:
            key = f"{section}.{name}"
            old, new = (_value(getattr(each, section), name) for each in (stored, config))
            if key == "data.mixture" and weights_by_step(stored_weights) == weights_by_step(weights):
                continue  # equal weights; the corpora may have moved
            if old != new and not _is_free(key):
                yield key, old, new


def _value(section: Section, name: str) -> Any:
    """Return the value of a setting, also of one that a resolved config leaves out; None if the section lacks it."""
    return section.settings().get(name, getattr(section, name, None))


def is_decisive(key: str) -> bool:
    """Return whether a setting decides a run's results, its beginning and its length included."""
    return key in _WHOLE_RUN or not (_is_free(key) or key in ("data.mixture", _REPORTS))


def _is_free(key: str) -> bool:
    return (key.startswith(_FREE) and key != _ROUNDING) or key in _FREE_KEYS


def _forbidden(key: str, before: Any, now: Any, config: Config) -> str | None:
    moves = key == "model.router_bias_rate" and (config.model.router == "sigmoid" or bool(before) == bool(now))
    if key in _OF_ADAPTER or (key in SHAPES and not moves):  # with biases before and after, another rate trains alike
        return "whose weights do not fit another model"
    if key in _ORDER or (key == _MIXTURE and len(before or ()) != len(now or ())):
        return "and the order of the samples follows from it"
    if key == _BATCH and len(entries_of(config.data.sequence_length)) > 1:
        return "and data.sequence_length changes after as many tokens"
    parts = ("train.micro_batch_size", "train.gradient_accumulation_steps")
    if key == _BATCH and not config.derived.intersection(parts):
        return (
            "and with train.micro_batch_size and train.gradient_accumulation_steps given it follows from parallel.dp; "
            "leave one of these two out to change it on purpose"
        )
    if key == "optimizer.name":
        return "whose state does not fit another optimizer"
    grouped = config.optimizer.groups  # whose rule is `_check_optimizers`
    if key == "optimizer.momentum" and config.optimizer.name == "sgd" and bool(before) != bool(now) and not grouped:
        return "and sgd has a momentum to resume only where it was above 0"
    return None


def _check_data(checkpoint: Checkpoint, config: Config) -> None:
    dataset, facts = open_dataset(config), checkpoint.facts
    names = [source.name for source in dataset.sources]
    key = "data.path" if len(names) == 1 else "data.mixture"
    if facts.tokenizer_sha256 not in (None, dataset.tokenizer_sha256):
        raise UserError(
            f"{key} is {', '.join(names)}, whose tokenizer is not the one that {checkpoint.path} was trained with; "
            "give the data it was trained on, or start a new run in another folder."
        )
    _check_rule(checkpoint, dataset.rule)
    if not facts.tokens:
        return  # an import with an optimizer's state, whose data were another system's
    trained_on = facts.corpora or ((facts.tokens, facts.documents),)
    for name, now, then in zip(names, dataset.sizes(), trained_on, strict=True):
        if now != then:
            raise UserError(
                f"{key} has {name} with {now[0]:,} tokens in {now[1]:,} documents but {checkpoint.path} was trained on "
                f"{then[0]:,} in {then[1]:,} there; give that data, or start a new run in another folder."
            )
    for name, read, content in zip(names, dataset.contents(), facts.contents, strict=False):
        if differs := different_file(content, read):
            raise other_text(differs, checkpoint)
        masks = (content.loss_mask, read.content.loss_mask)
        if config.data.loss_tokens == "answers" and None not in masks and masks[0] != masks[1]:
            raise UserError(
                f"{key} has {name}, where other tokens count for the loss than {checkpoint.path} was trained on; give "
                "that data, with the chat template it had (data.chat_template), or start a new run in another folder."
            )


def different_file(then: Content, now: Corpus) -> Path | None:
    """Return the first data file whose checksum differs from the checkpoint's, or None."""
    if now.content.documents != then.documents and now.content.documents and then.documents:
        return now.files[-1]
    if then.tokens is None or now.content.tokens is None or then.dtype != now.content.dtype:
        return None  # only reading all tokens would show it, which a run does in the background
    return None if then.tokens == now.content.tokens else now.files[0]


def other_text(file: Path, checkpoint: Checkpoint) -> UserError:
    """Return the error for a file that differs from a checkpoint's training data."""
    return UserError(
        f"{shown(file)} holds other text than {checkpoint.path} was trained on, though as much of it; give that data, "
        "or start a new run in another folder."
    )


def _check_rule(checkpoint: Checkpoint, rule: TextRule) -> None:
    before = checkpoint.facts.rule
    if before is None or before.is_assumed or rule.is_assumed:
        return
    if rule.special_tokens != before.special_tokens:
        raise UserError(
            f"data.special_tokens is {rule.special_tokens} but {checkpoint.path} was trained with "
            f"{before.special_tokens}, which makes other tokens of the same text; set it to {before.special_tokens}, "
            "or start a new run in another folder."
        )
    if rule.beginning != before.beginning and checkpoint.facts.beginning is not None:
        raise UserError(
            f"The texts of the data begin with the tokens {list(rule.beginning)} but those that {checkpoint.path} was "
            f"trained on with {list(before.beginning)}; give that data, or start a new run in another folder."
        )


def find_warm_start(config: Config, damaged: Damaged | None = None) -> SelectedCheckpoint | None:
    """Return the newest valid checkpoint of the run in `train.init_from`, or that of `train.init_step`, checked.

    None if it is not set. Settings that make the weights compute a different function give a warning; weights that do
    not fit the model, or another tokenizer than the data's, are an error.
    """
    if not config.train.init_from:
        return None
    where = f"{config.origin('train.init_from')}train.init_from is {config.train.init_from}"
    advice = "; give the folder of a run"
    named = f"{config.origin('train.init_step')}train.init_step"
    step = None if config.train.init_step is None else str(config.train.init_step)
    choice = select_checkpoint(Path(config.train.init_from), f"{where}, which", advice, damaged, step, named)
    checkpoint = choice.checkpoint
    if config.train.init_average:
        from threefold.checkpoint.index import weight_names

        asks = f"{config.origin('train.init_average')}train.init_average is true"
        weight_names(checkpoint.path, True, asks)  # raises if there is none
    before, now = choice.config.model.settings(), config.model.settings()
    warnings = list(choice.warnings)
    same_function = (
        "preset",
        "file",
        "initializer_range",
        "hidden_dropout",
        "embedding_dropout",
        "attention_dropout",
        "mtp_loss",
    )
    for key in {**before, **now}:
        old, new = (_value(model, key) for model in (choice.config.model, config.model))
        if old == new or key in same_function:
            continue
        warnings.append(f"model.{key} is {new!r}; {checkpoint.path} had {old!r}.")
        stretched = key == "max_position_embeddings" and config.model.position_embedding == "rope"
        biases = choice.config.model.has_expert_bias == config.model.has_expert_bias
        left_out = key == "mtp_layers" and new < old
        fits = stretched or left_out or (key in ("router", "router_bias_rate") and biases)
        if f"model.{key}" in SHAPES and not fits:
            raise UserError(
                f"{config.origin(f'model.{key}')}model.{key} is {new!r} but {checkpoint.path}, which train.init_from "
                f"names, has {old!r}, whose weights do not fit another model; set it to {old!r}."
            )
    warnings += _other_adapter(config, choice.config, checkpoint)
    # The data's tokenizer must be the one the weights were trained with, if both are known.
    stored, data = checkpoint.path / TOKENIZER, open_dataset(config)
    if data.tokenizer_file is not None and checkpoint.facts.tokenizer_sha256 not in (None, data.tokenizer_sha256):
        known = loaded(FolderFiles(checkpoint.path).text(TOKENIZER), f"the tokenizer {stored}")
        given = load_tokenizer(data.tokenizer_file, "the tokenizer")
        if known.get_vocab() != given.get_vocab():
            raise UserError(
                f"The tokenizer of the data is {data.tokenizer_file}, which is not that of {checkpoint.path}, which "
                f"train.init_from names; prepare the data with --tokenizer {stored}."
            )
    return replace(choice, warnings=tuple(warnings))


def _other_adapter(config: Config, stored: Config, checkpoint: Checkpoint) -> Iterator[str]:
    """Yield warnings about the adapters of a warm start; raise a `UserError` if the checkpoint's do not fit.

    A base without adapters fits any: these begin with their initial values.
    """
    if not stored.adapter.rank:
        return
    before, now = stored.adapter.settings(), config.adapter.settings()
    for name in ("rank", "targets", "dora", "alpha", "rank_stabilized"):
        key, old, new = f"adapter.{name}", before.get(name), now.get(name)
        if old == new:
            continue
        if key in _OF_ADAPTER:
            given = getattr(config.adapter, name)
            raise UserError(
                f"{config.origin(key)}{key} is {given!r} but {checkpoint.path}, which train.init_from names, has "
                f"adapters with {old!r}; set it to {old!r}, or begin from an export of that run, which has them merged."
            )
        yield f"{key} is {new!r}; {checkpoint.path} had {old!r}."
