"""The moving average of the weights in every layout, against one process."""

from dataclasses import replace
from typing import Any

import pytest

from tests.support.parity import LLAMA, MOE, Case, check

EMA = (("optimizer.ema_decay", 0.6), ("optimizer.ema_start", 1), ("optimizer.ema_warmup", True))
LATER = (("optimizer.ema_decay", 0.5), ("optimizer.ema_every", 2), ("optimizer.ema_warmup", False))
GPT = Case(dtype="fp64", dropout=0.1, update=EMA, steps=4)
FAMILIES = {
    "gpt": GPT,
    "every second step": replace(GPT, update=LATER),
    "llama": replace(LLAMA, update=EMA, steps=4),
    "frozen": replace(GPT, update=(*EMA, ("optimizer.frozen", ("embed", "blocks.1", "**.bias"))), tie=False),
    "mixture": replace(MOE, update=EMA, steps=4),
}


def zero(stage: int, *more: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    return (("parallel.zero", stage), *more)


QUICK: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt", {"dp": 2, "tp": 2, "pp": 1, "settings": zero(1)}),  # zero of rows that do not divide
    ("every second step", {"dp": 2, "tp": 1, "pp": 2, "accumulation": 4}),
)
SLOW: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpt", {"dp": 2, "tp": 1, "pp": 1}),
    ("gpt", {"dp": 1, "tp": 3, "pp": 1}),
    ("llama", {"dp": 1, "tp": 2, "pp": 1, "settings": (("parallel.sequence_parallel", True),)}),
    ("llama", {"dp": 1, "tp": 1, "pp": 2, "schedule": "zbv", "accumulation": 4}),
    ("gpt", {"dp": 1, "tp": 1, "pp": 2, "schedule": "interleaved", "accumulation": 4, "layers": 4}),
    ("llama", {"dp": 1, "tp": 1, "pp": 1, "cp": 2}),
    ("mixture", {"dp": 2, "tp": 1, "pp": 1, "settings": (("parallel.ep", 2),)}),
    ("gpt", {"dp": 2, "tp": 1, "pp": 1, "settings": zero(3, ("train.recompute", "full"))}),
    ("llama", {"dp": 2, "tp": 1, "pp": 2, "settings": zero(3), "accumulation": 2}),
    ("gpt", {"dp": 2, "tp": 2, "pp": 2, "accumulation": 2}),
    ("frozen", {"dp": 2, "tp": 2, "pp": 1, "settings": zero(1)}),
)


def named(case: tuple[str, dict[str, Any]], slow: bool) -> Any:
    family, layout = case
    words = " ".join(f"{key}{value}" for key, value in layout.items() if isinstance(value, int))
    settings = " ".join(f"{key.partition('.')[2]}={value}" for key, value in layout.get("settings", ()))
    mark = [pytest.mark.slow] if slow else []
    return pytest.param(*case, id=" ".join((family, words, settings)).strip(), marks=mark)


@pytest.mark.parametrize(
    ("family", "layout"), [*(named(each, False) for each in QUICK), *(named(each, True) for each in SLOW)]
)
def test_the_average_is_that_of_one_process(pool, expected, family: str, layout: dict[str, Any]) -> None:
    check(pool, expected, replace(FAMILIES[family], **layout))
