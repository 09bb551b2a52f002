"""Trains a Llama of two layers with torchtitan's Trainer (0.3): FSDP over `--dp` ranks, or tensor parallelism."""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torchtitan_on_cpus import reduce_by_sums

# isort: split
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import (
    _EMBEDDING_INIT,
    _NORM_INIT,
    ComplexRoPE,
    Embedding,
    Linear,
    Llama3Model,
    ModelSpec,
    RMSNorm,
    _build_llama3_layers,
    _output_linear_init,
    parallelize_llama,
    pipeline_llm,
)
from torchtitan.trainer import Trainer

import threefold_parity as parity
from threefold_parity.torchtitan import TorchtitanAdapter

VOCABULARY, LENGTH, BATCH, HIDDEN = 64, 16, 8, 32


class Samples(BaseDataLoader):
    """The same samples in the same order for every number of replicas."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        pass

    def __init__(self, config: Config, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any) -> None:
        self.world, self.rank, self.size = dp_world_size, dp_rank, local_batch_size

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        generator = torch.Generator().manual_seed(1)
        while True:
            rows = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator).chunk(self.world)[self.rank]
            for part in rows.split(self.size):
                yield {"input": part[:, :-1]}, part[:, 1:]

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        pass


class NoTokenizer(BaseTokenizer):
    @dataclass(kw_only=True, slots=True)
    class Config(BaseTokenizer.Config):
        pass

    def __init__(self, config: Config, **_: Any) -> None:
        pass

    def encode(self, *_: Any, **__: Any) -> list[int]:
        return []

    def decode(self, *_: Any, **__: Any) -> str:
        return ""

    def get_vocab_size(self) -> int:
        return VOCABULARY

    def get_vocab(self) -> dict[str, int]:
        return {}


def model() -> ModelSpec:
    rope = ComplexRoPE.Config(dim=HIDDEN // 4, max_seq_len=LENGTH, theta=500000, scaling="llama")
    heads = {"n_heads": 4, "n_kv_heads": 2, "fuse_qkv": True, "rope": rope, "attn_backend": "varlen"}
    layers = _build_llama3_layers(n_layers=2, dim=HIDDEN, hidden_dim=64, **heads)
    for layer in layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config = Llama3Model.Config(
        dim=HIDDEN,
        vocab_size=VOCABULARY,
        tok_embeddings=Embedding.Config(num_embeddings=VOCABULARY, embedding_dim=HIDDEN, param_init=_EMBEDDING_INIT),
        norm=RMSNorm.Config(normalized_shape=HIDDEN, param_init=_NORM_INIT),
        lm_head=Linear.Config(in_features=HIDDEN, out_features=VOCABULARY, param_init=_output_linear_init(HIDDEN)),
        layers=layers,
    )
    parts = {"parallelize_fn": parallelize_llama, "pipelining_fn": pipeline_llm}
    none = {"post_optimizer_build_fn": None, "state_dict_adapter": None}
    return ModelSpec(name="llama3", flavor="tiny", model=config, **parts, **none)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--dp", type=int, default=1)
    options.add_argument("--tp", type=int, default=1)
    options.add_argument("--bf16", action="store_true")
    given = options.parse_args()
    config = Trainer.Config(
        model_spec=model(),
        loss=CrossEntropyLoss.Config(global_vocab_size=VOCABULARY),
        optimizer=default_adamw(lr=1e-2),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0),
        training=TrainingConfig(
            local_batch_size=BATCH // given.dp,
            global_batch_size=BATCH,
            seq_len=LENGTH,
            steps=10,
            mixed_precision_param="bfloat16" if given.bf16 else "float32",
            disable_cuda_graphs=True,
        ),
        dataloader=Samples.Config(),
        tokenizer=NoTokenizer.Config(),
        parallelism=ParallelismConfig(
            tensor_parallel_degree=given.tp,
            data_parallel_shard_degree=given.dp,
            spmd_backend="partial_dtensor",
        ),
        activation_checkpoint=None,
        dump_folder="trained",
    )
    config.debug.seed = 1
    trainer = config.build()
    for part in trainer.model_parts:
        reduce_by_sums(part)
    parity.Recorder(trainer.model_parts, trainer.optimizers, TorchtitanAdapter(), axes={"dp": given.dp, "tp": given.tp})
    trainer.train()


if __name__ == "__main__":
    main()
