#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
CHECKPOINT_PATH=${1:-"checkpoints/llama"}
TOKENIZER_ARG=${2:-"MOCK"} # a path, or "MOCK"
DATA_ARG=${3:-"MOCK"}
mkdir -p "$(dirname "$CHECKPOINT_PATH")"
GPUS=8
DTYPE="fp8"
CACHE="${PWD}/cache"
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --rotary-percent 1.0
    --apply-layernorm-1p
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 128
    --train-samples 12800
    --lr 0.00015      # the highest
    --bf16
    --grad-reduce-in-bf16
    --calculate-per-token-loss
    --manual-gc
)
DTYPE_ARGS=()
if [[ "$DTYPE" == "fp8" ]]; then
    DTYPE_ARGS+=(
        "--fp8-format hybrid"
        "--fp8-param-gather"
    )
fi
DDP_ARGS=(
    --use-distributed-optimizer
    --overlap-grad-reduce
)
TRAINING_ARGS+=("${DDP_ARGS[@]}")
DATA_ARGS_LIST=()
if [[ "$TOKENIZER_ARG" == "MOCK" ]] || [[ "$DATA_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA_ARGS_LIST+=(
        "--mock-data"
        "--tokenizer-type NullTokenizer"
        "--vocab-size 128256"
        "--data-cache-path ${CACHE}"
        "--split '99,1,0'"
    )
else
    DATA_ARGS_LIST+=(
        "--data-path $DATA_ARG"
        "--tokenizer-model $TOKENIZER_ARG"
        # --vocab-size might follow from the tokenizer
        "--vocab-size 128256"
    )
fi
if [ ! -f "pretrain_gpt.py" ]; then
    echo "Error: no pretrain_gpt.py, give --path"
    exit 1
fi
torchrun --nproc_per_node $GPUS \
    "pretrain_gpt.py" \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${DTYPE_ARGS[@]} \
    ${DATA_ARGS_LIST[@]} \
    --save "$CHECKPOINT_PATH"
set +x