"""The hash of all weights is the same in every layout, and one bit changes it."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.parity import Case, make_engine
from tests.train.support import Run, manifest, steps_of, train_rank
from threefold.checkpoint.index import INDEX, index_text, read_fingerprint
from threefold.checkpoint.manifest import read_manifest, write_manifest
from threefold.exact.fingerprint import WeightHashes
from threefold.exact.tensor_hash import PartHash, fingerprint_of
from threefold.report.checkpoints import summarize_checkpoint
from threefold.verify.worker_pool import WorkerPool

EXACT = ("train.exact", True)
SIZES = {"layers": 2, "heads": 8, "head_dim": 4, "ffn": 64, "vocab": 88, "sequence": 16, "batch": 8}
CASE = Case(**SIZES, accumulation=1, settings=(EXACT,))  # type: ignore[arg-type]
MODULUS = 1 << 64


def hashed(tensor: Tensor) -> int:
    return int(PartHash(tensor.shape, (0,) * tensor.dim(), tensor.shape)(tensor)) % MODULUS


def hashed_in_parts(whole: Tensor, counts: Sequence[int]) -> int:
    """Hash a tensor cut into a number of parts along each dim."""
    cuts = [
        [(int(part[0]), len(part)) for part in torch.arange(size).chunk(count)]
        for size, count in zip(whole.shape, counts, strict=True)
    ]
    total = 0
    for place in product(*cuts):
        part = whole
        for dim, (start, size) in enumerate(place):
            part = part.narrow(dim, start, size)
        total += int(PartHash(part.shape, [start for start, _ in place], whole.shape)(part))
    return total % MODULUS


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64]
)
@pytest.mark.parametrize(
    ("shape", "counts"),
    [((), ()), ((37,), (5,)), ((24, 40), (1, 8)), ((24, 40), (7, 3)), ((3, 5, 8), (3, 2, 4)), ((2, 70_001), (1, 3))],
    ids=str,
)
def test_parts_add_up_to_the_whole(shape: tuple[int, ...], counts: tuple[int, ...], dtype: torch.dtype) -> None:
    whole = (100 * torch.randn(shape, dtype=torch.float64)).to(dtype)
    assert hashed_in_parts(whole, counts) == hashed(whole)


def test_every_bit_of_every_element_counts() -> None:
    whole = torch.randn(4, 6)
    known = {hashed(whole)}
    for element, bit in product(range(whole.numel()), range(32)):
        changed = whole.clone()
        changed.view(torch.int32).flatten()[element] ^= -(1 << 31) if bit == 31 else 1 << bit
        known.add(hashed(changed))
    assert len(known) == 1 + 32 * whole.numel()


def test_signs_of_a_row_count() -> None:
    """The top bits of the words alone, of which a sum without factors would see only whether their number is odd."""
    whole = torch.randn(4, 6)
    changed = whole.clone()
    changed[1] = -changed[1]
    assert hashed(changed) != hashed(whole)


def test_position_counts_and_the_sign_of_zero_does_not() -> None:
    whole = torch.randn(4, 6)
    assert hashed(whole.flip(0)) != hashed(whole) != hashed(whole.flip(1))
    assert hashed(-torch.zeros(5)) == hashed(torch.zeros(5))


def test_name_counts() -> None:
    assert fingerprint_of({"a": 1, "b": 2}) != fingerprint_of({"a": 2, "b": 1})
    assert fingerprint_of({"a": 1, "b": 2}) == fingerprint_of({"b": 2, "a": 1})


def taken(case: Case, flipped: str = "", rank: int = 0, turn: int = 0) -> dict[str, int]:
    """Hash the initial weights as a rank of the pool; one rank flips the lowest bit of an element of a parameter."""
    engine = make_engine(case)
    if engine.mesh.rank == rank:
        for weight in engine.model.weights:
            if weight.name == flipped:
                weight.master.detach().view(torch.int32).flatten()[-1] ^= 1
    return WeightHashes(engine.model.weights, engine.mesh).take(turn)


LAYOUTS = [(2, 1, 1), (1, 2, 2), (1, 8, 1), (2, 2, 2)]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_layouts_have_one_fingerprint(pool: WorkerPool, layout: tuple[int, int, int]) -> None:
    """With a tied embedding, which the first and the last stage hold."""
    (expected,) = pool.run(1, taken, CASE)
    case = CASE.with_layout(*layout)
    for turn in (0, 1):
        for found in pool.run(case.world_size, taken, case, "", 0, turn):
            assert found == expected
            assert fingerprint_of(found) == fingerprint_of(expected)


@pytest.mark.parametrize("layout", [(2, 1, 1), (1, 2, 1)], ids=str)
def test_one_bit_of_one_rank_names_the_parameter(pool: WorkerPool, layout: tuple[int, int, int]) -> None:
    """Of two replicas, each in its turn."""
    (expected,) = pool.run(1, taken, CASE)
    case, name = CASE.with_layout(*layout), "blocks.1.mlp.up.weight"
    seen = []
    for turn in (0, 1):
        found = pool.run(2, taken, case, name, 1, turn)[0]
        different = [each for each, value in expected.items() if found[each] != value]
        assert set(different) <= {name}
        assert bool(different) == (fingerprint_of(found) != fingerprint_of(expected))
        seen.append(bool(different))
    assert sorted(seen) == ([False, True] if layout[0] == 2 else [True, True])


def test_records_and_checkpoints_have_the_fingerprint_of_an_exact_run(
    pool: WorkerPool, tokens: Path, tmp_path: Path
) -> None:
    run = Run(tokens, steps=2, set=(EXACT, ("model.vocab_size", 304)))
    layouts = {"one": run, "two": run.but(dp=2, set=(*run.set, ("train.recompute", "full")))}
    found = {}
    for name, each in layouts.items():
        printed = pool.run(each.world_size, train_rank, each, tmp_path / name)[0]
        prints = [line["fingerprint"] for line in steps_of(tmp_path / name).values()]
        checkpoint = tmp_path / name / "checkpoints" / "step_00000002"
        assert manifest(checkpoint)["fingerprint"] == prints[-1] == read_fingerprint(checkpoint)
        assert summarize_checkpoint(checkpoint).document(None, False)["fingerprint"] == prints[-1]
        assert f"{prints[-1]} after step 2" in printed
        found[name] = prints
    assert found["one"] == found["two"]
    assert len(set(found["one"])) == 2


def test_weights_that_are_not_those_written_are_not_trained(pool: WorkerPool, tokens: Path, tmp_path: Path) -> None:
    """In another layout, an exact run has the fingerprint of its checkpoint, or goes back to an older one."""
    run = Run(tokens, steps=1, set=(EXACT, ("model.vocab_size", 304), ("checkpoint.every", 1)))
    pool.run(1, train_rank, run, tmp_path)
    pool.run(2, train_rank, run.but(steps=2, dp=2), tmp_path, True)
    folder = tmp_path / "checkpoints" / "step_00000002"
    write_manifest(folder, replace(read_manifest(folder).facts, fingerprint="0123456789ab"))
    printed = pool.run(2, train_rank, run.but(steps=3, tp=2), tmp_path, True)[0]
    assert "its weights have the fingerprint" in printed
    assert "0123456789ab when it was written" in printed
    assert sorted(steps_of(tmp_path)) == [1, 2, 3]


def test_other_runs_have_one_in_their_checkpoints_alone(pool: WorkerPool, tokens: Path, tmp_path: Path) -> None:
    pool.run(1, train_rank, Run(tokens, steps=1), tmp_path)
    assert "fingerprint" not in steps_of(tmp_path)[1]
    checkpoint = tmp_path / "checkpoints" / "step_00000001"
    assert manifest(checkpoint)["fingerprint"] is None
    found = summarize_checkpoint(checkpoint).document(None, False)["fingerprint"]
    assert found is not None
    assert found == read_fingerprint(checkpoint)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("0123456789ab", "0123456789ab"),
        (None, None),
        (7, None),
        (["0123456789ab"], None),
        ("0123456789ab\x1b[2J", None),
    ],
    ids=str,
)
def test_only_fingerprints_are_read_from_an_index(tmp_path: Path, written: Any, read: str | None) -> None:
    (tmp_path / INDEX).write_text(index_text({}, {}, written))
    assert read_fingerprint(tmp_path) == read
