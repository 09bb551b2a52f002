"""Reasons for Megatron-LM flags without a counterpart; the first matching pattern applies."""

from typing import Final

_KERNELS: Final = "kernels are chosen automatically"
_OVERLAP: Final = "communication is overlapped automatically"
_BOARD: Final = "the run's folder has TensorBoard events and metrics.jsonl"
_SAVE: Final = "the folder of the run is an option of the command: threefold train … --run-dir"


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


REASONS: Final = {
    "save": _SAVE,
    "load": "threefold train … --resume resumes a run; Megatron-LM's checkpoints are unsupported",
    "ckpt-format": "checkpoints have one format, which opens in every layout",
    "dist-ckpt-*": "checkpoints have one format, which opens in every layout",
    "use-dist-ckpt": "checkpoints have one format, which opens in every layout",
    "async-save": "checkpoints have one format, which opens in every layout",
    "no-load-*": "a run is resumed with its whole state, or starts from weights with train.init_from",
    "no-save-*": "checkpoints always have everything that resuming needs",
    "finetune": "train.init_from starts from weights alone",
    "vocab-file": "data.tokenizer names a tokenizer.json; token files need none but model.vocab_size and data.eod",
    "merge-file": "data.tokenizer names a tokenizer.json; token files need none but model.vocab_size and data.eod",
    "tokenizer-model": "data.tokenizer names a tokenizer.json; token files need none but model.vocab_size and data.eod",
    "make-vocab-size-divisible-by": "the vocabulary need not be divisible, so it is not padded",
    "data-impl": "the files say what they are",
    "data-cache-path": "the order of samples is computed, not stored",
    "mock-data": "make tokens with threefold data prepare",
    "reset-position-ids": "positions count within the sample, also with data.separate_documents",
    "no-create-attention-mask-in-dataloader": "attention is causal without a mask in memory",
    "num-workers": "tokens are memory-mapped, so there are no workers",
    "dataloader-type": "samples of a step follow from train.seed and the step",
    "exit-*": "train.max_steps ends the run; a stopped run is resumed from its last checkpoint with --resume",
    "checkpoint-num-layers": "train.recompute full keeps the inputs of every train.recompute_every-th block",
    "recompute-method": "train.recompute full keeps the inputs of every train.recompute_every-th block",
    "recompute-num-layers": "train.recompute full keeps the inputs of every train.recompute_every-th block",
    "recompute-modules": "train.recompute selective is the attention core",
    "distribute-saved-activations": "parallel.sequence_parallel shards the kept activations",
    "pipeline-model-parallel-split-rank": "there is no encoder",
    "decoder-*-pipeline-num-layers": "parallel.partition takes a list of stage split points",
    "cp-comm-type": "parallel.cp_method is all-gather or ring",
    "expert-tensor-parallel-size": "experts are split by parallel.tp like everything else",
    "moe-token-dispatcher-type": _KERNELS,
    "moe-grouped-gemm": _KERNELS,
    "overlap-*": _OVERLAP,
    "tp-comm-overlap*": _OVERLAP,
    "no-async-tensor-model-parallel-allreduce": _OVERLAP,
    "delay-*": _OVERLAP,
    "ddp-*": "gradients are always summed in buckets",
    "distributed-backend": "NCCL between GPUs, gloo between CPUs",
    "distributed-timeout-minutes": "a failed rank ends the run at once",
    "transformer-impl": _KERNELS,
    "use-mcore-models": "there is one implementation of the model",
    "use-legacy-models": "there is one implementation of the model",
    "use-flash-attn": "attention is always the fused one",
    "attention-backend": "attention is always the fused one",
    "attention-softmax-in-fp32": "fused attention accumulates in fp32",
    "apply-query-key-layer-scaling": "scores are scaled once; fused attention accumulates in fp32",
    "no-*-fusion": _KERNELS,
    "cross-entropy-*": _KERNELS,
    "no-gradient-accumulation-fusion": _KERNELS,
    "accumulate-allreduce-grads-in-fp32": "gradients are always accumulated in fp32",
    "fp8-*": "precision.dtype is fp32, bf16, fp16 or fp64",
    "hysteresis": "the loss scale halves at each overflow",
    "min-loss-scale": "the loss scale halves as often as it must",
    "override-opt_param-scheduler": "a resumed run uses the current config",
    "override-opt-param-scheduler": "a resumed run uses the current config",
    "use-checkpoint-opt*": "a resumed run uses the current config",
    "tensorboard-*": _BOARD,
    "log-*": _BOARD,
    "wandb-*": _BOARD,
    "timing-log-*": _BOARD,
    "manual-gc*": "garbage collection is automatic",
    "empty-unused-memory-level": "garbage collection is automatic",
    "tiktoken-*": "data.tokenizer names a tokenizer.json; token files need none but model.vocab_size and data.eod",
    "tokenizer-hf-*": "data.tokenizer names a tokenizer.json; token files need none but model.vocab_size and data.eod",
    "no-mmap-bin-files": "token files are memory-mapped",
    "no-position-embedding": "positions follow from --position-embedding-type",
    "fp4-*": "precision.dtype is fp32, bf16, fp16 or fp64",
    "apply-layernorm-1p": "the weights of norms start at 1 and are not decayed, as with the flag",
    "te-rng-tracker": "random streams are keyed by position",
    "data-parallel-random-init": "all replicas start from the same weights",
    "moe-permute-fusion": _KERNELS,
    "moe-per-layer-logging": _BOARD,
    "moe-router-dtype": "routers compute in fp32",
    "moe-flex-*": _KERNELS,
    "no-check-for-nan*": "a step whose gradients are not finite is skipped or ends the run",
    "check-for-*": "a step whose gradients are not finite is skipped or ends the run",
    "rerun-mode": "a step whose gradients are not finite is skipped or ends the run",
    "auto-detect-ckpt-format": "checkpoints have one format, which opens in every layout",
    "use-persistent-ckpt-worker": "checkpoints have one format, which opens in every layout",
    "ckpt-*": "checkpoints have one format, which opens in every layout",
    "save-retain-interval": "checkpoint.keep says how many checkpoints stay",
    "non-persistent-*": "checkpoint.every says when checkpoints are made",
    "enable-experimental": "there are no experimental switches",
    "logging-level": _BOARD,
    "init-model-with-meta-device": "each rank initialises only its own shards",
    "data-parallel-sharding-strategy": "parallel.zero sets what is sharded",
    "fsdp-*": _OVERLAP,
    "megatron-fsdp-*": "gradients are always accumulated in fp32",
    "use-nccl-ub": _OVERLAP,
    "cuda-graph-*": _KERNELS,
    "enable-cuda-graph": _KERNELS,
    "external-cuda-graph": _KERNELS,
    "use-te-rng-tracker": "random streams are keyed by position",
    "DDP-impl": "gradients are always summed in buckets",
    "local-rank": "ranks are detected automatically",
    "deterministic-mode": "there is no deterministic mode",
    "disable-bf16-reduced-precision-matmul": "sums of products are in fp32",
    "seq-*-fusion": _KERNELS,
    "activations-checkpoint-*": "train.recompute full keeps the inputs of every train.recompute_every-th block",
    "test-mode": "there is no test mode",
    "one-logger-*": _BOARD,
    "no-one-logger": _BOARD,
    "disable-straggler-on-startup": _BOARD,
    "inference-*": "threefold generate has options of its own",
    "profile*": "the step log has times; there is no profiler in a config",
}

UNSUPPORTED: Final = {
    "rampup-batch-size": "train.global_batch_size is the same from first to last step",
    "step-batch-size-schedule": "train.global_batch_size is the same from first to last step",
    "decoupled-*": "all weights have one learning rate, optimizer.lr and min_lr",
    "start-weight-decay": "optimizer.weight_decay is the same in every step",
    "end-weight-decay": "optimizer.weight_decay is the same in every step",
    "weight-decay-incr-style": "optimizer.weight_decay is the same in every step",
    "lr-warmup-init": "warm-up starts from 0",
    "rotary-percent": "rotary positions cover the whole head",
    "rotary-interleaved": "rotary pairs are half a head apart",
    "rotary-scaling-factor": "model.rope_scaling is none, linear, dynamic, llama3 or yarn, with its own factors",
    "rotary-seq-len-interpolation-factor": "model.rope_scaling linear and model.rope_factor",
    "use-rope-scaling": "only architecture llama has it, which needs --normalization RMSNorm and --swiglu",
    "rope-scaling-factor": "only architecture llama has it, which needs --normalization RMSNorm and --swiglu",
    "rope-type": "rotary positions are the usual ones",
    "mscale*": "model.rope_scaling yarn and model.rope_attention_factor",
    "squared-relu": "llama has SwiGLU",
    "openai-gelu": "llama has SwiGLU",
    "quick-geglu": "the only gated function is SwiGLU, that of llama",
    "glu-linear-offset": "the only gated function is SwiGLU, that of llama, without an offset",
    "activation-func-clamp-value": "activations are not clamped",
    "softmax-type": "attention uses the plain softmax",
    "window-size": "model.sliding_window is for llama, in all layers but the first few",
    "window-attn-skip-freq": "model.sliding_window is for llama, in all layers but the first few",
    "add-bias-linear": "biases follow from model.architecture",
    "*-data-path": "one data.path or data.mixture is divided by data.split",
    "*data-args-path": "its paths and weights belong into data.mixture",
    "use-checkpoint-args": "the sizes of the model are in a checkpoint of Megatron-LM; give them as flags",
    "multi-latent-attention": "attention has whole keys and values for each head or group",
    "*-lora-rank": "attention has whole keys and values for each head or group",
    "qk-head-dim": "attention has whole keys and values for each head or group",
    "qk-pos-emb-head-dim": "attention has whole keys and values for each head or group",
    "v-head-dim": "attention has whole keys and values for each head or group",
    "mtp-*": "the loss is that of the next token only",
    "moe-router-score-function": "routers use softmax",
    "moe-router-enable-expert-bias": "model.router_aux_loss is the load balancing loss",
    "moe-router-bias-update-rate": "model.router_aux_loss is the load balancing loss",
    "moe-router-group-topk": "experts are chosen from all, model.experts_per_token of them",
    "moe-router-num-groups": "experts are chosen from all, model.experts_per_token of them",
    "moe-router-topk-scaling-factor": "the weights of a token's experts are not scaled",
    "moe-router-force-load-balancing": "routers choose by their scores",
    "moe-token-drop-policy": "model.expert_capacity_factor keeps the tokens that come first",
    "moe-pad-expert-input-to-capacity": "experts compute no padding",
    "sft": "fine-tuning starts from weights with train.init_from",
    "spec": "there is one implementation of the model",
}
"""Pattern → reason, for flags that change the training and have no counterpart."""
SATISFIED: Final = {
    "calculate-per-token-loss": ("true",),
    "rotary-percent": ("1.0", "1"),
    "rope-type": ("rope",),
    "moe-router-topk-scaling-factor": ("1.0", "1"),
    "moe-router-score-function": ("softmax",),
    "lr-warmup-init": ("0", "0.0"),
    "weight-decay-incr-style": ("constant",),
    "rotary-interleaved": ("false",),
    "softmax-type": ("vanilla",),
}
"""Flag → values that equal our behavior; the loss, for example, is the mean over all tokens of a step."""
SWITCHES: Final = _names(
    "add-qkv-bias apply-layernorm-1p apply-query-key-layer-scaling accumulate-allreduce-grads-in-fp32 async-save "
    "attention-softmax-in-fp32 bf16 calculate-per-token-loss checkpoint-activations cross-entropy-loss-fusion "
    "disable-bias-linear distribute-saved-activations empty-cache eod-mask-loss finetune fp16 fp8-param-gather "
    "grad-reduce-in-bf16 group-query-attention log-throughput log-params-norm log-num-zeros-in-grad "
    "log-memory-to-tensorboard log-timers-to-tensorboard log-validation-ppl-to-tensorboard "
    "log-world-size-to-tensorboard manual-gc mock-data moe-grouped-gemm moe-permute-fusion moe-router-pre-softmax "
    "moe-shared-expert-gate moe-per-layer-logging multi-latent-attention no-async-tensor-model-parallel-allreduce "
    "no-bias-dropout-fusion no-bias-gelu-fusion no-bias-swiglu-fusion no-create-attention-mask-in-dataloader "
    "no-gradient-accumulation-fusion no-load-optim no-load-rng no-masked-softmax-fusion no-mmap-bin-files "
    "no-position-embedding no-rope-fusion no-save-optim no-save-rng openai-gelu overlap-grad-reduce "
    "overlap-param-gather override-opt-param-scheduler override-opt_param-scheduler profile qk-layernorm quick-geglu "
    "recompute-activations reset-attention-mask reset-position-ids sequence-parallel squared-relu swiglu "
    "tp-comm-overlap "
    "untie-embeddings-and-output-weights use-checkpoint-args use-checkpoint-opt_param-scheduler "
    "use-cpu-initialization use-dist-ckpt use-distributed-optimizer use-flash-attn use-legacy-models "
    "use-mcore-models use-megatron-fsdp use-rope-scaling use-rotary-position-embeddings use-torch-fsdp2"
)
"""Flags without a value; a word after them does not belong to them."""
