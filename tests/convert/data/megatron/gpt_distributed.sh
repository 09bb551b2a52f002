#!/bin/bash
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
GPT_ARGS="--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --sequence-parallel --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024"
GPT_ARGS="$GPT_ARGS --micro-batch-size 4 --global-batch-size 16"
GPT_ARGS="${GPT_ARGS} \
    --lr 0.00015 --bf16"
python -m torch.distributed.launch $DISTRIBUTED_ARGS pretrain_gpt.py $GPT_ARGS --distributed-backend nccl 2>&1 | tee log
