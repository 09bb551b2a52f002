"""Measure a block of latent attention beside a plain implementation of the same, and the KV cache's two forms.

    python benchmarks/latent.py [--rounds 3] [--length 512 2048]

A forward and backward pass of DeepSeek-V2-Lite's attention (16 heads, latents of 512), in turns: this package's
`LatentAttention`, and the same by plain operations: products, softmax under a mask, products. Then decoding one token
with that many positions in the cache: the absorbed form, and keys and values computed again from all latents.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
from contest import Contestant, contest, ratio
from hardware import hardware_line
from rich.console import Console
from rich.table import Table
from torch import Tensor

from threefold.config import Config, resolve
from threefold.models.layers.latent_attention import LatentAttention
from threefold.models.layers.latent_config import LatentConfig


def attention() -> LatentAttention:
    """Return the attention of DeepSeek-V2-Lite."""
    given = {"model": {"preset": "deepseek-v2-lite"}, "data": {"path": "unused", "sequence_length": 4096}}
    config = resolve(Config.model_validate(given), 1).model
    assert isinstance(config, LatentConfig)
    torch.manual_seed(0)
    return LatentAttention(config, 0, "blocks.0.attn")


def plain(module: LatentAttention, x: Tensor) -> Tensor:
    """Compute `module(x)` with an attention matrix."""
    q, (k, v) = module.queries(x), module.keys_and_values(module.latents(x))
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
    weights = (q @ k.mT * module.core.scoring.factor(q.shape[-1])).masked_fill(later, -torch.inf).softmax(-1)
    return module.proj((weights @ v).transpose(1, 2).flatten(2))


def passes(way: str, length: int) -> Callable[[int], None]:
    """Return a function that does a forward and backward pass."""
    module = attention()
    x = torch.randn(1, length, 2048).requires_grad_()
    return partial(_pass, module if way == "package" else partial(plain, module), x)


def _pass(compute: Callable[[Tensor], Tensor], x: Tensor, _: int) -> None:
    out = compute(x)
    out.backward(torch.ones(out.shape))


def decoding(way: str, length: int) -> Callable[[int], None]:
    """Return a function that attends from one token to `length` cached ones."""
    module = attention().requires_grad_(False)
    cached, x = module.latents(torch.randn(1, length, 2048)), torch.randn(1, 1, 2048)
    return partial(_decode, way, module, cached, x)


def _decode(way: str, module: LatentAttention, cached: Tensor, x: Tensor, _: int) -> None:
    q = module.queries(x)
    if way == "package":
        module.absorbed(q, cached, torch.zeros(1, cached.shape[1], dtype=torch.bool))
    else:
        module.core(q, *module.keys_and_values(cached))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--length", type=int, nargs="+", default=[512, 2048])
    args = parser.parse_args()
    table = Table("", "tokens", "package, ms", "plain, ms", "plain / package")
    for what, make, steps in (("forward and backward", passes, 1), ("decoding a token", decoding, 10)):
        for length in args.length:
            pair = [Contestant(way, make, (way, length), launched=False) for way in ("package", "plain")]
            found = contest(pair, args.rounds, steps)
            times = (f"{statistics.median(found[way]) * 1000:.1f}" for way in ("package", "plain"))
            table.add_row(what, f"{length:,}", *times, f"{ratio(found['package'], found['plain']):.2f}")
    console = Console()
    console.print(hardware_line(), highlight=False, soft_wrap=True)
    console.print(table)


if __name__ == "__main__":
    main()
