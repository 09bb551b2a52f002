"""Short scripts that start trainings with Megatron-LM, in each form that its own examples have."""

_SMALL = "--num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
_LLAMA = (
    "--normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope "
    "--untie-embeddings-and-output-weights"
)
GPT_345M = rf"""#!/bin/bash
# One variable a group, each line continued
CHECKPOINT_PATH=<Specify path>
DATA_PATH=<Specify path and file prefix>_text_document
VOCAB_FILE=<Specify path to file>/gpt2-vocab.json
GPT_ARGS="
    {_SMALL} \
    --micro-batch-size 4 \
    --global-batch-size 8 \
    --lr 0.00015 --train-iters 500000 --lr-decay-style cosine --min-lr 1.0e-5 --fp16
"
DATA_ARGS="
    --data-path $DATA_PATH \
    --vocab-file $VOCAB_FILE \
    --split 949,50,1
"
torchrun pretrain_gpt.py \
    $GPT_ARGS \
    $DATA_ARGS \
    --save $CHECKPOINT_PATH
"""
GPT_DISTRIBUTED = rf"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NNODES=2
NODE_RANK=0
WORLD_SIZE=$(($GPUS_PER_NODE*$NNODES))
DISTRIBUTED_ARGS="
    --nproc_per_node $GPUS_PER_NODE \
    --nnodes $NNODES \
    --node_rank $NODE_RANK
"
GPT_ARGS="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel {_SMALL}"
GPT_ARGS="$GPT_ARGS --micro-batch-size 4 --global-batch-size 16"
GPT_ARGS="${{GPT_ARGS}} \
    --lr 0.00015 --bf16"
python -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS --distributed-backend nccl 2>&1 | tee log
"""
GPT_175B = r"""#!/bin/bash
GPUS_PER_NODE=8
NUM_NODES=${NUM_NODES:-16}
CHECKPOINT_PATH=$1 #<Specify path>
DATA_PATH=$2
DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
)
GPT_MODEL_ARGS=(
    --num-layers 96
    --hidden-size 12288
    --num-attention-heads 96
    --seq-length 2048
    --max-position-embeddings 2048
    --attention-backend auto # Can use (flash/fused/unfused/local)
)
TRAINING_ARGS=(
    --micro-batch-size 1
    --global-batch-size 1536
    --rampup-batch-size 16 16 5859375
    --adam-beta2 0.95
    --lr 6.0e-5
)
MODEL_PARALLEL_ARGS=(
	--tensor-model-parallel-size 8
	--pipeline-model-parallel-size 16
)
torchrun ${DISTRIBUTED_ARGS[@]} pretrain_gpt.py \
    ${GPT_MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    ${MODEL_PARALLEL_ARGS[@]} \
    --data-path $DATA_PATH --save $CHECKPOINT_PATH
"""
LLAMA_FP8 = rf"""#!/bin/bash
export CUDA_DEVICE_MAX_CONNECTIONS=${{CUDA_DEVICE_MAX_CONNECTIONS:-1}}
CHECKPOINT_PATH=${{1:-"checkpoints/llama"}}
TOKENIZER_ARG=${{2:-"MOCK"}} # a path, or "MOCK"
DATA_ARG=${{3:-"MOCK"}}
mkdir -p "$(dirname "$CHECKPOINT_PATH")"
GPUS=8
DTYPE="fp8"
CACHE="${{PWD}}/cache"
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention
    --num-query-groups 8
    --seq-length 8192 --max-position-embeddings 8192
    {_LLAMA}
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
TRAINING_ARGS+=("${{DDP_ARGS[@]}}")
DATA_ARGS_LIST=()
if [[ "$TOKENIZER_ARG" == "MOCK" ]] || [[ "$DATA_ARG" == "MOCK" ]] || [[ -z "$TOKENIZER_ARG" ]]; then
    DATA_ARGS_LIST+=(
        "--mock-data"
        "--tokenizer-type NullTokenizer"
        "--vocab-size 128256"
        "--data-cache-path ${{CACHE}}"
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
    ${{MODEL_ARGS[@]}} \
    ${{TRAINING_ARGS[@]}} \
    ${{DTYPE_ARGS[@]}} \
    ${{DATA_ARGS_LIST[@]}} \
    --save "$CHECKPOINT_PATH"
set +x"""
MIXTRAL = rf"""#!/bin/bash
GPUS_PER_NODE=8
NNODES=${{SLURM_NNODES:-"4"}}
MODEL_ARGS=(
    --num-layers 32 --hidden-size 4096 --num-attention-heads 32 --group-query-attention --num-query-groups 8
    --seq-length 4096 --max-position-embeddings 32768 --ffn-hidden-size 14336
    {_LLAMA}
    --no-position-embedding
)
MOE_ARGS=(
    --num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
)
LOGGING_ARGS=(
    --log-interval 1 \
    --eval-iters 10
)
if [ -n "${{WANDB_API_KEY}}" ]; then
    LOGGING_ARGS+=(
        --wandb-project ${{WANDB_PROJECT:-"Mixtral"}}
        --wandb-exp-name ${{WANDB_NAME:-"Mixtral_8x7B"}}
    )
fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes $NNODES pretrain_gpt.py \
    ${{MODEL_ARGS[@]}} ${{MOE_ARGS[@]}} ${{LOGGING_ARGS[@]}} \
    --tensor-model-parallel-size 1 --pipeline-model-parallel-size 4 --expert-model-parallel-size 8 \
    --use-distributed-optimizer --micro-batch-size 1 --global-batch-size 256 --lr 1e-4 --bf16
"""
CASE = r"""#!/bin/bash
SCALE="small" # or "large"
case "${SCALE}" in
    "small")
        TP=1
        LAYERS=12
        ;;
    "large" | "huge")
        TP=4
        LAYERS=48
        EXTRA="--recompute-activations"
        ;;
    *)
        echo "not a scale: --scale"
        exit 1
        ;;
esac
options=" \
       --tensor-model-parallel-size ${TP} \
       --num-layers ${LAYERS} --hidden-size 768 --num-attention-heads 12 --seq-length 64 \
       --max-position-embeddings 64 --micro-batch-size 2 --lr 1e-4"
torchrun --nproc_per_node 8 ../../pretrain_gpt.py ${options}
"""
SOURCED = rf"""#!/bin/bash
TP=${{TP:-2}}
SCRIPT_PATH="${{BASH_SOURCE[0]}}"
source $(dirname $SCRIPT_PATH)/common.sh
ARGS="\
  $COMMON_OPTIONS \
  {_SMALL} \
  --micro-batch-size ${{MBS}} --lr 1e-4"
torchrun --nproc-per-node=$GPUS pretrain_gpt.py $ARGS
"""
COMMON = r"""
echo "Loading common options"
GPUS=4
MBS=3
COMMON_OPTIONS="\
    --tensor-model-parallel-size $TP  \
    --${PRECISION:-bf16} \
    "
if [ ${LOWER:-false} == true ]; then
    COMMON_OPTIONS="${COMMON_OPTIONS} --no-gradient-accumulation-fusion"
else
    COMMON_OPTIONS="${COMMON_OPTIONS}"
fi
if [ ${GRAPH:-true} == true ]; then
    COMMON_OPTIONS="${COMMON_OPTIONS} --adam-beta2 ${BETA2:-0.95}"
fi
"""
SBATCH = r"""#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=8
#SBATCH --job-name=gpt --exclusive
NAME="gpt"
DIR=`pwd`
options="--num-layers 24 --hidden-size 1024 --num-attention-heads 16 \
--seq-length 1024 --max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 64 --lr 1e-4 \
--pipeline-model-parallel-size 2 --save $DIR/checkpoints"
run_cmd="python -u ${DIR}/pretrain_gpt.py $@ ${options}"
srun -l --container-image "nvcr.io/nvidia/pytorch:24.01-py3" \
     --output=$DIR/logs/%x_%j.log sh -c "${run_cmd}"
set +x
"""
HEREDOC = rf"""#!/bin/bash
TP=${{TP:-1}}
FSDP=${{FSDP:-1}}
PROFILE=${{PROFILE:-0}}
ARGS=(
    {_SMALL}
    --tensor-model-parallel-size ${{TP}}
    --micro-batch-size 1 --global-batch-size 32 --lr 1e-4
)
if [ "${{FSDP}}" = 1 ]; then
    unset CUDA_DEVICE_MAX_CONNECTIONS
    ARGS=(
        "${{ARGS[@]}}"
        --use-megatron-fsdp
        --init-model-with-meta-device
    )
fi
if [ "${{PROFILE}}" = 1 ]; then
    ARGS=("${{ARGS[@]}}" --profile --profile-step-end 12)
fi
TRAINING_CMD="
cd /somewhere;
python /somewhere/pretrain_gpt.py ${{ARGS[@]}}"
LOGS=logs
mkdir -p ${{LOGS}} || {{
    echo "Error"
    exit 1
}}
sbatch <<EOF
#!/bin/bash
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=8
srun \
    --mpi=pmix -l \
    bash -x -c "${{TRAINING_CMD}}" 2>&1 | tee ${{LOGS}}/\${{SLURM_JOB_ID}}.log

EOF
"""
ARGUMENTS = r"""#!/bin/bash
while [[ $# -gt 0 ]]; do
    case $1 in
        --data)
            DATA="$2"
            shift 2
            ;;
        -h|--help)
            exit 0
            ;;
    esac
done
if [ $# -lt 0 ] || [ -z ${LAYERS} ]; then
    LAYERS=6
fi
[ -z "$HIDDEN" ] && HIDDEN=384
train() {
    local extra=$1
    torchrun --nproc_per_node=2 pretrain_gpt.py --num-layers $LAYERS --hidden-size=$HIDDEN --num-attention-heads 6 \
        --seq-length $((64 * 2)) --max-position-embeddings $((LAYERS * 100)) --micro-batch-size 4 --lr 1e-4 $extra
}
train "--clip-grad 0.5 --seed 7"
"""
QWEN_CONF = r"""#!/bin/bash
if [ -z ${HF_MODEL_CKPT} ]; then
    TOKENIZER_MODEL=Qwen/Qwen3-8B
else
    TOKENIZER_MODEL=${HF_MODEL_CKPT}
fi
MODEL_ARGS=" \
    --micro-batch-size 1 \
    --bf16 \
    --no-masked-softmax-fusion \
    --disable-bias-linear \
    --untie-embeddings-and-output-weights \
    --position-embedding-type rope \
    --no-rope-fusion \
    --normalization RMSNorm \
    --swiglu \
    --num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32 \
    --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm \
    --seq-length 4096 --max-position-embeddings 40960 \
    --padded-vocab-size 151936 \
    --rotary-percent 1.0 --rotary-base 1000000 \
    --lr 1e-5 \
"
"""
EXPERTS = rf"""#!/bin/bash
LAYERS=27
ARGS=(--num-layers $LAYERS --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16
    {_LLAMA} --norm-epsilon 1e-6 --seq-length 1024 --max-position-embeddings 1024
    --num-experts 64 --moe-layer-freq [0]*1+[1]*26 --moe-ffn-hidden-size 1408 --moe-router-topk 6
    --moe-router-pre-softmax --moe-shared-expert-intermediate-size 2816 --moe-aux-loss-coeff 1e-3
    --moe-router-score-function softmax --moe-router-topk-scaling-factor 1.0)
ARGS+=(--micro-batch-size 1 --lr 1e-4)
for extra in "--clip-grad 0.5" --bf16; do
    ARGS+=($extra)
done
torchrun --nproc_per_node 8 pretrain_gpt.py "${{ARGS[@]}}"
"""
MODEL_ARGS = """
ENV_VARS:
  CUDA_DEVICE_MAX_CONNECTIONS: 1
TEST_TYPE: regular
MODEL_ARGS:
  --num-layers: 12
  --hidden-size: 512
  --num-attention-heads: 8
  --seq-length: 1024
  --max-position-embeddings: 1024
  --micro-batch-size: 4
  --global-batch-size: 32
  --lr: 0.00015
  --split: 949,50,1
  --tensor-model-parallel-size: 1
  --use-distributed-optimizer: true
  --calculate-per-token-loss: true
  --use-flash-attn: false
  --bf16: true
METRICS: [lm loss]
"""
