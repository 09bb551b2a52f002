#!/bin/bash
TP=${TP:-2}
SCRIPT_PATH="${BASH_SOURCE[0]}"
source $(dirname $SCRIPT_PATH)/common.sh
ARGS="\
  $COMMON_OPTIONS \
  --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 \
  --micro-batch-size ${MBS} --lr 1e-4"
torchrun --nproc-per-node=$GPUS pretrain_gpt.py $ARGS
