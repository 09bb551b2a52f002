"""PaddleFleetX and PaddleNLP: converts Fleet's YAML, and the flags of GPT pre-training scripts through its keys."""

import os
import re
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any, Final

from threefold.config.loading import read_document
from threefold.convert.key_mapping import (
    KeyMapping,
    count,
    flat,
    foreign_text,
    literal,
    number,
    switch,
    tables_of,
    text,
    whole,
)
from threefold.convert.launch_line import launch_of
from threefold.errors import UserError

_PRECISION: Final = "Engine.mix_precision"
_TABLES: Final = tables_of("paddlefleetx")
_KEYS: Final = _TABLES["names"] | {
    name: f"{section}.{name}" for section, names in _TABLES["same_names"].items() for name in names.split()
}
"""Flag of a script, or name of a setting anywhere under PreTraining → key of Fleet's YAML."""
_SIZE_KEYS: Final = ("vocab_size", "hidden_size", "num_layers", "num_attention_heads", "max_position_embeddings")
_WORDS: Final = {
    **dict.fromkeys(("true", "1", "yes", "t", "y"), True),
    **dict.fromkeys(("false", "0", "no", "f", "n"), False),
}
_SCRIPT: Final = re.compile(
    r"^#!|(?<![\w-])--[A-Za-z]\w*|\bpaddle\.distributed\b|(?<!\S)-(?:o\s+\w+\.|c\s)", re.MULTILINE
)
SECTION: Final = re.compile(
    r"^(PreTraining|Global|Engine|Model|Distributed|Data|Optimizer|_base_)[ \t]*:", re.MULTILINE
)


def _read_flags(path: Path) -> KeyMapping:
    """Read the flags of a script as keys of Fleet's YAML, or the YAML of its `-c` with each `-o` applied."""
    launch = launch_of(foreign_text(path), path, renamed={"-c": "--config", "-o": "--override"}, several=("override",))
    flags = dict(launch.flags)
    mapping = _of_overrides(flags, path)
    if mapping is None:
        mapping = KeyMapping(path, _TABLES["defaults"])
        if flags.get("use_amp") and "scale_loss" not in flags:
            mapping.given[f"{_PRECISION}.scale_loss"] = 128  # the default of the versions that have this flag
        name = flags.pop("model_name_or_path", None)
        if isinstance(name, str) and name in _TABLES["sizes"]:
            sizes = dict(zip(_SIZE_KEYS, _TABLES["sizes"][name], strict=True))
            mapping.given |= {f"Model.{key}": value for key, value in sizes.items()}
            shown = ", ".join(f"{key} {value}" for key, value in sizes.items())
            mapping.note("model_name_or_path", name, f"its sizes are PaddleNLP's: {shown}")
        elif name is not None:
            reason = "its sizes are in its own code; set those of model"
            mapping.note("model_name_or_path", name, reason, unsupported=True)
        for word in launch.unread:
            mapping.note(word, "a word", "belongs to no flag", unsupported=True)
    mapping.notes[:0] = launch.notes
    for name, value in flags.items():
        _name(mapping, name, _of_flag(mapping, name, value))
    given = mapping.given
    # PaddleNLP's newer names: micro-batch size per device, and gradient accumulation steps.
    micro, steps = (given.pop(key, None) for key in ("per_device_train_batch_size", "gradient_accumulation_steps"))
    if micro is not None:
        given["Global.micro_batch_size"] = micro
        if str(micro).isdecimal() and str(steps or 1).isdecimal():
            given["Global.local_batch_size"] = int(micro) * int(steps or 1)
    elif steps is not None:
        mapping.note("gradient_accumulation_steps", steps, "follows from the batch sizes")
    if launch.world is not None and "Distributed.dp_degree" not in given:
        degrees = ("Distributed.mp_degree", "Distributed.pp_degree", "Distributed.sharding.sharding_degree")
        one = prod(int(degree) or 1 for key in degrees if (degree := str(given.get(key))).isdecimal())
        if launch.world % one == 0:
            given["Distributed.dp_degree"] = launch.world // one
    return mapping


def _of_overrides(flags: dict[str, Any], path: Path) -> KeyMapping | None:
    name = flags.pop("config", None)
    overrides = flags.pop("override", [])
    if not isinstance(name, str):
        return None
    folders = [path.parent, *Path(os.path.realpath(path)).parents]
    file = next((folder / name for folder in folders if len(name) < 1000 and (folder / name).is_file()), None)
    if file is None:
        raise UserError(f"{path} starts a training with {name}, which does not exist; put it beside the script.")
    mapping = _of_yaml(file)
    mapping.where = str(path)
    mapping.note("config", name, "read, with the overrides of the script")
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals:
            mapping.note(override, "an override", "is not a key=value", unsupported=True)
        else:
            _put(mapping, key, literal(value))
    return mapping


def _put(mapping: KeyMapping, key: str, value: Any) -> None:
    """Set a foreign setting; None takes back that of a base file."""
    mapping.given.pop(key, None)
    if value is not None:
        mapping.given[key] = value


def _name(mapping: KeyMapping, name: str, value: Any, spelled: str | None = None) -> None:
    """Set a setting that stands without its section, under its key in Fleet's YAML."""
    key = _KEYS.get(name, name)
    mapping.spelled[key] = spelled or name
    _put(mapping, key, value)


def _of_flag(mapping: KeyMapping, name: str, value: Any) -> Any:
    """Return the value of a flag as the scripts read it: only switches and numbers are more than words."""
    if _KEYS.get(name, name) in _TABLES["switches"].split():
        if value is True and name != "enable_addto":
            mapping.note(name, "not given", "the script reads the flag without a value as false")
            return False
        return value if value is True else _WORDS.get(str(value).lower(), value)
    return None if value in ("", "None") else value


END_OF_TEXT = 50256  # end-of-document token of GPT-2's vocabulary, which Fleet's GPTDataset assumes


_OF_ENGINE: Final = re.compile(
    r"Global\.((?:max_steps|num_train_epochs|accumulate_steps|logging_freq|eval_freq|eval_iters|test_iters|run_mode)$"
    r"|mix_precision\.|save_load\.)"
)
"""Settings that Fleet's last examples have in the section Global, without a section Engine."""


def read(path: Path) -> KeyMapping:
    """Read the settings of a Fleet YAML with its base files, or of a script with Fleet's flags."""
    text = foreign_text(path)
    if _SCRIPT.search(text) and (text.startswith("#!") or not SECTION.search(text)):
        return _read_flags(path)
    return _of_yaml(path)


def _of_yaml(path: Path) -> KeyMapping:
    """Read a YAML with its base files; below PreTraining, its first form, sections do not count, only last names do."""
    mapping = KeyMapping(path)
    for key, value in flat(_merged(path, ()), str(path)).items():
        if key.startswith("PreTraining.") and value != {}:
            _name(mapping, key.rpartition(".")[2], literal(value), key)
        elif value != {}:
            _put(mapping, key, literal(value))
    return mapping


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
    if document.get("_inherited_", True) is False:
        return {key: value for key, value in document.items() if key != "_inherited_"}
    for key, value in document.items():
        old = merged.get(key)
        merged[key] = _over(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def fill(mapping: KeyMapping, world: int | None) -> None:
    """Convert a Fleet config."""
    given = mapping.given
    for old, new in _TABLES["old_names"].items():
        for key in [key for key in given if key.startswith(old)]:
            mapping.rename(key, new + key.removeprefix(old))
    if not any(key.startswith("Engine.") for key in given):
        for key in [key for key in given if _OF_ENGINE.match(key)]:
            mapping.rename(key, f"Engine.{key.removeprefix('Global.')}")
    if "Optimizer.grad_clip" in given:
        mapping.rename("Optimizer.grad_clip", "Optimizer.grad_clip.clip_norm")
    if "Optimizer.grad_clip.name" in given:
        given.setdefault("Optimizer.grad_clip.clip_norm", 1.0)
    chinese = [key for key, name in (("Model.name", "GPT-cn"), ("model_type", "gpt-cn")) if given.get(key) == name]
    for key in chinese:
        reason = "data.eod is for you to set: the end of a document in its Chinese vocabulary"
        mapping.note(key, given.pop(key), reason)
    if (other := _TABLES["modules"].get(str(given.get("Model.module")))) is not None:
        mapping.note("Model.module", given.pop("Model.module"), other, unsupported=True)
        given.pop("Model.name", None)  # of its tokenizer
    for key, values in _TABLES["implied"].items():
        if given.get(key) in values:
            del given[key]
    for switch_, patterns in _TABLES["switched_off"].items():
        if given.get(switch_) is False:
            off = [key for key in given if any(fnmatchcase(key, each) for each in (switch_, *patterns.split()))]
            mapping.leave_idle(off, f"nothing reads it while {switch_} is false")
    for key in [key for key in given if key.startswith("Data.Eval.")]:
        if given[key] == given.get(key.replace("Eval", "Train", 1)):
            del given[key]
    mapping.move(_TABLES["rows"]["all"])
    mapping.put_activation("Model.hidden_act", _TABLES["activations"])
    if mapping.take("check_accuracy", switch, False):
        mapping.settings |= {"model.hidden_dropout": 0.0, "model.attention_dropout": 0.0}
        mapping.note("check_accuracy", True, "the script sets dropout to 0 with it, and so are model.*_dropout")
    _layout(mapping, world)
    _batch(mapping)
    _length(mapping)
    _precision(mapping)
    _recompute(mapping)
    _optimizer(mapping)
    if mapping.settings["model.vocab_size"] > END_OF_TEXT and not chinese:
        mapping.put("data.eod", END_OF_TEXT)
    mapping.put("checkpoint.keep", 0)
    mapping.leave(_TABLES["reasons"], _TABLES["unsupported"])


def _length(mapping: KeyMapping) -> None:
    """Convert the length of the run, and the steps of evaluations and checkpoints."""
    by_epoch = mapping.take("Engine.run_mode", text, "step") == "epoch"
    steps, every = mapping.take("Engine.max_steps", whole), mapping.take("Engine.eval_freq", whole, -1)
    batches, saved = mapping.take("Engine.eval_iters", whole, 0), mapping.take("Engine.save_load.save_steps", whole, -1)
    if by_epoch:
        mapping.put("train.epochs", max(1, mapping.take("Engine.num_train_epochs", whole, 1)))
        if steps is not None:
            mapping.note("Engine.max_steps", steps, "Engine.run_mode is epoch, so epochs are the length")
    elif steps is None or steps > 0:
        mapping.put("train.max_steps", 500000 if steps is None else steps)
    else:
        mapping.note("Engine.max_steps", steps, "a training has at least 1 step; set train.max_steps", unsupported=True)
    evaluates = every > 0 and batches != 0
    mapping.put("train.eval_every", every if evaluates and not by_epoch else 0)
    mapping.put("train.eval_every_epochs", every if evaluates and by_epoch else None)
    mapping.put("train.eval_batches", batches if batches > 0 else None)
    if batches < 0 and evaluates:
        mapping.note("Engine.eval_iters", batches, "train.eval_batches is a number of batches, not all of them")
    mapping.put("checkpoint.every", max(0, saved))


def _layout(mapping: KeyMapping, world: int | None) -> None:
    tp, pp = mapping.take("Distributed.mp_degree", count, 1), mapping.take("Distributed.pp_degree", count, 1)
    shards = mapping.take("Distributed.sharding.sharding_degree", count, 1)
    if shards == 1 and str(mapping.given.get("Distributed.sharding.sharding_stage")) != "1":
        mapping.leave_idle(["Distributed.sharding.sharding_stage"], "nothing is sharded while sharding_degree is 1")
    stage = mapping.take("Distributed.sharding.sharding_stage", whole, 2)
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
    prefix = f"{_PRECISION}."
    on = mapping.take(f"{prefix}use_pure_fp16", switch, False)
    on = mapping.take(f"{prefix}enable", switch, on)
    if not on:
        mapping.leave_idle((f"{prefix}dtype", f"{prefix}scale_loss"), "mixed precision is off")
        return
    dtype = mapping.take(f"{prefix}dtype", text, "float16")
    scale = mapping.take(f"{prefix}scale_loss", number, 32768.0)
    if dtype not in ("float16", "bfloat16"):
        raise UserError(f"{mapping.where}: {prefix}dtype is {dtype!r} but must be float16 or bfloat16.")
    mapping.put("precision.dtype", "fp16" if dtype == "float16" else "bf16")
    if dtype == "float16":
        mapping.put("precision.loss_scale", scale)


def _recompute(mapping: KeyMapping) -> None:
    wanted = mapping.take("Model.use_recompute", switch, mapping.take("Engine.use_recompute", switch, False))
    if not wanted:
        mapping.leave_idle(("Model.recompute_granularity", "Model.no_recompute_layers"), "use_recompute is false")
        return
    granularity = mapping.take("Model.recompute_granularity", text, "full")
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
    elif name == "AdamW":
        reason = "optimizer.weight_decay is for weight matrices; Fleet's AdamW decays biases and norms, too"
        mapping.note("Optimizer.name", name, reason)
    elif name != "FusedAdamW":
        mapping.note("Optimizer.name", name, "optimizer.name is adamw, the nearest", unsupported=True)
    betas = [mapping.take(f"Optimizer.beta{n}", number, default) for n, default in ((1, 0.9), (2, 0.999))]
    if name != "Momentum":
        mapping.put("optimizer.betas", betas)
    mapping.put("optimizer.clip_grad_norm", mapping.take("Optimizer.grad_clip.clip_norm", number, 0.0))
    _schedule(mapping)


def _schedule(mapping: KeyMapping) -> None:
    """Convert the schedule of the rate, which in Fleet may also rise from max_lr to min_lr."""
    steps, rate = mapping.take("Optimizer.lr.decay_steps", whole), mapping.take("Optimizer.lr.warmup_rate", number, 0.0)
    style = mapping.take("lr_decay_style", text, "cosine")
    if style == "none":
        mapping.settings.update({"optimizer.decay": "constant", "optimizer.warmup_steps": 0})
        mapping.settings.pop("optimizer.min_lr", None)
        mapping.note("lr_decay_style", style, "max_lr in all steps: optimizer.decay is constant, warmup_steps is 0")
        return
    if style != "cosine":
        raise UserError(f"{mapping.where}: lr_decay_style is {style!r} but must be cosine or none.")
    if steps is None:
        steps = mapping.settings.get("train.max_steps")
    if steps is not None:
        mapping.settings.update({"optimizer.decay_steps": steps, "optimizer.warmup_steps": round(rate * steps)})
