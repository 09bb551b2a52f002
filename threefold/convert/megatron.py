"""Megatron-LM: converts the flags of a launch script or of a YAML with `MODEL_ARGS`."""

import re
from pathlib import Path
from typing import Final

from threefold.config.loading import read_document
from threefold.convert.key_mapping import (
    KeyMapping,
    Unmapped,
    count,
    foreign_text,
    number,
    switch,
    tables_of,
    text,
    texts,
    whole,
)
from threefold.convert.launch_line import Launch, launch_of
from threefold.errors import UserError

MODEL_ARGS: Final = re.compile(r"^MODEL_ARGS[ \t]*:", re.MULTILINE)
_TABLES: Final = tables_of("megatron")
_ROWS: Final = _TABLES["rows"]
_LLAMA_ONLY = "only architecture llama has it, which needs --normalization RMSNorm and --swiglu"
_NO_EXPERTS = "--num-experts is not given, so there are none"


def fill_model(mapping: KeyMapping) -> None:
    """Choose the family (gpt or llama) and fill the section `model`."""
    mapping.move(_ROWS["model"])
    llama = _is_llama(mapping)
    hidden, heads = (mapping.settings.get(f"model.{key}") for key in ("hidden_size", "num_attention_heads"))
    mapping.put("model.tie_embeddings", not mapping.take("untie-embeddings-and-output-weights", switch, False))
    width = mapping.take("ffn-hidden-size", whole)
    if width is None and llama and hidden is not None:
        width = int(4 * hidden * 2 / 3) // 64 * 64  # Megatron-LM's own default
    mapping.put("model.ffn_hidden_size", width)
    _groups(mapping, llama)
    if llama:
        mapping.put("model.architecture", "llama")
        mapping.move(_ROWS["llama"])
        factor = mapping.take("rope-scaling-factor", number, 8.0)
        if mapping.take("use-rope-scaling", switch, False):  # that of Llama 3.1, with Megatron-LM's constants
            mapping.settings |= {
                "model.rope_scaling": "llama3",
                "model.rope_factor": factor,
                "model.rope_original_positions": 8192,
                "model.rope_low_frequency_factor": 1.0,
                "model.rope_high_frequency_factor": 4.0,
            }
        _experts(mapping)
    else:
        squared, tanh = mapping.take("squared-relu", switch, False), mapping.take("openai-gelu", switch, False)
        exact = mapping.take("no-bias-gelu-fusion", switch, False)  # else, as OpenAI's, the tanh approximation
        mapping.put("model.activation", "relu2" if squared else "gelu" if exact and not tanh else "gelu_tanh")
        if heads and mapping.given_whole("kv-channels", 0) * heads == hidden:
            del mapping.given["kv-channels"]
        mapping.leave_rows(_ROWS["llama"], _LLAMA_ONLY, unsupported=True)
    if not mapping.settings.get("model.num_experts"):
        mapping.leave_rows(_ROWS["experts"], _NO_EXPERTS, unsupported=False)
        if mapping.settings.pop("parallel.ep", 1) > 1:
            mapping.note("expert-model-parallel-size", "above 1", "parallel.ep is 1: this model has no experts")


def _is_llama(mapping: KeyMapping) -> bool:
    """Return whether norms and feed-forward are Llama's; note what does not fit the family."""
    norm, swiglu = mapping.take("normalization", text, "LayerNorm"), mapping.take("swiglu", switch, False)
    position = mapping.take("position-embedding-type", text, "learned_absolute")
    no_biases = mapping.take("disable-bias-linear", switch, False)
    llama, rope = norm == "RMSNorm" and swiglu, position == "rope"
    if llama:
        differing = [
            (not rope, "position-embedding-type", position, "llama has rotary positions"),
            (not no_biases, "disable-bias-linear", "not given", "llama has no biases"),
        ]
    else:
        mapping.put("model.position_embedding", "rope" if rope else "learned")
        learned = position == "learned_absolute"
        differing = [
            (norm != "LayerNorm", "normalization", norm, "gpt has layer norms"),
            (swiglu, "swiglu", True, "gpt has no gates; with --normalization RMSNorm it is llama"),
            (no_biases, "disable-bias-linear", True, "gpt has biases"),
            (not rope and not learned, "position-embedding-type", position, "learned"),
        ]
    for differs, key, value, reason in differing:
        if differs:
            mapping.note(key, value, f"not convertible exactly: {reason}", unsupported=True)
    return llama


def _groups(mapping: KeyMapping, llama: bool) -> None:
    grouped, groups = mapping.take("group-query-attention", switch, False), mapping.take("num-query-groups", whole, 1)
    if grouped and llama:
        mapping.put("model.num_key_value_heads", groups)
    elif grouped and groups != mapping.settings.get("model.num_attention_heads"):
        mapping.note("num-query-groups", groups, f"not convertible exactly: {_LLAMA_ONLY}", unsupported=True)
    elif groups != 1 and not grouped:
        mapping.note("num-query-groups", groups, "Megatron-LM does not look at it without --group-query-attention")


def _experts(mapping: KeyMapping) -> None:
    if not mapping.settings.get("model.num_experts"):
        return
    balancing = mapping.take("moe-router-load-balancing-type", text, "aux_loss")
    mapping.move(_ROWS["experts"])
    if balancing == "none":
        mapping.put("model.router_aux_loss", 0.0)
    elif balancing == "seq_aux_loss":
        mapping.put("model.router_sequence_loss", mapping.settings.pop("model.router_aux_loss", None))
    elif balancing != "aux_loss":
        reason = "experts are balanced by model.router_aux_loss"
        mapping.note("moe-router-load-balancing-type", balancing, reason, unsupported=True)
    if (factor := mapping.settings.get("model.expert_capacity_factor")) is not None:
        reason = "counts the tokens of each sequence, not of a rank's micro-batch"
        mapping.note("moe-expert-capacity-factor", factor, reason)
    _router(mapping)
    every = mapping.take("moe-layer-freq", text, "1")
    if every.isdecimal() and int(every) > 1:
        mapping.put("model.moe_every", int(every))
        mapping.note("moe-layer-freq", every, "the last layer of each run has experts, not the first")
    elif pattern := _layer_pattern(every, mapping.settings.get("model.num_layers", 0)):
        mapping.settings |= pattern
    elif every != "1":
        reason = "model.moe_every and model.dense_layers say which layers have experts"
        mapping.note("moe-layer-freq", every, reason, unsupported=True)


def _router(mapping: KeyMapping) -> None:
    score = mapping.take("moe-router-score-function", text, "softmax")
    if score == "sigmoid":
        mapping.put("model.router", score)
    elif score != "softmax":
        mapping.note("moe-router-score-function", score, "model.router is softmax or sigmoid", unsupported=True)
    if mapping.take("moe-router-pre-softmax", switch, False) and score == "softmax":
        mapping.put("model.normalize_expert_weights", False)
    rate = mapping.take("moe-router-bias-update-rate", number, 1e-3)
    if mapping.take("moe-router-enable-expert-bias", switch, False):
        mapping.put("model.router_bias_rate", rate)
    groups, chosen = (mapping.take(f"moe-router-{key}", whole) for key in ("num-groups", "group-topk"))
    if not groups or not chosen or groups == 1:
        return
    # Megatron-LM adds up as many scores of a group as a token may have experts of it.
    added, best = mapping.settings.get("model.experts_per_token", 2) // chosen, 2 if score == "sigmoid" else 1
    if added != best:
        reason = f"model.router_groups takes the sum of {best} of the scores of each group, and here it is {added}"
        mapping.note("moe-router-num-groups", groups, reason, unsupported=True)
        return
    mapping.settings |= {"model.router_groups": groups, "model.router_groups_chosen": chosen}


def _layer_pattern(text: str, layers: int) -> dict[str, int] | None:
    """Return settings for a list such as `([0]*3+[1]*58)`, if only the first layers are dense."""
    parts = text.replace(" ", "").strip("()").split("+")
    found = [re.fullmatch(r"\[([01](?:,[01])*)\](?:\*(\d{1,6}))?", part) for part in parts]
    kinds: list[str] = []
    for each in found:
        if each is None:
            return None
        kinds += each[1].split(",") * min(int(each[2] or 1), 10_000)
    dense = kinds.index("1") if "1" in kinds else 0
    if len(kinds) != layers or "0" in kinds[dense:]:
        return None
    return {"model.dense_layers": dense} if dense else {"model.moe_every": 1}


GPT2_TOKENS = 50257


_OTHER_MODELS: Final = re.compile(r"bert|t5|mamba|hybrid|retro|ict|vision|vlm|mimo|dino|inpaint|multimodal|rl", re.I)
"""Words in a script's name that stand for models other than decoder-only ones."""


def read(path: Path) -> KeyMapping:
    """Read the flags, without dashes, of a script or a YAML with `MODEL_ARGS`, and `world-size` if it is known."""
    text = foreign_text(path)
    launch = _of_yaml(path) if MODEL_ARGS.search(text) else launch_of(text, path, _TABLES["switches"].split())
    _check_model(launch, path)
    mapping = KeyMapping(path, notes=launch.notes)
    for word in launch.unread:
        mapping.note(word, "a word", "belongs to no flag that is known", unsupported=True)
    for name, value in launch.flags.items():
        plain = name.replace("_", "-")
        if plain in mapping.given:
            mapping.note(plain, mapping.given[plain], "given twice in two spellings; the last counts")
        mapping.given[plain], mapping.spelled[plain] = value, name
    if launch.world is not None:
        mapping.given["world-size"] = launch.world
    return mapping


def _of_yaml(path: Path) -> Launch:
    """Read the flags of a YAML whose section MODEL_ARGS maps each flag to its value; false means not given."""
    document, _ = read_document(path)
    found = document.get("MODEL_ARGS") if isinstance(document, dict) else None
    if not isinstance(found, dict) or not found:
        raise UserError(f"{path}: MODEL_ARGS must map flags to values, such as --num-layers: 24.")
    flags = {
        str(name).removeprefix("--"): value if isinstance(value, bool | list) else str(value)
        for name, value in found.items()
        if value is not False and value is not None
    }
    others = [name for name in document if name != "MODEL_ARGS"]
    notes = [Unmapped(str(name), "a section", "for the launcher, not the model") for name in others]
    return Launch("", flags, None, notes, [])


def _check_model(launch: Launch, path: Path) -> None:
    name = Path(launch.script).stem
    words = re.split(r"[_\W]+", name)
    if found := next((word for word in words if _OTHER_MODELS.fullmatch(word)), None):
        raise UserError(
            f"{path} starts {Path(launch.script).name}, which trains {found} models, and Threefold trains decoder-only "
            "GPT and Llama models; give a script that starts pretrain_gpt.py."
        )
    for part, flags in _TABLES["other_models"].items():
        if flag := next((flag for flag in flags.split() if flag in launch.flags), None):
            raise UserError(
                f"{path} has --{flag}, so its model has {part}, and Threefold trains decoder-only GPT and Llama "
                "models; give a script of one of these."
            )


def fill(mapping: KeyMapping, world: int | None) -> None:
    """Convert the flags of Megatron-LM."""
    for old, new in _TABLES["old_names"].items():
        if old in mapping.given:
            value = mapping.given.pop(old)
            if new in mapping.given:
                mapping.note(new, mapping.given[new], f"given twice, and --{old} counts")
            mapping.given[new] = "rope" if old.startswith("use-rotary") else value
    world = world or mapping.take("world-size", whole)
    mapping.given.pop("world-size", None)
    mapping.move(_ROWS["all"])
    _layout(mapping, world)
    _batch(mapping)
    _data(mapping)
    _precision(mapping)
    _recompute(mapping)
    _optimizer(mapping)
    _schedule(mapping)
    every, batches = mapping.take("eval-interval", whole, 1000), mapping.take("eval-iters", whole, 100)
    mapping.put("train.eval_every", every if batches else 0)
    mapping.put("train.eval_batches", batches or None)
    fill_model(mapping)
    mapping.put("checkpoint.keep", 0)
    for key, allowed in _TABLES["satisfied"].items():
        if key in mapping.given and str(mapping.given[key]).lower() in allowed:
            del mapping.given[key]
    mapping.leave(_TABLES["reasons"], _TABLES["unsupported"])


def fill_training(mapping: KeyMapping) -> None:
    """Convert the flags of batches, precision and optimizer alone, of one rank."""
    mapping.settings["parallel.dp"] = 1
    mapping.move(row for row in _ROWS["all"] if not row.ours.startswith("parallel."))
    for part in (_batch, _precision, _optimizer, _schedule):
        part(mapping)


def _layout(mapping: KeyMapping, world: int | None) -> None:
    tp, pp, cp = (mapping.settings.get(f"parallel.{axis}", 1) for axis in ("tp", "pp", "cp"))
    mapping.settings |= {"parallel.tp": tp, "parallel.pp": pp}
    mapping.put("parallel.dp", mapping.replicas(world, tp * pp * cp, "world size"))
    if cp > 1 and "cp-comm-type" not in mapping.given:
        mapping.put("parallel.cp_method", "ring")
    mapping.take_sequence_parallel("sequence-parallel")
    for flag, stage in (("use-distributed-optimizer", 1), ("use-torch-fsdp2", 3), ("use-megatron-fsdp", 3)):
        if mapping.take(flag, switch, False):
            mapping.put_zero(stage, flag, True)
    if mapping.take("grad-reduce-in-bf16", switch, False):
        if mapping.settings.get("parallel.zero"):
            reason = "gradients are summed in fp32: parallel.gradient_compression does not go with parallel.zero"
            mapping.note("grad-reduce-in-bf16", True, reason)
        elif mapping.settings["parallel.dp"] * cp > 1:
            mapping.put("parallel.gradient_compression", "bf16")
        else:
            mapping.note("grad-reduce-in-bf16", True, "a single replica has no gradients to all-reduce")
    layers = mapping.take("num-layers-per-virtual-pipeline-stage", count)
    chunks = mapping.take("num-virtual-stages-per-pipeline-rank", count, 1)
    if layers:
        chunks = max(1, mapping.given_whole("num-layers", 1) // pp // layers)
    mapping.put_chunks(chunks, "virtual pipeline stages")


def _batch(mapping: KeyMapping) -> None:
    micro, dp = mapping.settings.get("train.micro_batch_size", 1), mapping.settings["parallel.dp"]
    total = mapping.take("global-batch-size", count, micro * dp)
    mapping.settings.update({"train.global_batch_size": total, "train.micro_batch_size": micro})
    steps, samples = mapping.take("train-iters", whole), mapping.take("train-samples", whole)
    if samples is not None:
        steps = max(1, samples // total)
        mapping.note("train-samples", samples, f"train.max_steps is {steps} = {samples} / {total}")
    mapping.put("train.max_steps", steps)


def _data(mapping: KeyMapping) -> None:
    paths = mapping.take("data-path", texts, [])
    if len(paths) == 1:
        mapping.put("data.path", paths[0])
        if "$" in paths[0] or "<" in paths[0]:
            mapping.note("data-path", paths[0], "not set in the file; put your path into data.path")
    elif paths:
        mapping.put("data.mixture", _mixture(mapping, paths))
    kind = mapping.take("tokenizer-type", text, "GPT2BPETokenizer" if "merge-file" in mapping.given else "")
    padded = mapping.take("padded-vocab-size", whole)
    size = mapping.take("vocab-size", whole, padded)
    if kind == "GPT2BPETokenizer":
        size = size or GPT2_TOKENS
        mapping.put("data.eod", GPT2_TOKENS - 1)
        reason = f"model.vocab_size {size}, and data.eod {GPT2_TOKENS - 1}: no padding of the former is needed"
        mapping.note("tokenizer-type", kind, reason)
    elif kind:
        reason = "model.vocab_size and data.eod are for you to set: its tokens, and the end of a document"
        mapping.note("tokenizer-type", kind, reason)
    mapping.put("model.vocab_size", size)
    for flag in ("tokenizer-model", "vocab-file"):
        file = mapping.given.get(flag)
        if isinstance(file, str) and Path(file).name == "tokenizer.json":
            mapping.put("data.tokenizer", mapping.given.pop(flag))
    if mapping.take("reset-attention-mask", switch, False):
        mapping.put("data.separate_documents", True)
    if not mapping.take("eod-mask-loss", switch, False):
        reason = "with data.eod nothing is predicted after the end of a document, as with the flag"
        mapping.note("eod-mask-loss", "not given", reason)
    elif "calculate-per-token-loss" not in mapping.given:
        reason = "a step's loss is the mean over its tokens, not the mean of its micro-batches' means"
        mapping.note("calculate-per-token-loss", "not given", reason)


def _mixture(mapping: KeyMapping, paths: list[str]) -> dict[str, float]:
    try:
        weighted = [(float(weight), path) for weight, path in zip(paths[::2], paths[1::2], strict=True)]
    except ValueError:  # no number, or no path after it
        mapping.note("data-path", " ".join(paths), "without weights Megatron-LM goes by sizes; here each has weight 1")
        return dict.fromkeys(paths, 1.0)
    mixture: dict[str, float] = {}
    for weight, path in weighted:
        mixture[path] = mixture.get(path, 0.0) + weight
    return mixture


def _precision(mapping: KeyMapping) -> None:
    fp16, bf16 = mapping.take("fp16", switch, False), mapping.take("bf16", switch, False)
    if fp16 and bf16:
        raise UserError(f"{mapping.where}: --fp16 and --bf16 are both given but one excludes the other; leave one out.")
    mapping.put("precision.dtype", "fp16" if fp16 else "bf16" if bf16 else None)
    fixed, first = mapping.take("loss-scale", number), mapping.take("initial-loss-scale", number)
    window = mapping.take("loss-scale-window", whole)
    if fp16:
        mapping.put("precision.loss_scale", fixed or first or 2.0**32)
        mapping.put("precision.loss_scale_window", window)
    if fp16 and fixed is not None:
        mapping.note("loss-scale", fixed, "precision.loss_scale starts there, but is dynamic")
    for key, value in (("loss-scale", fixed), ("initial-loss-scale", first), ("loss-scale-window", window)):
        if not fp16 and value is not None:
            mapping.note(key, value, "only --fp16 reads it")


def _recompute(mapping: KeyMapping) -> None:
    granularity = mapping.take("recompute-granularity", text)
    if mapping.take("recompute-activations", switch, False):
        granularity = granularity or "selective"
    if mapping.take("checkpoint-activations", switch, False):
        granularity = "full"
    if granularity not in (None, "full", "selective"):
        raise UserError(f"{mapping.where}: --recompute-granularity is {granularity!r} but must be full or selective.")
    mapping.put("train.recompute", granularity)


def _optimizer(mapping: KeyMapping) -> None:
    name = mapping.take("optimizer", text, "adam")
    if name not in ("adam", "sgd"):
        mapping.note("optimizer", name, "optimizer.name is adamw, the nearest", unsupported=True)
    betas = [mapping.take("adam-beta1", number, 0.9), mapping.take("adam-beta2", number, 0.999)]
    momentum = mapping.take("sgd-momentum", number)
    if name == "sgd":
        mapping.put("optimizer.name", "sgd")
        mapping.put("optimizer.momentum", 0.9 if momentum is None else momentum)
    else:  # its adam is AdamW: no flag turns decoupled weight decay off
        mapping.put("optimizer.name", "adamw")
        mapping.put("optimizer.betas", betas)
        if momentum is not None:
            mapping.note("sgd-momentum", momentum, "only --optimizer sgd reads it")


def _schedule(mapping: KeyMapping) -> None:
    total = mapping.settings["train.global_batch_size"]
    steps = mapping.take("lr-decay-iters", whole, mapping.settings.get("train.max_steps"))
    warmup = mapping.take("lr-warmup-iters", whole, 0)
    decay_samples, warmup_samples = (mapping.take(f"lr-{part}-samples", whole) for part in ("decay", "warmup"))
    steps = steps if decay_samples is None else max(1, decay_samples // total)
    warmup = warmup if warmup_samples is None else warmup_samples // total
    fraction = mapping.take("lr-warmup-fraction", number)
    if fraction is not None and steps is not None:
        warmup = round(fraction * steps)
    mapping.put("optimizer.decay_steps", steps)
    mapping.put("optimizer.warmup_steps", warmup)
    style, last = mapping.take("lr-decay-style", text, "linear"), mapping.take("lr-wsd-decay-iters", whole)
    decay = style.lower()
    if decay not in ("constant", "linear", "cosine", "wsd"):
        mapping.note("lr-decay-style", style, "optimizer.decay is cosine, the nearest", unsupported=True)
        decay = "cosine"
    mapping.put("optimizer.decay", decay)
    if decay == "wsd" and steps is not None and last is not None:
        mapping.put("optimizer.stable_steps", max(0, steps - warmup - last))
    shape = mapping.take("lr-wsd-decay-style", text, "exponential")
    if decay == "wsd" and shape != "linear":
        mapping.note("lr-wsd-decay-style", shape, "the last part of wsd decays linearly")
