"""Contestants of `gpu.py`: Threefold, and its alternatives, each set up as its users would."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from plain_gpt import PlainGPT
from torch import Tensor, nn

from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.config.presets import PRESETS
from threefold.data.loader import Batch
from threefold.huggingface.files import choose_type, write_model
from threefold.models.family import make_model, model_plan
from threefold.train.step import Engine

LEARNING_RATE, BETAS, WEIGHT_DECAY, CLIP = 3e-4, (0.9, 0.95), 0.1, 1.0
TINY: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "ffn_hidden_size": 128,
    "vocab_size": 512,
}
"""Sizes for trying the script on a CPU."""

Step = Callable[[int], float]
"""Function that runs step number 0, 1, 2, … of a training run and returns its loss."""


@dataclass(frozen=True)
class Training:
    """One training task.

    Attributes:
        preset: model, a value of `model.preset`.
        sequence: tokens of a sample.
        tokens: tokens of a step.
        micro_batch: samples per forward pass.
        compiled: whether to use `torch.compile`.
        tiny: whether to use the sizes of `TINY`.
    """

    preset: str
    sequence: int
    tokens: int
    micro_batch: int
    dtype: str
    device: str
    compiled: bool
    tiny: bool

    @cached_property
    def config(self) -> Config:
        """Return Threefold's resolved config."""
        # Published models have positions for their own length only.
        positions = max(self.sequence, PRESETS[self.preset]["max_position_embeddings"])
        sizes: dict[str, Any] = {"max_position_embeddings": positions}
        sizes |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        if self.tiny:
            sizes |= TINY | ({"num_key_value_heads": 2, "head_dim": 16} if self.preset.startswith("llama") else {})
        given: dict[str, Any] = {
            "model": {"preset": self.preset, **sizes},
            "data": {"path": "none", "sequence_length": self.sequence},
            "train": {
                "global_batch_size": self.tokens // self.sequence,
                "micro_batch_size": self.micro_batch,
                "compile": self.compiled,
                "device": self.device,
            },
            "precision": {"dtype": self.dtype},
            "optimizer": {
                "lr": LEARNING_RATE,
                "betas": BETAS,
                "weight_decay": WEIGHT_DECAY,
                "clip_grad_norm": CLIP,
            },
        }
        return resolve(Config.model_validate(given), TINY["vocab_size"] if self.tiny else 0)

    def batch(self, step: int) -> Tensor:
        """Return int64 [samples, sequence + 1] on the host, in pinned memory beside a GPU."""
        vocab = self.config.model.vocab_size
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(0, vocab, (self.tokens // self.sequence, self.sequence + 1), generator=generator)
        return tokens.pin_memory() if self.device == "cuda" else tokens


def threefold_step(training: Training) -> Step:
    """Set up Threefold's engine, in an initialised process group of this one rank."""
    config = training.config
    mesh = Mesh(Layout(), torch.device(training.device, 0) if training.device == "cuda" else training.device)
    plan = model_plan(config.model, training.sequence)
    engine = Engine(partial(make_model, config.model), plan, mesh, config)

    def step(number: int) -> float:
        tokens = training.batch(number)
        rows = torch.arange(len(tokens))
        return engine.train_step(Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), rows), number).loss

    return step


def plain_step(training: Training) -> Step:
    """Set up a GPT of torch modules only (`plain_gpt.py`)."""
    model = training.config.model
    sizes = (model.num_layers, model.hidden_size, model.num_attention_heads, model.ffn_hidden_size, model.vocab_size)
    return _plain_loop(training, PlainGPT(*sizes, training.sequence))


def transformers_step(training: Training) -> Step:
    """Set up the model of `transformers` in a plain training loop."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = training.config.model
    kind = choose_type(model, None)
    settings = write_model(model, kind, "float32", None, {}) | {"use_cache": False}
    config = AutoConfig.for_model(**{key: value for key, value in settings.items() if key != "architectures"})
    config.bos_token_id = config.eos_token_id = 0
    made = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = made

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            logits = self.model(input_ids=tokens).logits
            loss: Tensor = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            return loss

    return _plain_loop(training, WithLoss())


def litgpt_step(training: Training) -> Step:
    """Set up the Llama model of `litgpt` in a plain training loop; it has no learned positions for GPT."""
    from litgpt import GPT
    from litgpt import Config as LitConfig

    model = training.config.model
    config = LitConfig(
        block_size=training.sequence,
        n_layer=model.num_layers,
        n_embd=model.hidden_size,
        n_head=model.num_attention_heads,
        n_query_groups=model.num_key_value_heads,
        head_size=model.head_dim,
        intermediate_size=model.ffn_hidden_size,
        vocab_size=model.vocab_size,
        padded_vocab_size=model.vocab_size,
        norm_class_name="RMSNorm",
        mlp_class_name="LLaMAMLP",
        rotary_percentage=1.0,
        rope_base=int(model.rope_theta),
        parallel_residual=False,
        bias=False,
    )

    class WithLoss(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = GPT(config)
            if model.tie_embeddings:
                self.model.lm_head.weight = self.model.transformer.wte.weight
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)

        def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
            loss: Tensor = nn.functional.cross_entropy(self.model(tokens).flatten(0, 1).float(), labels.flatten())
            return loss

    return _plain_loop(training, WithLoss())


def _plain_loop(training: Training, model: nn.Module) -> Step:
    """Train with fused AdamW, bf16 autocast over fp32 weights, gradient accumulation and clipping."""
    device = torch.device(training.device)
    model = model.to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY, fused=True
    )
    run = torch.compile(model) if training.compiled else model
    micro_batches = training.tokens // training.sequence // training.micro_batch

    def step(number: int) -> float:
        total = torch.zeros((), device=device)
        for tokens in training.batch(number).to(device, non_blocking=True).chunk(micro_batches):
            with torch.autocast(device.type, torch.bfloat16, enabled=training.dtype == "bf16"):
                loss = run(tokens[:, :-1], tokens[:, 1:]) / micro_batches
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        return float(total)

    return step


@dataclass(frozen=True)
class Contestant:
    """One way to train.

    Attributes:
        module: module that must be installed; empty for none.
        families: prefixes of the presets that it supports.
    """

    name: str
    make_step: Callable[[Training], Step]
    module: str = ""
    families: tuple[str, ...] = ("gpt", "llama")

    def can_train(self, preset: str) -> bool:
        """Return whether it is installed and supports the preset."""
        return preset.startswith(self.families) and (
            not self.module or importlib.util.find_spec(self.module) is not None
        )


CONTESTANTS = (
    Contestant("Threefold", threefold_step),
    Contestant("transformers", transformers_step, "transformers"),
    Contestant("litgpt", litgpt_step, "litgpt", ("llama",)),
    Contestant("plain module", plain_step, families=("gpt",)),
)
