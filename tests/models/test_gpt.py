"""The GPT model: published sizes, causality, initial weights."""

import pytest
import torch

from threefold.config import Config, resolve
from threefold.constants import IGNORE_INDEX
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.models.layers.decoder import SampleInfo
from threefold.parallel.parameter import draw_
from threefold.random.dropout import Dropout, sample_keys


def config(**model: object) -> Config:
    given = {"model": model, "data": {"path": "unused", "sequence_length": 16}}
    return resolve(Config.model_validate(given), int(model.get("vocab_size") or 50257))


@pytest.mark.parametrize(
    ("preset", "parameters"),
    [
        ("gpt2-124m", 124_439_808),
        ("gpt2-medium", 354_823_168),
        ("gpt2-large", 774_030_080),
        ("gpt2-xl", 1_557_611_200),
    ],
)
def test_published_sizes(preset: str, parameters: int) -> None:
    """OpenAI's released models, whose parameters are counted with the tied head once."""
    with torch.device("meta"):
        model = GPT(config(preset=preset).model)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters


def small() -> tuple[GPT, Config]:
    settings = config(num_layers=2, hidden_size=24, num_attention_heads=4, vocab_size=50)
    model = GPT(settings.model)
    plan = gpt_plan(settings.model, 16)
    for name, parameter in model.named_parameters():
        draw_(parameter, parameter, name, plan, seed=3)
    return model, settings


def test_embeddings_may_have_a_dropout_of_their_own() -> None:
    """By default that of the blocks; a rate of 0 is one, too."""
    sizes = {"num_layers": 1, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 50, "hidden_dropout": 0.2}
    for given, embedded in (({}, 0.2), ({"embedding_dropout": 0.5}, 0.5), ({"embedding_dropout": 0.0}, 0.0)):
        model = GPT(config(**sizes, **given).model)
        keys = sample_keys(1, 0, torch.arange(64))
        dropped = (model.embed(torch.zeros(64, 16, dtype=torch.int64), SampleInfo(keys)) == 0).float().mean()
        assert dropped == pytest.approx(embedded, abs=0.02)
        assert {dropout.p for dropout in model.blocks[0].dropout.values()} == {0.2}


def test_no_token_sees_a_later_one() -> None:
    model, _ = small()
    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 9:] = (changed[:, 9:] + 1) % 50
    torch.testing.assert_close(model(tokens)[:, :9], model(changed)[:, :9])
    assert not torch.isclose(model(tokens)[:, 9:], model(changed)[:, 9:]).all(-1).any()


def test_loss_is_the_sum_over_the_tokens_that_count() -> None:
    model, _ = small()
    tokens = torch.randint(0, 50, (3, 16), generator=torch.Generator().manual_seed(1))
    labels = tokens.roll(-1, 1)
    labels[0, 4:] = IGNORE_INDEX
    losses = -model(tokens).log_softmax(-1).gather(-1, labels.clamp(0).unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(model(tokens, labels), losses[labels != IGNORE_INDEX].sum())


def test_initial_weights_are_gpt2s() -> None:
    model, settings = small()
    weights = dict(model.named_parameters())
    assert weights["embed.tokens.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert weights["blocks.1.mlp.down.weight"].std().item() == pytest.approx(0.02 / (2 * 2) ** 0.5, rel=0.1)
    assert weights["blocks.0.attn_norm.weight"].eq(1).all()
    assert weights["blocks.0.attn.qkv.bias"].eq(0).all()
    assert settings.model.tie_embeddings
    assert model.head.output.weight is model.embed.tokens.weight


def test_dropout_needs_keys_and_differs_by_layer() -> None:
    """Each of its layers draws once, another mask than all others."""
    rates = {"hidden_dropout": 0.5, "attention_dropout": 0.5}
    settings = config(num_layers=2, hidden_size=24, num_attention_heads=4, vocab_size=50, **rates)
    model = GPT(settings.model)
    masks: dict[str, list[torch.Tensor]] = {}
    for name, module in model.named_modules():
        if isinstance(module, Dropout):
            masks[name] = []
            module.register_forward_hook(
                lambda _, given, out, name=name: masks[name].append((out == 0) & (given[0] != 0))
            )
    names = {"embed.dropout"}
    for layer in (0, 1):
        names |= {f"blocks.{layer}.attn.core.dropout", f"blocks.{layer}.dropout.attn", f"blocks.{layer}.dropout.mlp"}
    assert masks.keys() == names

    tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(2))
    samples = SampleInfo(torch.tensor([5, 6]))
    plain = model.eval()(tokens)
    assert torch.equal(model(tokens, samples=samples), plain)
    assert torch.equal(model.train()(tokens), plain)
    assert not any(mask.any() for drawn in masks.values() for mask in drawn)
    for drawn in masks.values():
        drawn.clear()
    dropped = model(tokens, samples=samples)
    assert {name: len(drawn) for name, drawn in masks.items()} == dict.fromkeys(names, 1)
    first = {name: drawn.pop() for name, drawn in masks.items()}
    assert torch.equal(model(tokens, samples=samples), dropped)
    for name, mask in first.items():
        (again,) = masks[name]
        assert torch.equal(again, mask)
        rows = torch.tril(torch.ones(16, 16)).expand(2, 4, 16, 16) > 0 if "core" in name else torch.ones_like(mask)
        assert mask[rows].float().mean() == pytest.approx(0.5, abs=0.1)
        assert (mask[0] == mask[1])[rows[0]].float().mean() == pytest.approx(0.5, abs=0.1)
        for other, theirs in first.items():
            if other != name and theirs.shape == mask.shape:
                assert (mask == theirs)[rows].float().mean() == pytest.approx(0.5, abs=0.1), (name, other)
