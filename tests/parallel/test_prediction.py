"""Multi-token prediction computes in every layout what one process does, also gradients of the shared embedding."""

from dataclasses import replace

import pytest

from tests.support.layouts import laid_out
from tests.support.parity import BIASED_SIZES, BOTH, DEEPSEEK, LLAMA, MOE, Case, check
from tests.support.sweep import sweep


def predicting(case: Case, depths: int = 2, **changes: object) -> Case:
    return replace(case, model=(*case.model, ("mtp_layers", depths), ("mtp_loss", 0.7)), **changes)


PLAIN = predicting(LLAMA)
TIED = predicting(BOTH, layers=3)
LATENT = predicting(DEEPSEEK, 1, dropout=0.0, layers=4)
MIXTURE = predicting(MOE, documents=True)
BIASED = predicting(replace(MOE, model=BIASED_SIZES), documents=True)

LAYOUTS = [
    (TIED, "tp2,pp2 sp"),
    (PLAIN, "pp2"),
    (PLAIN, "tp2"),
    (PLAIN, "tp2 sp"),
    (PLAIN, "cp2"),
    (PLAIN, "cp2 ring"),
    (TIED, "pp2"),
    (TIED, "dp2 zero3"),
    (PLAIN, "dp2,pp2 zero3"),
    (PLAIN, "pp2 full"),
    (replace(PLAIN, layers=6), "pp2 interleaved micro4"),
    (replace(PLAIN, layers=6), "pp2 zbv micro4"),
    (replace(PLAIN, layers=6, tie=True), "pp2 zbv micro4"),
    (PLAIN, "tp2 chunk5"),
    (LATENT, "tp2,cp2 sp"),
    (LATENT, "pp2 selective"),
    (MIXTURE, "dp2 ep2"),
    (MIXTURE, "tp2,pp2 sp"),
    (BIASED, "tp2,cp2 sp"),
    (BIASED, "dp2,pp2 ep2"),
    (replace(PLAIN, dtype="fp32"), "tp2,pp2"),
]


@sweep(
    ("case", "words"),
    [pytest.param(*each, id=f"{place} {each[1]}") for place, each in enumerate(LAYOUTS)],
    quick=(0,),
    slow=slice(1, None, 3),
)
def test_a_layout_computes_what_one_process_does(pool, expected, case: Case, words: str) -> None:
    check(pool, expected, laid_out(case, words))
