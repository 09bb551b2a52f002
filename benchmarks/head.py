"""Measure time and memory of the loss of a head with a large vocabulary: all logits at once, and in chunks.

    python benchmarks/head.py [--rounds 3] [--vocab 131072] [--tokens 4096] [--hidden 512]

One forward and backward pass of `LinearCrossEntropy`, fp32 and bf16, in a process each, in turns. *Tokens, gradients at
once* is the alternative of Liger Kernel (arXiv 2410.10989): chunks of tokens whose gradients are computed in the
forward pass, with one matrix product fewer. Memory is the peak of the process above its start, including the gradient
of the weight.
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
from contest import Contestant, contest
from hardware import hardware_line
from rich.console import Console
from rich.table import Table
from torch import Tensor

from threefold.host import keep_freed_memory
from threefold.models.layers.decoder import Linear, LinearCrossEntropy
from threefold.ops.kernels import product

COLUMNS, TOKENS = 8192, 256
"""Sizes of chunks that hold 128 MiB of fp32 logits, for 131,072 columns and 4,096 tokens."""
MIB = 1 << 20
WAYS = ("all at once", f"{COLUMNS} columns", f"{TOKENS} tokens, gradients at once")


def head_step(way: str, dtype: str, sizes: tuple[int, int, int], report: str) -> Callable[[int], None]:
    """Return a function that does one pass and writes the process's peak memory into `report`."""
    keep_freed_memory()  # as `threefold.train.run` does
    vocab, tokens, hidden = sizes
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    output = Linear(hidden, vocab, bias=False, dtype=kind)
    x = torch.randn(tokens, hidden, dtype=kind, requires_grad=True)
    labels = torch.randint(0, vocab, (tokens,))
    loss = LinearCrossEntropy(COLUMNS if way == WAYS[1] else 0)
    before = _resident()

    def step(_: int) -> None:
        x.grad = output.weight.grad = None
        if way == WAYS[2]:
            x.grad, output.weight.grad = by_tokens(x.detach(), output.weight.detach(), labels)
        else:
            (loss(x, output, labels).sum() / tokens).backward()
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        Path(report).write_text(str(most - before))

    return step


def by_tokens(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients of the mean loss, computed in chunks of tokens."""
    grad_x, grad_weight = torch.empty_like(x), torch.zeros_like(weight, dtype=torch.float32)
    for rows, columns, out in zip(x.split(TOKENS), labels.split(TOKENS), grad_x.split(TOKENS), strict=True):
        logits = product(rows, weight).float()
        probabilities = logits.sub_(logits.amax(1, keepdim=True)).exp_()
        grad = probabilities.mul_((1 / len(x)) / probabilities.sum(1, keepdim=True))
        grad = grad.scatter_add_(1, columns.unsqueeze(1), grad.new_full((len(rows), 1), -1 / len(x))).to(x.dtype)
        out.copy_(product(grad, weight.t()))
        grad_weight += product(grad.t(), rows.t())
    return grad_x, grad_weight.to(weight.dtype)


def _resident() -> int:
    """Return the resident memory of this process in bytes (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each, of which the medians are printed")
    for name, default in (("vocab", 131072), ("tokens", 4096), ("hidden", 512)):
        parser.add_argument(f"--{name}", type=int, default=default)
    arguments = parser.parse_args()
    sizes = arguments.vocab, arguments.tokens, arguments.hidden
    table = Table(title=f"Vocabulary {sizes[0]}, {sizes[1]} tokens, hidden {sizes[2]}", title_justify="left")
    for heading in ("", "logits at once", "seconds", "largest memory, MiB"):
        table.add_column(heading, justify="right")
    for dtype in ("fp32", "bf16"):
        with tempfile.TemporaryDirectory() as folder:
            report = partial(os.path.join, folder)
            contestants = [Contestant(way, head_step, (way, dtype, sizes, report(way))) for way in WAYS]
            seconds = contest(contestants, arguments.rounds, 1)
            for way in WAYS:
                most = int(Path(report(way)).read_text()) / MIB
                table.add_row(dtype, way, f"{statistics.median(seconds[way]):.2f}", f"{most:,.0f}")
    console = Console()
    console.print(hardware_line(), highlight=False, soft_wrap=True)
    console.print(table)


if __name__ == "__main__":
    main()
