"""The choices one by one."""

import pytest
import torch

from threefold.errors import DivergenceError, UserError
from threefold.inference.generate import Sampling, uniform

LOGITS = [0.1, 0.4, 0.3, 0.2]  # probabilities, whose logarithms are the logits


def counts(sampling: Sampling, draws: int = 400) -> dict[int, int]:
    logits = torch.tensor(LOGITS).log().expand(draws, -1)
    numbers = torch.tensor([uniform(0, "text", place) for place in range(draws)], dtype=torch.float64)
    chosen = sampling.choose(logits, numbers).tolist()
    return {token: chosen.count(token) for token in sorted(set(chosen))}


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(0.0), {1}),
        (Sampling(1.0), {0, 1, 2, 3}),
        (Sampling(1.0, top_k=0, top_p=1.0), {0, 1, 2, 3}),
        (Sampling(1.0, top_k=1), {1}),
        (Sampling(1.0, top_k=2), {1, 2}),
        (Sampling(1.0, top_k=99), {0, 1, 2, 3}),
        (Sampling(1.0, top_p=0.39), {1}),
        (Sampling(1.0, top_p=0.41), {1, 2}),
        (Sampling(1.0, top_p=0.71), {1, 2, 3}),
        (Sampling(1.0, top_k=2, top_p=0.99), {1, 2}),
        # of the two likeliest the first has 4/7 of what is left, so it is enough
        (Sampling(1.0, top_k=2, top_p=0.55), {1}),
        (Sampling(0.02), {1}),
        (Sampling(1e-320), {1}),
        (Sampling(1e-320, top_k=2, top_p=0.9), {1}),
        (Sampling(1e300), {0, 1, 2, 3}),
    ],
)
def test_what_may_be_chosen(sampling: Sampling, possible: set[int]) -> None:
    assert set(counts(sampling)) == possible


def test_how_often_each_is_chosen() -> None:
    found = counts(Sampling(1.0), 4000)
    assert [found[token] / 4000 for token in range(4)] == pytest.approx(LOGITS, abs=0.03)


def test_what_is_left_is_chosen_as_often_as_it_is_likely() -> None:
    """Of the two likeliest the first has 4/7 of what is left, and not all the numbers above it go to the last."""
    for sampling in (Sampling(1.0, top_p=0.41), Sampling(1.0, top_k=2)):
        found = counts(sampling, 4000)
        assert [found[1] / 4000, found[2] / 4000] == pytest.approx([4 / 7, 3 / 7], abs=0.03)


def test_the_greatest_random_number_chooses_a_token_that_may_be() -> None:
    number = torch.tensor([1 - 2**-53], dtype=torch.float64)
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(0))
    for sampling in (Sampling(1.0), Sampling(1.0, top_p=0.5), Sampling(1.0, top_k=3)):
        chosen = sampling.choose(logits, number)
        rank = (logits > logits[0, chosen]).sum() + 1
        assert rank == {0.5: rank, None: rank}[sampling.top_p] <= (sampling.top_k or 1000)
    nucleus = logits.double().softmax(-1).sort(descending=True).values.cumsum(-1)
    last = Sampling(1.0, top_p=0.5).choose(logits, number)
    assert (logits > logits[0, last]).sum() == (nucleus < 0.5).sum()


def test_random_numbers_are_of_the_seed_the_text_and_the_place() -> None:
    numbers = {uniform(seed, text, place) for seed in (0, 1) for text in ("a", "b") for place in (0, 1)}
    assert len(numbers) == 8
    assert uniform(3, "a", 5) == uniform(3, "a", 5)
    assert all(0 <= number < 1 for number in numbers)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"temperature": -1.0}, "--temperature is -1"),
        ({"top_k": -1}, "--top-k is -1"),
        ({"top_p": 1.5}, "--top-p is 1.5"),
    ],
)
def test_mistakes_are_told(arguments: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        Sampling(**arguments)


@pytest.mark.parametrize("temperature", [0.0, 1e-320, 0.8])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_refused(temperature: float, wrong: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [0.0, wrong, 1.0]])
    with pytest.raises(DivergenceError, match="logits for the next token are not finite, so none can be chosen"):
        Sampling(temperature).choose(logits, torch.tensor([0.5, 0.5], dtype=torch.float64))
    allowed = torch.tensor([[0.0, float("-inf"), 2.0]])  # a token that is ruled out
    assert Sampling(temperature).choose(allowed, torch.tensor([0.0], dtype=torch.float64)) == 2


def test_a_temperature_that_is_no_number_is_refused() -> None:
    with pytest.raises(UserError, match="--temperature is nan but must be at least 0"):
        Sampling(float("nan"))
