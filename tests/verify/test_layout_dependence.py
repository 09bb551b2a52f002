"""Layers whose result depends on the layout are refused by name; weights drawn by numpy are the same on every rank."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.custom_state_models import LENGTH, PARTS, WIDTH, Model, Part
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.models.source import construct
from threefold.parallel.parallelize import TrainingSettings
from threefold.train.step import GradientStep
from threefold.verify.module_check import refuse_layout_dependent


class LookUp(nn.Module):
    """Embedding of rounded activations."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH, **options)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table((x.sum(-1) * 7).long() % 11)


class Wrapped(Part):
    def __init__(self, name: str, make: Callable[[], nn.Module]) -> None:
        super().__init__(name)
        self.inner = make()

    def forward(self, x: Tensor, samples: object) -> Tensor:
        return self.inner(x) * self.gain


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "no dropout": lambda: nn.Dropout(0.0),
    "Dropout": lambda: nn.Dropout(0.1),
    "AlphaDropout": lambda: nn.AlphaDropout(0.2),
    "RReLU": nn.RReLU,
    "attention dropout": lambda: nn.MultiheadAttention(WIDTH, 2, dropout=0.1),
    "LSTM dropout": lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True),
    "encoder layer": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True),
    "batch norm": lambda: nn.BatchNorm1d(LENGTH, track_running_stats=False),
    "max_norm": lambda: LookUp(max_norm=1.0),
    "scale_grad_by_freq": lambda: LookUp(scale_grad_by_freq=True),
    "spectral norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH, device="cpu")),
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH, device="cpu")),
}
PARTS.update({kind: partial(Wrapped, make=make) for kind, make in LAYERS.items()})
REFUSED = {
    "Dropout": "'blocks.0.part.inner' is Dropout(p=0.1), which draws from torch's generator, so that the layout "
    "would change the dropped elements; use threefold.Dropout(0.1, 'blocks.0.part.inner'), called with the activation "
    "and samples.keys, samples being a parameter of the layer's forward.",
    "AlphaDropout": "'blocks.0.part.inner' is AlphaDropout(p=0.2),",
    "RReLU": "'blocks.0.part.inner' is RReLU(), which draws from torch's generator",
    "attention dropout": "'blocks.0.part.inner' is MultiheadAttention(dropout=0.1),",
    "LSTM dropout": "'blocks.0.part.inner' is LSTM(dropout=0.3),",
    "encoder layer": "'blocks.0.part.inner.self_attn' is MultiheadAttention(dropout=0.1),",
    "batch norm": "'blocks.0.part.inner' is a BatchNorm1d, whose statistics are those of the samples of its own rank",
    "max_norm": "'blocks.0.part.inner.table' is Embedding(max_norm=1),",
    "scale_grad_by_freq": "'blocks.0.part.inner.table' is Embedding(scale_grad_by_freq=True),",
    "spectral norm": "'blocks.0.part.inner' has spectral_norm,",
    "old spectral norm": "'blocks.0.part.inner' has spectral_norm,",
}
"""Part of the model → how the sentence begins."""


def sentences(kinds: tuple[str, ...]) -> dict[str, str]:
    """What each of two replicas is told of models with these parts; empty where they are taken."""
    mesh, told = Mesh(Layout(dp=2)), {}
    for kind in kinds:
        make = partial(Model, kind=kind)
        try:
            with torch.device("meta"):
                plan = Model.plan.build(make())
            GradientStep(make, plan, mesh, TrainingSettings())
        except UserError as error:
            told[kind] = str(error)
        else:
            told[kind] = ""
    return told


def test_layers_whose_result_depends_on_the_layout_are_refused_by_name(pool) -> None:
    for told in pool.run(2, sentences, (*REFUSED, "no dropout", "plain")):
        assert told.pop("no dropout") == told.pop("plain") == ""
        assert told.keys() == REFUSED.keys()
        for kind, begin in REFUSED.items():
            assert told[kind].startswith(begin), kind
            assert told[kind].endswith(".")


def gains(kind: str) -> torch.Tensor:
    """The first weight of a part, drawn in a process that has drawn other numbers before."""
    mesh = Mesh(Layout(dp=2))
    random.seed(mesh.rank)
    np.random.seed(mesh.rank)
    make = partial(Model, kind=kind)
    before = random.getstate()[1][:5], np.random.get_state()[1][:5].tolist()
    found = construct(make, seed=4).get_parameter("blocks.1.part.gain").detach()
    assert before == (random.getstate()[1][:5], np.random.get_state()[1][:5].tolist())
    return found


def test_weights_that_numpy_and_random_draw_are_the_same_on_every_rank(pool) -> None:
    first, second = pool.run(2, gains, "numpy weights")
    assert torch.equal(first, second)


@pytest.mark.parametrize("seed", [3, 4])
def test_they_follow_from_the_seed(seed: int) -> None:
    make = partial(Model, kind="numpy weights")
    alike = torch.equal(construct(make, seed).blocks[0].part.gain, construct(make, 4).blocks[0].part.gain)
    assert alike == (seed == 4)


@pytest.mark.parametrize(
    "layer",
    [
        *(kind(0.1) for kind in (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout)),
        *(kind(4, 4, 2, dropout=0.1) for kind in (nn.RNN, nn.GRU)),
        *(kind(4) for kind in (nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)),
        *(kind(2, output_ratio=0.5) for kind in (nn.FractionalMaxPool2d, nn.FractionalMaxPool3d)),
        nn.EmbeddingBag(4, 4, max_norm=1.0),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_each_kind_of_layer_is_refused(layer: nn.Module) -> None:
    with pytest.raises(UserError, match=rf"^'part' is (a )?{type(layer).__name__}\b"):
        refuse_layout_dependent({"part": layer})
