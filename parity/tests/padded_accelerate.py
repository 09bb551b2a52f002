"""Trains a small causal model with Accelerate on rows that its prepared loader pads, batch by batch."""

import sys

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch import Tensor, nn
from torch.utils.data import DataLoader

import threefold_parity as parity
from threefold_parity.accelerate import AccelerateAdapter

WORDS, WIDTH, BATCH = 41, 16, 8


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(tokens)
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        seen = attention_mask.bool()[:, None, None] & torch.ones(tokens.shape[1], tokens.shape[1]).bool().tril()
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen).transpose(1, 2).flatten(2)
        return self.head(x + self.out(mixed))


def padded(rows: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, attention mask and labels, as long as the longest of the rows."""
    tokens = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    mask = nn.utils.rnn.pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    labels = tokens.roll(-1, 1).masked_fill(mask.roll(-1, 1) == 0, -100)
    labels[:, -1] = -100
    return tokens, mask, labels


def main(samples: int) -> None:
    loading = DataLoaderConfiguration(split_batches=True)
    accelerator = Accelerator(cpu=True, dataloader_config=loading)
    draws = torch.Generator().manual_seed(1)
    lengths = torch.randint(3, 12, (samples,), generator=draws).tolist()
    data = [torch.randint(1, WORDS, (length,), generator=draws) for length in lengths]
    torch.manual_seed(0)
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(data, BATCH, collate_fn=padded)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    recorder = parity.Recorder(model, optimizer, AccelerateAdapter(), epoch_steps=len(loader))
    for _ in range(2):
        for tokens, mask, labels in loader:
            count = accelerator.reduce((labels != -100).sum())
            losses = F.cross_entropy(
                model(tokens, attention_mask=mask).flatten(0, 1), labels.flatten(), reduction="sum"
            )
            accelerator.backward(losses * accelerator.num_processes / count)  # DistributedDataParallel takes means
            recorder.after_backward(accelerator.reduce(losses.detach()) / count)
            optimizer.step()
            optimizer.zero_grad()
    recorder.close()


if __name__ == "__main__":
    main(int(sys.argv[1]))
