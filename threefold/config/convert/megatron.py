"""Megatron-LM: the flags of a GPT pre-training, in a shell script or one after the other in a text."""

import re
from pathlib import Path
from typing import Any, Final

from threefold.config.convert.key_mapping import (
    Draft,
    Given,
    Note,
    Same,
    count,
    dp_of,
    foreign_text,
    number,
    put_chunks,
    put_zero,
    switch,
    take_sequence_parallel,
    text,
    texts,
    whole,
)
from threefold.config.convert.megatron_model import fill_model
from threefold.config.convert.megatron_reasons import REASONS, SATISFIED, SWITCHES, UNSUPPORTED
from threefold.config.convert.shell.launch_line import Launch, launch_of
from threefold.config.document import read_document
from threefold.errors import UserError

GPT2_TOKENS = 50257

TABLE = (
    Same("seed", "train.seed", whole),
    Same("micro-batch-size", "train.micro_batch_size", count),
    Same("seq-length", "data.sequence_length", whole),
    Same("split", "data.split", text, "969,30,1"),
    Same("log-interval", "log.every", whole, 100),
    Same("save-interval", "checkpoint.every", whole, 0),
    Same("lr", "optimizer.lr", number),
    Same("min-lr", "optimizer.min_lr", number, 0.0),
    Same("weight-decay", "optimizer.weight_decay", number, 0.01),
    Same("adam-eps", "optimizer.eps", number),
    Same("clip-grad", "optimizer.clip_grad_norm", number, 1.0),
    Same("tensor-model-parallel-size", "parallel.tp", count),
    Same("pipeline-model-parallel-size", "parallel.pp", count),
    Same("context-parallel-size", "parallel.cp", count),
    Same("expert-model-parallel-size", "parallel.ep", count),
)
OLD_NAMES = {
    "model-parallel-size": "tensor-model-parallel-size",
    "batch-size": "micro-batch-size",
    "warmup": "lr-warmup-fraction",
    "layernorm-epsilon": "norm-epsilon",
    "use-rotary-position-embeddings": "position-embedding-type",
}


_OTHER_MODELS: Final = re.compile(r"bert|t5|mamba|hybrid|retro|ict|vision|vlm|mimo|dino|inpaint|multimodal|rl", re.I)
"""What the script's name says of models that are no decoder-only GPT."""
_OTHER_FLAGS: Final = {
    "hybrid-layer-pattern": "Mamba layers",
    "hybrid-override-pattern": "Mamba layers",
    "hybrid-attention-ratio": "Mamba layers",
    "mamba-state-dim": "Mamba layers",
    "encoder-num-layers": "an encoder",
    "decoder-num-layers": "an encoder",
    "encoder-seq-length": "an encoder",
    "decoder-seq-length": "an encoder",
    "bert-no-binary-head": "BERT's heads",
    "vocab-extra-ids": "T5's masks",
    "retro-project-dir": "retrieval",
}


def read(path: Path) -> Given:
    """The flags of a script or of a YAML with `MODEL_ARGS`, without their dashes, and `world-size`, if it is known.

    Raises:
        UserError: the file cannot be read, has no flags, or starts a model that is no decoder-only transformer.
    """
    text = foreign_text(path)
    launch = _of_yaml(path) if re.search(r"^MODEL_ARGS[ \t]*:", text, re.MULTILINE) else launch_of(text, path, SWITCHES)
    _refuse_other_models(launch, path)
    notes = [Note(*remark) for remark in launch.remarks]
    notes += [Note(word, "a word", "belongs to no flag that is known", unsupported=True) for word in launch.unread]
    flags: dict[str, Any] = {}
    spelled: dict[str, str] = {}
    for name, value in launch.flags.items():
        plain = name.replace("_", "-")
        if plain in flags:
            notes.append(Note(plain, flags[plain], "given twice in two spellings; the last counts"))
        flags[plain], spelled[plain] = value, name
    spelled = {plain: name for plain, name in spelled.items() if name.replace("_", "-") != name}
    return Given(flags if launch.world is None else {**flags, "world-size": launch.world}, notes, spelled)


def _of_yaml(path: Path) -> Launch:
    """The flags of a YAML whose section MODEL_ARGS maps each flag to its value; one that is false is not given."""
    document, _ = read_document(path)
    found = document.get("MODEL_ARGS") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path}: MODEL_ARGS must map flags to values, such as --num-layers: 24.")
    flags = {
        str(name).removeprefix("--"): value if isinstance(value, bool | list) else str(value)
        for name, value in found.items()
        if value is not False and value is not None
    }
    remarks: list[tuple[str, Any, str]] = [
        (str(name), "a section", "the launcher's; it says nothing of the model")
        for name in document
        if name != "MODEL_ARGS"
    ]
    return Launch("", flags, [], None, remarks)


def _refuse_other_models(launch: Launch, path: Path) -> None:
    name = Path(launch.script).stem
    words = re.split(r"[_\W]+", name)
    if found := next((word for word in words if _OTHER_MODELS.fullmatch(word)), None):
        raise UserError(
            f"{path} starts {Path(launch.script).name}, which trains {found} models, and Threefold trains decoder-only "
            "GPT and Llama models; give a script that starts pretrain_gpt.py."
        )
    if flag := next((flag for flag in _OTHER_FLAGS if flag in launch.flags), None):
        raise UserError(
            f"{path} has --{flag}, so its model has {_OTHER_FLAGS[flag]}, and Threefold trains decoder-only GPT and "
            "Llama models; give a script of one of these."
        )


def fill(draft: Draft, world: int | None) -> None:
    """Make ours of the flags."""
    for old, new in OLD_NAMES.items():
        if old in draft.given:
            value = draft.given.pop(old)
            draft.given[new] = "rope" if old.startswith("use-rotary") else value
    world = world or draft.take("world-size", whole)
    draft.given.pop("world-size", None)
    draft.move(TABLE)
    _layout(draft, world)
    _batch(draft)
    _data(draft)
    _precision(draft)
    _recompute(draft)
    _optimizer(draft)
    _evaluation(draft)
    fill_model(draft)
    draft.put("checkpoint.keep", 0)
    for key, allowed in SATISFIED.items():
        if key in draft.given and str(draft.given[key]).lower() in allowed:
            del draft.given[key]
    draft.leave(REASONS, UNSUPPORTED)


def _layout(draft: Draft, world: int | None) -> None:
    tp, pp, cp = (draft.settings.get(f"parallel.{axis}", 1) for axis in ("tp", "pp", "cp"))
    draft.settings |= {"parallel.tp": tp, "parallel.pp": pp}
    draft.put("parallel.dp", dp_of(draft, world, tp * pp * cp, "world size"))
    if cp > 1 and "cp-comm-type" not in draft.given:
        draft.put("parallel.cp_method", "ring")
    take_sequence_parallel(draft, "sequence-parallel")
    for flag, stage in (("use-distributed-optimizer", 1), ("use-torch-fsdp2", 3), ("use-megatron-fsdp", 3)):
        if draft.take(flag, switch, False):
            put_zero(draft, stage, flag, True)
    if draft.take("grad-reduce-in-bf16", switch, False):
        _reduce_in_bf16(draft)
    layers = draft.take("num-layers-per-virtual-pipeline-stage", count)
    chunks = draft.take("num-virtual-stages-per-pipeline-rank", count, 1)
    if layers:
        chunks = max(1, draft.given_whole("num-layers", 1) // pp // layers)
    put_chunks(draft, chunks, "virtual pipeline stages")


def _reduce_in_bf16(draft: Draft) -> None:
    if draft.settings.get("parallel.zero"):
        reason = "gradients are summed in fp32: parallel.gradient_compression does not go with parallel.zero"
        draft.note("grad-reduce-in-bf16", True, reason)
    elif draft.settings["parallel.dp"] * draft.settings.get("parallel.cp", 1) > 1:
        draft.put("parallel.gradient_compression", "bf16")
    else:
        draft.note("grad-reduce-in-bf16", True, "one replica sums no gradients with others")


def _batch(draft: Draft) -> None:
    micro, dp = draft.settings.get("train.micro_batch_size", 1), draft.settings["parallel.dp"]
    total = draft.take("global-batch-size", count, micro * dp)
    draft.settings.update({"train.global_batch_size": total, "train.micro_batch_size": micro})
    steps, samples = draft.take("train-iters", whole), draft.take("train-samples", whole)
    if samples is not None:
        steps = max(1, samples // total)
        draft.note("train-samples", samples, f"train.max_steps is {steps} = {samples} / {total}")
    draft.put("train.max_steps", steps)


def _data(draft: Draft) -> None:
    paths = draft.take("data-path", texts, [])
    if len(paths) == 1:
        draft.put("data.path", paths[0])
        if "$" in paths[0] or "<" in paths[0]:
            draft.note("data-path", paths[0], "not set in the file; put your path into data.path")
    elif paths:
        draft.put("data.mixture", _mixture(draft, paths))
    kind = draft.take("tokenizer-type", text, "GPT2BPETokenizer" if "merge-file" in draft.given else "")
    padded = draft.take("padded-vocab-size", whole)
    size = draft.take("vocab-size", whole, padded)
    if kind == "GPT2BPETokenizer":
        size = size or GPT2_TOKENS
        draft.put("data.eod", GPT2_TOKENS - 1)
        draft.note(
            "tokenizer-type",
            kind,
            f"model.vocab_size {size}, and data.eod {GPT2_TOKENS - 1}: no padding of the former is needed",
        )
    elif kind:
        draft.note(
            "tokenizer-type",
            kind,
            "model.vocab_size and data.eod are for you to set: its tokens, and the end of a document",
        )
    draft.put("model.vocab_size", size)
    for flag in ("tokenizer-model", "vocab-file"):
        file = draft.given.get(flag)
        if isinstance(file, str) and Path(file).name == "tokenizer.json":
            draft.put("data.tokenizer", draft.given.pop(flag))
    if draft.take("reset-attention-mask", switch, False):
        draft.put("data.separate_documents", True)
    if not draft.take("eod-mask-loss", switch, False):
        draft.note(
            "eod-mask-loss",
            "not given",
            "with data.eod nothing is predicted after the end of a document, as with the flag",
        )


def _mixture(draft: Draft, paths: list[str]) -> dict[str, float]:
    weighted = len(paths) % 2 == 0 and all(_is_number(word) for word in paths[::2])
    if not weighted:
        draft.note("data-path", " ".join(paths), "without weights Megatron-LM goes by sizes; here each has weight 1")
        return dict.fromkeys(paths, 1.0)
    mixture: dict[str, float] = {}
    for weight, path in zip(paths[::2], paths[1::2], strict=True):
        mixture[path] = mixture.get(path, 0.0) + float(weight)
    return mixture


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _precision(draft: Draft) -> None:
    fp16, bf16 = draft.take("fp16", switch, False), draft.take("bf16", switch, False)
    if fp16 and bf16:
        raise UserError(f"{draft.where}: --fp16 and --bf16 are both given but one excludes the other; leave one out.")
    draft.put("precision.dtype", "fp16" if fp16 else "bf16" if bf16 else None)
    fixed, first = draft.take("loss-scale", number), draft.take("initial-loss-scale", number)
    window = draft.take("loss-scale-window", whole)
    if fp16:
        draft.put("precision.loss_scale", fixed or first)
        draft.put("precision.loss_scale_window", window)
    if fixed is not None:
        draft.note("loss-scale", fixed, "precision.loss_scale starts there for fp16, but is dynamic")


def _recompute(draft: Draft) -> None:
    granularity = draft.take("recompute-granularity", text)
    if draft.take("recompute-activations", switch, False):
        granularity = granularity or "selective"
    if draft.take("checkpoint-activations", switch, False):
        granularity = "full"
    if granularity not in (None, "full", "selective"):
        raise UserError(f"{draft.where}: --recompute-granularity is {granularity!r} but must be full or selective.")
    draft.put("train.recompute", granularity)


def _optimizer(draft: Draft) -> None:
    name = draft.take("optimizer", text, "adam")
    if name not in ("adam", "sgd"):
        draft.note("optimizer", name, "optimizer.name is adamw, the nearest", unsupported=True)
    draft.put("optimizer.name", "sgd" if name == "sgd" else "adamw")
    draft.put("optimizer.betas", [draft.take("adam-beta1", number, 0.9), draft.take("adam-beta2", number, 0.999)])
    _schedule(draft)


def _schedule(draft: Draft) -> None:
    total = draft.settings["train.global_batch_size"]
    steps = draft.take("lr-decay-iters", whole, draft.settings.get("train.max_steps"))
    warmup = draft.take("lr-warmup-iters", whole, 0)
    decay_samples, warmup_samples = (draft.take(f"lr-{part}-samples", whole) for part in ("decay", "warmup"))
    steps = steps if decay_samples is None else max(1, decay_samples // total)
    warmup = warmup if warmup_samples is None else warmup_samples // total
    fraction = draft.take("lr-warmup-fraction", number)
    if fraction is not None and steps is not None:
        warmup = round(fraction * steps)
    draft.put("optimizer.decay_steps", steps)
    draft.put("optimizer.warmup_steps", warmup)
    style, last = draft.take("lr-decay-style", text, "linear"), draft.take("lr-wsd-decay-iters", whole)
    decay = style.lower()
    if decay not in ("constant", "linear", "cosine", "wsd"):
        draft.note("lr-decay-style", style, "optimizer.decay is cosine, the nearest", unsupported=True)
        decay = "cosine"
    draft.put("optimizer.decay", decay)
    if decay == "wsd" and steps is not None and last is not None:
        draft.put("optimizer.stable_steps", max(0, steps - warmup - last))
    shape = draft.take("lr-wsd-decay-style", text, "exponential")
    if decay == "wsd" and shape != "linear":
        draft.note("lr-wsd-decay-style", shape, "the last part of wsd decays linearly")


def _evaluation(draft: Draft) -> None:
    every, batches = draft.take("eval-interval", whole, 1000), draft.take("eval-iters", whole, 100)
    draft.put("train.eval_every", every if batches else 0)
    draft.put("train.eval_batches", batches or None)
