"""The model and the batch that the benchmarks train, and Threefold's training of it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.host import keep_freed_memory
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.train.engine import Engine

LAYERS, HIDDEN, HEADS, FFN, VOCAB, SEQUENCE = 8, 256, 8, 1024, 8192, 256
MICRO_BATCH, GLOBAL_BATCH = 4, 32
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
TOKENS_PER_STEP = GLOBAL_BATCH * SEQUENCE


def describe() -> str:
    """The shape in one line."""
    return (
        f"{LAYERS} layers, hidden {HIDDEN}, {HEADS} heads, ffn {FFN}, vocabulary {VOCAB}, sequence {SEQUENCE}, "
        f"micro-batch {MICRO_BATCH}, {GLOBAL_BATCH} sequences a step, AdamW"
    )


def global_batch(step: int) -> Tensor:
    """int64 [GLOBAL_BATCH, SEQUENCE], the same on every rank."""
    return torch.randint(0, VOCAB, (GLOBAL_BATCH, SEQUENCE), generator=torch.Generator().manual_seed(step))


def config(dtype: str, dp: int = 1, tp: int = 1, pp: int = 1, **train: Any) -> Config:
    """Threefold's config of it."""
    given = {
        "model": {
            "num_layers": LAYERS,
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "ffn_hidden_size": FFN,
            "max_position_embeddings": SEQUENCE,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "data": {"path": "none", "sequence_length": SEQUENCE},
        "parallel": {"dp": dp, "tp": tp, "pp": pp},
        "train": {
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": MICRO_BATCH,
            "max_steps": 1000,
            "device": "cpu",
        }
        | train,
        "precision": {"dtype": dtype},
        "optimizer": {
            "lr": LEARNING_RATE,
            "betas": BETAS,
            "weight_decay": WEIGHT_DECAY,
            "clip_grad_norm": CLIP,
        },
    }
    return resolve(Config.model_validate(given), VOCAB)


def threefold_step(settings: Config) -> Callable[[int], None]:
    """Set Threefold's training up on this rank of an initialised process group; returns what does one step of it."""
    keep_freed_memory()  # as `threefold.train.entry_point` does
    parallel = settings.parallel
    mesh = Mesh(Layout(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp), torch.device("cpu"))
    engine = Engine(lambda: GPT(settings.model), gpt_plan(settings.model, SEQUENCE), mesh, settings)
    share = GLOBAL_BATCH // parallel.dp
    rows = torch.arange(mesh.dp.index * share, (mesh.dp.index + 1) * share)

    def step(number: int) -> None:
        tokens = global_batch(number)[rows]
        engine.train_step(Batch(tokens, tokens.roll(-1, 1), rows), number)

    return step
