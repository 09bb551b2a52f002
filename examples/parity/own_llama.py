"""Trains a Llama of two layers: that of `transformers`, or with `--own` one written by hand, with fused projections.

    threefold parity run --reference 'python own_llama.py' --candidate 'python own_llama.py --own'

`place` gives the hand-written model's tensors the names that they have in `transformers`.
"""

import argparse
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaConfig, LlamaForCausalLM

import threefold_parity as parity

VOCABULARY, LENGTH, BATCH, HIDDEN, HEADS, KV_HEADS, FFN = 96, 16, 8, 32, 4, 2, 44
HEAD = HIDDEN // HEADS
QUERIES, KEYS = HEADS * HEAD, KV_HEADS * HEAD


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, QUERIES + 2 * KEYS, bias=False)
        self.out = nn.Linear(QUERIES, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(x).split((QUERIES, KEYS, KEYS), -1)
        q, k, v = (part.unflatten(-1, (-1, HEAD)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True, enable_gqa=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Linear(HIDDEN, 2 * FFN, bias=False)
        self.down = nn.Linear(FFN, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(HIDDEN, 1e-6), Attention()
        self.mlp_norm, self.mlp = nn.RMSNorm(HIDDEN, 1e-6), MLP()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Llama(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.RMSNorm(HIDDEN, 1e-6), nn.Linear(HIDDEN, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def rotated(x: Tensor) -> Tensor:
    frequencies = 1 / 10000 ** (torch.arange(0, HEAD, 2) / HEAD)
    angles = torch.outer(torch.arange(x.shape[2]), frequencies).repeat(1, 2)
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "attention": "self_attn",
    "attention.out": "self_attn.o_proj",
    "attention_norm": "input_layernorm",
    "mlp": "mlp",
    "mlp.down": "mlp.down_proj",
    "mlp_norm": "post_attention_layernorm",
}


def place(what: str, name: str, tensor: Tensor) -> parity.Placement | list[parity.Placement] | None:
    """Give a tensor its name in `transformers`; the fused projections have several."""
    module = name.removesuffix(".weight") if what == "parameter" else name
    layer, inside = "", module
    if module.startswith("blocks."):
        number, _, inside = module.removeprefix("blocks.").partition(".")
        layer = f"model.layers.{number}" + ("." if inside else "")
    if what == "parameter" and inside == "attention.qkv":
        sizes = {"q_proj": QUERIES, "k_proj": KEYS, "v_proj": KEYS}
        return parity.fused(tensor, {f"{layer}self_attn.{each}.weight": size for each, size in sizes.items()})
    if what == "parameter" and inside == "mlp.gate_up":
        return parity.fused(tensor, {f"{layer}mlp.{each}.weight": FFN for each in ("gate_proj", "up_proj")})
    called = layer + NAMES.get(inside, inside)
    return parity.whole(tensor, name=f"{called}.weight" if what == "parameter" else called)


def batches() -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(100):
        yield torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=generator)


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--own", action="store_true")
    own = options.parse_args().own
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": 2, "max_position_embeddings": LENGTH}
    heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS}
    model = Llama() if own else LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **sizes, **heads))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    recorder = parity.Recorder(model, optimizer, place if own else None)
    for rows in batches():
        tokens, labels = rows[:, :-1], rows[:, 1:]
        logits = model(tokens) if own else model(input_ids=tokens).logits
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        loss.backward()
        recorder.after_backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
