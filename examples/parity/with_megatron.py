"""Trains a small GPTModel of Megatron-Core: data, tensor and pipeline parallelism, the distributed optimizer."""

import argparse
import os
from typing import Any

import torch
import torch.distributed as dist

if not torch.cuda.is_available():
    import megatron_on_cpus

    megatron_on_cpus.begin()

from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

import threefold_parity as parity
from threefold_parity.megatron import MegatronAdapter

VOCABULARY, WIDTH, LENGTH, BATCH, MICRO_BATCHES = 96, 32, 16, 8, 2
ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29583"}


def forward_step(batches: Any, model: Any) -> Any:
    part = next(batches)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)[None, None]
    output = model(part[:, :-1], torch.arange(LENGTH).expand(len(part), -1), mask, labels=part[:, 1:])
    return output, lambda losses: (losses.mean(), {"loss": losses.mean().detach()})


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tp", type=int, default=1)
    options.add_argument("--pp", type=int, default=1)
    options.add_argument("--gated", action="store_true")
    options.add_argument("--zero", action="store_true")
    options.add_argument("--bf16", action="store_true")
    args = options.parse_args()
    os.environ |= {name: value for name, value in ALONE.items() if name not in os.environ}
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(args.tp, args.pp)
    model_parallel_cuda_manual_seed(1)
    dtype = torch.bfloat16 if args.bf16 else torch.float32
    config = TransformerConfig(
        num_layers=2,
        hidden_size=WIDTH,
        num_attention_heads=4,
        num_query_groups=2,
        tensor_model_parallel_size=args.tp,
        pipeline_model_parallel_size=args.pp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=args.bf16,
        use_cpu_initialization=True,
        gated_linear_unit=args.gated,
        activation_func=torch.nn.functional.silu if args.gated else torch.nn.functional.gelu,
        add_bias_linear=not args.gated,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    ends = {
        "pre_process": parallel_state.is_pipeline_first_stage(),
        "post_process": parallel_state.is_pipeline_last_stage(),
    }
    tied = {"share_embeddings_and_output_weights": True}
    gpt = GPTModel(config, get_gpt_layer_local_spec(), VOCABULARY, LENGTH, **ends, **tied)
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=args.zero, bucket_size=4000, grad_reduce_in_fp32=args.bf16
    )
    model = DistributedDataParallel(config, wrapping, Float16Module(config, gpt) if args.bf16 else gpt)
    model.broadcast_params()
    narrow = {"bf16": args.bf16, "params_dtype": dtype}
    settings = OptimizerConfig(lr=3e-3, clip_grad=0.3, use_distributed_optimizer=args.zero, **narrow)
    optimizer = get_megatron_optimizer(settings, [model])
    dp, replica = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()
    axes = {"tp": args.tp, "pp": args.pp, "dp": dp}
    recorder = parity.Recorder([model], optimizer, MegatronAdapter(), axes=axes)
    data = torch.Generator().manual_seed(1)
    for _ in range(100):
        mine = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data).chunk(dp)[replica]
        recorder.batch(mine[:, :-1], mine[:, 1:])
        model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(mine.chunk(MICRO_BATCHES)),
            model=model,
            num_microbatches=MICRO_BATCHES,
            seq_length=LENGTH,
            micro_batch_size=len(mine) // MICRO_BATCHES,
            forward_only=False,
        )
        optimizer.step()


if __name__ == "__main__":
    main()
