"""Train a causal language model of `transformers`, data and tensor parallel by the names of its modules.

    torchrun --nproc-per-node 4 examples/transformers_model.py --tp 2
    python examples/transformers_model.py            # the same losses, on one process

The model is built from a config with random weights, so that nothing is downloaded; `from_pretrained` works as well.
"""

import argparse

import torch
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

import threefold as t3

TABLE = {
    "**.self_attn.*_proj": t3.Column(),
    "**.self_attn.o_proj": t3.Row(),
    "**.mlp.*_proj": t3.Column(),
    "**.mlp.down_proj": t3.Row(),
    "**.embed_tokens": t3.Vocab(),
    "lm_head": t3.Vocab(),
}


def sentences() -> list[torch.Tensor]:
    """Return sequences that count up from different numbers: tokens that are easy to predict."""
    return [(torch.arange(24) * step + start) % 64 for start in range(16) for step in (1, 3)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--zero", type=int, default=0)
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    mesh = t3.init_mesh(tp=given.tp)

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=88,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=False,
    )
    model = AutoModelForCausalLM.from_config(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(sentences(), batch_size=10, shuffle=True, generator=torch.Generator().manual_seed(0))

    table = TABLE if given.tp > 1 else None
    model, optimizer, loader = t3.prepare(model, optimizer, loader, mesh=mesh, zero=given.zero, tensor_parallel=table)
    for epoch in range(given.epochs):
        for ids in loader:
            t3.backward(model(input_ids=ids, labels=ids).loss)
            t3.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if mesh.rank == 0:
            print(f"epoch {epoch + 1}: loss {optimizer.loss:.5f}")


if __name__ == "__main__":
    main()
