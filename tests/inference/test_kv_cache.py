"""Keys and values that are kept give what running all tokens again gives."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.inference.support import FAMILIES, Oracle
from threefold.errors import UserError
from threefold.inference.model import Cache, CachedAttention, Model, Trained, caching
from threefold.models.layers.attention import CausalAttention

CPU = torch.device("cpu")
TOKENS = torch.randint(1, 300, (4, 30), generator=torch.Generator().manual_seed(1)).tolist()
BEGUN = [1, 7, 12, 3]
"""Tokens of each sequence that come at once: the rest come one by one."""
SLOTS = 16


def fill(model: Model, cache: Cache, rows: list[int], tokens: list[list[int]]) -> None:
    lengths = [len(each) for each in tokens]
    cache.cursor.fill(rows, lengths, CPU)
    model.hidden(torch.tensor([each + [0] * (max(lengths) - len(each)) for each in tokens]))


def advance(model: Model, cache: Cache, tokens: list[int], positions: list[int]) -> torch.Tensor:
    cache.cursor.advance(positions, CPU)
    hidden = model.hidden(torch.tensor(tokens).unsqueeze(1))
    assert hidden is not None
    return model.logits(hidden[:, 0])


def departs(trained: Trained, new_tokens: int = 4) -> float:
    """Greatest difference of any logit from the slow way's, over sequences of odd lengths side by side."""
    oracle, model, found = Oracle(trained), trained.load(dtype="fp64"), []
    with caching(model.stage, 4, SLOTS) as cache:
        fill(model, cache, [0, 1, 2, 3], [tokens[:begun] for tokens, begun in zip(TOKENS, BEGUN, strict=True)])
        for step in range(new_tokens):
            places = [begun + step for begun in BEGUN]
            logits = advance(model, cache, [tokens[p] for tokens, p in zip(TOKENS, places, strict=True)], places)
            for row, place in enumerate(places):
                found.append((logits[row] - oracle.logits(TOKENS[row][: place + 1])[-1]).abs().max())
    return float(torch.stack(found).max())  # not a number where any is not one


def test_equal_to_running_all_tokens(trained: Trained) -> None:
    assert departs(trained) < 1e-12


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_equal_to_running_all_tokens(runs: Callable[[str], Path], family: str) -> None:
    """Of prompts of different lengths side by side, longer than windows and shorter."""
    assert departs(Trained.find(runs(family))) < 1e-12


def test_rows_are_used_again_and_let_go(trained: Trained) -> None:
    oracle, model = Oracle(trained), trained.load(dtype="fp64")
    with caching(model.stage, 3, SLOTS) as cache:
        fill(model, cache, [0, 1, 2], [tokens[:10] for tokens in TOKENS[:3]])
        advance(model, cache, [5, 5, 5], [10, 10, 10])
        fill(model, cache, [1], [TOKENS[3][:4]])  # a shorter one in the row of a longer
        cache.keep([2, 1], CPU)
        logits = advance(model, cache, [7, TOKENS[3][4]], [11, 4])
    expected = [oracle.logits([*TOKENS[2][:10], 5, 7])[-1], oracle.logits(TOKENS[3][:5])[-1]]
    assert torch.allclose(logits, torch.stack(expected), rtol=0, atol=1e-12)


def test_angles_that_depend_on_the_length_bound_the_context(runs: Callable[[str], Path]) -> None:
    model = Trained.find(runs("rope")).load()
    config, length = model.trained.config, model.context
    for method, context in {"yarn": length, "dynamic": 9, "longrope": 9}.items():
        scaled = config.model.model_copy(update={"rope_scaling": method, "rope_original_positions": 9})
        trained = replace(model.trained, config=config.model_copy(update={"model": scaled}))
        assert replace(model, trained=trained).context == context


def test_windows_keep_no_more_than_they_see(runs: Callable[[str], Path]) -> None:
    model = Trained.find(runs("llama")).load()
    with caching(model.stage, 2, SLOTS) as cache:
        fill(model, cache, [0, 1], [tokens[:14] for tokens in TOKENS[:2]])
        slots = [module.slots for module in model.stage.modules() if isinstance(module, CachedAttention)]
        assert slots == [SLOTS, 5, 5]
        # two rows of 2 key-value heads (of 4), 6 wide, keys and values
        assert cache.nbytes == 2 * 2 * 6 * 2 * 4 * sum(slots)


def test_of_latent_attention_it_keeps_latents_alone(runs: Callable[[str], Path]) -> None:
    model = Trained.find(runs("latent")).load()
    with caching(model.stage, 2, SLOTS) as cache:
        fill(model, cache, [0, 1], [tokens[:14] for tokens in TOKENS[:2]])
        # two rows of SLOTS latents in each of three layers, 9 wide, with the rotary part, half of a head of 6 and even
        assert cache.nbytes == 3 * 2 * SLOTS * (9 + 4) * 4


def test_afterwards_the_model_is_as_it_was(trained: Trained) -> None:
    model = trained.load()
    before = [repr(model.stage), model.stage(torch.tensor(TOKENS)[:, :16])]
    with caching(model.stage, 4, SLOTS) as cache:
        fill(model, cache, [0, 1, 2, 3], [tokens[:10] for tokens in TOKENS])
    assert repr(model.stage) == before[0]
    assert torch.equal(model.stage(torch.tensor(TOKENS)[:, :16]), before[1])


class OtherAttention(CausalAttention):
    def forward(self, *inputs: Any) -> torch.Tensor:
        return super().forward(*inputs)


def test_an_attention_with_another_forward_is_refused() -> None:
    with pytest.raises(UserError) as told, caching(nn.ModuleList([OtherAttention()]), 1, SLOTS):
        pass
    assert str(told.value) == (
        "the KV cache computes attention itself, without the forward of OtherAttention; use a model of --model, which "
        "runs without a cache."
    )
