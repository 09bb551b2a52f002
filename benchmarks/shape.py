"""Models and batches of the benchmarks, and functions that train them with Threefold and others."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from plain_gpt import PlainGPT
from plain_kernels import PlainKernels
from torch import Tensor

from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.data.loader import Batch
from threefold.host import keep_freed_memory
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.planner.block import model_flops_per_token
from threefold.train.step import Engine


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT and its batches.

    Attributes:
        layers, hidden, heads, ffn, vocab: sizes of the model, whose embeddings are tied.
        sequence: tokens of a sample.
        micro_batch, global_batch: numbers of samples.
    """

    layers: int
    hidden: int
    heads: int
    ffn: int
    vocab: int
    sequence: int
    micro_batch: int
    global_batch: int

    @property
    def tokens_per_step(self) -> int:
        return self.global_batch * self.sequence

    @property
    def flops_per_token(self) -> float:
        """Return the model FLOPs per token, as `threefold.models.family` counts them."""
        found = model_flops_per_token(config("fp32", shape=self).model, self.sequence)
        assert found is not None
        return found

    def describe(self) -> str:
        return (
            f"{self.layers} layers, hidden {self.hidden}, {self.heads} heads, ffn {self.ffn}, vocabulary {self.vocab}, "
            f"sequence {self.sequence}, micro-batch {self.micro_batch}, {self.global_batch} sequences a step, AdamW"
        )

    def batch(self, step: int) -> Tensor:
        """Return int64 [global_batch, sequence], equal on every rank."""
        generator = torch.Generator().manual_seed(step)
        return torch.randint(0, self.vocab, (self.global_batch, self.sequence), generator=generator)


BASE = Shape(layers=8, hidden=256, heads=8, ffn=1024, vocab=8192, sequence=256, micro_batch=4, global_batch=32)
SHAPES = {
    "0.8M": Shape(layers=4, hidden=128, heads=4, ffn=512, vocab=65, sequence=64, micro_batch=12, global_batch=12),
    "8x256": BASE,
    "gpt2-124m": Shape(
        layers=12, hidden=768, heads=12, ffn=3072, vocab=50257, sequence=1024, micro_batch=2, global_batch=2
    ),
}
"""Shapes measured by `limit.py`; the first is nanoGPT's character model for a CPU."""

LAYERS, HIDDEN, HEADS, FFN = BASE.layers, BASE.hidden, BASE.heads, BASE.ffn
VOCAB, SEQUENCE, MICRO_BATCH, GLOBAL_BATCH = BASE.vocab, BASE.sequence, BASE.micro_batch, BASE.global_batch
LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
TOKENS_PER_STEP = BASE.tokens_per_step


def describe() -> str:
    return BASE.describe()


def global_batch(step: int) -> Tensor:
    """Return int64 [GLOBAL_BATCH, SEQUENCE], equal on every rank."""
    return BASE.batch(step)


def config(dtype: str, dp: int = 1, tp: int = 1, pp: int = 1, shape: Shape = BASE, **train: Any) -> Config:
    given = {
        "model": {
            "num_layers": shape.layers,
            "hidden_size": shape.hidden,
            "num_attention_heads": shape.heads,
            "ffn_hidden_size": shape.ffn,
            "max_position_embeddings": shape.sequence,
            "tie_embeddings": True,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "data": {"path": "none", "sequence_length": shape.sequence},
        "parallel": {"dp": dp, "tp": tp, "pp": pp},
        "train": {
            "global_batch_size": shape.global_batch,
            "micro_batch_size": shape.micro_batch,
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
    return resolve(Config.model_validate(given), shape.vocab)


def threefold_step(settings: Config, shape: Shape = BASE) -> Callable[[int], None]:
    """Set up Threefold's training on this rank of a process group; return a function that does one step."""
    keep_freed_memory()  # as `threefold.train.run` does
    parallel = settings.parallel
    layout = Layout(dp=parallel.dp, tp=parallel.tp, pp=parallel.pp)
    exact = getattr(settings.train, "exact", False)  # older checkouts have none
    mesh = Mesh(layout, torch.device("cpu"), **({"exact": True} if exact else {}))
    engine = Engine(lambda: GPT(settings.model), gpt_plan(settings.model, shape.sequence), mesh, settings)
    share = shape.global_batch // parallel.dp
    rows = torch.arange(mesh.dp.index * share, (mesh.dp.index + 1) * share)

    def step(number: int) -> None:
        tokens = shape.batch(number)[rows]
        engine.train_step(Batch(tokens, tokens.roll(-1, 1), rows), number)

    return step


def transformers_step(dtype: str, shape: Shape = BASE) -> Callable[[int], None]:
    """Set up GPT-2 of `transformers` in a plain training loop."""
    from transformers import AutoModelForCausalLM, GPT2Config

    config = GPT2Config(
        vocab_size=shape.vocab,
        n_positions=shape.sequence,
        n_embd=shape.hidden,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_inner=shape.ffn,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        use_cache=False,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").train()
    return plain_step(model, lambda tokens: model(input_ids=tokens, labels=tokens).loss, dtype, shape)


def plain_gpt_step(dtype: str, shape: Shape) -> Callable[[int], None]:
    """Set up the same model as written by hand (`plain_gpt.py`)."""
    model = PlainGPT(shape.layers, shape.hidden, shape.heads, shape.ffn, shape.vocab, shape.sequence).train()
    return plain_step(model, lambda tokens: model(tokens, tokens.roll(-1, 1)), dtype, shape)


def plain_kernels_step(shape: Shape) -> Callable[[int], None]:
    """Set up only the kernels of the plain GPT, in fp32, without the cost of autograd, modules and Python."""
    from threefold.torch_private.tensors import foreach_norm, fused_adam_  # missing in older checkouts

    keep_freed_memory()  # as Threefold does, and the plain module does not
    model = PlainGPT(shape.layers, shape.hidden, shape.heads, shape.ffn, shape.vocab, shape.sequence)
    kernels = PlainKernels(model)
    weights = kernels.weights
    means, squares = ([torch.zeros_like(each) for each in weights.values()] for _ in range(2))
    counts = torch.zeros(len(weights))

    @torch.no_grad()
    def step(number: int) -> None:
        added: dict[str, Tensor] = {}
        for tokens in shape.batch(number).split(shape.micro_batch):
            _, found = kernels.loss_and_gradients(tokens, tokens.roll(-1, 1))
            for name, gradient in found.items():
                added[name] = added[name].add_(gradient) if name in added else gradient
        gradients = [added[name] for name in weights]
        float(torch.stack(foreach_norm(gradients)).norm())
        counts.add_(1)
        constants = {"lr": LEARNING_RATE, "betas": BETAS, "weight_decay": WEIGHT_DECAY, "eps": 1e-8}
        fused_adam_(list(weights.values()), gradients, means, squares, counts.unbind(), True, **constants)

    return step


def plain_step(
    model: torch.nn.Module, loss_of: Callable[[Tensor], Tensor], dtype: str, shape: Shape
) -> Callable[[int], None]:
    """Return a plain training step: accumulation, clipping, fused AdamW; bf16 as autocast over fp32 weights."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    micro_batches = shape.global_batch // shape.micro_batch

    def step(number: int) -> None:
        for tokens in shape.batch(number).chunk(micro_batches):
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bf16"):
                loss = loss_of(tokens)
            (loss / micro_batches).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return step
