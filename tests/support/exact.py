"""Exact runs: the same bits of losses, norms, gradients and weights as in one process."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.layouts import laid_out
from tests.support.parity import Case, Trace, in_layout, make_engine, shard_of, trained
from threefold.verify.worker_pool import WorkerPool

EXACT = ("train.exact", True)
CASE = Case(
    layers=4,
    heads=8,
    head_dim=4,
    ffn=72,
    vocab=88,
    sequence=24,
    batch=16,
    accumulation=16,
    dropout=0.1,
    settings=(EXACT,),
)
LLAMA = replace(
    CASE,
    layers=2,
    sequence=28,
    positions="rope",
    tie=False,
    steps=2,
    documents=True,
    model=(
        ("architecture", "llama"),
        ("num_key_value_heads", 4),
        ("head_dim", 6),
        ("qkv_bias", True),
        ("qk_norm", True),
        ("sliding_window", 5),
        ("full_attention_layers", 1),
    ),
)
MOE = replace(
    CASE,
    layers=2,
    positions="rope",
    tie=False,
    steps=2,
    model=(
        ("architecture", "llama"),
        ("num_key_value_heads", 4),
        ("head_dim", 6),
        ("num_experts", 16),
        ("experts_per_token", 3),
        ("expert_ffn_hidden_size", 16),
        ("expert_capacity_factor", 0.8),
        ("shared_expert_ffn_hidden_size", 24),
        ("shared_expert_gate", True),
        ("router_aux_loss", 0.1),
        ("router_z_loss", 0.01),
    ),
)
"""Experts of few rows, some of one or none: 24 tokens choose 3 of 16."""


def with_model(case: Case, **settings: Any) -> Case:
    """Return the case with other settings of the model."""
    return replace(case, model=tuple((dict(case.model) | settings).items()))


CONTEXT: dict[str, Any] = {"sequence": 32, "settings": (EXACT, ("train.grain_context", 4))}
FAMILIES = {
    "gpt": CASE,
    "documents": replace(CASE, documents=True),
    "llama": LLAMA,
    "few-keys": with_model(LLAMA, num_key_value_heads=2),  # fewer key-value heads than pieces
    "plain": replace(  # attention that torch's fused kernel would compute
        with_model(LLAMA, num_key_value_heads=8, sliding_window=0, full_attention_layers=0),
        sequence=33,
        documents=False,
        dropout=0.0,
        tie=True,
    ),
    "mixture": MOE,
    "dropless": with_model(
        MOE,
        num_experts=4,
        experts_per_token=1,
        expert_capacity_factor=0.0,
        normalize_expert_weights=False,
        shared_expert_ffn_hidden_size=0,
        shared_expert_gate=False,
        router_aux_loss=0.0,
    ),
    "batches": replace(  # products that are computed in batches, in sample groups of four
        CASE, layers=2, head_dim=16, ffn=256, vocab=384, sequence=32, batch=32, accumulation=32, steps=2
    ),
    "widths": with_model(CASE, width_base=8),
    "groups": replace(
        CASE,
        groups=(
            (("match", "blocks.**"), ("name", "muon"), ("lr_scale", 0.5), ("eps", 1e-5)),
            (("match", "blocks.1.mlp"), ("name", "sgd"), ("momentum", 0.9), ("lr_scale", 20.0)),
            (("match", "**.bias"), ("weight_decay", 0.2), ("lr_scale", 2.0)),
        ),
    ),
}
_OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"eps": 1e-8},
    "nesterov": {"name": "sgd", "eps": 1e-8, "momentum": 0.9, "nesterov": True, "lr": 0.05},
}


def family(words: str) -> Case:
    """Return the run of one process that `words` name: a family, and `context` (pieces of sequences), `bf16`, `short`
    (sequences of two tokens) or the name of an optimizer."""
    name, *more = words.split()
    case = FAMILIES[name]
    for word in more:
        if word == "context":
            case = replace(case, **CONTEXT, layers=2, steps=2)
        elif word == "short":
            case = replace(with_model(case, experts_per_token=1), sequence=2)
        elif word == "bf16":
            case = replace(case, dtype=word)
        else:  # sizes that two threads share, and shards with odd ends
            given = {"name": word, **_OPTIMIZERS.get(word, {})}
            update = tuple((f"optimizer.{key}", value) for key, value in given.items() if key != "name")
            case = replace(case, optimizer=given["name"], update=update, vocab=344, ffn=200)
    return case


def spread(case: Case, words: str) -> Case:
    """Return the exact run in a layout (`laid_out`), with micro-batches of one sample if it names no number of them."""
    made = laid_out(replace(case, settings=(EXACT, *(each for each in case.settings if each != EXACT))), words)
    return made if "micro" in words else replace(made, accumulation=case.batch // made.dp)


def with_layout(case: Case, dp: int, tp: int, pp: int, schedule: str = "1f1b", micro: int = 1, **settings: Any) -> Case:
    """Return an exact run in a layout, with micro-batches of `micro` samples; a setting `a__b` is `a.b`."""
    named = {key.replace("__", "."): value for key, value in settings.items()}
    given = tuple((dict([EXACT, *case.settings]) | named).items())
    return case.with_layout(dp, tp, pp, schedule=schedule, accumulation=case.batch // dp // micro, settings=given)


def slow_but(values: Iterable[Any], *quick: Any, sweep: Sequence[Any] = ()) -> list[Any]:
    """Return values as parameters of a test, all but the quick ones marked as slow, or as a sweep."""
    marks = {True: pytest.mark.sweep, False: pytest.mark.slow}
    return [value if value in quick else pytest.param(value, marks=marks[value in sweep]) for value in values]


def exact_run(case: Case, threads: int = 1) -> Trace:
    """Train with a number of threads, and evaluate once."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        engine = make_engine(case)
        trace = trained(engine, case.steps, lambda step: shard_of(case, step, engine.mesh.dp.index))
        trace.losses.append(engine.evaluate(shard_of(case, 99, engine.mesh.dp.index))[0])
        trace.norms.append(0.0)
        trace.gradients.append({})
        return trace
    finally:
        torch.set_num_threads(before)


def differences(expected: Trace, found: Trace) -> list[str]:
    """Return what has other bits, in order: the first losses, norms, gradients, and weights."""
    different = []
    for step, (loss, norm) in enumerate(zip(expected.losses, expected.norms, strict=True)):
        if found.losses[step] != loss:
            different.append(f"loss of step {step}: {loss!r}, {found.losses[step]!r}")
        for name, gradient in found.gradients[step].items():
            if not same_bits(gradient, expected.gradients[step][name]):
                different.append(f"gradient of step {step}: {name}")
        if found.norms[step] != norm:
            different.append(f"norm of step {step}: {norm!r}, {found.norms[step]!r}")
    different += [
        f"weight: {name}" for name, weight in found.final.items() if not same_bits(weight, expected.final[name])
    ]
    return different


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether tensors are equal, signs of zeros included."""
    return torch.equal(one, other) and torch.equal(one.signbit(), other.signbit())


def check_near_plain(pool: WorkerPool, exact: Trace, case: Case) -> None:
    """Compare an exact run of one process with the run that is not exact: equal up to rounding."""
    (plain,) = pool.run(1, in_layout, replace(case, accumulation=4, settings=()))
    assert exact.losses[:-1] == pytest.approx(plain.losses, rel=1e-5)  # the last one is an evaluation's
    for name, gradient in plain.gradients[0].items():
        assert (exact.gradients[0][name] - gradient).abs().max() <= 1e-4 * gradient.abs().max(), name


def check(pool: WorkerPool, expected: Trace, case: Case) -> None:
    """Compare all ranks of a layout with one process, to the bit."""
    for rank, found in enumerate(pool.run(case.world_size, exact_run, case)):
        assert not differences(expected, found)[:6], f"rank {rank} of {case}"
