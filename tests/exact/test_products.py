"""Products of exact runs: the same bits in every cut and with any number of threads, whatever the kernel does."""

import os
import subprocess
import sys
from collections.abc import Iterator
from math import gcd
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.exact.support import tree
from tests.support.bits import drawn, equal, same_in_threads
from tests.support.kernels import KERNELS, products_of
from threefold.exact import products as exact_products
from threefold.exact.layers import RowSum, context_parts
from threefold.exact.products import PRODUCTS, WHOLE, Products, equal_parts

PIECES = 8
SHAPES = ((24, 32, 48), (48, 4, 32), (3, 17, 8))
"""Rows, terms and columns, some of which the pieces do not divide."""


@pytest.fixture(autouse=True)
def threads_stay() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def check_cuts(products: Products, rows: int, inner: int, columns: int, dtype: torch.dtype, threads: int) -> None:
    """Compare the products of a layer, forward and backward, with those of ranks with other numbers of threads."""
    pieces = gcd(PIECES, columns)
    x, weight, grad = (drawn(*s, seed=sum(s)).to(dtype) for s in ((rows, inner), (columns, inner), (rows, columns)))
    torch.set_num_threads(1)
    whole = products.product(x, weight, 1, WHOLE, pieces)
    of_x = products.product(grad, weight.t(), pieces)
    of_weight = products.product(grad.t(), x.t(), 1, equal_parts(pieces))
    torch.set_num_threads(threads)
    for ranks in (each for each in (1, 2, 8) if pieces % each == 0):
        own, parts = pieces // ranks, [*zip(weight.chunk(ranks), grad.chunk(ranks, 1), strict=True)]
        assert equal(torch.cat([products.product(x, part, 1, WHOLE, own) for part, _ in parts], 1), whole)
        assert equal(tree([products.product(upper.contiguous(), part.t(), own) for part, upper in parts]), of_x)
        found = [products.product(upper.contiguous().t(), x.t(), 1, equal_parts(own)) for _, upper in parts]
        assert equal(torch.cat(found), of_weight)


@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_that_misbehave_leave_the_bits(kernel: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        products = products_of(KERNELS[kernel])
        for shape in SHAPES:
            check_cuts(products, *shape, dtype, 2)
        assert products.refused, "the trials found nothing"


@pytest.mark.parametrize("kernel", KERNELS)
def test_batches_of_kernels_that_misbehave_leave_the_bits(kernel: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        products = products_of(KERNELS[kernel])
        for rows, inner, columns in ((24, 24, 4), (16, 16, 16), (33, 5, 24)):
            a, b = drawn(6, rows, inner).to(dtype), drawn(6, inner, columns, seed=1).to(dtype).mT
            whole: Tensor = same_in_threads(lambda a=a, b=b, products=products: products.products(a, b))
            assert equal(products.products(a[2:5].clone(), b[2:5]), whole[2:5])
        assert products.refused, "the trials found nothing"


def test_what_the_kernel_computes_at_once_is_taken_if_it_has_the_same_bits() -> None:
    """Of a kernel that behaves: one call for a whole product, after one trial for each shape."""
    calls: list[tuple[int, int]] = []

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        calls.append((len(a), len(b)))
        return (a.unsqueeze(1) * b).sum(2)  # of a contiguous last dim: the same sum for each element

    products = Products(multiply, torch.bmm)
    x, weight = drawn(24, 32), drawn(96, 32, seed=1)
    first = products.product(x, weight, 1, WHOLE, PIECES)
    assert (products.trials, products.refused) == (1, 0)
    calls.clear()
    assert equal(products.product(x, weight, 1, WHOLE, PIECES), first)
    assert (calls, products.trials) == ([(24, 96)], 1)


@pytest.mark.parametrize(("context", "runs"), [(1, 1), (1, 4), (2, 1), (4, 1), (2, 2)])
def test_parts_of_rows_are_those_of_context_pieces(context: int, runs: int) -> None:
    x = torch.arange(48).unsqueeze(1)
    rows = RowSum(runs, context=context)
    chunks = x.chunk(sum(map(len, rows.parts())))
    found = [torch.cat([chunks[number] for number in part]) for part in rows.parts()]
    expected = [run for part in context_parts(x, context, 0) for run in part.chunk(runs)]
    assert all(map(equal, found, expected))
    assert len(found) == len(expected)


WIDTHS = ((1024, 768, 2304), (1024, 768, 768), (1024, 768, 3072), (1024, 3072, 768), (512, 768, 6288), (512, 512, 512))
"""Of gpt2-124m with an eighth of its vocabulary, and one that differs on processors with AMX."""


def check_widths() -> None:
    """Compare cuts and threads in large products, and print the trials; for a process of its own."""
    for dtype in (torch.float32, torch.bfloat16):
        for rows, inner, columns in WIDTHS:
            check_cuts(PRODUCTS, rows, inner, columns, dtype, 2)
    print(PRODUCTS.trials, PRODUCTS.refused)


_FLAGS = frozenset(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
INSTRUCTIONS: dict[str, dict[str, str]] = {
    "avx2": {"ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE", "ATEN_CPU_CAPABILITY": "avx512"},
    "avx512_bf16": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16", "MKL_ENABLE_INSTRUCTIONS": "AVX512"},
    "amx": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_AMX"},
}
_NEEDED = {"avx2": "avx2", "avx512": "avx512f", "avx512_bf16": "avx512_bf16", "amx": "amx_bf16"}


def run(environment: dict[str, str], *command: str) -> str:
    root = Path(__file__).parents[2]
    found = subprocess.run(
        [sys.executable, *command], cwd=root, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stdout[-3000:] + found.stderr[-3000:]
    return found.stdout


needs_instructions = [
    pytest.param(name, marks=pytest.mark.skipif(flag not in _FLAGS, reason=f"the processor has no {flag}"))
    for name, flag in _NEEDED.items()
]


@pytest.mark.sweep
@pytest.mark.parametrize("name", needs_instructions)
def test_large_products_have_the_same_bits_under_every_instruction_set(name: str) -> None:
    code = "from tests.exact.test_products import check_widths; check_widths()"
    trials, refused = map(int, run(INSTRUCTIONS[name], "-c", code).split())
    assert trials > refused >= 0


@pytest.mark.sweep
@pytest.mark.parametrize("name", needs_instructions)
def test_suites_of_exact_runs_pass_under_every_instruction_set(name: str) -> None:
    suites = ("tests/exact/test_layers.py", "tests/exact/test_experts.py", "tests/exact/test_layouts.py")
    run(INSTRUCTIONS[name], "-m", "pytest", "-q", "-x", "-m", "not sweep", *suites, "tests/verify/test_exact.py")


def test_trials_see_sums_in_another_order() -> None:
    """Of sums that are rounded to bf16, which hides the order of nearly all sums of plain drawn numbers."""

    def in_order(a: Tensor, b: Tensor, cut: int) -> Tensor:
        one, other = (a[:, part].float() @ b[:, part].float().t() for part in (slice(cut), slice(cut, None)))
        return (one + other).to(a.dtype)

    for inner in (64, 512):
        plain = drawn(128, inner).bfloat16(), drawn(128, inner, seed=1).bfloat16()
        [*drawn_for_trials] = exact_products._adverse(128, 128, inner, torch.bfloat16)
        seen = [
            float((in_order(*pair, 7) != in_order(*pair, 40)).float().mean()) for pair in (plain, *drawn_for_trials)
        ]
        assert seen[0] < 1e-3
        assert min(seen[1:]) > 0.05
