"""Products of a run's own sizes: kernels that misbehave only there do not pass as equal bits, in any layer."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.command import Command
from tests.support.kernels import KERNELS, of_batch, with_kernel
from tests.support.mistakes import Patch, patched
from tests.support.sweep import sweep
from tests.verify.support import MistakenPool, config
from threefold.config import Config
from threefold.exact.experts import computed_rows
from threefold.exact.products import PRODUCTS, Products
from threefold.models.source import ConfigSource
from threefold.verify import exact, products
from threefold.verify.layouts import prepare_exact
from threefold.verify.products import ProductsTried, try_products
from threefold.verify.worker_pool import WorkerPool

SMALL = {"num_layers": 2, "hidden_size": 48, "num_attention_heads": 8, "vocab_size": 72}
MIXTURE = config(
    model={
        **SMALL,
        "architecture": "llama",
        "num_experts": 8,
        "expert_ffn_hidden_size": 16,
        "shared_expert_ffn_hidden_size": 32,
        "shared_expert_gate": True,
    },
    data={"sequence_length": 48},
    train={"global_batch_size": 8},
)
LAYERS = {
    "144 × 48",  # query, key and value
    "48 × 48",  # output of attention
    "8 × 48",  # router
    "1 × 48",  # gate of the shared expert
    "64 × 48",  # shared expert
    "48 × 32",
    "32 × 48 of an expert",
    "48 × 16 of an expert",
    "72 × 48",  # head
}


def tried(given: Config, dtype: str | None = None) -> ProductsTried:
    return try_products(ConfigSource(), prepare_exact(given, dtype, vocab_size=1), (1, 2))


def without_trials() -> list[Patch]:
    """Take the faster way everywhere, as if a trial could not see its bits."""
    return [(Products, "_tried", lambda self, key, trial: True)]


@sweep("kernel", KERNELS, quick=(0,))
def test_products_are_those_of_parts_whatever_the_kernel(kernel: str) -> None:
    for dtype in ("fp32", "bf16"):
        with patched(with_kernel(kernel)):
            found = tried(MIXTURE, dtype)
        assert (found.layers, found.experts, found.different) == (len(LAYERS), 2, ())
        assert found.refused


@pytest.mark.parametrize("kernel", ["rows", "threads"])
def test_every_layer_whose_parts_differ_is_named(kernel: str) -> None:
    with patched([*with_kernel(kernel), *without_trials()]):
        assert set(tried(MIXTURE).different) == LAYERS


def only_if(wanted: Callable[[Tensor, Tensor], bool], kernel: str) -> list[Patch]:
    """Products without trials, which misbehave where `wanted` says so."""
    right = PRODUCTS._multiply

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return KERNELS[kernel](a, b) if wanted(a, b) else right(a, b)

    return [*without_trials(), (PRODUCTS, "_multiply", multiply), (PRODUCTS, "_multiply_batch", of_batch(multiply))]


def test_experts_are_tried_with_every_number_of_rows() -> None:
    assert {computed_rows(count) for count in range(1, 129)} == set(range(16, 129, 16))
    assert {computed_rows(count) for count in range(129, 513)} == {160, 192, 224, 256, 320, 384, 448, 512}
    assert computed_rows(0) == 0
    for number in (16, 32, 48):  # terms of the gradient of the weight [16, 48] of a half of an expert, of [32, 48] else
        with patched(only_if(lambda a, b, number=number: a.shape[1] == number and len(a) in (16, 32), "rows")):
            assert "32 × 48 of an expert" in tried(MIXTURE).different


@pytest.mark.parametrize(
    "preset", [pytest.param(name, marks=pytest.mark.slow) for name in ("gemma-3-27b", "mixtral-8x7b")] + ["phi-4"]
)
def test_no_product_of_a_large_model_takes_minutes_or_all_memory(monkeypatch: pytest.MonkeyPatch, preset: str) -> None:
    """Sequences of a preset are as long as it can read: 16,384 positions and more."""
    sizes: list[int] = []

    def note(layer: Any, rows: int, *_: Any) -> bool:
        sizes.append(rows * layer.out * layer.inner)
        return True

    monkeypatch.setattr(products, "_has_bits_of_parts", note)
    given = {"data": {"path": "none"}, "model": {"preset": preset}, "train": {"global_batch_size": 8}}
    assert not tried(Config.model_validate(given)).different
    assert 1 << 35 < max(sizes) <= 1 << 37


REAL = {"num_layers": 1, "hidden_size": 64, "num_attention_heads": 16, "vocab_size": 64}


def misbehaves_at_its_real_size() -> list[Patch]:
    return only_if(lambda a, b: a.shape[1] >= REAL["hidden_size"], "columns")


@pytest.fixture(params=[[], [misbehaves_at_its_real_size]], ids=["right", "misbehaves"])
def misbehaves(
    request: pytest.FixtureRequest, pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether the products of all workers misbehave at the real size of the config `exact.yaml`."""
    (tmp_path / "exact.yaml").write_text(
        config(model=REAL, data={"sequence_length": 16}, train={"global_batch_size": 8}).to_yaml()
    )
    monkeypatch.chdir(tmp_path)

    @contextmanager
    def workers(ranks: int, full: bool = False) -> Iterator[tuple[Any, Path]]:
        yield MistakenPool(pool, request.param[0], None) if request.param else pool, tmp_path

    monkeypatch.setattr(exact, "workers", workers)
    return bool(request.param)


def verdicts(threefold: Command, *words: str) -> tuple[int, list[str], list[str]]:
    """Return exit status, the verdict of each layout, and the sizes whose parts differ."""
    ended = threefold("verify", "exact.yaml", "--exact", *words, "tp2", "--steps", "1", "--json")
    document = json.loads(ended.output)
    return ended.status, [each["verdict"] for each in document["layouts"]], document["products"]["different"]


def test_a_run_that_is_not_exact_at_its_real_size_is_not_equal(threefold: Command, misbehaves: bool) -> None:
    sizes = ["64 × 64", "64 × 256", "192 × 64", "256 × 64"]
    shrunk, full = verdicts(threefold), verdicts(threefold, "--full")
    if not misbehaves:
        assert shrunk == full == (0, ["equal"], [])
        return
    assert (shrunk[:2], full[:2]) == ((1, ["equal"]), (1, ["departs"]))
    assert shrunk[2] == full[2] == sizes
    assert "✗ Products of" in threefold("verify", "exact.yaml", "--exact", "tp2", "--steps", "1").output
