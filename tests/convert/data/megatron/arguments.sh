#!/bin/bash
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
