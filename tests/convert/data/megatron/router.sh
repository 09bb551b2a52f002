#!/bin/bash
ARGS=(--num-layers 27 --hidden-size 2048 --ffn-hidden-size 10944 --num-attention-heads 16
    --normalization RMSNorm --swiglu --disable-bias-linear --position-embedding-type rope --untie-embeddings-and-output-weights
    --seq-length 1024 --max-position-embeddings 1024 --num-experts 64 --moe-ffn-hidden-size 1408 --moe-router-topk 8
    --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-4 --moe-router-score-function sigmoid
    --moe-router-topk-scaling-factor 2.5 --moe-router-enable-expert-bias --moe-router-bias-update-rate 2e-3
    --moe-router-num-groups 8 --moe-router-group-topk 4 --moe-router-pre-softmax --micro-batch-size 1 --lr 1e-4)
torchrun --nproc_per_node 8 pretrain_gpt.py "${ARGS[@]}"
