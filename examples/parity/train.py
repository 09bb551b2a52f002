"""Trains a small GPT in plain PyTorch: FSDP2 over `dp`, tensor parallelism over `tp`; alone, on one process."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import threefold_parity as parity

VOCABULARY, WIDTH, HEADS, LENGTH, BATCH, MICRO_BATCHES = 96, 32, 4, 16, 8, 2


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for each in (self.q, self.k, self.v)]
        return self.out(F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def parallelize(model: GPT, dp: int, tp: int) -> None:
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    for block in model.blocks:
        column, row = ColwiseParallel(), RowwiseParallel()
        plan = {f"attention.{name}": column for name in "qkv"} | {"attention.out": row, "up": column, "down": row}
        parallelize_module(block, mesh["tp"], plan)
    for module in (*model.blocks, model) if dp > 1 else ():
        fully_shard(module, mesh=mesh["dp"])


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--tp", type=int, default=1)
    tp = options.parse_args().tp
    world, rank = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("RANK", 0))
    dp, replica = world // tp, rank // tp
    torch.manual_seed(0)
    model = GPT()
    if world > 1:
        dist.init_process_group("gloo")
        parallelize(model, dp, tp)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    recorder = parity.Recorder(model, optimizer, axes={"dp": dp, "tp": tp})
    data = torch.Generator().manual_seed(1)
    for _ in range(100):
        batch = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)
        for part in batch.chunk(dp)[replica].chunk(MICRO_BATCHES):
            loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten())
            (loss / MICRO_BATCHES).backward()
        recorder.after_backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
