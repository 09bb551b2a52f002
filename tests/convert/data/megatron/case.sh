#!/bin/bash
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
