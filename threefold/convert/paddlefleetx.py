"""PaddleFleetX and PaddleNLP: converts Fleet's YAML, and the flags of GPT pre-training scripts through its keys."""

import os
import re
from math import prod
from pathlib import Path
from typing import Any, Final

from threefold.config.loading import read_document
from threefold.convert.key_mapping import (
    KeyMapping,
    Same,
    Unmapped,
    alike,
    anything,
    count,
    flat,
    foreign_text,
    number,
    switch,
    text,
    whole,
)
from threefold.convert.launch_line import launch_of
from threefold.errors import UserError

_PRECISION: Final = "Engine.mix_precision"
_SAME_NAMES: Final = {
    "Data.Train.dataset": "input_dir split max_seq_len",
    "Distributed": "virtual_pp_degree dp_degree mp_degree pp_degree",
    "Distributed.sharding": "sharding_degree sharding_stage sharding_offload",
    "Engine": "max_steps num_train_epochs logging_freq eval_freq eval_iters test_iters",
    "Engine.save_load": "output_dir save_steps",
    "Global": "global_batch_size local_batch_size micro_batch_size seed device",
    "Model": (
        "vocab_size hidden_size num_layers num_attention_heads ffn_hidden_size max_position_embeddings "
        "hidden_dropout_prob attention_probs_dropout_prob hidden_act initializer_range type_vocab_size use_recompute "
        "recompute_granularity sequence_parallel"
    ),
    "Optimizer": "weight_decay",
    "Optimizer.lr": "max_lr min_lr warmup_rate decay_steps",
    _PRECISION: "use_pure_fp16 scale_loss",
}
KEYS: Final = {
    **{name: f"{section}.{name}" for section, names in _SAME_NAMES.items() for name in names.split()},
    "batch_size": "Global.local_batch_size",
    "logging_steps": "Engine.logging_freq",
    "eval_steps": "Engine.eval_freq",
    "use_amp": f"{_PRECISION}.enable",
    "num_hidden_layers": "Model.num_layers",
    "intermediate_size": "Model.ffn_hidden_size",
    "hidden_activation": "Model.hidden_act",
    "fuse_transformer": "Model.fused_transformer",
    "tensor_parallel_degree": "Distributed.mp_degree",
    "pipeline_parallel_degree": "Distributed.pp_degree",
    "sharding_parallel_degree": "Distributed.sharding.sharding_degree",
    "grad_clip": "Optimizer.grad_clip.clip_norm",
    "learning_rate": "Optimizer.lr.max_lr",
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


def _read_flags(path: Path) -> KeyMapping:
    """Read the flags of a script as keys of Fleet's YAML, or the YAML of its `-c` with each `-o` applied."""
    launch = launch_of(foreign_text(path), path, renamed={"-c": "--config", "-o": "--override"}, several=("override",))
    flags, notes, spelled = dict(launch.flags), list(launch.notes), {}
    settings = _of_overrides(flags, path, notes)
    if settings is None:
        settings = dict(DEFAULTS)
        flags.pop("model_type", None)
        name = flags.pop("model_name_or_path", None)
        if isinstance(name, str) and name in _SIZES:
            sizes = dict(zip(_SIZE_KEYS, _SIZES[name], strict=True))
            settings |= {f"Model.{key}": value for key, value in sizes.items()}
            shown = ", ".join(f"{key} {value}" for key, value in sizes.items())
            notes.append(Unmapped("model_name_or_path", name, f"its sizes are PaddleNLP's: {shown}"))
        elif name is not None:
            reason = "its sizes are in its own code; set those of model"
            notes.append(Unmapped("model_name_or_path", name, reason, unsupported=True))
        notes += [Unmapped(word, "a word", "belongs to no flag", unsupported=True) for word in launch.unread]
    for name, value in flags.items():
        key = KEYS.get(name, name)
        settings[key], spelled[key] = _typed(key, value), name
    if settings.get(f"{_PRECISION}.use_pure_fp16") and settings.get(f"{_PRECISION}.enable") is None:
        settings[f"{_PRECISION}.enable"] = True
    # PaddleNLP's newer names: micro-batch size per device, and gradient accumulation steps.
    micro, steps = (settings.pop(key, None) for key in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    if micro is not None:
        settings["Global.micro_batch_size"] = micro
        if str(micro).isdecimal() and str(steps or 1).isdecimal():
            settings["Global.local_batch_size"] = int(micro) * int(steps or 1)
    elif steps is not None:
        notes.append(Unmapped("gradient_accumulation_steps", steps, "follows from the batch sizes"))
    if launch.world is not None and "Distributed.dp_degree" not in settings:
        degrees = ("Distributed.mp_degree", "Distributed.pp_degree", "Distributed.sharding.sharding_degree")
        one = prod(int(degree) or 1 for key in degrees if (degree := str(settings.get(key))).isdecimal())
        if launch.world % one == 0:
            settings["Distributed.dp_degree"] = launch.world // one
    mapping = KeyMapping(path, settings, notes)
    mapping.spelled = spelled
    return mapping


def _of_overrides(flags: dict[str, Any], path: Path, notes: list[Unmapped]) -> dict[str, Any] | None:
    name = flags.pop("config", None)
    overrides = flags.pop("override", [])
    if not isinstance(name, str):
        return None
    folders = [path.parent, *Path(os.path.realpath(path)).parents]
    file = next((folder / name for folder in folders if len(name) < 1000 and (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{path} starts a training with {name}, which does not exist; put it beside the script.")
    settings = _of_yaml(file)
    notes.append(Unmapped("config", name, "read, with the overrides of the script"))
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            notes.append(Unmapped(override, "an override", "is not a key=value", unsupported=True))
        else:
            settings[key] = _typed(key, value)
    return settings


def _typed(key: str, value: Any) -> Any:
    if key.startswith(f"{_PRECISION}.") and not key.endswith("scale_loss") and not key.endswith("dtype"):
        return value is True or value in _SWITCHED
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value if value not in ("", "None", "none") else None


END_OF_TEXT = 50256  # end-of-document token of GPT-2's vocabulary, which Fleet's GPTDataset assumes


def _split(value: Any) -> str:
    return ",".join(str(part) for part in value) if isinstance(value, list) else text(value)


TABLE = (
    Same("Global.seed", "train.seed", whole, 1024),
    Same("Engine.max_steps", "train.max_steps", whole, 500000),
    Same("Engine.logging_freq", "log.every", whole, 1),
    *alike("train", whole, "eval_freq=eval_every eval_iters=eval_batches", prefix="Engine."),
    Same("Engine.save_load.save_steps", "checkpoint.every", whole),
    Same("Model.vocab_size", "model.vocab_size", whole, 50304),
    Same("Model.hidden_size", "model.hidden_size", whole, 768),
    *alike("model", whole, "num_layers num_attention_heads", 12, "Model."),
    Same("Model.ffn_hidden_size", "model.ffn_hidden_size", whole),
    Same("Model.hidden_dropout_prob", "model.hidden_dropout", number, 0.1),
    Same("Model.attention_probs_dropout_prob", "model.attention_dropout", number, 0.1),
    Same("Model.max_position_embeddings", "model.max_position_embeddings", whole),
    Same("Model.initializer_range", "model.initializer_range", number),
    Same("Data.Train.dataset.input_dir", "data.path", text),
    Same("Data.Train.dataset.split", "data.split", _split),
    Same("Data.Train.dataset.max_seq_len", "data.sequence_length", whole, 1024),
    Same("Optimizer.weight_decay", "optimizer.weight_decay", number),
    Same("Optimizer.epsilon", "optimizer.eps", number),
    *alike("optimizer", number, "max_lr=lr min_lr", prefix="Optimizer.lr."),
)
OLD_NAMES = {
    "Data.batch_size.": "Global.",
    "Data.dataset.": "Data.Train.dataset.",
    "Optimizer.adam_beta": "Optimizer.beta",
    "Optimizer.adam_epsilon": "Optimizer.epsilon",
}
"""Beginnings of keys in the first versions → their current beginnings."""
REASONS = {
    "train.device auto uses the GPUs that it finds": "Global.device",
    "Fleet reads it under Engine, where log.every comes from": "Global.logging_freq",
    "train.max_steps ends the run; further epochs follow automatically": "Engine.num_train_epochs",
    "train.max_steps ends the run": "Engine.run_mode",
    "follows from the batch sizes": "Engine.accumulate_steps",
    "`threefold eval` evaluates the test part": "Engine.test_iters",
    "the folder of the run is an option of the command: threefold train … --run-dir": "Engine.save_load.output_dir",
    "threefold train … --resume resumes a run; Paddle's checkpoints are unsupported": "Engine.save_load.ckpt_dir",
    "checkpoints are made every checkpoint.every steps": "Engine.save_load.save_epoch",
    "the operations in 16 bits are fixed: products, but not norms, softmax and loss": "Engine.mix_precision.*",
    "kernels are chosen automatically": "Model.fused_* Optimizer.tensor_fusion Fused.*",
    "attention is always the fused one": "Model.use_flash_attn",
    "queries, keys and values are always one product": "Model.fuse_attn_qkv",
    "scores are scaled once; fused attention accumulates in fp32": "Model.scale_qk_*",
    "a GPT has no token types; Fleet does not use it either": "Model.type_vocab_size",
    "train.recompute_every leaves out blocks by a rhythm, not by a list": "Model.no_recompute_layers",
    "samples always come in an order drawn from train.seed": "Data.Train.sampler.shuffle",
    "samples of a step follow from train.seed and the step": "Data.*.sampler.*",
    "tokens are memory-mapped, so there are no workers": "Data.*.loader.*",
    "the files state their format": "Data.*.dataset.name",
    "the test part is that of data.split": "Data.Test.*",
    "validation reads data.path with data.split": "Data.Eval.*",
    "gradients are always summed in buckets": "Distributed.fuse_*",
    "weights and optimizer state stay on the device": "Distributed.sharding.sharding_offload",
    "communication is overlapped automatically": "Distributed.sharding.*_overlap",
    "train.recompute_every counts blocks": "Distributed.pp_recompute_interval",
    "precision.master_weights is true by default": "Optimizer.multi_precision",
    "the step log has times; there is no profiler in a config": "Profiler.*",
}
"""Reasons for settings that need no counterpart, each with the patterns of their keys; the first match applies."""
ACTIVATIONS = {"gelu": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu"}
"""Fleet's name of an activation function → ours; its GPTs compute GELU by the tanh approximation."""
IMPLIED = {
    "Model.module": ("GPTModule", "GPTModuleAuto"),
    "Model.name": ("GPT",),
    "Optimizer.lr.name": ("CosineAnnealingWithWarmupDecay",),
    "Optimizer.grad_clip.name": ("ClipGradByGlobalNorm",),
    "Data.Train.dataset.name": ("GPTDataset",),
    "Distributed.sharding.sharding_offload": (False,),
    "Profiler.enable": (False,),
}
"""Key → values that equal our behavior."""


def read(path: Path) -> KeyMapping:
    """Read the settings of a Fleet YAML with its base files, or of a script with Fleet's flags."""
    text = foreign_text(path)
    if _SCRIPT.search(text) and (text.startswith("#!") or not _SECTION.search(text)):
        return _read_flags(path)
    return KeyMapping(path, _of_yaml(path))


def _of_yaml(path: Path) -> dict[str, Any]:
    return {key: value for key, value in flat(_merged(path, ()), str(path)).items() if value != {}}


def _merged(path: Path, below: tuple[Path, ...]) -> dict[str, Any]:
    document, _ = read_document(path)
    if not isinstance(document, dict):
        raise UserError(f"{path} is not a Fleet config: it must be a mapping of sections such as Model: and Engine:.")
    base = document.pop("_base_", None)
    if base is None:
        return document
    file = Path(os.path.realpath(path.parent / str(base)))
    if file in below or not file.is_file():
        what = "is circular" if file in below else "does not exist; put it where the key says"
        raise UserError(f"{path}: _base_ is {str(base)!r} but that file {what}.")
    return _over(_merged(file, (*below, Path(os.path.realpath(path)), file)), document)


def _over(base: dict[str, Any], document: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in document.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def fill(mapping: KeyMapping, world: int | None) -> None:
    """Convert a Fleet config."""
    given = mapping.given
    for old, new in OLD_NAMES.items():
        for key in [key for key in given if key.startswith(old)]:
            given[new + key.removeprefix(old)] = given.pop(key)
    if "Optimizer.grad_clip" in given:
        given["Optimizer.grad_clip.clip_norm"] = given.pop("Optimizer.grad_clip")
    for key, values in IMPLIED.items():
        if given.get(key) in values:
            del given[key]
    for key in [key for key in given if key.startswith("Data.Eval.")]:
        if given[key] == given.get(key.replace("Eval", "Train", 1)) or key == "Data.Eval.dataset.name":
            del given[key]
    mapping.move(TABLE)
    mapping.put_activation("Model.hidden_act", ACTIVATIONS)
    _layout(mapping, world)
    _batch(mapping)
    _precision(mapping)
    _recompute(mapping)
    _optimizer(mapping)
    if mapping.settings["model.vocab_size"] > END_OF_TEXT:
        mapping.put("data.eod", END_OF_TEXT)
    mapping.put("checkpoint.keep", 0)
    mapping.leave(REASONS)


def _layout(mapping: KeyMapping, world: int | None) -> None:
    tp, pp = mapping.take("Distributed.mp_degree", count, 1), mapping.take("Distributed.pp_degree", count, 1)
    shards = mapping.take("Distributed.sharding.sharding_degree", count, 1)
    stage = mapping.take("Distributed.sharding.sharding_stage", whole, 1)
    replicas = mapping.take("Distributed.dp_degree", count)
    if replicas is None:
        one = tp * pp * shards
        replicas = mapping.replicas(world or (one if shards > 1 else None), one, "Distributed.dp_degree")
    mapping.settings.update({"parallel.dp": replicas * shards, "parallel.tp": tp, "parallel.pp": pp})
    if shards > 1:
        mapping.put("parallel.zero_shards", shards)
        mapping.put_zero(stage, "Distributed.sharding.sharding_stage", stage)
    chunks = mapping.take("Distributed.virtual_pp_degree", whole, mapping.take("Model.virtual_pp_degree", whole, 1))
    mapping.put_chunks(chunks, "virtual_pp_degree")
    mapping.take_sequence_parallel("Model.sequence_parallel")


def _batch(mapping: KeyMapping) -> None:
    dp = mapping.settings["parallel.dp"]
    total, local = (mapping.take(f"Global.{name}_batch_size", count) for name in ("global", "local"))
    if local is not None:
        reason = f"sequences of one replica in a step: train.global_batch_size {local * dp} = {local} · dp {dp}"
        if total is not None and total != local * dp:
            reason = f"left out: global_batch_size {total} is not {local} · dp {dp}"
        mapping.note("Global.local_batch_size", local, reason)
        total = local * dp if total is None else total
    mapping.put("train.global_batch_size", total)
    mapping.put("train.micro_batch_size", mapping.take("Global.micro_batch_size", count, local))


def _precision(mapping: KeyMapping) -> None:
    prefix = "Engine.mix_precision."
    on = mapping.take(f"{prefix}use_pure_fp16", switch, False)
    on = mapping.take(f"{prefix}enable", switch, on)
    dtype = mapping.take(f"{prefix}dtype", text, "float16")
    scale = mapping.take(f"{prefix}scale_loss", number)
    if not on:
        return
    if dtype not in ("float16", "bfloat16"):
        raise UserError(f"{mapping.where}: {prefix}dtype is {dtype!r} but must be float16 or bfloat16.")
    mapping.put("precision.dtype", "fp16" if dtype == "float16" else "bf16")
    if dtype == "float16":
        mapping.put("precision.loss_scale", scale)


def _recompute(mapping: KeyMapping) -> None:
    wanted = mapping.take("Model.use_recompute", switch, mapping.take("Engine.use_recompute", switch, False))
    granularity = mapping.take("Model.recompute_granularity", text, "full")
    if not wanted:
        return
    mapping.put("train.recompute", "full" if granularity == "full" else "selective")
    if granularity not in ("full", "core_attn"):
        reason = "the nearest is train.recompute selective, the core alone"
        mapping.note("Model.recompute_granularity", granularity, reason)


def _optimizer(mapping: KeyMapping) -> None:
    name = mapping.take("Optimizer.name", text, "FusedAdamW")
    mapping.settings.setdefault("optimizer.weight_decay", 0.0 if name in ("Adam", "Momentum") else 0.01)
    if name == "Momentum":
        mapping.put_optimizer("sgd", "Optimizer.name", name)
        mapping.put("optimizer.momentum", mapping.take("Optimizer.momentum", number, 0.9))
        mapping.put("optimizer.nesterov", mapping.take("Optimizer.use_nesterov", switch))
    elif name == "Adam":
        mapping.put_optimizer("adam", "Optimizer.name", name)
    elif name not in ("FusedAdamW", "AdamW"):
        mapping.note("Optimizer.name", name, "optimizer.name is adamw, the nearest", unsupported=True)
    betas = [mapping.take(f"Optimizer.beta{n}", number, default) for n, default in ((1, 0.9), (2, 0.999))]
    if name != "Momentum":
        mapping.put("optimizer.betas", betas)
    mapping.put("optimizer.clip_grad_norm", mapping.take("Optimizer.grad_clip.clip_norm", number, 0.0))
    steps, rate = mapping.take("Optimizer.lr.decay_steps", whole), mapping.take("Optimizer.lr.warmup_rate", number, 0.0)
    if mapping.take("Optimizer.lr.use_increments", switch, False) and steps is not None:
        total = mapping.settings.get("train.global_batch_size", 1)
        mapping.note("Optimizer.lr.use_increments", True, f"decay_steps {steps} counts samples: / {total} a step")
        steps = max(1, steps // total)
    if steps is not None:
        mapping.settings.update({"optimizer.decay_steps": steps, "optimizer.warmup_steps": round(rate * steps)})
    name = mapping.take("Optimizer.lr.name", anything)
    if name is not None:
        mapping.note("Optimizer.lr.name", name, "optimizer.decay is cosine; linear, constant and wsd are there too")
