"""Multi-token prediction computes in every layout what one process does, also gradients of the shared embedding."""

from dataclasses import replace

import pytest

from tests.support.layouts import laid_out
from tests.support.parity import (
    BIASED_SIZES,
    BOTH,
    DEEPSEEK,
    LLAMA,
    MOE,
    Case,
    check,
    make_engine,
    shard_of,
)
from tests.support.sweep import sweep
from threefold.models.layers.prediction import PredictingHead


def predicting(case: Case, depths: int = 2, **changes: object) -> Case:
    return replace(case, model=(*case.model, ("mtp_layers", depths), ("mtp_loss", 0.7)), **changes)


PLAIN = predicting(LLAMA)
TIED = predicting(BOTH)
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
    (replace(PLAIN, optimizer="muon"), "tp2,pp2"),
    (MIXTURE, "dp2,tp2 ep2 zero3 sp"),
    (replace(PLAIN, layers=6), "tp2,pp2 zbv sp micro4"),
    (TIED, "pp2,cp2 full micro4"),
    (replace(PLAIN, layers=6), "dp2,pp2 interleaved zero3 micro4"),
    (predicting(LLAMA, 13), "tp2"),  # more than a sample has positions
]


@sweep(
    ("case", "words"),
    [pytest.param(*each, id=f"{place} {each[1]}") for place, each in enumerate(LAYOUTS)],
    quick=(0,),
    slow=slice(1, None, 3),
)
def test_a_layout_computes_what_one_process_does(pool, expected, case: Case, words: str) -> None:
    check(pool, expected, laid_out(case, words))


def terms_of(case: Case) -> tuple[float, dict[str, float], float]:
    """Return the loss and its terms of a first step on this rank of the layout, and the loss of an evaluation."""
    engine = make_engine(case)
    batch = shard_of(case, 0, engine.mesh.dp.index)
    heads = [module for stage in engine.stages for module in stage.modules() if isinstance(module, PredictingHead)]
    looked: list[bool] = []
    for head in heads:
        head.register_forward_pre_hook(
            lambda _, given, named: looked.append(named["samples"].ahead is not None), with_kwargs=True
        )
    evaluated, counted = engine.evaluate(batch)
    assert not any(looked), "an evaluation computes no further tokens"
    looked.clear()
    result = engine.train_step(batch, 0)
    assert all(looked)
    assert bool(looked) == bool(heads)
    return result.loss, dict(result.terms), evaluated / counted


@pytest.mark.parametrize("words", ["dp1", pytest.param("tp2,pp2 sp", marks=pytest.mark.slow)])
def test_a_step_has_the_losses_of_each_token_by_name_and_an_evaluation_that_of_the_next(pool, words: str) -> None:
    case = laid_out(replace(PLAIN, dropout=0.0), words)
    for loss, terms, evaluated in pool.run(case.world_size, terms_of, case):
        assert list(terms) == ["next", "mtp_1", "mtp_2"]
        assert loss == pytest.approx(terms["next"] + 0.35 * (terms["mtp_1"] + terms["mtp_2"]), rel=1e-12)
        assert evaluated == pytest.approx(terms["next"], rel=1e-12)
        assert terms["next"] > terms["mtp_1"] > terms["mtp_2"] > 1  # of ever fewer tokens, divided by the same number
