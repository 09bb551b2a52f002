
#! /bin/bash
# Runs the "345M" parameter model; it's small
GPUS_PER_NODE=${GPUS_PER_NODE:-8}
NNODES=2
DATA_PATH="0.3 corpora/books 0.7 corpora/code"
CHECKPOINT_PATH=$1 #<Specify path>
DISTRIBUTED_ARGS="--nproc_per_node $GPUS_PER_NODE --nnodes $NNODES --master_addr localhost"
export CUDA_DEVICE_MAX_CONNECTIONS=1
MODEL_ARGS=(
    --num-layers 24 --hidden-size 1024
    --num-attention-heads 16 # as in GPT-3 medium
    --seq-length 1024 --max-position-embeddings 2048
)
LR="
    --lr 0.00015 \
    --lr-decay-style cosine
    --min-lr 1.0e-5
"
torchrun $DISTRIBUTED_ARGS pretrain_gpt.py \
    "${MODEL_ARGS[@]}" $LR \
    --tensor-model-parallel-size 2 --pipeline-model-parallel-size=2 --sequence-parallel \
    --num-layers-per-virtual-pipeline-stage 4 \
    --micro-batch-size 4 --global-batch-size 128 --train-iters 500000 --lr-decay-iters 320000 \
    --save $CHECKPOINT_PATH --data-path $DATA_PATH --seed 42 \
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap --split 900,90,10 \
    --clip-grad 0.5 --lr-warmup-fraction .01 --recompute-activations --adam-beta2 0.95 \
    --use-distributed-optimizer --frobnicate 7 --save-interval 10000 --eval-iters 10 --bf16 2>&1 | tee log.txt
echo --done
