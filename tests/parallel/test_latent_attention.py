"""Latent attention computes in every layout what it does in one process; its values are narrower than its keys."""

from dataclasses import replace

import pytest

from tests.support.layouts import laid_out
from tests.support.parity import DEEPSEEK, Case, check
from tests.support.sweep import sweep

PLAIN_QUERIES = replace(DEEPSEEK, model=(*DEEPSEEK.model, ("query_rank", 0), ("value_head_dim", 11)))
UNDROPPED = replace(DEEPSEEK, dropout=0.0, layers=4)
MIXTURE = replace(
    DEEPSEEK,
    layers=4,
    model=(
        *DEEPSEEK.model,
        *(("num_experts", 4), ("expert_ffn_hidden_size", 18), ("shared_expert_ffn_hidden_size", 12)),
        *(("dense_layers", 1), ("router_aux_loss", 0.1)),
    ),
)


LAYOUTS = [
    (DEEPSEEK, "tp2 sp"),
    (DEEPSEEK, "tp2,cp2"),
    (DEEPSEEK, "cp2 ring"),
    (DEEPSEEK, "tp2"),
    (DEEPSEEK, "cp2"),
    (DEEPSEEK, "dp2 zero3"),
    (PLAIN_QUERIES, "tp3 sp"),
    (PLAIN_QUERIES, "tp2,cp2 ring sp"),
    (UNDROPPED, "tp2,cp2 sp"),
    (UNDROPPED, "cp3 ring"),
    (UNDROPPED, "pp2"),
    (UNDROPPED, "pp2 interleaved micro4"),
    (UNDROPPED, "tp2,pp2 zbv sp micro4"),
    (UNDROPPED, "pp2,cp2 zero-bubble full micro4"),
    (replace(UNDROPPED, dtype="fp32", documents=False), "tp2,cp2 sp selective"),
    (replace(DEEPSEEK, dtype="fp32"), "dp2,tp2 zero3 sp"),
    (MIXTURE, "dp2 ep2"),
    (MIXTURE, "dp2,tp2,cp2 ep2 zero3 sp"),
    (MIXTURE, "dp2,pp2 ep2 interleaved micro4"),
]


@sweep(
    ("case", "words"),
    [pytest.param(*each, id=f"{place} {each[1]}") for place, each in enumerate(LAYOUTS)],
    quick=(0, 1, 2),
    slow=slice(0, None, 2),
)
def test_a_layout_computes_what_one_process_does(pool, expected, case: Case, words: str) -> None:
    check(pool, expected, laid_out(case, words))
