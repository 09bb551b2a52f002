"""Layers with magnitudes (DoRA), against plain torch and the package `peft`."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import threefold as t3
from tests.adapters.support import ALPHA, RANK, with_adapter
from tests.support.parity import MOE, Case
from threefold.adapters.layers import PassSamples
from threefold.errors import UserError
from threefold.models.source import ConfigSource

FACTORS = ("lora_a", "lora_b", "lora_magnitude")


def layer_of(bias: bool = True, **settings: object) -> nn.Linear:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(7, 5, bias).double())
    t3.add_adapter(model, rank=RANK, alpha=ALPHA, targets=["0"], dora=True, **settings)
    with torch.no_grad():
        for name in FACTORS:
            getattr(model[0], name).normal_().mul_(0.5)
    return model[0]


def test_rows_have_their_magnitude_and_the_norm_is_a_constant() -> None:
    layer, x = layer_of(), torch.randn(6, 7, dtype=torch.float64)
    a, b, change = (getattr(layer, name).detach().clone().requires_grad_() for name in FACTORS)
    both = layer.weight + ALPHA / RANK * b @ a
    merged = (layer.weight.norm(dim=1) + change).unsqueeze(1) * both / both.detach().norm(dim=1, keepdim=True)
    expected = x @ merged.t() + layer.bias
    torch.testing.assert_close(layer(x), expected)
    layer(x).square().sum().backward()
    expected.square().sum().backward()
    for name, leaf in zip(FACTORS, (a, b, change), strict=True):
        torch.testing.assert_close(getattr(layer, name).grad, leaf.grad, msg=name)


def test_nothing_changes_at_first_also_for_a_row_of_zeros() -> None:
    plain = nn.Linear(7, 5)
    with torch.no_grad():
        plain.weight[2] = 0
    model = nn.Sequential(nn.Linear(7, 5))
    model[0].load_state_dict(plain.state_dict())
    t3.add_adapter(model, rank=2, targets=["0"], dora=True)
    x = torch.randn(3, 7)
    torch.testing.assert_close(model(x), plain(x))
    model(x).sum().backward()
    assert all(getattr(model[0], name).grad.isfinite().all() for name in FACTORS)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("stabilized", [False, True])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.slow
def test_logits_and_gradients_are_those_of_peft(dropout: float, stabilized: bool, bias: bool) -> None:
    peft = pytest.importorskip("peft")
    ours = layer_of(bias, rank_stabilized=stabilized)
    settings = {"r": RANK, "lora_alpha": ALPHA, "use_rslora": stabilized, "lora_dropout": dropout, "use_dora": True}
    base = nn.Sequential(nn.Linear(7, 5, bias)).double()
    base[0].load_state_dict({k: v for k, v in ours.state_dict().items() if "lora" not in k})
    theirs = peft.get_peft_model(base, peft.LoraConfig(target_modules=["0"], **settings)).double()
    layer = theirs.base_model.model[0]
    weights = {
        "lora_a": layer.lora_A["default"].weight,
        "lora_b": layer.lora_B["default"].weight,
        "lora_magnitude": layer.lora_magnitude_vector["default"].weight,
    }
    with torch.no_grad():
        for name, weight in weights.items():
            start = ours.weight.norm(dim=1) if name == "lora_magnitude" else 0
            weight.copy_(getattr(ours, name) + start)
    x = torch.randn(4, 6, 7, dtype=torch.float64)
    if dropout:  # with one mask on both sides
        mask = (torch.rand(x.shape) > dropout) / (1 - dropout)
        layer.lora_dropout["default"] = Masked(mask)
        vars(ours)["adapter"] = replace(ours.adapter, dropout=Masked(mask), samples=PassSamples())
    got, expected = ours(x), theirs(x)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)
    labels = torch.randn_like(got)
    (got * labels).sum().backward()
    (expected * labels).sum().backward()
    for name, weight in weights.items():
        torch.testing.assert_close(getattr(ours, name).grad, weight.grad, rtol=1e-11, atol=1e-12, msg=name)


class Masked(nn.Module):
    """Dropout with a given mask."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor, keys: Tensor | None = None) -> Tensor:
        return x * self.mask


@pytest.mark.parametrize(
    ("case", "settings", "says"),
    [
        (MOE, {}, "adapter.dora is true but 'blocks.1.mlp.experts' is experts, whose rows have no magnitudes; use"),
        (replace(Case(), tie=False), {"targets": ("**",)}, "'embed.tokens' is an embedding, whose rows have no magni"),
        (replace(Case(), settings=(("train.exact", True),)), {}, "train.exact is true"),
    ],
    ids=["experts", "embedding", "exact"],
)
def test_what_has_no_magnitudes_is_refused(case: Case, settings: dict, says: str) -> None:
    with pytest.raises(UserError) as error:
        ConfigSource().load(with_adapter(case, dora=True, **settings).config)
    assert says in str(error.value)
    assert str(error.value).count(". ") == 0
