"""Settings of the public GPT and Llama examples of other systems, as facts: key → value, in each form that they have.

Fleet's and Colossal-AI's keys are dotted; Megatron-LM's and PaddleNLP's are flags, where True stands for a bare flag.
"""

import ast
import re
from typing import Any, NamedTuple

import yaml

Settings = dict[str, Any]


class Case(NamedTuple):
    """Example, and what the original makes of it, by arithmetic of its own."""

    kind: str  # fleet-yaml, fleet-flags, colossal or megatron
    settings: Settings
    world: int
    layout: tuple[int, int, int]  # dp · tp · pp
    batch: tuple[int, int]  # sequences of a step and of a micro-batch
    parameters: int
    unsupported: tuple[str, ...] = ()
    vocabulary: int | None = None  # that of the tokenizer, if the config does not give it


def gpt(vocabulary: int, positions: int, layers: int, width: int, inner: int | None = None) -> int:
    """Count the parameters of a GPT with a tied head: embeddings, blocks of four matrices with biases, norms."""
    inner = inner or 4 * width
    block = 4 * width * width + 4 * width + 2 * width * inner + inner + width + 4 * width
    return (vocabulary + positions) * width + layers * block + 2 * width


def llama(vocabulary: int, layers: int, width: int, inner: int, heads: int, groups: int, head: int) -> int:
    """Count the parameters of a Llama with a head of its own."""
    block = 2 * width * heads * head + 2 * width * groups * head + 3 * width * inner + 2 * width
    return 2 * vocabulary * width + layers * block + width


def _given(text: str) -> Settings:
    """Read settings written as `key=value`, or as a key alone for a bare flag."""
    found: Settings = {}
    for part in text.split():
        key, equals, value = part.partition("=")
        number = re.fullmatch(r"-?[\d.]+(e-?\d+)?", value)
        found[key] = ast.literal_eval(value) if number or value in ("True", "False") else value if equals else True
    return found


def _sections(prefix: str, names: str, *values: Any) -> Settings:
    return {f"{prefix}{name}": value for name, value in zip(names.split(), values, strict=True)}


_BLACK, _WHITE = ["reduce_sum", "c_softmax_with_cross_entropy", "elementwise_div"], ["lookup_table", "lookup_table_v2"]


def _engine(prefix: str, precision: Settings) -> Settings:
    return {
        **_sections(prefix, "max_steps num_train_epochs accumulate_steps logging_freq", 500000, 1, None, 1),
        **_sections(prefix, "eval_freq eval_iters test_iters", 500, 10, None),
        **{f"{prefix}mix_precision.{key}": value for key, value in precision.items()},
        **_sections(f"{prefix}save_load.", "save_steps save_epoch output_dir ckpt_dir", 1000, 1, "./output", None),
    }


def _data(part: str, split: list[int]) -> Settings:
    prefix = f"Data.{part}."
    return {
        **_sections(f"{prefix}dataset.", "name input_dir split max_seq_len", "GPTDataset", "./data/", split, 1024),
        **_sections(f"{prefix}sampler.", "name shuffle drop_last", "GPTBatchSampler", False, True),
        **_sections(f"{prefix}loader.", "num_workers return_list collate_fn", 1, False, "gpt_collate_fn"),
    }


_O2 = {"enable": True, "dtype": "float16", "level": "O2", "scale_loss": 32768.0}
_LISTS = {"custom_black_list": _BLACK, "custom_white_list": _WHITE}
_GLOBAL = _sections(
    "Global.", "device seed global_batch_size local_batch_size micro_batch_size", "gpu", 1024, None, 1, 1
)
_RATE = {
    **_sections("Optimizer.", "weight_decay beta1 beta2 epsilon", 0.01, 0.9, 0.999, 1e-8),
    **_sections("Optimizer.lr.", "name decay_steps warmup_rate", "CosineAnnealingWithWarmupDecay", 360000, 0.01),
    **_sections("Optimizer.lr.", "max_lr min_lr", 5e-5, 1e-5),
    **_sections("Optimizer.grad_clip.", "name clip_norm", "ClipGradByGlobalNorm", 1.0),
}
_PROFILER = _sections("Profiler.", "enable scheduler profiler_log detailed", False, [1, 5], "profiler_log", False)
_REST = {
    **_sections("Model.", "name vocab_size_divisible_unit fused_linear fuse_attn_qkv", "GPT", 128, False, True),
    **_sections("Model.", "scale_qk_by_layer_num sequence_parallel", True, False),
    "Model.fused_softmax_with_triangular": True,
    **_data("Train", [969, 30, 1]),
    **_data("Eval", [969, 30, 1]),
    **_RATE,
    **_sections("Optimizer.", "name tensor_fusion lr.use_increments", "FusedAdamW", False, True),
    **_PROFILER,
    "Distributed.fuse_sequence_parallel_allreduce": False,
}
FLEET_BASE = {
    **_GLOBAL,
    **_engine("Engine.", {**_O2, **_LISTS}),
    **_REST,
    **_sections("Model.", "module use_flash_attn", "GPTModule", False),
}
"""Base file of the last ppfleetx."""
FLEET_EXAMPLES_BASE = {**_GLOBAL, **_engine("Global.", {**_O2, **_LISTS}), **_REST, "Model.no_recompute_layers": None}
"""Base file of the last examples, which have no section Engine."""
_OLD_DATA = {key: value for key, value in _data("Train", [949, 50, 1]).items() if ".dataset." in key}
FLEET_AUTO_BASE = {
    **_GLOBAL,
    **_engine("Engine.", {**_O2, **_LISTS, "level": "o2", "use_fp16_guard": False}),
    "Engine.eval_freq": 1,
    **_sections("Model.", "module name fuse_attn_qkv", "GPTModuleAuto", "GPT", False),
    **{
        f"Data.{part}.{key}": value
        for part in ("Train", "Eval")
        for key, value in {"collate_fn": "gpt_collate_fn", "sample_split": 2}.items()
    },
    **_OLD_DATA,
    **{key.replace("Train", "Eval"): value for key, value in _OLD_DATA.items()},
    **_RATE,
    "Optimizer.name": "AdamW",
}
"""Base file of the examples of automatic parallelism."""


def _sizes(vocabulary: int, width: int, layers: int, heads: int, inner: int | None, positions: int = 1024) -> Settings:
    names = "vocab_size hidden_size num_layers num_attention_heads ffn_hidden_size max_position_embeddings"
    return {
        **_sections("Model.", names, vocabulary, width, layers, heads, inner, positions),
        **_sections("Model.", "hidden_dropout_prob attention_probs_dropout_prob", 0.1, 0.1),
        **_sections("Model.", "type_vocab_size initializer_range", 16, 0.02),
    }


def _recompute(wanted: bool, granularity: str | None = None) -> Settings:
    return _sections("Model.", "use_recompute recompute_granularity no_recompute_layers", wanted, granularity, None)


def _batches(total: int | None, local: int | None, micro: int) -> Settings:
    return _sections("Global.", "global_batch_size local_batch_size micro_batch_size", total, local, micro)


def _distributed(
    dp: int | None, mp: int, pp: int, sharding: int = 1, stage: int = 1, overlap: bool = False
) -> Settings:
    return {
        **_sections("Distributed.", "dp_degree mp_degree pp_degree", dp, mp, pp),
        **_sections("Distributed.sharding.", "sharding_degree sharding_stage sharding_offload", sharding, stage, False),
        **_sections("Distributed.sharding.", "reduce_overlap broadcast_overlap", overlap, overlap),
    }


_1_3B, _345M, _6_7B = (50304, 2048, 24, 16, None), (50304, 1024, 24, 16, 4096), (50304, 4096, 32, 32, None)
_FLEET: dict[str, tuple[Settings, int, tuple[int, int, int], tuple[int, int], int]] = {
    "1.3B dp8": (
        {**_batches(None, 8, 8), **_sizes(*_1_3B), **_recompute(True), **_distributed(8, 1, 1)},
        *(8, (8, 1, 1), (64, 8), gpt(50304, 1024, 24, 2048)),
    ),
    "1.3B single card": (
        {**_batches(8, 8, 8), **_sizes(*_1_3B), **_recompute(True), **_distributed(1, 1, 1)},
        *(1, (1, 1, 1), (8, 8), gpt(50304, 1024, 24, 2048)),
    ),
    "345M single card": (
        {**_batches(None, 8, 8), **_sizes(*_345M), **_recompute(False), **_distributed(1, 1, 1)},
        *(1, (1, 1, 1), (8, 8), gpt(50304, 1024, 24, 1024)),
    ),
    "6.7B sharding16": (
        {
            **_batches(None, 8, 8),
            **_sizes(*_6_7B),
            **_recompute(True),
            **_distributed(None, 1, 1, 16, 2, True),
            "Model.fused_linear": True,
            "Optimizer.tensor_fusion": True,
        },
        *(16, (16, 1, 1), (128, 8), gpt(50304, 1024, 32, 4096)),
    ),
    "175B mp8 pp16": (
        {
            **_batches(None, 1536, 1),
            **_sizes(51200, 12288, 96, 96, None),
            **_recompute(True, "core_attn"),
            **_distributed(None, 8, 16),
            **_sections("Model.", "virtual_pp_degree sequence_parallel fused_linear", 1, True, True),
        },
        *(128, (1, 8, 16), (1536, 1), gpt(51200, 1024, 96, 12288)),
    ),
}
"""Settings of Fleet's examples over those of a base file; world, layout, batches, parameters."""
_ONLY_PPFLEETX = {
    "13B dp8": (
        {
            **_batches(480, None, 4),
            **_sizes(50432, 5120, 40, 40, None, 4096),
            **_recompute(True, "full"),
            **_distributed(None, 2, 8),
            **_sections("Engine.", "max_steps eval_freq save_load.save_steps", 200000, 1000, 500),
            **_sections("Data.", "Train.dataset.max_seq_len Eval.dataset.max_seq_len", 4096, 4096),
            **_sections("Optimizer.lr.", "decay_steps warmup_rate max_lr min_lr", 160000, 0.001, 1e-4, 1e-5),
            "Global.seed": 1234,
        },
        *(128, (8, 2, 8), (480, 4), gpt(50432, 4096, 40, 5120)),
    ),
    "6.7B single card": (
        {
            **_batches(None, 8, 8),
            **_sizes(50304, 1024, 32, 32, 16384),
            **_recompute(False),
            **_distributed(1, 1, 1),
        },
        *(1, (1, 1, 1), (8, 8), gpt(50304, 1024, 32, 1024, 16384)),
    ),
}


def _first_form(settings: Settings, **sections: Settings) -> Settings:
    """Return settings of July 2022: one root, PreTraining, and names that count without their sections."""
    return {f"PreTraining.{key}": value for part in (settings, *sections.values()) for key, value in part.items()}


def _july(
    dp: int, mp: int, pp: int, sharding: int, stage: int, sizes: Settings, batch: Settings, **given: Any
) -> Settings:
    model = {key.replace("Model.", "Model."): value for key, value in sizes.items()}
    return _first_form(
        {
            **_sections("", "device max_steps num_train_epochs seed use_recompute", "gpu", 500000, 1, 1024, True),
            **{f"batch_size.{key.removeprefix('Global.')}": value for key, value in batch.items()},
            **_sections("mix_precision.", "use_pure_fp16 scale_loss", True, 32768.0),
            **_sections("", "logging_freq eval_freq eval_iters", 1, 500, 10),
            **_sections("dataset.", "input_dir split max_seq_len", "./data", "949,50,1", 1024),
            **_sections("save_load.", "save_steps output_dir ckpt_dir", 1000, "./output", None),
            **given,
        },
        model=model,
        distributed={
            key: value for key, value in _distributed(dp, mp, pp, sharding, stage).items() if "overlap" not in key
        },
        optimizer={
            **_sections("Optimizer.", "weight_decay adam_beta1 adam_beta2 adam_epsilon", 0.01, 0.9, 0.999, 1e-8),
            **_sections("Optimizer.lr.", "decay_steps warmup_rate max_lr min_lr", 360000, 0.01, 1e-5, 5e-5),
            "Optimizer.grad_clip": 1.0,
        },
    )


_LOGGED = (51200, 1024, 4, 2, None)
FIRST_FORM = {
    "hybrid": Case(
        "fleet-yaml",
        _july(2, 1, 1, 4, 2, _sizes(*_LOGGED), _batches(8, None, 1), **{"save_load.save_steps": 100}),
        *(8, (8, 1, 1), (8, 1), gpt(51200, 1024, 4, 1024)),
    ),
    "data parallel": Case(
        "fleet-yaml",
        _july(8, 1, 1, 1, 1, _sizes(*_1_3B), _batches(64, None, 8)),
        *(8, (8, 1, 1), (64, 8), gpt(50304, 1024, 24, 2048)),
    ),
    "group shard": Case(
        "fleet-yaml",
        _july(1, 1, 1, 16, 2, _sizes(*_6_7B), _batches(None, 8, 1)),
        *(16, (16, 1, 1), (128, 1), gpt(50304, 1024, 32, 4096)),
    ),
    "3D": Case(
        "fleet-yaml",
        _july(
            1,
            8,
            16,
            1,
            1,
            _sizes(51200, 12288, 96, 96, None, 2048),
            _batches(1536, None, 1),
            **{"dataset.max_seq_len": 2048},
        ),
        *(128, (1, 8, 16), (1536, 1), gpt(51200, 2048, 96, 12288)),
    ),
    "single": Case(
        "fleet-yaml",
        _july(1, 1, 1, 1, 1, _sizes(*_345M), _batches(None, 8, 8), use_recompute=False),
        *(1, (1, 1, 1), (8, 8), gpt(50304, 1024, 24, 1024)),
    ),
    "August, with fused kernels": Case(
        "fleet-yaml",
        _july(
            *(8, 1, 1, 1, 1, _sizes(*_1_3B), _batches(64, 8, 8)),
            recompute_granularity="only_attn",
            tensor_fusion=True,
            fused_linear=True,
            **{"quantization.use_qat": False, "quantization.weight_bits": 8, "quantization.activation_bits": 8},
        ),
        *(8, (8, 1, 1), (64, 8), gpt(50304, 1024, 24, 2048)),
    ),
}
FLEET = {
    **{f"ppfleetx {name}": Case("fleet-yaml", FLEET_BASE | own, *rest) for name, (own, *rest) in _FLEET.items()},
    **{
        f"ppfleetx {name}": Case("fleet-yaml", FLEET_BASE | own, *rest) for name, (own, *rest) in _ONLY_PPFLEETX.items()
    },
    **{
        f"examples {name}": Case("fleet-yaml", FLEET_EXAMPLES_BASE | own, *rest)
        for name, (own, *rest) in _FLEET.items()
    },
    **{
        f"auto {name}": Case("fleet-yaml", FLEET_AUTO_BASE | own | {"Model.fuse_attn_qkv": True}, *rest)
        for name, (own, *rest) in _FLEET.items()
        if "175B" not in name
    },
    "ppfleetx Chinese": Case(
        "fleet-yaml",
        FLEET_BASE | _FLEET["345M single card"][0] | {"Model.name": "GPT-cn"},
        *_FLEET["345M single card"][1:],
    ),
    **{f"July 2022 {name}": case for name, case in FIRST_FORM.items()},
}

_PADDLENLP = {
    "model_type": "gpt",
    "model_name_or_path": "gpt2-small-en",
    "input_dir": "./data",
    "output_dir": "output",
    "weight_decay": 0.01,
    "grad_clip": 1.0,
    "max_steps": 500000,
    "save_steps": 100000,
    "decay_steps": 320000,
    "eval_freq": 1000,
    "warmup_rate": 0.01,
    "scale_loss": 32768,
    "device": "gpu",
}
_SMALL = gpt(50304, 1024, 4, 1024)
PADDLENLP = {
    "first": Case(
        "fleet-flags",
        {**_PADDLENLP, "micro_batch_size": 8, "local_batch_size": 8, "dp_degree": 1, "mp_degree": 1, "pp_degree": 2}
        | {"use_amp": "True"},
        *(2, (1, 1, 2), (8, 8), _SMALL),
    ),
    "last": Case(
        "fleet-flags",
        {**_PADDLENLP, "global_batch_size": 16, "micro_batch_size": 2, "dp_degree": 2, "mp_degree": 2, "pp_degree": 2}
        | {"sharding_degree": 1, "use_pure_fp16": "True", "use_recompute": "False", "sharding_stage": 2}
        | {"sharding_offload": "False"},
        *(8, (2, 2, 2), (16, 2), _SMALL),
    ),
    "every argument": Case(
        "fleet-flags",
        {**_PADDLENLP, "split": "949,50,1", "max_seq_len": 1024, "local_batch_size": 16, "micro_batch_size": 8}
        | {"max_lr": 1e-5, "min_lr": 5e-5, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8}
        | {"num_train_epochs": 1, "logging_freq": 1, "eval_iters": 10, "fuse_transformer": "False"}
        | {"use_sharding": "False", "sharding_degree": 1, "dp_degree": 2, "mp_degree": 1, "pp_degree": 1}
        | {"use_recompute": "t", "sharding_stage": 1, "sharding_offload": "no", "use_pure_fp16": "y"}
        | {"enable_addto": True, "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "seed": 1234}
        | {"check_accuracy": "false", "lr_decay_style": "cosine", "profiler_options": "batch_range=[10,20]"},
        *(2, (2, 1, 1), (32, 8), _SMALL),
    ),
}

_COLOSSAL_ADAM = {"optimizer.type": "Adam", "optimizer.lr": 0.00015, "optimizer.weight_decay": 1e-2}
_HYBRID_ADAM = _COLOSSAL_ADAM | {"optimizer.type": "HybridAdam"}


def _gpt2(batch: int, model: str, mode: str | None, tensor: int, pipeline: int = 1, **given: Any) -> Settings:
    return {
        "BATCH_SIZE": batch,
        "SEQ_LEN": 1024,
        "NUM_EPOCHS": 60,
        **_COLOSSAL_ADAM,
        "fp16.mode": "AMP_TYPE.NAIVE",
        "loss.type": "GPTLMLoss",
        "model.type": model,
        "model.checkpoint": True,
        "parallel.pipeline": pipeline,
        "parallel.tensor.size": tensor,
        "parallel.tensor.mode": mode,
        **given,
    }


def _gpt3(pipeline: int, mode: str, batch: int = 192, parts: int = 192, **given: Any) -> Settings:
    found = _gpt2(batch, "gpt3", mode, 4, pipeline, SEQ_LEN=2048, NUM_MICRO_BATCHES=parts)
    del found["loss.type"]
    return {**found, "model.dtype": "torch.half", "TENSOR_SHAPE": [1, 2048, 12288], **given}


_ZERO = {
    "zero.model_config.tensor_placement_policy": "cpu",
    "zero.model_config.shard_strategy": "TensorShardStrategy()",
    "zero.optimizer_config": {},
}
_VOCAB = {"loss_fn.type": "vocab_parallel_cross_entropy"}
_124M, _175B = gpt(50304, 1024, 12, 768), gpt(50304, 2048, 96, 12288)
_PARTS = {"NUM_MICRO_BATCHES": 4, "HIDDEN_SIZE": 768}


def _no_fp16(settings: Settings) -> Settings:
    return {key: value for key, value in settings.items() if key not in ("fp16.mode", "loss.type")}


COLOSSAL = {
    "gpt2_1d": Case("colossal", _gpt2(32, "gpt2_8B", "1d", 4), 8, (2, 4, 1), (64, 32), gpt(50304, 1024, 72, 3072)),
    "gpt2_2d": Case("colossal", _gpt2(4, "gpt2_small", "2d", 4), 8, (2, 4, 1), (8, 4), _124M),
    "gpt2_2p5d": Case(
        "colossal", _gpt2(4, "gpt2_small", "2.5d", 8, **{"parallel.tensor.depth": 2}), 8, (2, 4, 1), (4, 2), _124M
    ),
    "gpt2_3d": Case("colossal", _gpt2(4, "gpt2_small", "3d", 8), 16, (4, 4, 1), (8, 2), _124M),
    "gpt2_pp": Case("colossal", _gpt2(8, "gpt2_small", None, 1, 2, **_PARTS), 4, (2, 1, 2), (16, 2), _124M),
    "gpt2_pp1d": Case(
        "colossal",
        _gpt2(8, "gpt2_small", "1d", 2, 2, **_PARTS, **_VOCAB, **{"model.dtype": "torch.half"}),
        *(8, (2, 2, 2), (16, 2), _124M),
    ),
    "gpt2_vanilla": Case("colossal", _gpt2(1, "gpt2_small", None, 1), 4, (4, 1, 1), (4, 1), _124M),
    "gpt2_zero3": Case(
        "colossal",
        _no_fp16(_gpt2(2, "gpt2_small", None, 1)) | _HYBRID_ADAM | _ZERO | {"zero.model_config.reuse_fp16_shard": True},
        *(8, (8, 1, 1), (16, 2), _124M),
    ),
    "gpt2_zero3_pp1d": Case(
        "colossal",
        _no_fp16(_gpt2(8, "GPT2_small_pipeline_hybrid", "1d", 2, 2, **_PARTS, **{"model.num_chunks": 1}))
        | {**_HYBRID_ADAM, **_ZERO, "TENSOR_SHAPE": [2, 1024, 768]},
        *(8, (2, 2, 2), (16, 2), _124M),
    ),
    "gpt3_pp1d": Case("colossal", _gpt3(32, "1d", **_VOCAB), 128, (1, 4, 32), (192, 1), _175B),
    "gpt3_pp1d_min": Case("colossal", _gpt3(24, "1d", **_VOCAB), 96, (1, 4, 24), (192, 1), _175B),
    "gpt3_pp2d": Case("colossal", _gpt3(24, "2d", 96, 48), 96, (1, 4, 24), (96, 2), _175B),
    "gpt3_pp2p5d": Case(
        "colossal", _gpt3(24, "2.5d", 96, 48, **{"parallel.tensor.depth": 1}), 96, (1, 4, 24), (96, 2), _175B
    ),
}

_345M_FLAGS = {
    **_given("num-layers=24 hidden-size=1024 num-attention-heads=16 seq-length=1024"),
    **_given("max-position-embeddings=1024 micro-batch-size=4 global-batch-size=8 lr=0.00015"),
    **_given("train-iters=500000 lr-decay-iters=320000 lr-decay-style=cosine min-lr=1e-05"),
    **_given("weight-decay=0.01 lr-warmup-fraction=0.01 clip-grad=1.0 fp16"),
    **_given("data-path=data/my_text_document vocab-file=gpt2-vocab.json merge-file=gpt2-merges.txt"),
    **_given("split=949,50,1 log-interval=100 save-interval=10000 eval-interval=1000 eval-iters=10"),
    **_given("save=checkpoints load=checkpoints"),
}
_175B_FLAGS = _345M_FLAGS | {
    **_given("num-layers=96 hidden-size=12288 num-attention-heads=96 seq-length=2048"),
    **_given("max-position-embeddings=2048 micro-batch-size=1 global-batch-size=1536 lr=6e-05"),
    **_given("min-lr=6e-06 weight-decay=0.1 adam-beta1=0.9 adam-beta2=0.95 init-method-std=0.006"),
    **_given("lr-decay-iters=430000 lr-warmup-fraction=0.001 tensorboard-dir=logs"),
    **_given("tensor-model-parallel-size=8 pipeline-model-parallel-size=16"),
}
_OF_README = {"tensor-model-parallel-size": 1, "pipeline-model-parallel-size": 1}
_LLAMA3 = {
    **_given("use-mcore-models num-layers=32 hidden-size=4096 ffn-hidden-size=14336"),
    **_given("num-attention-heads=32 group-query-attention num-query-groups=8 kv-channels=128"),
    **_given("seq-length=8192 max-position-embeddings=8192 position-embedding-type=rope"),
    **_given("rotary-base=1000000 rotary-percent=1.0 attention-dropout=0.0 hidden-dropout=0.0"),
    **_given("swiglu normalization=RMSNorm init-method-std=0.0134 attention-backend=fused"),
    **_given("apply-layernorm-1p untie-embeddings-and-output-weights disable-bias-linear"),
    **_given("micro-batch-size=1 global-batch-size=128 train-samples=1953125000"),
    **_given("lr-decay-samples=1949218748 lr-warmup-samples=3906252 lr=0.00015 min-lr=1e-05"),
    **_given("lr-decay-style=cosine clip-grad=1.0 weight-decay=0.1 adam-beta1=0.9 adam-beta2=0.95"),
    **_given("bf16 grad-reduce-in-bf16 cross-entropy-loss-fusion manual-gc"),
    **_given("calculate-per-token-loss empty-unused-memory-level=1 exit-duration-in-mins=235"),
    **_given("fp8-format=hybrid fp8-amax-history-len=1024 fp8-amax-compute-algo=max"),
    **_given("fp8-param-gather tensor-model-parallel-size=1 context-parallel-size=1"),
    **_given("sequence-parallel use-distributed-optimizer overlap-grad-reduce"),
    **_given("overlap-param-gather mock-data tokenizer-type=NullTokenizer vocab-size=128256"),
    **_given("data-cache-path=cache tiktoken-pattern=v2 split=99,1,0"),
    **_given("no-create-attention-mask-in-dataloader no-mmap-bin-files num-workers=1"),
    **_given("log-interval=1 eval-iters=32 eval-interval=100 save-interval=1000 log-throughput"),
    **_given("profile profile-step-start=4 profile-step-end=6 ckpt-format=torch_dist"),
    **_given("distributed-timeout-minutes=60 save=checkpoints load=checkpoints tensorboard-dir=logs"),
}
_345M_SIZE = gpt(50257, 1024, 24, 1024)
MEGATRON = {
    "gpt 345M": Case("megatron", _345M_FLAGS, 1, (1, 1, 1), (8, 4), _345M_SIZE),
    "gpt 345M, distributed": Case(
        "megatron",
        _345M_FLAGS
        | {"tensor-model-parallel-size": 2, "pipeline-model-parallel-size": 2, "sequence-parallel": True}
        | {"global-batch-size": 16, "data-impl": "mmap", "distributed-backend": "nccl"},
        *(8, (2, 2, 2), (16, 4), _345M_SIZE),
    ),
    "gpt2 345M of version 1": Case(
        "megatron",
        {
            **{key: value for key, value in _345M_FLAGS.items() if not key.endswith(("batch-size", "fraction"))},
            **_given("batch-size=8 model-parallel-size=2 warmup=0.01 checkpoint-activations"),
            **_given("data-impl=mmap distributed-backend=nccl DDP-impl=torch"),
        },
        *(8, (4, 2, 1), (32, 8), _345M_SIZE),
    ),
    "gpt3 345M of the README": Case(
        "megatron",
        _175B_FLAGS | _OF_README | {"num-layers": 12, "hidden-size": 512, "num-attention-heads": 8, "seq-length": 1024},
        *(8, (8, 1, 1), (1536, 1), gpt(50257, 2048, 12, 512)),
    ),
    "gpt3 857M of the README": Case(
        "megatron",
        _175B_FLAGS | _OF_README | {"num-layers": 24, "hidden-size": 1024, "num-attention-heads": 16},
        *(8, (8, 1, 1), (1536, 1), gpt(50257, 2048, 24, 1024)),
    ),
    "gpt3 175B": Case(
        "megatron",
        _175B_FLAGS
        | {
            "attention-backend": "auto",
            "step-batch-size-schedule": "0:16 2.4B:320 4.8B:624 7.2B:928 9.6B:1232 12B:1536",
        },
        *(128, (1, 8, 16), (1536, 1), gpt(50257, 2048, 96, 12288), ("step-batch-size-schedule",)),
    ),
    "gpt3 175B of 2021": Case(
        "megatron",
        {
            **{key: value for key, value in _175B_FLAGS.items() if not key.endswith(("-iters", "fraction"))},
            "rampup-batch-size": [16, 16, 5859375],
            "train-samples": 146484375,
            "lr-decay-samples": 126953125,
            **_given("lr-warmup-samples=183105 log-interval=10 eval-iters=40 split=98,2,0"),
            "checkpoint-activations": True,
        },
        *(1024, (8, 8, 16), (1536, 1), gpt(50257, 2048, 96, 12288), ("rampup-batch-size",)),
    ),
    "llama3 8B": Case("megatron", _LLAMA3, 8, (8, 1, 1), (128, 1), llama(128256, 32, 4096, 14336, 32, 8, 128)),
    "llama3 8B, decoupled": Case(
        "megatron",
        _LLAMA3 | {"decoupled-lr": 5.0e-4, "decoupled-min-lr": 4.5e-5},
        *(8, (8, 1, 1), (128, 1), llama(128256, 32, 4096, 14336, 32, 8, 128), ("decoupled-lr", "decoupled-min-lr")),
    ),
}
CASES = {
    **{f"Fleet, {name}": case for name, case in FLEET.items()},
    **{f"PaddleNLP, {name}": case for name, case in PADDLENLP.items()},
    **{f"Colossal-AI, {name}": case for name, case in COLOSSAL.items()},
    **{f"Megatron-LM, {name}": case for name, case in MEGATRON.items()},
}


def written(kind: str, settings: Settings) -> tuple[str, str]:
    """Return the name and the text of a file with these settings."""
    if kind == "fleet-yaml":
        return "config.yaml", yaml.safe_dump(_nested(settings), sort_keys=False)
    if kind == "colossal":
        lines = [f"{name} = {_python(value)}" for name, value in _nested(settings).items()]
        return "config.py", "\n".join(lines) + "\n"
    command = (
        "torchrun pretrain_gpt.py" if kind == "megatron" else "python -m paddle.distributed.launch run_pretrain.py"
    )
    flags = (f"--{name}" if value is True else f"--{name} {_word(value)}" for name, value in settings.items())
    return "train.sh", f"#!/bin/bash\n{command} \\\n    " + " \\\n    ".join(flags) + "\n"


def _word(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value))
    return f'"{value}"' if isinstance(value, str) and " " in value else str(value)


def _nested(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        place = found
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return found


def _python(value: Any) -> str:
    if isinstance(value, dict):
        return f"dict({', '.join(f'{name}={_python(part)}' for name, part in value.items())})"
    return value if isinstance(value, str) and not value[:1].isdecimal() else repr(value)
