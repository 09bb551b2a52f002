"""The loss of whole logits, a run of rows at a time, against torch's own in fp64; chunks of it are tested where the
head is, in `tests/parallel/test_chunked_loss.py`."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.support.compiled import traced
from tests.support.saved_tensors import recording_saved
from threefold.constants import IGNORE_INDEX, LOGITS_AT_ONCE
from threefold.ops.cross_entropy import cross_entropy
from threefold.planner.dry_step import StorageTracker
from threefold.torch_private.fake import fake_tensors

TOLERANCE = {torch.float64: 1e-14, torch.float32: 3e-7, torch.bfloat16: 2**-8, torch.float16: 2**-11}
SIZES = [(1, 1), (5, 7), (300, 1000), (2, LOGITS_AT_ONCE + 1), (LOGITS_AT_ONCE // 65 + 3, 65), (0, 9)]
"""One run, several with a shorter last one, rows longer than a run, none."""


def problem(tokens: int, vocab: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, labels of which one is ignored, and the weight of each token's loss."""
    generator = torch.Generator().manual_seed(tokens + vocab)
    logits = (torch.randn(tokens, vocab, generator=generator, dtype=torch.float64) * scale).to(dtype)
    labels = torch.randint(0, vocab, (tokens,), generator=generator)
    labels[tokens // 2 : tokens // 2 + 1] = IGNORE_INDEX
    return logits, labels, torch.rand(tokens, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("tokens", "vocab"), SIZES)
def test_equals_torch_in_fp64(tokens: int, vocab: int, dtype: torch.dtype) -> None:
    logits, labels, weights = problem(tokens, vocab, dtype)
    own, theirs = logits.clone().requires_grad_(), logits.double().requires_grad_()
    got = cross_entropy(own, labels)
    expected = F.cross_entropy(theirs, labels, ignore_index=IGNORE_INDEX, reduction="none")
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    assert got.dtype == torch.promote_types(dtype, torch.float32)
    wide = 1e-6 if got.dtype == torch.float32 else 1e-13
    torch.testing.assert_close(got.double(), expected, rtol=wide, atol=wide)
    assert own.grad is not None
    assert theirs.grad is not None
    assert own.grad.dtype == dtype
    # Each gradient is rounded once, so that a label whose probability is near one has no error of a larger number's.
    limit = TOLERANCE[dtype] * theirs.grad.abs() + (1e-7 if dtype != torch.float64 else 1e-15)
    assert bool(((own.grad.double() - theirs.grad).abs() <= limit).all())
    assert torch.equal(own, logits)  # which the backward pass leaves as they were


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_compiled_it_is_the_same(dtype: torch.dtype) -> None:
    logits, labels, weights = problem(7, 11, dtype)
    own, alone = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    got, expected = traced(torch.compile(cross_entropy, fullgraph=True), own, labels), cross_entropy(alone, labels)
    torch.testing.assert_close(got, expected)
    (got * weights).sum().backward()
    (expected * weights).sum().backward()
    assert own.grad is not None
    assert alone.grad is not None
    wide = TOLERANCE[dtype]
    torch.testing.assert_close(own.grad, alone.grad, rtol=wide, atol=wide / 1000)


def test_of_a_strided_view() -> None:
    logits, labels, _ = problem(7, 11, torch.float32)
    whole = torch.cat([logits, logits], 1).requires_grad_()
    cross_entropy(whole[:, :11], labels).sum().backward()
    assert whole.grad is not None
    assert whole.grad[:, 11:].abs().max() == 0
    alone = logits.clone().requires_grad_()
    cross_entropy(alone, labels).sum().backward()
    assert torch.equal(whole.grad[:, :11], alone.grad)


def test_large_logits_overflow_nowhere() -> None:
    logits, labels, _ = problem(6, 9, torch.float32, scale=1e30)
    own = logits.clone().requires_grad_()
    losses = cross_entropy(own, labels)
    losses.sum().backward()
    assert bool(losses.isfinite().all())
    assert own.grad is not None
    assert bool(own.grad.isfinite().all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_is_told(bad: float) -> None:
    logits, labels, _ = problem(4, 9, torch.float32)
    logits[0, 3] = bad
    losses = cross_entropy(logits, labels)
    assert not losses[0].isfinite()
    assert bool(losses[1:].isfinite().all())


def test_keeps_the_logits_and_two_numbers_for_each_token() -> None:
    logits, labels, _ = problem(20, 50, torch.bfloat16)
    with recording_saved([]) as saved:
        losses = cross_entropy(logits.requires_grad_(), labels)
    assert saved.nbytes == 20 * (50 * 2 + 2 * 4 + 8)
    assert losses.requires_grad


def of_a_dry_run(tokens: int) -> tuple[list[object], int]:
    """The operations of the loss and its gradient, and the most bytes beside logits and their gradient."""
    operations: list[object] = []
    with fake_tensors(), StorageTracker(lambda *told: operations.append(told[0])) as tracker:
        logits = torch.empty(tokens, LOGITS_AT_ONCE // 4, dtype=torch.bfloat16, requires_grad=True)
        cross_entropy(logits, torch.zeros(tokens, dtype=torch.int64)).sum().backward()
    return operations, tracker.most - 2 * logits.nbytes


def test_a_dry_run_goes_over_one_run_of_rows() -> None:
    """It needs the memory of all, in which the other runs have the place of the first."""
    (few, least), (many, most) = of_a_dry_run(8), of_a_dry_run(80)
    assert few == many
    assert 0 < least <= most < least + 72 * 100
