"""A model with adapters in one process, against plain torch: the model with the merged weights W + s · B·A."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import threefold as t3
from tests.adapters.support import ALPHA, RANK, with_adapter
from tests.support.parity import BOTH, DEEPSEEK, LLAMA, MOE, WIDE, Case
from threefold.errors import UserError
from threefold.models.source import ConfigSource

CASES = {
    "gpt": Case(dtype="fp64", tie=False),
    "llama": LLAMA,
    "gated heads": WIDE,
    "soft caps": replace(BOTH, tie=False),
    "experts": MOE,
    "latent attention": DEEPSEEK,
}
PARTS = {
    "query": lambda config: config.num_attention_heads // config.num_key_value_heads * config.head_dim,
    "gates": lambda config: config.num_attention_heads // config.num_key_value_heads * config.head_dim,
    "key": lambda config: config.head_dim,
    "value": lambda config: config.head_dim,
}


def projection_of_rows(name: str, rows: int, case: Case) -> list[int]:
    """Return the number of the projection of each output feature of a fused layer, from what its family says."""
    config = case.config.model
    if name.endswith("gate_up"):
        return [row % 2 for row in range(rows)]
    if name.endswith("attn.qkv") and config.architecture == "llama":
        parts = ["query", *(["gates"] if config.attention_gate else []), "key", "value"]
        pattern = [number for number, part in enumerate(parts) for _ in range(PARTS[part](config))]
    else:
        return []
    return pattern * (rows // len(pattern))


def merged(name: str, weight: Tensor, a: Tensor, b: Tensor, case: Case, factor: float) -> Tensor:
    """Return W + s · B·A, row by row: that of a row is its projection's."""
    of_row = projection_of_rows(name, weight.shape[-2], case)
    if not of_row or a.shape[-2] == RANK:
        return weight + factor * (b @ a)
    rows = [b[..., row, None, :] @ a[..., RANK * part : RANK * (part + 1), :] for row, part in enumerate(of_row)]
    return weight + factor * torch.cat(rows, -2)


def base_and_adapted(case: Case) -> tuple[nn.Module, nn.Module, dict[str, Tensor]]:
    make, _ = ConfigSource().load(case.config)
    base = ConfigSource().load(replace(case, update=()).config)[0]().double()
    adapted = make().double()
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in adapted.parameters():
            parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    factors = {name: value for name, value in adapted.named_parameters() if value.requires_grad}
    assert factors
    assert all("lora_" in name for name in factors)
    base.load_state_dict({k: v for k, v in adapted.state_dict().items() if "lora_" not in k}, strict=True)
    return base.eval(), adapted.eval(), factors


@pytest.mark.parametrize("which", CASES)
@pytest.mark.parametrize("targets", [None, ("**",)], ids=["default", "all"])
def test_an_adapted_model_is_the_merged_one(which: str, targets: tuple[str, ...] | None) -> None:
    case = with_adapter(CASES[which], **({} if targets is None else {"targets": targets}))
    base, adapted, factors = base_and_adapted(case)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in factors.items()}
    weights = dict(base.named_parameters())
    changed: dict[str, Tensor] = {}
    for name, a in leaves.items():
        if not name.endswith("_a"):
            continue
        b, owner = leaves[f"{name[:-1]}b"], name.rpartition(".")[0]
        if name.endswith("lora_embedding_a"):
            changed[f"{owner}.weight"] = weights[f"{owner}.weight"] + ALPHA / RANK * (b @ a).t()
            continue
        place = f"{owner}.weight" if name.endswith(".lora_a") else name.removesuffix("_lora_a")
        changed[place] = merged(place.removesuffix(".weight"), weights[place], a, b, case, ALPHA / RANK)
    if targets:
        assert {name.rpartition(".")[0] for name in changed} >= {"head.output", "embed.tokens"}
    tokens = torch.randint(0, case.vocab, (2, 12), generator=torch.Generator().manual_seed(4))
    labels = tokens.roll(1, 1)
    logits, expected = adapted(tokens), functional_call(base, changed, (tokens,))
    torch.testing.assert_close(logits, expected, rtol=1e-11, atol=1e-11)
    adapted(tokens, labels).backward()
    functional_call(base, changed, (tokens, labels)).backward()
    for name, leaf in leaves.items():
        torch.testing.assert_close(factors[name].grad, leaf.grad, rtol=1e-9, atol=1e-11, msg=name)
    assert all(value.grad is None for name, value in adapted.named_parameters() if name not in factors)


def test_a_projection_alone_has_rows_of_its_own() -> None:
    case = with_adapter(LLAMA, targets=("blocks.*.attn.qkv.value",))
    base, adapted, factors = base_and_adapted(case)
    a, b = factors["blocks.0.attn.qkv.lora_a"], factors["blocks.0.attn.qkv.lora_b"]
    assert len(factors) == 2 * case.layers
    assert a.shape == (RANK, case.heads * case.head_dim)
    values = torch.tensor(projection_of_rows("attn.qkv", len(b), case)) == 2
    x = torch.randn(2, 3, a.shape[1], dtype=torch.float64)
    added = adapted.get_submodule("blocks.0.attn.qkv")(x) - base.get_submodule("blocks.0.attn.qkv")(x)
    torch.testing.assert_close(added, ALPHA / RANK * x @ a.t() @ (b * values.unsqueeze(1)).t())


@pytest.mark.parametrize(("stabilized", "factor"), [(False, 7 / 3), (True, 7 / 3**0.5)])
def test_the_factor(stabilized: bool, factor: float) -> None:
    layer = nn.Sequential(nn.Linear(4, 5).double())
    x, plain = torch.randn(3, 4, dtype=torch.float64), nn.Linear(4, 5).double()
    plain.load_state_dict(layer[0].state_dict())
    t3.add_adapter(layer, rank=3, alpha=7, targets=["0"], rank_stabilized=stabilized)
    assert torch.equal(layer(x), plain(x))  # B is zero
    nn.init.normal_(layer[0].lora_b)
    torch.testing.assert_close(layer(x), plain(x) + factor * x @ layer[0].lora_a.t() @ layer[0].lora_b.t())
    assert not layer[0].weight.requires_grad
    assert layer[0].lora_a.requires_grad


def test_initial_values_follow_from_seed_and_name() -> None:
    def factors(seed: int, targets: list[str]) -> dict[str, Tensor]:
        model = nn.ModuleDict({"one": nn.Linear(40, 5), "other": nn.Linear(40, 5), "table": nn.Embedding(40, 5)})
        t3.add_adapter(model, rank=30, targets=targets, seed=seed)
        return {name: value for name, value in model.named_parameters() if "lora_" in name}

    first = factors(1, ["*"])
    assert torch.equal(first["one.lora_a"], factors(1, ["one"])["one.lora_a"])
    assert not torch.equal(first["one.lora_a"], factors(2, ["*"])["one.lora_a"])
    assert not torch.equal(first["one.lora_a"], first["other.lora_a"])
    assert first["one.lora_a"].std().item() == pytest.approx((3 * 40) ** -0.5, rel=0.1)
    assert not any(value.any() for name, value in first.items() if name.endswith("_b"))
    assert first["table.lora_embedding_a"].shape == (30, 40)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"rank": 0}, "rank is 0 but must be at least 1; use 8."),
        ({"targets": "one"}, "targets is 'one' but must be a list of names, such as ['blocks.*.up']."),
        (
            {"targets": ["won"]},
            "linear layer, embedding or experts of the model are called 'won'; the nearest is 'one'.",
        ),
        ({"targets": ["norm"]}, "no linear layer, embedding or experts of the model are called 'norm'."),
        ({"dropout": 1.5}, "dropout is 1.5 but input should be less than 1."),
        ({"dropout": 0.1}, "'one' is in no layer whose forward takes samples, which key what is dropped; use 0."),
    ],
    ids=str,
)
def test_mistakes_are_one_sentence(given: dict, says: str) -> None:
    model = nn.ModuleDict({"one": nn.Linear(4, 5), "norm": nn.LayerNorm(4)})
    with pytest.raises(UserError) as error:
        t3.add_adapter(model, **{"rank": 3, "targets": ["one"], **given})
    assert str(error.value).endswith(says)


@pytest.mark.parametrize(
    ("case", "settings", "says"),
    [
        (Case(), {"targets": ("head.output",)}, "'head.output' shares its weight with 'embed.tokens.weight'"),
        (Case(), {"targets": ("blocks.*.mlp.upp",)}, "are called 'blocks.*.mlp.upp'; the nearest is"),
        (MOE, {"dropout": 0.1}, "get tokens without their places; use 0, or leave them out of targets."),
        (Case(), {"rank": 0}, "adapter.alpha is 7.0 but adapter.rank is 0, so there is no adapter"),
        (replace(Case(), settings=(("train.exact", True),)), {}, "adapter.rank is 3 but train.exact is true"),
        (replace(Case(), settings=(("precision.fp8", True),)), {}, "precision.fp8 is true but adapter.rank is 3"),
    ],
    ids=str,
)
def test_settings_that_do_not_go_together(case: Case, settings: dict, says: str) -> None:
    with pytest.raises(UserError, match=r".*") as error:
        ConfigSource().load(with_adapter(case, **settings).config)
    assert says in str(error.value)
    assert str(error.value).count(". ") == 0
