"""Colossal-AI: the Python file of `--config`, which is read and never run."""

import ast
import re
from pathlib import Path
from typing import Any

from threefold.config.convert.arithmetic import constant
from threefold.config.convert.draft import (
    Draft,
    Same,
    count,
    dp_of,
    flat,
    number,
    put_chunks,
    put_zero,
    switch,
    text,
    whole,
)
from threefold.config.presets import PRESETS
from threefold.errors import UserError
from threefold.files import read_text

USED = "used by other settings"
"""Pseudo-key: names that other settings are made of, which have done their part."""

TABLE = (
    Same("seed", "train.seed", whole, 1024),
    Same("SEQ_LEN", "data.sequence_length", count),
    Same("VOCAB_SIZE", "model.vocab_size", whole),
    Same("HIDDEN_SIZE", "model.hidden_size", whole),
    Same("NUM_LAYERS", "model.num_layers", whole),
    Same("NUM_ATTENTION_HEADS", "model.num_attention_heads", whole),
    Same("model.vocab_size", "model.vocab_size", whole),
    Same("model.hidden_size", "model.hidden_size", whole),
    Same("model.num_layers", "model.num_layers", whole),
    Same("model.num_attention_heads", "model.num_attention_heads", whole),
    Same("model.max_position_embeddings", "model.max_position_embeddings", whole),
    Same("optimizer.lr", "optimizer.lr", number),
    Same("optimizer.weight_decay", "optimizer.weight_decay", number, 0.0),
    Same("optimizer.eps", "optimizer.eps", number),
    Same("clip_grad_norm", "optimizer.clip_grad_norm", number, 0.0),
    Same("fp16.initial_scale", "precision.loss_scale", number),
    Same("fp16.growth_interval", "precision.loss_scale_window", whole),
)
OTHER_NAMES = {
    "SEQ_LENGTH": "SEQ_LEN",
    "SEQUENCE_LENGTH": "SEQ_LEN",
    "num_layers": "NUM_LAYERS",
    "num_attention_heads": "NUM_ATTENTION_HEADS",
    "DEPTH": "NUM_LAYERS",
    "NUM_HEADS": "NUM_ATTENTION_HEADS",
    "model.depth": "model.num_layers",
    "model.num_heads": "model.num_attention_heads",
    "model.max_seq_len": "model.max_position_embeddings",
    "MAX_GRAD_NORM": "clip_grad_norm",
    "gradient_clipping": "clip_grad_norm",
    "LEARNING_RATE": "optimizer.lr",
    "WEIGHT_DECAY": "optimizer.weight_decay",
}
_SIZES = {
    "small": "gpt2-124m",
    "medium": "gpt2-medium",
    "large": "gpt2-large",
    "exlarge": "gpt2-xl",
    "xl": "gpt2-xl",
    "gpt3": "gpt3-175b",
}
"""What the name of a model's class says of its size."""
REASONS = {
    "NUM_EPOCHS": "train.max_steps ends the run; set it to epochs · samples / train.global_batch_size",
    "WARMUP_*": "optimizer.warmup_steps counts steps",
    "TENSOR_SHAPE": "what pipeline stages send follows from the model",
    "model.embed_split_hidden": "the embedding is always split by the vocabulary",
    "model.fuse_*": "kernels are chosen by themselves",
    "loss*": "the loss is the cross-entropy of the next token, vocabulary-parallel by itself",
    "gradient_handler": "gradients are summed by themselves",
    "zero.*": "parallel.zero has no further settings; weights and states stay on the device",
    "fp16.*": "the loss scale halves at each overflow and doubles after precision.loss_scale_window steps",
    "lr_scheduler*": "optimizer.decay, warmup_steps and decay_steps are the schedule",
    "hooks": "the step log and checkpoints are always there",
    "LOG_PATH": "the folder of the run is an option of the command: threefold train … --run-dir",
    "logging*": "the folder of the run is an option of the command: threefold train … --run-dir",
    "cudnn_*": "kernels are chosen by themselves",
    "TOTAL_BATCH_SIZE": "its part in the other settings is what counts",
}


def read(path: Path) -> dict[str, Any]:
    """The assignments of a config file as `name` or `name.key`, and the names that went into others.

    Raises:
        UserError: not Python, or nothing is set there.
    """
    try:
        module = ast.parse(read_text(path))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"{path}{line}: not Python, so it is no Colossal-AI config.") from None
    values: dict[str, Any] = {}
    used: set[str] = set()
    for statement in module.body:
        _run(statement, values, used)
    if not values:
        raise UserError(f"{path} sets nothing such as BATCH_SIZE = 8, so it is no Colossal-AI config.")
    return {**flat(values), USED: sorted(used)}


def _run(statement: ast.stmt, values: dict[str, Any], used: set[str]) -> None:
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return
    docstring = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    if docstring:
        return
    named = isinstance(statement, ast.Assign) and all(isinstance(target, ast.Name) for target in statement.targets)
    if not isinstance(statement, ast.Assign) or not named:
        values[f"line {statement.lineno}"] = ast.unparse(statement).splitlines()[0]
        return
    used.update(node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name))
    value = constant(statement.value, values)
    for target in statement.targets:
        if isinstance(target, ast.Name):
            values[target.id] = value


def fill(draft: Draft, world: int | None) -> None:
    """Make ours of a Colossal-AI config."""
    used = set(draft.given.pop(USED, ()))
    for old, new in OTHER_NAMES.items():
        if old in draft.given and new not in draft.given:
            draft.given[new] = draft.given.pop(old)
    draft.move(TABLE)
    _model(draft)
    _layout(draft, world)
    _batch(draft)
    _precision(draft)
    _optimizer(draft)
    for name in used & draft.given.keys():
        del draft.given[name]
    draft.leave(REASONS)


def _model(draft: Draft) -> None:
    name = draft.take("model.type", text, "")
    parts = re.split(r"[^a-z0-9]+", name.lower())
    preset = next((preset for part, preset in _SIZES.items() if part in parts), None)
    if preset is not None:
        sizes = {key: value for key, value in PRESETS[preset].items() if key not in ("vocab_size",)}
        for key, value in sizes.items():
            draft.settings.setdefault(f"model.{key}", value)
        reason = f"its sizes are in its own code; those of preset {preset} are taken for what the file does not set"
        draft.note("model.type", name, reason)
    elif name:
        draft.note("model.type", name, "its sizes are in its own code; set those of model that the file does not")
    length = draft.settings.get("data.sequence_length")
    if length is not None:
        draft.settings["model.max_position_embeddings"] = max(
            length, draft.settings.get("model.max_position_embeddings", 0)
        )
    if "model.vocab_size" not in draft.settings:
        draft.put("model.vocab_size", PRESETS["gpt2-124m"]["vocab_size"])
        draft.note("VOCAB_SIZE", "not given", "model.vocab_size is that of GPT-2, 50257")
    if draft.take("model.checkpoint", switch, False):
        draft.put("train.recompute", "full")


def _degree(draft: Draft, key: str) -> int:
    plain = draft.take(f"parallel.{key}", count, 1)
    return int(draft.take(f"parallel.{key}.size", count, plain))


def _layout(draft: Draft, world: int | None) -> None:
    tp, pp = _degree(draft, "tensor"), _degree(draft, "pipeline")
    mode = draft.take("parallel.tensor.mode", text, "1d")
    draft.settings.update({"parallel.tp": tp, "parallel.pp": pp})
    if mode == "sequence":
        draft.settings.update({"parallel.tp": 1, "parallel.cp": tp, "parallel.cp_method": "ring"})
        draft.note("parallel.tensor.mode", mode, f"ring self-attention is parallel.cp {tp} with cp_method ring")
    elif mode not in ("1d", "None") and tp > 1:
        draft.note("parallel.tensor.mode", mode, f"parallel.tp {tp} splits weights along one dim")
    draft.put("parallel.dp", dp_of(draft, world, tp * pp, "world size"))
    put_chunks(draft, draft.take("model.num_chunks", whole, 1), "model.num_chunks")
    if any(key == "zero" or key.startswith("zero.") for key in draft.given):
        put_zero(draft, 3, "zero", draft.given.pop("zero", "given"))


def _batch(draft: Draft) -> None:
    dp, pp = (draft.settings[f"parallel.{axis}"] for axis in ("dp", "pp"))
    size, parts = draft.take("BATCH_SIZE", count), draft.take("NUM_MICRO_BATCHES", count, 1)
    steps = draft.take("gradient_accumulation", count, 1)
    if size is None:
        return
    if size % parts:
        raise UserError(f"{draft.where}: NUM_MICRO_BATCHES is {parts} but must divide BATCH_SIZE {size}.")
    if parts > 1 and pp == 1:
        draft.note("NUM_MICRO_BATCHES", parts, "also holds without a pipeline: gradients of micro-batches add up")
    total, micro = size * steps * dp, size // parts
    draft.settings.update({"train.global_batch_size": total, "train.micro_batch_size": micro})
    reason = f"taken as a replica's: train.global_batch_size {total} = {size} · {steps} accumulated · dp {dp}"
    draft.note("BATCH_SIZE", size, reason)


def _precision(draft: Draft) -> None:
    mode = draft.take("fp16.mode", text)
    half = draft.take("model.dtype", text, "")
    if mode is not None or half.endswith((".half", ".float16")):
        draft.put("precision.dtype", "fp16")
    elif half.endswith("bfloat16"):
        draft.put("precision.dtype", "bf16")
    else:
        for key in ("loss_scale", "loss_scale_window"):
            draft.settings.pop(f"precision.{key}", None)


def _optimizer(draft: Draft) -> None:
    name = draft.take("optimizer.type", text, "Adam")
    kind = name.rpartition(".")[2]
    draft.put("optimizer.name", "sgd" if kind == "SGD" else "adamw")
    if kind == "Adam":
        draft.note("optimizer.type", name, "optimizer.name is adamw: weight decay is decoupled, not added to gradients")
    elif kind not in ("AdamW", "HybridAdam", "FusedAdam", "CPUAdam", "SGD"):
        draft.note("optimizer.type", name, "optimizer.name is adamw, the nearest")
    betas = draft.take("optimizer.betas", _pair, [0.9, 0.999])
    draft.put("optimizer.betas", betas)
    draft.put("optimizer.decay", "constant")
    draft.put("optimizer.warmup_steps", 0)
    draft.note("lr_scheduler", "not given", "optimizer.decay is constant: the schedule is in the training script")


def _pair(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("a pair of numbers")
    return [number(part) for part in value]
