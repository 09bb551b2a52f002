"""Checkpoints written and read by megatron-core, on CPUs: `python megatron_core.py write llama FOLDER`.

The folders of `data/megatron_core` were written so, by megatron-core 0.16.1. It asks for CUDA in a few places, which are
given CPUs. `tensors.pt` beside a checkpoint of one rank holds tokens, their logits, and the weights after one more
update; `torch_dist` beside files of several ranks holds the same checkpoint in the other format.
"""

import argparse
import contextlib
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")
SIZES = {"llama": (1, 1, None, 3), "gpt": (1, 1, None, 3), "llama-ranks": (2, 2, 2, 4), "gpt-ranks": (2, 3, None, 3)}
"""tp, pp, chunks and layers of each checkpoint; those of ranks are in files `mp_rank_*`."""
LR, STEPS = 0.01, 3


class OnCPU(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.cuda:
            return args[0]
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = "cpu"
        return function(*args, **kwargs)


def args_of(kind: str) -> argparse.Namespace:
    """Return the arguments of a run of Megatron-LM, those that matter."""
    from megatron.core.transformer.enums import AttnBackend

    tp, pp, chunks, layers = SIZES[kind]
    llama = kind.startswith("llama")
    return argparse.Namespace(
        num_layers=layers,
        hidden_size=12,
        num_attention_heads=6,
        group_query_attention=llama,
        num_query_groups=2 if llama else 1,
        kv_channels=2,
        ffn_hidden_size=20,
        padded_vocab_size=40,
        vocab_size=37,
        make_vocab_size_divisible_by=4,
        max_position_embeddings=24,
        seq_length=16,
        position_embedding_type="rope" if llama else "learned_absolute",
        rotary_base=5000,
        rotary_percent=1.0,
        rotary_interleaved=False,
        normalization="RMSNorm" if llama else "LayerNorm",
        norm_epsilon=1e-5,
        apply_layernorm_1p=False,
        add_bias_linear=not llama,
        add_qkv_bias=False,
        qk_layernorm=False,
        swiglu=llama,
        squared_relu=False,
        openai_gelu=False,
        bias_gelu_fusion=True,
        untie_embeddings_and_output_weights=llama,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.02,
        num_experts=None,
        multi_latent_attention=False,
        window_size=None,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks,
        params_dtype=torch.float32,
        attention_backend=AttnBackend.auto,
        exit_signal=signal.SIGTERM,
        seed=1234,
        lr=LR,
        min_lr=0.0,
        lr_decay_style="constant",
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        clip_grad=0.0,
        optimizer="adam",
        use_distributed_optimizer=False,
        global_batch_size=2,
        micro_batch_size=2,
        split="1,0,0",
        train_iters=100,
        iteration=STEPS,
        consumed_train_samples=2 * STEPS,
        bf16=False,
        fp16=False,
        data_path=["corpus_text_document"],
    )


def chunks_of(kind: str) -> list[Any]:
    """Return the parts of the model on this rank."""
    from megatron.core import parallel_state as state
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    args = args_of(kind)
    tp, pp, chunks, layers = SIZES[kind]
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=args.hidden_size,
        num_attention_heads=args.num_attention_heads,
        num_query_groups=args.num_query_groups if args.group_query_attention else None,
        ffn_hidden_size=args.ffn_hidden_size,
        gated_linear_unit=args.swiglu,
        activation_func=F.silu if args.swiglu else F.gelu,
        normalization=args.normalization,
        add_bias_linear=args.add_bias_linear,
        bias_activation_fusion=not args.swiglu,  # GELU by its tanh approximation
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        virtual_pipeline_model_parallel_size=chunks,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        attention_softmax_in_fp32=True,
    )
    built = []
    for chunk in range(chunks or 1):
        stage = None if chunks is None else chunk
        rank, last = state.get_pipeline_model_parallel_rank(), (chunks or 1) - 1
        torch.manual_seed(3 + 10 * rank + 100 * chunk)  # other weights in each part
        model = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization=args.normalization),
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            position_embedding_type=args.position_embedding_type,
            rotary_base=args.rotary_base,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            pre_process=rank == 0 and chunk == 0,
            post_process=rank == pp - 1 and chunk == last,
            vp_stage=stage,
        )
        model.ddp_config = DistributedDataParallelConfig()
        built.append(model)
    return built


def optimizer_of(chunks: list[Any]) -> Any:
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    config = OptimizerConfig(
        optimizer="adam",
        lr=LR,
        weight_decay=0.1,
        adam_beta1=0.9,
        adam_beta2=0.95,
        adam_eps=1e-8,
        clip_grad=0.0,
    )
    optimizer = get_megatron_optimizer(config, chunks)
    for group in optimizer.param_groups:  # as Megatron-LM's scheduler does
        group["weight_decay"] = 0.1 * group["wd_mult"]
    return optimizer


def logits_of(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    length = tokens.shape[1]
    mask = torch.triu(torch.ones(1, 1, length, length), 1).bool()
    return model(tokens, torch.arange(length)[None].expand_as(tokens), mask)


def step(model: Any, optimizer: Any, tokens: torch.Tensor) -> None:
    """Make an update as a run of one rank does."""
    for parameter in model.parameters():
        parameter.grad = None
    logits = logits_of(model, tokens[:, :-1])
    F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    for parameter in model.parameters():
        parameter.main_grad = parameter.grad
    optimizer.step()


def drawn_tokens() -> torch.Tensor:
    """Return two rows of one text of 33 tokens, as a run reads it in samples of 16."""
    text = torch.randint(0, 37, (33,), generator=torch.Generator().manual_seed(5))
    return text.unfold(0, 17, 16)


def weights_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def write(kind: str, folder: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core import parallel_state as state

    chunks, args, tokens = chunks_of(kind), args_of(kind), drawn_tokens()
    optimizer = optimizer_of(chunks)
    place = folder / f"iter_{STEPS:07d}"
    common = {"args": args, "checkpoint_version": 3.0, "iteration": STEPS}
    if not kind.endswith("-ranks"):
        (model,) = chunks
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():  # norms and biases of which none is 0 or 1
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
        for _ in range(STEPS):
            step(model, optimizer, tokens)
        place.mkdir(parents=True)
        sharded = model.sharded_state_dict()
        saved = {**common, "model": sharded, "optimizer": optimizer.sharded_state_dict(sharded)}
        dist_checkpointing.save(saved, place)
        logits = logits_of(model, tokens).detach()
        step(model, optimizer, tokens)
        torch.save({"tokens": tokens, "logits": logits, "after": weights_of(model)}, folder / "tensors.pt")
    else:
        rank, stage = state.get_tensor_model_parallel_rank(), state.get_pipeline_model_parallel_rank()
        for each in chunks:  # moments without a forward pass, which would need all ranks
            for number, parameter in enumerate(each.parameters()):
                part = 1000 * stage + 10_000 * (each.vp_stage or 0)
                generator = torch.Generator().manual_seed(100 + number + part)
                parameter.main_grad = torch.randn(parameter.shape, generator=generator) * 0.01
        optimizer.step()
        name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if SIZES[kind][1] > 1 else "")
        (place / name).mkdir(parents=True)
        named = {"model": chunks[0]} if len(chunks) == 1 else {f"model{n}": each for n, each in enumerate(chunks)}
        models = {key: each.state_dict_for_save_checkpoint() for key, each in named.items()}
        saved = {**common, **models, "optimizer": optimizer.state_dict()}
        torch.save(saved, place / name / "model_optim_rng.pt")
        place = folder / "torch_dist" / place.name
        place.mkdir(parents=True, exist_ok=True)
        dist.barrier()
        sharded = {key: each.sharded_state_dict() for key, each in named.items()}
        state = optimizer.sharded_state_dict(sharded)
        dist_checkpointing.save({**common, **sharded, "optimizer": state}, place)
    if dist.get_rank() == 0:
        (folder / "latest_checkpointed_iteration.txt").write_text(str(STEPS))


def read(kind: str, folder: Path) -> None:
    """Load a `torch_dist` folder, and write `read.pt`: logits, weights, and weights after an update."""
    from megatron.core import dist_checkpointing

    (model,) = chunks_of(kind)
    optimizer, tokens = optimizer_of([model]), drawn_tokens()
    (place,) = folder.glob("iter_*")
    sharded = model.sharded_state_dict()
    wanted = {"model": sharded}
    has_state = any("optimizer.state" in name for name in dist_checkpointing.load_tensors_metadata(place))
    if has_state:
        wanted["optimizer"] = optimizer.sharded_state_dict(sharded, is_loading=True)
    loaded = dist_checkpointing.load(wanted, place)
    model.load_state_dict({name: value for name, value in loaded["model"].items() if value is not None}, strict=False)
    weights, logits = weights_of(model), logits_of(model, tokens).detach()
    if has_state:
        optimizer.load_state_dict(loaded["optimizer"])
        step(model, optimizer, tokens)
    args = vars(loaded["args"]) if "args" in loaded else {}
    found = {"logits": logits, "weights": weights, "after": weights_of(model), "args": args}
    torch.save(found, folder / "read.pt")


def start(rank: int, world: int, action: str, kind: str, folder: Path) -> None:
    import megatron.core.tensor_parallel.random as streams
    from megatron.core import parallel_state

    torch.set_num_threads(1)
    torch.cuda.current_device, torch.cuda.synchronize = lambda: "cpu", lambda *_: None
    streams.CudaRNGStatesTracker.fork = lambda *_: contextlib.nullcontext()
    tp, pp, chunks, _ = SIZES[kind]
    dist.init_process_group("gloo", init_method=f"file://{folder}.store", rank=rank, world_size=world)
    parallel_state.initialize_model_parallel(tp, pp, chunks)
    with OnCPU():
        {"write": write, "read": read}[action](kind, folder)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    action, kind, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3]).resolve()
    tp, pp, *_ = SIZES[kind]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    Path(f"{folder}.store").unlink(missing_ok=True)
    if tp * pp == 1:
        start(0, 1, action, kind, folder)
    else:
        mp.spawn(start, (tp * pp, action, kind, folder), tp * pp)
    Path(f"{folder}.store").unlink(missing_ok=True)
