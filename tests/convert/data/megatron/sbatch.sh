#!/bin/bash
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
