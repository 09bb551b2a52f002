"""PaddleFleetX and PaddleNLP: maps the flags of a GPT pre-training script to the keys of Fleet's YAML."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from threefold.config.convert.key_mapping import Given, Unmapped, foreign_text
from threefold.config.convert.shell.launch_line import launch_of
from threefold.errors import UserError

_PRECISION: Final = "Engine.mix_precision"
KEYS: Final = {
    "input_dir": "Data.Train.dataset.input_dir",
    "output_dir": "Engine.save_load.output_dir",
    "split": "Data.Train.dataset.split",
    "max_seq_len": "Data.Train.dataset.max_seq_len",
    "global_batch_size": "Global.global_batch_size",
    "local_batch_size": "Global.local_batch_size",
    "micro_batch_size": "Global.micro_batch_size",
    "batch_size": "Global.local_batch_size",
    "seed": "Global.seed",
    "device": "Global.device",
    "max_steps": "Engine.max_steps",
    "num_train_epochs": "Engine.num_train_epochs",
    "logging_freq": "Engine.logging_freq",
    "logging_steps": "Engine.logging_freq",
    "eval_freq": "Engine.eval_freq",
    "eval_steps": "Engine.eval_freq",
    "eval_iters": "Engine.eval_iters",
    "test_iters": "Engine.test_iters",
    "save_steps": "Engine.save_load.save_steps",
    "use_amp": f"{_PRECISION}.enable",
    "use_pure_fp16": f"{_PRECISION}.use_pure_fp16",
    "scale_loss": f"{_PRECISION}.scale_loss",
    "vocab_size": "Model.vocab_size",
    "hidden_size": "Model.hidden_size",
    "num_layers": "Model.num_layers",
    "num_hidden_layers": "Model.num_layers",
    "num_attention_heads": "Model.num_attention_heads",
    "ffn_hidden_size": "Model.ffn_hidden_size",
    "intermediate_size": "Model.ffn_hidden_size",
    "max_position_embeddings": "Model.max_position_embeddings",
    "hidden_dropout_prob": "Model.hidden_dropout_prob",
    "attention_probs_dropout_prob": "Model.attention_probs_dropout_prob",
    "hidden_act": "Model.hidden_act",
    "hidden_activation": "Model.hidden_act",
    "initializer_range": "Model.initializer_range",
    "type_vocab_size": "Model.type_vocab_size",
    "use_recompute": "Model.use_recompute",
    "recompute_granularity": "Model.recompute_granularity",
    "sequence_parallel": "Model.sequence_parallel",
    "fuse_transformer": "Model.fused_transformer",
    "virtual_pp_degree": "Distributed.virtual_pp_degree",
    "dp_degree": "Distributed.dp_degree",
    "mp_degree": "Distributed.mp_degree",
    "pp_degree": "Distributed.pp_degree",
    "sharding_degree": "Distributed.sharding.sharding_degree",
    "sharding_stage": "Distributed.sharding.sharding_stage",
    "sharding_offload": "Distributed.sharding.sharding_offload",
    "tensor_parallel_degree": "Distributed.mp_degree",
    "pipeline_parallel_degree": "Distributed.pp_degree",
    "sharding_parallel_degree": "Distributed.sharding.sharding_degree",
    "weight_decay": "Optimizer.weight_decay",
    "grad_clip": "Optimizer.grad_clip.clip_norm",
    "max_lr": "Optimizer.lr.max_lr",
    "learning_rate": "Optimizer.lr.max_lr",
    "min_lr": "Optimizer.lr.min_lr",
    "warmup_rate": "Optimizer.lr.warmup_rate",
    "decay_steps": "Optimizer.lr.decay_steps",
    "adam_beta1": "Optimizer.beta1",
    "adam_beta2": "Optimizer.beta2",
    "adam_epsilon": "Optimizer.epsilon",
}
"""Flag → key of Fleet's YAML."""
DEFAULTS: Final = {
    "Global.seed": 1234,
    "Optimizer.weight_decay": 0.0,
    "Optimizer.lr.max_lr": 1e-5,
    "Optimizer.lr.decay_steps": 360000,
    "Optimizer.lr.warmup_rate": 0.01,
    "Engine.save_load.save_steps": 500,
    "Engine.eval_freq": 500,
    "Engine.eval_iters": 10,
    "Data.Train.dataset.split": "949,50,1",
}
"""Defaults of the pre-training scripts that differ from those of the YAML."""
_SIZES: Final = {
    "gpt2-small-en": (50304, 1024, 4, 4, 1024),
    "gpt2-en": (50304, 768, 12, 12, 1024),
    "gpt2-medium-en": (50304, 1024, 24, 16, 1024),
    "gpt2-large-en": (50257, 1280, 36, 20, 1024),
    "gpt2-xl-en": (50257, 1600, 48, 25, 1024),
    "gpt3-1.3B-en": (50304, 2048, 24, 16, 1024),
    "gpt3-13B-en": (50304, 5120, 40, 128, 1024),
    "gpt3-89B-en": (51200, 12288, 48, 96, 1024),
    "gpt3-175B-en": (51200, 12288, 96, 96, 1024),
}
"""Vocabulary, width, layers, heads and positions of PaddleNLP's named models."""
_SIZE_KEYS: Final = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "max_position_embeddings")
_SWITCHED: Final = ("True", "true", "1", "yes", "t", "y")
_SCRIPT: Final = re.compile(r"^#!|(?<![\w-])--[A-Za-z]\w*|\bpaddle\.distributed\b|(?<!\S)-o\s+\w+\.", re.MULTILINE)
_SECTION: Final = re.compile(r"^(?:Global|Engine|Model|Distributed|Data|Optimizer|_base_)[ \t]*:", re.MULTILINE)


def is_script(text: str) -> bool:
    """Whether a text is a script with flags, not YAML."""
    return bool(_SCRIPT.search(text)) and (text.startswith("#!") or not _SECTION.search(text))


def read_flags(path: Path, of_yaml: Callable[[Path], dict[str, Any]]) -> Given:
    """The flags of a script as keys of Fleet's YAML; and the YAML of its `-c`, overridden by each `-o`.

    Args:
        path: of the script.
        of_yaml: reads a YAML.

    Raises:
        UserError: it has no flags, or the YAML does not exist.
    """
    launch = launch_of(foreign_text(path), path, renamed={"-c": "--config", "-o": "--override"}, several=("override",))
    notes = [Unmapped(*remark) for remark in launch.remarks]
    flags = dict(launch.flags)
    settings = _of_overrides(flags, path, of_yaml, notes)
    if settings is None:
        settings = dict(DEFAULTS)
        _put_sizes(flags, settings, notes)
        notes += [Unmapped(word, "a word", "belongs to no flag", unsupported=True) for word in launch.unread]
    spelled: dict[str, str] = {}
    for name, value in flags.items():
        key = KEYS.get(name, name)
        settings[key], spelled[key] = _typed(key, value), name
    _mix(settings)
    _accumulate(settings, notes)
    if launch.world is not None and "Distributed.dp_degree" not in settings:
        degrees = ("Distributed.mp_degree", "Distributed.pp_degree", "Distributed.sharding.sharding_degree")
        one = 1
        for key in degrees:
            one *= int(settings[key]) if str(settings.get(key)).isdecimal() and int(settings[key]) else 1
        if launch.world % one == 0:
            settings["Distributed.dp_degree"] = launch.world // one
    return Given(settings, notes, {key: name for key, name in spelled.items() if key != name})


def _of_overrides(
    flags: dict[str, Any], path: Path, of_yaml: Callable[[Path], dict[str, Any]], notes: list[Unmapped]
) -> dict[str, Any] | None:
    """The settings of the YAML that a script names, with its overrides; None where it names none."""
    name = flags.pop("config", None)
    overrides = flags.pop("override", [])
    if not isinstance(name, str):
        return None
    folders = [path.parent, *Path(os.path.realpath(path)).parents]
    file = next((folder / name for folder in folders if len(name) < 1000 and (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{path} starts a training with {name}, which does not exist; put it beside the script.")
    settings = of_yaml(file)
    notes.append(Unmapped("config", name, "read, with the overrides of the script"))
    for text in overrides:
        key, equals, value = text.partition("=")
        if not equals:
            notes.append(Unmapped(text, "an override", "is no key=value", unsupported=True))
        else:
            settings[key] = _typed(key, value)
    return settings


def _put_sizes(flags: dict[str, Any], settings: dict[str, Any], notes: list[Unmapped]) -> None:
    flags.pop("model_type", None)
    name = flags.pop("model_name_or_path", None)
    if name is None:
        return
    sizes = _SIZES.get(name) if isinstance(name, str) else None
    if sizes is None:
        reason = "its sizes are in its own code; set those of model"
        notes.append(Unmapped("model_name_or_path", name, reason, unsupported=True))
        return
    settings.update({f"Model.{key}": value for key, value in zip(_SIZE_KEYS, sizes, strict=True)})
    shown = ", ".join(f"{key} {value}" for key, value in zip(_SIZE_KEYS, sizes, strict=True))
    notes.append(Unmapped("model_name_or_path", name, f"its sizes are PaddleNLP's: {shown}"))


def _typed(key: str, value: Any) -> Any:
    """The value of a flag's text in YAML."""
    if key.startswith(f"{_PRECISION}.") and not key.endswith("scale_loss") and not key.endswith("dtype"):
        return value is True or value in _SWITCHED
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value if value not in ("", "None", "none") else None


def _mix(settings: dict[str, Any]) -> None:
    """Half precision is on if either flag sets it."""
    pure, mixed = (settings.get(f"{_PRECISION}.{key}") for key in ("use_pure_fp16", "enable"))
    if (pure or mixed) and mixed is not False:
        settings[f"{_PRECISION}.enable"] = True


def _accumulate(settings: dict[str, Any], notes: list[Unmapped]) -> None:
    """PaddleNLP's newer names: micro-batch size of a device, and gradient accumulation steps."""
    micro = settings.pop("per_device_train_batch_size", None)
    steps = settings.pop("gradient_accumulation_steps", None)
    if micro is not None:
        settings["Global.micro_batch_size"] = micro
        if str(micro).isdecimal() and str(steps or 1).isdecimal():
            settings["Global.local_batch_size"] = int(micro) * int(steps or 1)
    elif steps is not None:
        notes.append(Unmapped("gradient_accumulation_steps", steps, "follows from the batch sizes"))
