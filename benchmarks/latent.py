"""Measure a block of latent attention beside plain implementations of the same, in training and in generation.

    python benchmarks/latent.py [--rounds 5] [--length 256 1024 2048] [--dtype fp32 bf16] [--elapsed]

A forward and backward pass of DeepSeek-V2-Lite's attention (16 heads, latents of 512), in turns: this package's
`LatentAttention`, and the formulas of the paper around torch's `scaled_dot_product_attention`. Then one token's
attention to that many cached positions: the absorbed form over a cache of latents, and plain ones over a cache of all
heads' keys and values, and of latents from which these are computed again. Memory is the peak of the process above its
start, and what the cache holds. Times are those of the processor unless `--elapsed`, so that other programs matter
little.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from attention import MIB, peak, resident
from contest import Contestant, contest, ratio
from hardware import hardware_line
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.config import Config, resolve
from threefold.host import keep_freed_memory
from threefold.models.layers.latent_attention import LatentAttention
from threefold.models.layers.latent_config import LatentConfig
from threefold.models.layers.rope_scaling import frequencies, rope_scaling

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
HIDDEN = 2048


def settings() -> LatentConfig:
    given = {"model": {"preset": "deepseek-v2-lite"}, "data": {"path": "unused", "sequence_length": 4096}}
    config = resolve(Config.model_validate(given), 1).model
    assert isinstance(config, LatentConfig)
    return config


class PlainLatentAttention(nn.Module):
    """The same layer with the same weights, as equations 9 to 19 of arXiv 2405.04434 say, without low-rank queries."""

    def __init__(self, config: LatentConfig, weights: LatentAttention) -> None:
        super().__init__()
        self.heads, self.rank = config.num_attention_heads, config.key_value_rank
        self.of_queries = config.plain_head_dim, config.rope_head_dim
        self.of_keys = config.plain_head_dim, config.value_head_dim
        self.scale = config.head_dim**-0.5 * config.score_factor
        self.turns = frequencies(config.rope_head_dim, config.rope_theta, rope_scaling(config), 1)
        self.factor = rope_scaling(config).attention_factor
        self.q, self.kv_down, self.kv, self.proj = (
            nn.Linear(*reversed(each.shape), bias=False)
            for each in (weights.q.weight, weights.kv_down.weight, weights.kv.weight, weights.proj.weight)
        )
        self.kv_norm = nn.RMSNorm(self.rank, 1e-6)
        self.load_state_dict(weights.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        queries, (keys, values) = self.queries(x), self.keys_and_values(self.latents(x))
        return self.attend(queries, keys, values, True)

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, causal: bool) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (queries, keys, values))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.scale)
        return self.proj(out.transpose(1, 2).flatten(2))

    def queries(self, x: Tensor) -> Tensor:
        plain, turning = self.q(x).unflatten(-1, (self.heads, -1)).split(self.of_queries, -1)
        return torch.cat([plain, self._turned(turning)], -1)

    def latents(self, x: Tensor) -> Tensor:
        latent, turning = self.kv_down(x).split([self.rank, self.of_queries[1]], -1)
        return torch.cat([self.kv_norm(latent), self._turned(turning.unsqueeze(2)).squeeze(2)], -1)

    def keys_and_values(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        latent, turned = latents.split([self.rank, self.of_queries[1]], -1)
        plain, values = self.kv(latent).unflatten(-1, (self.heads, -1)).split(self.of_keys, -1)
        return torch.cat([plain, turned.unsqueeze(2).expand(-1, -1, self.heads, -1)], -1), values

    def _turned(self, x: Tensor) -> Tensor:
        angles = torch.arange(x.shape[1]).double().unsqueeze(1) * self.turns
        cos, sin = ((each * self.factor).to(x.dtype).unsqueeze(1) for each in (angles.cos(), angles.sin()))
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def layers(dtype: str) -> tuple[LatentAttention, PlainLatentAttention]:
    torch.manual_seed(0)
    config = settings()
    package = LatentAttention(config, 0, "blocks.0.attn")
    return package.to(DTYPES[dtype]), PlainLatentAttention(config, package).to(DTYPES[dtype])


def passes(way: str, length: int, dtype: str, report: str) -> Callable[[int], None]:
    """Return a function that does a forward and backward pass, and writes the process's peak memory into `report`."""
    keep_freed_memory()  # as `threefold.train.run` does
    module: nn.Module = layers(dtype)[way == "plain"]
    x = torch.randn(1, length, HIDDEN).to(DTYPES[dtype]).requires_grad_()
    return partial(_pass, module, x, report, resident())


def _pass(module: nn.Module, x: Tensor, report: str, before: int, _: int) -> None:
    module.zero_grad()
    out: Tensor = module(x)
    out.backward(torch.ones_like(out))
    Path(report).write_text(str(peak() - before))


def decoding(way: str, length: int, dtype: str, report: str) -> Callable[[int], None]:
    """Return a function that attends from a new token to `length` cached ones; the cache's size goes into `report`."""
    package, plain = (each.requires_grad_(False) for each in layers(dtype))
    x, before = (torch.randn(1, count, HIDDEN).to(DTYPES[dtype]) for count in (1, length))
    latents = package.latents(before)
    kept = plain.keys_and_values(latents) if way == "kept" else (latents,)
    hidden = torch.zeros(1, length, dtype=torch.bool)
    Path(report).write_text(str(sum(each.nbytes for each in kept)))

    def step(_: int) -> None:
        module = package if way == "package" else plain
        new, queries = module.latents(x), module.queries(x)
        for cached, each in zip(kept, plain.keys_and_values(new) if way == "kept" else (new,), strict=True):
            cached[:, -1:] = each
        if way == "package":
            package.proj(package.absorbed(queries, latents, hidden))
        else:
            plain.attend(queries, *(kept if way == "kept" else plain.keys_and_values(latents)), False)

    return step


def check() -> None:
    """Compare all ways in fp32, before their times are."""
    package, plain = (each.requires_grad_(False) for each in layers("fp32"))
    x = torch.randn(1, 9, HIDDEN)
    torch.testing.assert_close(package(x), plain(x), atol=1e-5, rtol=1e-5)
    q, latents = package.queries(x)[:, -1:], package.latents(x)
    absorbed = package.proj(package.absorbed(q, latents, torch.zeros(1, 9, dtype=torch.bool)))
    torch.testing.assert_close(absorbed, plain(x)[:, -1:], atol=1e-5, rtol=1e-5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each, of which the medians are printed")
    parser.add_argument("--length", type=int, nargs="+", default=[256, 1024, 2048])
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--elapsed", action="store_true", help="elapsed time, not that of the processor")
    args = parser.parse_args()
    check()
    table = Table("", "dtype", "tokens", "way", "ms", "of plain", "MiB")
    kinds = (("forward and backward", passes, 1, ("plain", "package")), ("a token", decoding, 10, TOKEN_WAYS))
    for what, make, steps, ways in kinds:
        for dtype in args.dtype:
            for length in args.length:
                _measure(table, what, make, steps, ways, (length, dtype), args)
    console = Console()
    console.print(hardware_line(), highlight=False, soft_wrap=True)
    console.print(table)


TOKEN_WAYS = ("kept", "again", "package")


def _measure(
    table: Table,
    what: str,
    make: Callable[..., Callable[[int], None]],
    steps: int,
    ways: tuple[str, ...],
    case: tuple[int, str],
    args: argparse.Namespace,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        contestants = [
            Contestant(way, make, (way, *case, f"{folder}/{way}"), launched=False, elapsed=args.elapsed) for way in ways
        ]
        found = contest(contestants, args.rounds, steps)
        for way in ways:
            ms, part = statistics.median(found[way]) * 1000, 1 / ratio(found[way], found[ways[0]])
            memory = int(Path(folder, way).read_text()) / MIB
            table.add_row(what, case[1], f"{case[0]:,}", way, f"{ms:.1f}", f"{part:.2f}", f"{memory:.1f}")


if __name__ == "__main__":
    main()
