"""The learning rate at the places where its pieces meet."""

from math import isclose

import pytest

from threefold.config import Config, resolve
from threefold.train.optim import learning_rate

W, END, LR, FLOOR = 10, 110, 1e-3, 1e-4


def rate(update: int, decay: str, **given: object) -> float:
    settings = {"lr": LR, "min_lr": FLOOR, "warmup_steps": W, "decay_steps": END, "decay": decay} | given
    config = Config.model_validate({"data": {"path": "unused"}, "optimizer": settings})
    return learning_rate(update, resolve(config, 300).optimizer)


@pytest.mark.parametrize(
    ("decay", "given", "expected"),
    [
        # the middle of the decay is update 60; cosine and linear are both half-way down there
        ("cosine", {}, {0: 0.0, 1: LR / W, W: LR, 60: (LR + FLOOR) / 2, END: FLOOR, END + 1: FLOOR, 9999: FLOOR}),
        ("cosine", {}, {35: FLOOR + (LR - FLOOR) * (1 + 2**-0.5) / 2, 85: FLOOR + (LR - FLOOR) * (1 - 2**-0.5) / 2}),
        (
            "linear",
            {},
            {0: 0.0, 1: LR / W, W: LR, 35: LR - (LR - FLOOR) / 4, 60: (LR + FLOOR) / 2, END: FLOOR, 9999: FLOOR},
        ),
        ("constant", {}, {0: 0.0, 1: LR / W, W: LR, 60: LR, END: LR, 9999: LR}),
        (
            "wsd",
            {"stable_steps": 60},
            {0: 0.0, 1: LR / W, W: LR, 40: LR, 70: LR, 90: (LR + FLOOR) / 2, END: FLOOR, 9999: FLOOR},
        ),
        ("wsd", {"stable_steps": END - W}, {W: LR, END - 1: LR, END: FLOOR}),  # no step is left to decay in
        ("cosine", {"warmup_steps": 0}, {1: LR, END: FLOOR}),
        ("linear", {"min_lr": 0.0}, {60: LR / 2, END: 0.0}),
        # a rate may also rise after the warm-up, as in Fleet's first GPT configs
        ("cosine", {"min_lr": 5 * LR}, {1: LR / W, W: LR, 60: 3 * LR, END: 5 * LR, 9999: 5 * LR}),
        ("linear", {"min_lr": 5 * LR}, {W: LR, 35: 2 * LR, 60: 3 * LR, END: 5 * LR}),
        ("wsd", {"min_lr": 5 * LR, "stable_steps": 60}, {W: LR, 70: LR, 90: 3 * LR, END: 5 * LR}),
    ],
)
def test_rates(decay: str, given: dict[str, object], expected: dict[int, float]) -> None:
    wrong = {}
    for update, value in expected.items():
        # without a warm-up the first update is already one step down
        tolerance = 1e-3 if given == {"warmup_steps": 0} else 1e-12
        got = rate(update, decay, **given)
        if not isclose(got, value, rel_tol=tolerance, abs_tol=1e-18):
            wrong[update] = (got, value)
    assert wrong == {}


def test_the_original_rates() -> None:
    """The n-th update of the logged run uses max · n / 3600."""
    rates = [
        f"{rate(n, 'cosine', lr=1e-5, min_lr=0.0, warmup_steps=3600, decay_steps=360_000):.5e}" for n in (1, 2, 3, 10)
    ]
    assert rates == ["2.77778e-09", "5.55556e-09", "8.33333e-09", "2.77778e-08"]
