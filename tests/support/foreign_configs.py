"""Files that start trainings with other systems, in the style of their own examples."""

FLEET_BASE = """\
Global: {device: gpu, seed: 1024, global_batch_size: , local_batch_size: 1, micro_batch_size: 1}
Engine:
  max_steps: 500000
  num_train_epochs: 1
  accumulate_steps:
  logging_freq: 1
  eval_freq: 500
  eval_iters: 10
  mix_precision:
    use_pure_fp16: True
    scale_loss: 32768.0
    custom_black_list: [reduce_sum, elementwise_div]
  save_load: {save_steps: 1000, save_epoch: 1, output_dir: ./output, ckpt_dir: }
Model: {module: GPTModule, name: GPT, fused_linear: False, sequence_parallel: False}
Data:
  Train:
    dataset: {name: GPTDataset, input_dir: ./data/, split: [949, 50, 1], max_seq_len: 1024}
    sampler: {name: GPTBatchSampler, shuffle: False, drop_last: True}
    loader: {num_workers: 1, return_list: False, collate_fn: gpt_collate_fn}
  Eval:
    dataset: {name: GPTDataset, input_dir: ./data/, split: [949, 50, 1], max_seq_len: 1024}
Optimizer:
  name: FusedAdamW
  weight_decay: 0.01
  beta1: 0.9
  beta2: 0.999
  epsilon: 1.0e-8
  lr: {name: CosineAnnealingWithWarmupDecay, decay_steps: 360000, warmup_rate: 0.01, max_lr: 5.0e-5, min_lr: 1.0e-5}
  grad_clip: {name: ClipGradByGlobalNorm, clip_norm: 1.0}
Profiler: {enable: False, scheduler: [1, 5]}
"""
FLEET = """\
_base_: ./base.yaml
Global: {local_batch_size: 8, micro_batch_size: 4}
Model:
  vocab_size: 50304
  hidden_size: 4096
  num_layers: 32
  num_attention_heads: 32
  ffn_hidden_size:
  hidden_dropout_prob: 0.1
  attention_probs_dropout_prob: 0.2
  max_position_embeddings: 1024
  type_vocab_size: 16
  initializer_range: 0.01
  use_recompute: True
  recompute_granularity: core_attn
  frobnicate: 7
Distributed:
  dp_degree:
  mp_degree: 2
  pp_degree: 1
  sharding: {sharding_degree: 16, sharding_stage: 2, sharding_offload: False, reduce_overlap: True}
"""
COLOSSAL = '''\
"""GPT-2 with everything."""
from pathlib import Path
from typing import Any
import pytest
from threefold.config import load_config
from threefold.convert import Converted, convert
from threefold.errors import UserError
import torch
from colossalai.amp import AMP_TYPE
from model import GPT2_small_pipeline_hybrid
from colossalai.nn.optimizer import HybridAdam
from colossalai.zero.shard_utils import TensorShardStrategy

BATCH_SIZE = 8
NUM_EPOCHS = 60
SEQ_LEN = 1024
NUM_MICRO_BATCHES = 4
HIDDEN_SIZE = 768
TENSOR_PARALLEL = 2
TENSOR_SHAPE = (BATCH_SIZE // NUM_MICRO_BATCHES, SEQ_LEN, HIDDEN_SIZE)
LOG_PATH = f"./logs_{TENSOR_PARALLEL}"
FROBNICATE = open("x")
zero = dict(
    model_config=dict(tensor_placement_policy='cpu', shard_strategy=TensorShardStrategy()), optimizer_config=dict()
)
fp16 = dict(mode=AMP_TYPE.NAIVE, initial_scale=2 * 1024)
optimizer = dict(type=HybridAdam, lr=0.00015, weight_decay=1e-2)
model = dict(type=GPT2_small_pipeline_hybrid, checkpoint=True, num_chunks=1, dtype=torch.half)
parallel = dict(pipeline=2, tensor=dict(size=TENSOR_PARALLEL, mode='1d'))
gradient_accumulation = 3
clip_grad_norm = 1.0
'''
MEGATRON = r"""
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
    --micro-batch-size 4 --global-batch-size $((4 * 32)) --train-iters 500000 --lr-decay-iters 320000 \
    --save $CHECKPOINT_PATH --data-path $DATA_PATH --seed 42 \
    --vocab-file gpt2-vocab.json --merge-file gpt2-merges.txt --data-impl mmap --split 900,90,10 \
    --clip-grad 0.5 --lr-warmup-fraction .01 --recompute-activations --adam-beta2 0.95 \
    --use-distributed-optimizer --frobnicate 7 --save-interval 10000 --eval-iters 10 --bf16 2>&1 | tee log.txt
echo --done
"""
LLAMA = """
--num-layers 32 --hidden-size 4096 --num-attention-heads 32 --seq-length 4096 --max-position-embeddings 4096
--normalization RMSNorm --swiglu --position-embedding-type rope --rotary-base 1000000 --disable-bias-linear
--group-query-attention --num-query-groups 8 --untie-embeddings-and-output-weights --norm-epsilon 1e-6
--num-experts 8 --moe-router-topk 1 --moe-aux-loss-coeff 0.02 --moe-z-loss-coeff 1e-3 --moe-expert-capacity-factor 1.5
--expert-model-parallel-size 4 --context-parallel-size 2 --world-size 16
--micro-batch-size 1 --global-batch-size 64 --train-samples 6400 --lr 1e-4 --lr-warmup-iters 7
--hidden-dropout 0 --attention-dropout 0 --data-path mine --tokenizer-type Llama2Tokenizer --tokenizer-model t.model
--recompute-granularity full --recompute-method uniform --no-async-tensor-model-parallel-allreduce
"""


HYBRID_GPT = """
import os
import torch
from colossalai.amp import AMP_TYPE

NUM_EPOCHS = 60
SEQ_LEN = 1024
BATCH_SIZE = 192
NUM_CHUNKS = None
TENSOR_SHAPE = (1, 1024, 1600)
CONFIG = dict(
    NUM_MICRO_BATCHES=192,
    parallel=dict(pipeline=2, tensor=dict(mode='1d', size=2)),
    fp16=dict(mode=AMP_TYPE.NAIVE, initial_scale=2**5),
    gradient_accumulation=3,
    clip_grad_norm=1.0,
)


def train():
    num_chunks = 1 if NUM_CHUNKS is None else NUM_CHUNKS
    model = GPT2_exlarge_pipeline_hybrid(num_chunks=num_chunks, checkpoint=True, dtype=torch.half)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.00015, weight_decay=1e-2,)


if __name__ == "__main__":
    train()
"""


FLEET_FLAGS = r"""#!/bin/bash
log_dir=dp2_pp2_mp2
rm -rf $log_dir
export PYTHONPATH=$PYTHONPATH:../../
python -m paddle.distributed.launch --log_dir $log_dir --gpus "0,1,2,3,4,5,6,7" run_pretrain.py \
    --model_type gpt --model_name_or_path gpt2-small-en \
    --input_dir "./data"\
    --output_dir "output"\
    --weight_decay 0.01\
    --grad_clip 1.0 --max_steps 500000 --save_steps 100000 --decay_steps 320000 --warmup_rate 0.01 \
    --scale_loss 32768 --global_batch_size 16 --micro_batch_size 2 \
    --dp_degree 2 --mp_degree 2 --pp_degree 2 --sharding_degree 1 --sharding_stage 1 --sharding_offload False \
    --use_pure_fp16 True --use_recompute True --max_lr 1e-4 --min_lr 1e-5 --logging_freq 1 --eval_freq 1000 --device gpu
"""


LOGGED_RUN = """
Global: {seed: 1024, global_batch_size: 8, micro_batch_size: 1}
Engine: {max_steps: 500000, logging_freq: 1, mix_precision: {enable: True, dtype: float16, level: O2}}
Model:
  vocab_size: 51200
  hidden_size: 1024
  num_layers: 4
  num_attention_heads: 2
  max_position_embeddings: 1024
  initializer_range: 0.02
  use_recompute: True
  recompute_granularity: full
Data: {Train: {dataset: {input_dir: ./data, max_seq_len: 1024}}}
Distributed: {dp_degree: 2, mp_degree: 2, pp_degree: 2}
Optimizer: {lr: {max_lr: 1.0e-5, min_lr: 1.0e-6, warmup_rate: 0.01, decay_steps: 360000}, grad_clip: {clip_norm: 1.0}}
"""
