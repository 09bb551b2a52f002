"""Reasons for Megatron-LM flags without a counterpart, each with the patterns of its flags; the first match counts."""

from typing import Final

REASONS: Final = {
    "the folder of the run is an option of the command: threefold train … --run-dir": "save",
    "threefold train … --resume resumes a run; Megatron-LM's checkpoints are unsupported": "load",
    "checkpoints have one format, which opens in every layout": (
        "ckpt-format dist-ckpt-* use-dist-ckpt async-save auto-detect-ckpt-format use-persistent-ckpt-worker ckpt-*"
    ),
    "a run is resumed with its whole state, or starts from weights with train.init_from": "no-load-*",
    "checkpoints always have everything that resuming needs": "no-save-*",
    "train.init_from starts from weights alone": "finetune",
    "data.tokenizer names a tokenizer.json; token files need none but model.vocab_size and data.eod": (
        "vocab-file merge-file tokenizer-model tiktoken-* tokenizer-hf-*"
    ),
    "the vocabulary need not be divisible, so it is not padded": "make-vocab-size-divisible-by",
    "the files state their format": "data-impl",
    "the order of samples is computed, not stored": "data-cache-path",
    "make tokens with threefold data prepare": "mock-data",
    "positions count within the sample, also with data.separate_documents": "reset-position-ids",
    "attention is causal without a mask in memory": "no-create-attention-mask-in-dataloader",
    "tokens are memory-mapped, so there are no workers": "num-workers",
    "samples of a step follow from train.seed and the step": "dataloader-type",
    "train.max_steps ends the run; a stopped run is resumed from its last checkpoint with --resume": "exit-*",
    "train.recompute full keeps the inputs of every train.recompute_every-th block": (
        "checkpoint-num-layers recompute-method recompute-num-layers activations-checkpoint-*"
    ),
    "train.recompute selective is the attention core": "recompute-modules",
    "parallel.sequence_parallel shards the kept activations": "distribute-saved-activations",
    "there is no encoder": "pipeline-model-parallel-split-rank",
    "parallel.partition takes a list of stage split points": "decoder-*-pipeline-num-layers",
    "parallel.cp_method is all-gather or ring": "cp-comm-type",
    "experts are split by parallel.tp like everything else": "expert-tensor-parallel-size",
    "kernels are chosen automatically": (
        "moe-token-dispatcher-type moe-grouped-gemm transformer-impl no-*-fusion cross-entropy-* "
        "no-gradient-accumulation-fusion moe-permute-fusion moe-flex-* cuda-graph-* enable-cuda-graph "
        "external-cuda-graph seq-*-fusion"
    ),
    "communication is overlapped automatically": (
        "overlap-* tp-comm-overlap* no-async-tensor-model-parallel-allreduce delay-* fsdp-* use-nccl-ub"
    ),
    "gradients are always summed in buckets": "ddp-* DDP-impl",
    "NCCL between GPUs, gloo between CPUs": "distributed-backend",
    "a failed rank ends the run at once": "distributed-timeout-minutes",
    "there is one implementation of the model": "use-mcore-models use-legacy-models",
    "attention is always the fused one": "use-flash-attn attention-backend",
    "fused attention accumulates in fp32": "attention-softmax-in-fp32",
    "scores are scaled once; fused attention accumulates in fp32": "apply-query-key-layer-scaling",
    "gradients are always accumulated in fp32": "accumulate-allreduce-grads-in-fp32 megatron-fsdp-*",
    "float8 is precision.fp8, whose scales are each row's own powers of two": "fp8-*",
    "precision.dtype is fp32, bf16, fp16 or fp64": "fp4-*",
    "the loss scale halves at each overflow": "hysteresis",
    "the loss scale halves as often as it must": "min-loss-scale",
    "a resumed run uses the current config": (
        "override-opt_param-scheduler override-opt-param-scheduler use-checkpoint-opt*"
    ),
    "the run's folder has metrics.jsonl, and events where TensorBoard is installed": (
        "tensorboard-* log-* wandb-* timing-log-* moe-per-layer-logging logging-level one-logger-* no-one-logger "
        "disable-straggler-on-startup"
    ),
    "garbage collection is automatic": "manual-gc* empty-unused-memory-level",
    "token files are memory-mapped": "no-mmap-bin-files",
    "positions follow from --position-embedding-type": "no-position-embedding",
    "the weights of norms start at 1 and are not decayed, as with the flag": "apply-layernorm-1p",
    "random streams are keyed by position": "te-rng-tracker use-te-rng-tracker",
    "all replicas start from the same weights": "data-parallel-random-init",
    "routers compute in fp32": "moe-router-dtype",
    "a step whose gradients are not finite is skipped or ends the run": "no-check-for-nan* check-for-* rerun-mode",
    "checkpoint.keep says how many checkpoints stay": "save-retain-interval",
    "checkpoint.every says when checkpoints are made": "non-persistent-*",
    "there are no experimental switches": "enable-experimental",
    "each rank initialises only its own shards": "init-model-with-meta-device",
    "parallel.zero sets what is sharded": "data-parallel-sharding-strategy",
    "ranks are detected automatically": "local-rank",
    "there is no deterministic mode": "deterministic-mode",
    "sums of products are in fp32": "disable-bf16-reduced-precision-matmul",
    "there is no test mode": "test-mode",
    "threefold generate has options of its own": "inference-*",
    "the step log has times; there is no profiler in a config": "profile*",
}
"""Reasons for flags that need no counterpart."""
UNSUPPORTED: Final = {
    "train.global_batch_size is the same from first to last step": "rampup-batch-size step-batch-size-schedule",
    "all weights have one learning rate, optimizer.lr and min_lr": "decoupled-*",
    "optimizer.weight_decay is the same in every step": "start-weight-decay end-weight-decay weight-decay-incr-style",
    "warm-up starts from 0": "lr-warmup-init",
    "rotary positions cover the whole head": "rotary-percent",
    "rotary pairs are half a head apart": "rotary-interleaved",
    "model.rope_scaling is none, linear, dynamic, llama3 or yarn, with its own factors": "rotary-scaling-factor",
    "model.rope_scaling linear and model.rope_factor": "rotary-seq-len-interpolation-factor",
    "only architecture llama has it, which needs --normalization RMSNorm and --swiglu": (
        "use-rope-scaling rope-scaling-factor"
    ),
    "rotary positions are the usual ones": "rope-type",
    "model.rope_scaling yarn and model.rope_attention_factor": "mscale*",
    "llama has SwiGLU": "squared-relu openai-gelu",
    "the only gated function is SwiGLU, that of llama": "quick-geglu",
    "the only gated function is SwiGLU, that of llama, without an offset": "glu-linear-offset",
    "activations are not clamped": "activation-func-clamp-value",
    "attention uses the plain softmax": "softmax-type",
    "model.sliding_window is for llama, in all layers but the first few": "window-size window-attn-skip-freq",
    "biases follow from model.architecture": "add-bias-linear",
    "one data.path or data.mixture is divided by data.split": "*-data-path",
    "its paths and weights belong into data.mixture": "*data-args-path",
    "the sizes of the model are in a checkpoint of Megatron-LM; give them as flags": "use-checkpoint-args",
    "attention has whole keys and values for each head or group": (
        "multi-latent-attention *-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim"
    ),
    "the loss is that of the next token only": "mtp-*",
    "routers use softmax": "moe-router-score-function",
    "model.router_aux_loss is the load balancing loss": "moe-router-enable-expert-bias moe-router-bias-update-rate",
    "experts are chosen from all, model.experts_per_token of them": "moe-router-group-topk moe-router-num-groups",
    "the weights of a token's experts are not scaled": "moe-router-topk-scaling-factor",
    "routers choose by their scores": "moe-router-force-load-balancing",
    "model.expert_capacity_factor keeps the tokens that come first": "moe-token-drop-policy",
    "experts compute no padding": "moe-pad-expert-input-to-capacity",
    "fine-tuning starts from weights with train.init_from": "sft",
    "there is one implementation of the model": "spec",
}
"""Reasons for flags that change the training and have no counterpart."""
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
SWITCHES: Final = (
    "accumulate-allreduce-grads-in-fp32 add-qkv-bias apply-layernorm-1p apply-query-key-layer-scaling async-save "
    "attention-softmax-in-fp32 bf16 calculate-per-token-loss checkpoint-activations cross-entropy-loss-fusion "
    "disable-bias-linear distribute-saved-activations empty-cache eod-mask-loss finetune fp16 fp8-param-gather "
    "grad-reduce-in-bf16 group-query-attention log-memory-to-tensorboard log-num-zeros-in-grad log-params-norm "
    "log-throughput log-timers-to-tensorboard log-validation-ppl-to-tensorboard log-world-size-to-tensorboard "
    "manual-gc mock-data moe-grouped-gemm moe-per-layer-logging moe-permute-fusion moe-router-pre-softmax "
    "moe-shared-expert-gate multi-latent-attention no-async-tensor-model-parallel-allreduce no-bias-dropout-fusion "
    "no-bias-gelu-fusion no-bias-swiglu-fusion no-create-attention-mask-in-dataloader no-gradient-accumulation-fusion "
    "no-load-optim no-load-rng no-masked-softmax-fusion no-mmap-bin-files no-position-embedding no-rope-fusion "
    "no-save-optim no-save-rng openai-gelu overlap-grad-reduce overlap-param-gather override-opt-param-scheduler "
    "override-opt_param-scheduler profile qk-layernorm quick-geglu recompute-activations reset-attention-mask "
    "reset-position-ids sequence-parallel squared-relu swiglu tp-comm-overlap untie-embeddings-and-output-weights "
    "use-checkpoint-args use-checkpoint-opt_param-scheduler use-cpu-initialization use-dist-ckpt "
    "use-distributed-optimizer use-flash-attn use-legacy-models use-mcore-models use-megatron-fsdp use-rope-scaling "
    "use-rotary-position-embeddings use-torch-fsdp2"
)
"""Flags without a value; a word after them does not belong to them."""
