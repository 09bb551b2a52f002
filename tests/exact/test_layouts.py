"""An exact run has the same bits in every layout inside its grain: families, dtypes, optimizers, transports."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.exact import (
    CASE,
    FAMILIES,
    check,
    check_near_plain,
    differences,
    exact_run,
    family,
    spread,
)
from tests.support.layouts import AXES, goes_together, in_words
from tests.support.pairwise import Row, every_value, pairwise
from tests.support.parity import Case, Trace
from tests.support.sweep import sweep
from threefold.errors import UserError
from threefold.verify.worker_pool import WorkerPool

QUICK = [
    ("gpt", "pp2 zbv"),
    ("gpt", "dp2,tp2,pp2 micro2"),
    ("gpt", "dp4 zero1 shards2"),
    ("gpt nesterov", "dp4 zero1"),
]
NAMED = [
    ("gpt", "tp4 sp selective"),
    ("gpt", "pp3 micro8"),
    ("gpt", "dp2,pp2 looped-bfs zero2 micro2"),
    ("gpt", "dp8 zero3"),
    ("gpt bf16", "tp8"),
    ("gpt context", "cp4"),
    ("gpt context", "tp8 sp"),
    ("gpt context", "cp4,tp2 sp sockets"),
    ("documents context", "cp2,tp4 sp"),
    ("gpt muon", "dp1"),
    ("few-keys", "dp2,tp4 sp"),
    ("plain", "tp8"),
    ("plain bf16", "tp2"),
    ("mixture", "tp2"),
    ("mixture", "dp4,tp2 sp ep2"),
    ("mixture", "dp8 ep8 micro1"),
    ("mixture", "dp2,tp2,pp2 zbv sp ep2"),
    ("mixture", "dp4,tp2 sp ep4 zero3 full"),
    ("mixture short", "dp8 ep8 zero2"),
    ("dropless", "dp4,pp2 ep2"),
    ("batches", "dp2,tp2,pp2 sp micro8"),
    ("batches", "dp8 micro2"),
    ("widths", "dp2,tp2,pp2 micro2"),
    ("groups", "dp2,tp4 zero3"),
]
"""Layouts that something is known to depend on, each with the family that shows it."""
ALL_AXES = {
    "family": ("gpt", "llama", "few-keys", "mixture", "documents"),
    "dtype": ("", "bf16"),
    "optimizer": ("", "sgd", "adam", "lion", "muon"),
    "micro": (16, 8, 4, 2),
    **AXES,
}


def is_valid(row: Row) -> bool:
    """Return whether the settings go together; exact mixtures have no context parallelism."""
    is_whole = row["schedule"] != "dualpipev" or row["micro"] * row["dp"] == 16
    return goes_together(row, 16, row["micro"]) and is_whole and (row["cp"] == 1 or row["family"] != "mixture")


def texts(row: Row) -> tuple[str, str]:
    """Return the words of a row's family and of its layout."""
    context = "context" if row["cp"] > 1 else ""
    return " ".join(filter(None, (row["family"], context, row["dtype"], row["optimizer"]))), in_words(row)


ROWS = pairwise(ALL_AXES, is_valid)
FEW = every_value(ROWS)
MARKED = [
    *((words, "") for words in QUICK),
    *((words, "slow") for words in [*NAMED, *(texts(ROWS[place]) for place in FEW)]),
    *((texts(row), "sweep") for place, row in enumerate(ROWS) if place not in FEW),
]


@pytest.mark.parametrize(
    ("words", "layout"),
    [
        pytest.param(*words, id=": ".join(words), marks=[getattr(pytest.mark, mark)] if mark else [])
        for words, mark in MARKED
    ],
)
def test_bits_are_those_of_one_process(
    pool: WorkerPool, one_process: Callable[[Case], Trace], words: str, layout: str
) -> None:
    case = family(words)
    check(pool, one_process(case), spread(case, layout))


@sweep("words", [*FAMILIES, "gpt context", "llama context"], quick=(0, 2), slow=(1, 4))
def test_exact_run_is_the_run_up_to_rounding(
    pool: WorkerPool, one_process: Callable[[Case], Trace], words: str
) -> None:
    check_near_plain(pool, one_process(family(words)), family(words))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "threads"),
    [
        ("gpt", 2),
        ("llama", 2),
        ("plain", 4),
        ("mixture", 2),
        ("gpt bf16", 4),
        ("plain bf16", 2),
        ("gpt nesterov", 2),
        ("gpt muon", 4),
    ],
)
def test_bits_do_not_depend_on_threads(
    pool: WorkerPool, one_process: Callable[[Case], Trace], words: str, threads: int
) -> None:
    few = replace(family(words), layers=1, steps=2)  # threads that share a core wait for each other
    (found,) = pool.run(1, exact_run, spread(few, "dp1"), threads)
    assert not differences(one_process(few), found)[:6]


@pytest.mark.slow
def test_norm_of_experts_that_zero_cuts_finer_than_tensor_pieces(
    pool: WorkerPool, one_process: Callable[[Case], Trace]
) -> None:
    odd = replace(family("mixture"), vocab=89)
    assert spread(odd, "dp1").config.train.grain_tensor == 1
    check(pool, one_process(odd), spread(odd, "dp8 ep2 zero3"))


REFUSED = [
    ("gpt", "dp1", {"train.grain_tensor": 3}, "grain_tensor is 3 but .* model.vocab_size 88; use 2"),
    ("gpt", "dp1", {"train.grain_tensor": 16}, "grain_tensor is 16 but .* model.vocab_size 88; use 8"),
    ("gpt", "dp1", {"train.grain_samples": 6}, "grain_samples is 6 but .* train.global_batch_size 16; use 4"),
    ("gpt", "dp1", {"train.grain_leaf": 3}, "grain_leaf is 3 but .* the samples of a part of the batch, 2; use 2"),
    ("gpt", "dp1", {"train.grain_leaf": 4}, "grain_leaf is 4 but .* the samples of a part of the batch, 2; use 2"),
    ("gpt", "dp8", {"train.grain_samples": 4}, "dp is 8 but must divide train.grain_samples 4; use 4"),
    ("gpt", "tp8", {"train.grain_tensor": 2}, "tp is 8 but must divide train.grain_tensor 2, .*; use 2"),
    ("gpt", "dp4,pp2 dualpipev", {}, r"runs the 2 sample groups of a replica one by .*; use train.grain_leaf 1"),
    ("gpt", "cp2", {"train.grain_context": 1}, "cp is 2 but must divide train.grain_context 1, .*; use .*context 2"),
    ("gpt context", "cp8", {}, "cp is 8 but must divide train.grain_context 4, .*; use train.grain_context 8"),
    ("gpt context", "dp1", {"train.grain_context": 32}, "grain_context is 32 but .* twice which divides .*; use 16"),
    (
        "gpt context",
        "dp1",
        {"train.grain_context": 3},
        "grain_context is 3 but must be 1, or a power of .*; use 2",
    ),
    ("gpt context", "cp2 ring", {}, "cp_method is ring but train.exact is true, .*; use all-gather"),
    ("gpt context", "dp1", {"train.exact": False}, "grain_context is 4 but train.exact is false; leave it out"),
    ("gpt context", "tp8 sp", {"train.grain_context": 8}, "tp is 8 but must divide the 4 pieces of a sequence"),
    ("llama", "dp1", {"model.attention_sinks": True}, "sinks is true but train.exact is true, .*; use false"),
    ("llama", "dp1", {"model.attention_softcap": 2.0}, "softcap is 2.0 but train.exact is true, .*; use 0"),
    ("llama", "dp1", {"model.mtp_layers": 1}, "mtp_layers is 1 but train.exact is true, .*; use 0"),
    ("mixture", "dp1", {"model.expert_bias": True}, "expert_bias is true but train.exact is true, .*; use false"),
    ("mixture", "dp1", {"model.expert_gate_limit": 7.0}, "gate_limit is 7.0 but train.exact is true, .*; use 0"),
    ("gpt", "dp2", {"precision.dtype": "fp16"}, "^precision.dtype .*train.exact is true"),
    ("gpt", "dp2", {"precision.dtype": "fp64"}, "^precision.dtype .*train.exact is true"),
    ("gpt bf16", "dp2", {"precision.master_weights": False}, "^precision.master_weights .*train.exact is true"),
    (
        "gpt",
        "dp2",
        {"optimizer.name": "torch.optim:RMSprop", "optimizer.eps": 1e-8},
        "^optimizer.name .*train.exact is true",
    ),
]


@pytest.mark.parametrize(("words", "layout", "settings", "error"), REFUSED)
def test_what_is_not_exact_is_refused_with_the_nearest_that_is(
    words: str, layout: str, settings: dict[str, object], error: str
) -> None:
    case = spread(family(words), layout)
    with pytest.raises(UserError, match=error):
        _ = replace(case, settings=(*case.settings, *settings.items())).config


def test_a_smaller_sample_group_suits_a_schedule_of_few() -> None:
    case = spread(CASE, "dp4,pp2 dualpipev")
    _ = replace(case, settings=(*case.settings, ("train.grain_leaf", 1))).config
