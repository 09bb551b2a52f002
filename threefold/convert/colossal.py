"""Colossal-AI: converts the Python file of `--config`, which is parsed but never executed."""

import ast
import re
from pathlib import Path
from typing import Any, Final

from threefold.config.presets import PRESETS
from threefold.convert.key_mapping import (
    KeyMapping,
    Unmapped,
    constant,
    count,
    flat,
    foreign_text,
    number,
    parsed,
    shortened,
    switch,
    tables_of,
    text,
    whole,
)
from threefold.errors import UserError

USED = "used by other settings"  # pseudo-key for the names that other settings use

_TABLES: Final = tables_of("colossal")
_SIZE_KEYS: Final = ("num_layers", "hidden_size", "num_attention_heads", "max_position_embeddings")
_DROPOUTS = ("model.hidden_dropout", "model.attention_dropout", "model.embedding_dropout")


def read(path: Path) -> KeyMapping:
    """Read the settings of a config file as `name` or `name.key`, and the names that other settings use.

    Settings are assignments, including those inside `CONFIG = dict(…)`, and in a script models and optimizers made in
    functions. Raises a `UserError` if the file is not Python, or sets nothing.
    """
    text = foreign_text(path)
    reader = _Reader()
    try:
        for statement in ast.iter_child_nodes(parsed(text)):
            if isinstance(statement, ast.stmt):
                reader.statement(statement)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f", line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise UserError(f"{path}{line}: not Python, so it is not a Colossal-AI config.") from None
    values = reader.values
    if not values:
        raise UserError(f"{path} has no assignment such as BATCH_SIZE = 8, so it is not a Colossal-AI config.")
    for name in [name for name, value in values.items() if name.lower() == "config" and isinstance(value, dict)]:
        for key, value in values.pop(name).items():
            if values.get(key, value) != value:
                reader.notes.append(Unmapped(key, values[key], f"that of {name} counts: {shortened(str(value))}"))
            values[key] = value
    settings = flat(values, str(path))
    return KeyMapping(path, {**settings, USED: sorted(reader.used)}, reader.notes)


_MADE: Final = re.compile(r"^(?:model|optimizer)$")
_CODE: Final = "code is not run, so its settings are not known; set them here if they matter"


class _Reader:
    """Collector of the assignments of a Python file, without executing it."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.used: set[str] = set()
        self.notes: list[Unmapped] = []

    def statement(self, statement: ast.stmt) -> None:
        if isinstance(statement, ast.Import | ast.ImportFrom | ast.Pass):
            return
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            return
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            self._definition(statement)
            return
        if isinstance(statement, ast.If) and "__name__" in ast.unparse(statement.test):
            return
        targets = statement.targets if isinstance(statement, ast.Assign) else []
        if isinstance(statement, ast.AnnAssign) and statement.value is not None:
            targets = [statement.target]
        if not targets or not all(isinstance(target, ast.Name) for target in targets):
            self.notes.append(Unmapped(f"line {statement.lineno}", _first_line(statement), _CODE, unsupported=True))
            return
        assert isinstance(statement, ast.Assign | ast.AnnAssign)
        assert statement.value is not None
        self.used.update(node.id for node in ast.walk(statement.value) if isinstance(node, ast.Name))
        value = constant(statement.value, self.values)
        self.values |= {target.id: value for target in targets if isinstance(target, ast.Name)}

    def _definition(self, definition: ast.FunctionDef | ast.ClassDef) -> None:
        self.notes.append(Unmapped(f"line {definition.lineno}", _first_line(definition), "code is not run"))
        if isinstance(definition, ast.ClassDef):
            return
        for node in ast.walk(definition):
            if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Call):
                continue
            name = node.targets[0].id if isinstance(node.targets[0], ast.Name) else ""
            made = ast.unparse(node.value.func)
            whose = _MODEL_CALL if name == "model" else _OPTIMIZER_CALL
            if _MADE.fullmatch(name) and whose.search(made) and name not in self.values:
                keywords = {part.arg: part.value for part in node.value.keywords if part.arg}
                settings = {
                    key: constant(value, self.values)
                    for key, value in keywords.items()
                    if not isinstance(value, ast.Name) or value.id in self.values  # no local variable
                }
                self.values[name] = {"type": made, **settings}
                self.used.update(part.id for part in ast.walk(node.value) if isinstance(part, ast.Name))
                self.notes.append(Unmapped(f"line {node.lineno}", _first_line(node), f"taken for {name}"))


_MODEL_CALL: Final = re.compile(r"(?i)gpt")
_OPTIMIZER_CALL: Final = re.compile(r"(?i)adam|sgd|lamb|lars")


def _first_line(statement: ast.stmt) -> str:
    return shortened(ast.unparse(statement).splitlines()[0])


def fill(mapping: KeyMapping, world: int | None) -> None:
    """Convert a Colossal-AI config."""
    used = set(mapping.given.pop(USED, ()))
    for old, new in _TABLES["other_names"].items():
        if old in mapping.given and new not in mapping.given:
            mapping.given[new] = mapping.given.pop(old)
    mapping.move(_TABLES["rows"]["all"])
    _model(mapping)
    _batch(mapping, _layout(mapping, world))
    _precision(mapping)
    _optimizer(mapping)
    for name in used & mapping.given.keys():
        del mapping.given[name]
    for key, value in _TABLES["implied"].items():
        if mapping.given.get(key) is value:
            del mapping.given[key]
    mapping.leave(_TABLES["reasons"], _TABLES["unsupported"])


def _model(mapping: KeyMapping) -> None:
    name = mapping.take("model.type", text, "")
    parts = re.split(r"[^a-z0-9]+", name.lower())
    sizes = next((sizes for part, sizes in _TABLES["sizes"].items() if part in parts), None)
    if sizes is not None:
        sized = dict(zip(_SIZE_KEYS, sizes, strict=True))
        # The pipeline classes have no dropout by default, the others 0.1.
        dropout = dict.fromkeys(_DROPOUTS, 0.0 if "pipeline" in parts else 0.1)
        for key, value in {**{f"model.{key}": value for key, value in sized.items()}, **dropout}.items():
            mapping.settings.setdefault(key, value)
        mapping.given.setdefault("model.act_func", "gelu")
        shown = ", ".join(f"{key} {value}" for key, value in sized.items())
        reason = f"its sizes are in its own code; those of Colossal-AI's function of that name are taken: {shown}"
        mapping.note("model.type", name, f"{reason}, where the file sets no others")
    elif name:
        reason = "its sizes are in its own code; set those of model that the file does not"
        mapping.note("model.type", name, reason, unsupported=True)
    length = mapping.settings.get("data.sequence_length")
    if length is not None:
        mapping.settings["model.max_position_embeddings"] = max(
            length, mapping.settings.get("model.max_position_embeddings", 0)
        )
    if "model.vocab_size" not in mapping.settings:
        size = 50304 if name else PRESETS["gpt2-124m"]["vocab_size"]
        mapping.put("model.vocab_size", size)
        whose = "Colossal-AI's models, GPT-2's 50257 padded" if name else "GPT-2"
        mapping.note("VOCAB_SIZE", "not given", f"model.vocab_size is that of {whose}: {size}")
    mapping.put_activation("model.act_func", _TABLES["activations"])
    ratio, hidden = mapping.take("model.mlp_ratio", number), mapping.settings.get("model.hidden_size")
    if ratio is not None and hidden is not None:
        mapping.put("model.ffn_hidden_size", int(ratio * hidden))
    if mapping.take("model.checkpoint", switch, False):
        mapping.put("train.recompute", "full")


def _degree(mapping: KeyMapping, key: str) -> int:
    plain = mapping.take(f"parallel.{key}", count, 1)
    return int(mapping.take(f"parallel.{key}.size", count, plain))


_GRIDS: Final = ("2d", "2.5d", "3d")
"""Modes in which a group of tensor-parallel ranks is a grid that splits weights along several dims, and the batch."""


def _layout(mapping: KeyMapping, world: int | None) -> int:
    """Convert the layout; return the replicas of ours for each one of Colossal-AI's."""
    size, pp = _degree(mapping, "tensor"), _degree(mapping, "pipeline")
    mode = mapping.take("parallel.tensor.mode", text, "1d")
    replicas, tp, further = mapping.replicas(world, size * pp, "world size"), size, 1
    if mode == "sequence":
        tp = 1
        mapping.settings.update({"parallel.cp": size, "parallel.cp_method": "ring"})
        mapping.note("parallel.tensor.mode", mode, f"ring self-attention is parallel.cp {size} with cp_method ring")
    elif mode in _GRIDS and size > 1:
        heads = mapping.settings.get("model.num_attention_heads", size)
        tp = max(part for part in range(1, size + 1) if size % part == 0 and heads % part == 0)
        further = size // tp
        split = f"weights are split along one dim only, by parallel.tp {tp}"
        rest = f", and samples over parallel.dp {replicas * further}" if further > 1 else ""
        mapping.note("parallel.tensor.mode", mode, split + rest)
        mapping.leave_idle(["parallel.tensor.depth"], "of the grid of parallel.tensor.mode")
    elif mode not in ("1d", "None") and size > 1:
        mapping.note("parallel.tensor.mode", mode, "none of 1d, 2d, 2.5d, 3d and sequence", unsupported=True)
    mapping.settings.update({"parallel.dp": replicas * further, "parallel.tp": tp, "parallel.pp": pp})
    chunks = mapping.take("NUM_CHUNKS", whole, 1)
    mapping.put_chunks(mapping.take("model.num_chunks", whole, chunks), "model.num_chunks")
    return further


def _batch(mapping: KeyMapping, further: int) -> None:
    dp, pp = mapping.settings["parallel.dp"] // further, mapping.settings["parallel.pp"]
    size, parts = mapping.take("BATCH_SIZE", count), mapping.take("NUM_MICRO_BATCHES", count, 1)
    steps = mapping.take("gradient_accumulation", count, 1)
    if size is None:
        return
    if size % parts:
        raise UserError(f"{mapping.where}: NUM_MICRO_BATCHES is {parts} but must divide BATCH_SIZE {size}.")
    if parts > 1 and pp == 1:
        mapping.note("NUM_MICRO_BATCHES", parts, "also holds without a pipeline: gradients of micro-batches add up")
    total, micro = size * steps * dp, max(1, size // parts // further)
    mapping.settings.update({"train.global_batch_size": total, "train.micro_batch_size": micro})
    reason = f"taken as a replica's: train.global_batch_size {total} = {size} · {steps} accumulated · dp {dp}"
    mapping.note("BATCH_SIZE", size, reason)


_AMP_MODES: Final = ("naive", "torch", "apex")
_DTYPES: Final = (".half", ".float16", ".bfloat16", ".float", ".float32")


def _precision(mapping: KeyMapping) -> None:
    mode = mapping.take("fp16.mode", text)
    half = mapping.take("model.dtype", text, "")
    for key, name, known in (("fp16.mode", mode, _AMP_MODES), ("model.dtype", half, _DTYPES)):
        if name and not name.lower().endswith(known):
            mapping.note(key, name, f"none that is known, such as {known[0].strip('.')}", unsupported=True)
    zero = any(key == "zero" or key.startswith("zero.") for key in mapping.given)
    if zero:
        mapping.put_zero(3, "zero", mapping.given.pop("zero", "given"))
        scale = mapping.take("zero.optimizer_config.initial_scale", number)
        window = mapping.take("zero.optimizer_config.growth_interval", whole)
        mapping.settings.setdefault("precision.loss_scale", 2.0**32 if scale is None else scale)
        mapping.settings.setdefault("precision.loss_scale_window", 1000 if window is None else window)
        if mode is None:
            mapping.note("fp16", "not given", "precision.dtype is fp16: Colossal-AI's ZeRO computes in it")
    elif mode is not None and mode.lower().endswith("torch"):
        mapping.settings.setdefault("precision.loss_scale_window", 2000)
    if zero or mode is not None or half.endswith((".half", ".float16")):
        mapping.put("precision.dtype", "fp16")
    elif half.endswith("bfloat16"):
        mapping.put("precision.dtype", "bf16")


def _optimizer(mapping: KeyMapping) -> None:
    name = mapping.take("optimizer.type", text)
    if name is not None:
        mapping.settings.setdefault("optimizer.lr", 1e-3)  # of torch and of Colossal-AI
    name = name or "Adam"
    kind = name.rpartition(".")[2]
    is_theirs = kind in ("HybridAdam", "FusedAdam", "CPUAdam", "DeepSpeedCPUAdam")
    decay = 0.01 if kind == "AdamW" else 0.0
    mapping.put("optimizer.weight_decay", mapping.take("optimizer.weight_decay", number, decay))
    if kind in ("SGD", "FusedSGD"):
        mapping.put_optimizer("sgd", "optimizer.type", name)
        mapping.put("optimizer.momentum", mapping.take("optimizer.momentum", number))
        mapping.put("optimizer.nesterov", mapping.take("optimizer.nesterov", switch))
    elif kind == "Adam" or (is_theirs and not mapping.take("optimizer.adamw_mode", switch, True)):
        mapping.put_optimizer("adam", "optimizer.type", name)
    else:
        mapping.put("optimizer.name", "adamw")
        if kind != "AdamW" and not is_theirs:
            mapping.note("optimizer.type", name, "optimizer.name is adamw, the nearest")
    if mapping.settings["optimizer.name"] != "sgd":
        mapping.put("optimizer.betas", mapping.take("optimizer.betas", _pair, [0.9, 0.999]))
    mapping.put("optimizer.decay", "constant")
    mapping.put("optimizer.warmup_steps", 0)
    mapping.note("lr_scheduler", "not given", "optimizer.decay is constant: the schedule is in the training script")


def _pair(value: Any) -> list[float]:
    if not isinstance(value, list) or len(value) != 2:
        raise ValueError("a pair of numbers")
    return [number(part) for part in value]
