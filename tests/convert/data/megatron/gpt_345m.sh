#!/bin/bash
# One variable a group, each line continued
CHECKPOINT_PATH=<Specify path>
DATA_PATH=<Specify path and file prefix>_text_document
VOCAB_FILE=<Specify path to file>/gpt2-vocab.json
GPT_ARGS="
    --num-layers 24 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 --max-position-embeddings 1024 \
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
