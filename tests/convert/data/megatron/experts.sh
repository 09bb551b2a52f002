#!/bin/bash
LAYERS=27
ARGS=(--num-layers $LAYERS --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights --norm-epsilon 1e-6 --seq-length 1024 --max-position-embeddings 1024
    --num-experts 64 --moe-layer-freq [0]*1+[1]*26 --moe-ffn-hidden-size 1408 --moe-router-topk 6
    --moe-router-pre-softmax --moe-shared-expert-intermediate-size 2816 --moe-aux-loss-coeff 1e-3
    --moe-router-score-function softmax --moe-router-topk-scaling-factor 1.0)
ARGS+=(--micro-batch-size 1 --lr 1e-4)
for extra in "--clip-grad 0.5" --bf16; do
    ARGS+=($extra)
done
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}"
