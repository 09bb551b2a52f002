"""Measure time and memory of attention over long sequences, windowed and inside documents, beside alternatives.

    python benchmarks/attention.py [--rounds 3] [--length 2048 8192] [--kind softcap sinks] [--window 64 256]
        [--before CHECKOUT] [--flex] [--processor]

Each contestant runs one forward and backward pass, fp32 and bf16, in a process of its own, in turns: this package's
attention in windows, inside documents of 512 tokens on average (exponentially distributed), and of whole
sequences with a soft cap or sinks, the first two beside torch's `scaled_dot_product_attention` under a mask, the last
two beside plain operations with an attention matrix; torch's fused causal attention over the whole sequence, without
further masks; with `--before` another checkout of this package; with
`--flex` torch's compiled flex attention with a block mask, then forward passes only, as it has no backward pass on a
CPU. Memory is the peak of the process above its start. `--processor` counts the time of processors, for busy machines.
"""

import argparse
import os
import resource
import statistics
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from contest import Contestant, contest, ratio
from hardware import hardware_line
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from threefold.host import keep_freed_memory
from threefold.models.layers.attention import CausalAttention
from threefold.models.layers.decoder import SampleInfo

HEADS, WIDTH, DOCUMENT, SOFTCAP = 8, 64, 512, 50.0
MIB = 1 << 20


def document_numbers(length: int) -> Tensor:
    """Return document numbers, int64 [1, length], for documents of `DOCUMENT` tokens on average."""
    draw = torch.Generator().manual_seed(0)
    lengths = torch.empty(length).exponential_(1 / DOCUMENT, generator=draw).long() + 1
    return torch.repeat_interleave(torch.arange(length), lengths)[:length].unsqueeze(0)


def attention_pass(
    way: str, hides: str, window: int, dtype: str, length: int, report: str, forward: bool
) -> Callable[[int], None]:
    """Return a function that does one pass and writes the process's peak memory into `report`.

    Args:
        way: `package`, `fused`, `masked`, `plain` or `flex`.
        hides: `window`, `documents`, `softcap` or `sinks`.
        window: positions that a token attends to; 0 for all.
        forward: whether to leave out the backward pass.
    """
    keep_freed_memory()  # as `threefold.train.run` does
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    draw = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(1, length, HEADS, WIDTH, generator=draw).to(kind).requires_grad_(not forward) for _ in range(3)
    ]
    grad = torch.randn(1, length, HEADS * WIDTH, generator=draw).to(kind)
    documents, before = document_numbers(length), resident()
    if way == "package":
        other = {"softcap": SOFTCAP} if hides == "softcap" else {"sinks": HEADS} if hides == "sinks" else {}
        core = CausalAttention(window=window, **other).to(kind)
        compute = partial(core, samples=SampleInfo(documents=documents if hides == "documents" else None))
    else:
        plain = partial(_plain, hides == "softcap")
        mask = _mask(window, documents[0], length) if way == "masked" else None
        fused = partial(_fused, mask)
        compute = plain if way == "plain" else _flex(window, documents[0], length) if way == "flex" else fused

    def step(_: int) -> None:
        for each in inputs:
            each.grad = None
        out = compute(*inputs)
        if not forward:
            out.backward(grad)
        Path(report).write_text(str(peak() - before))

    return step


def _fused(mask: Tensor | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return out.transpose(1, 2).flatten(2)


def _mask(window: int, documents: Tensor, length: int) -> Tensor:
    query, key = torch.arange(length).unsqueeze(1), torch.arange(length)
    near = query - key < window if window else documents.unsqueeze(1) == documents
    return (key <= query) & near


def _plain(capped: bool, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if capped:
        scores = SOFTCAP * torch.tanh(scores / SOFTCAP)
    scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if not capped:
        scores = torch.cat([scores, scores.new_zeros(*scores.shape[:-1], 1)], -1)
    return (scores.softmax(-1)[..., : k.shape[2]] @ v).transpose(1, 2).flatten(2)


def _flex(window: int, documents: Tensor, length: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    def attended(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        near = query - key < window if window else documents[query] == documents[key]
        return (key <= query) & near

    mask = create_block_mask(attended, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)

    def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        return compiled(q, k, v, block_mask=mask).transpose(1, 2).flatten(2)

    return compute


def resident() -> int:
    """Return the resident memory of this process in bytes (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Return the most resident memory that this process has had, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each, of which the medians are printed")
    parser.add_argument("--length", type=int, nargs="+", default=[2048, 8192])
    parser.add_argument("--dtype", nargs="+", default=["fp32", "bf16"])
    parser.add_argument("--kind", nargs="+", default=["window", "documents", "softcap", "sinks"])
    parser.add_argument("--window", type=int, nargs="+", default=[256])
    parser.add_argument("--before", default="", help="another checkout of this package")
    parser.add_argument("--flex", action="store_true", help="torch's flex attention too, forward passes alone")
    parser.add_argument("--processor", action="store_true", help="the time of processors, not elapsed time")
    arguments = parser.parse_args()
    table = Table(title="One forward pass" + " and backward pass" * (not arguments.flex), title_justify="left")
    for heading in ("S", "dtype", "hides", "way", "ms", "of causal", "MiB"):
        table.add_column(heading, justify="right")
    for length in arguments.length:
        for dtype in arguments.dtype:
            _measure(table, length, dtype, arguments)
    console = Console()
    console.print(hardware_line(), highlight=False, soft_wrap=True)
    console.print(table)


def _measure(table: Table, length: int, dtype: str, arguments: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        ways = [("causal", 0, "fused", "", "")]
        kinds = [
            (hides, window) for hides in arguments.kind for window in (arguments.window if hides == "window" else [0])
        ]
        for hides, window in kinds:
            ways.append((hides, window, "package", "", "tiles"))
            if hides in ("softcap", "sinks"):
                ways.append((hides, window, "plain", "", "plain"))
                continue
            ways.append((hides, window, "masked", "", "masked"))
            if arguments.before:
                ways.append((hides, window, "package", arguments.before, "before"))
            if arguments.flex:
                ways.append((hides, window, "flex", "", "flex"))
        contestants = []
        for hides, window, way, tree, shown in ways:
            name = f"{hides}{window}{shown}"
            given = (way, hides, window, dtype, length, os.path.join(folder, name), arguments.flex)
            one = Contestant(name, attention_pass, given, launched=False, tree=tree, elapsed=not arguments.processor)
            contestants.append(one)
        seconds = contest(contestants, arguments.rounds, 1)
        for hides, window, _, _, shown in ways:
            name = f"{hides}{window}{shown}"
            most = int(Path(folder, name).read_text()) / MIB
            part = 1 / ratio(seconds[name], seconds["causal0"])
            found = f"{statistics.median(seconds[name]) * 1000:.0f}", f"{part:.2f}", f"{most:,.0f}"
            table.add_row(f"{length:,}", dtype, _hidden(hides, window), shown or "fused", *found)


def _hidden(hides: str, window: int) -> str:
    return "nothing else" if hides == "causal" else f"{hides} {window or ''}".strip()


if __name__ == "__main__":
    main()
