"""Models and losses as users write them: plain PyTorch layers that pass several tensors, and a custom loss."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.parity import Case, Trace, trained
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.data.loader import BatchSlice
from threefold.models.custom_batch import map_tensors
from threefold.models.loss_terms import CountedLoss, LossFunction, LossTerm
from threefold.models.sharding import Column, Constant, Initial, ModelPlan, Normal, Replicated, Row, Split, matches
from threefold.random.dropout import Dropout
from threefold.train.step import Engine
from threefold.verify import reference
from threefold.verify.batches import BatchSource

WORDS, CLASSES, LENGTH, WIDTH, INNER = 23, 5, 7, 10, 12
OTHER_LENGTH, OTHER_WIDTH = 3, 5


class MaskedStart(nn.Module):
    """Embed words and pass the mask on."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.offset = nn.Parameter(torch.empty(LENGTH, WIDTH))

    def forward(self, ids: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(ids) + self.offset, keep


class MaskedBlock(nn.Module):
    """Mix the positions that the mask keeps; drop by the samples' keys."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.gain = nn.Parameter(torch.empty(WIDTH))
        self.dropout = Dropout(0.1, name)

    def forward(self, x: Tensor, keep: Tensor, samples: Any) -> tuple[Tensor, Tensor]:
        kept = x.masked_fill(~keep.unsqueeze(-1), 0.0)
        mixed = kept + kept.mean(1, keepdim=True) * self.gain
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(mixed)))), samples.keys), keep


class MaskedEnd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.scores = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.scores(self.norm(x).masked_fill(~keep.unsqueeze(-1), 0.0))


class MaskedModel(nn.Module):
    """Model whose layers pass (hidden, mask) on."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.start = MaskedStart()
        self.blocks = nn.ModuleList(MaskedBlock(f"blocks.{number}.dropout") for number in range(blocks))
        self.end = MaskedEnd()

    def forward(self, ids: Tensor, keep: Tensor, samples: Any) -> Tensor:
        x, keep = self.start(ids, keep)
        for block in self.blocks:
            x, keep = block(x, keep, samples)
        return self.end(x, keep)


class Streams(NamedTuple):
    ids: Tensor
    features: Tensor
    targets: Tensor


def _other(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else torch.float64


class StreamStart(nn.Module):
    """Produce two streams of different lengths, widths and dtypes, and places that only the end reads."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.scale = nn.Parameter(torch.empty(OTHER_WIDTH))

    def forward(self, ids: Tensor, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.words(ids)
        return x, (features.to(x.dtype) * self.scale).to(_other(x.dtype)), ids.argsort(1)


class StreamBlock(nn.Module):
    """Update each stream with the other one."""

    def __init__(self, reads_other: bool) -> None:
        super().__init__()
        self.reads_other = reads_other
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.join = nn.Linear(OTHER_WIDTH, WIDTH) if reads_other else None
        self.scale = nn.Parameter(torch.empty(OTHER_WIDTH))

    def forward(self, x: Tensor, other: Tensor, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.down(torch.tanh(self.up(x)))
        if self.join is not None:
            y = y + self.join(other.to(x.dtype)).mean(1, keepdim=True)
        # Computed in the model's dtype, so that sums over samples are as wide as the comparison.
        return x + y, torch.sin(other.to(x.dtype) * self.scale).to(other.dtype), places


class StreamEnd(nn.Module):
    """Return the inputs of the loss by name: scores and the other stream."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, other: Tensor, places: Tensor) -> dict[str, Tensor]:
        ordered = x.gather(1, places.unsqueeze(-1).expand_as(x))
        weights = torch.linspace(0.5, 1.5, LENGTH, dtype=x.dtype)
        return {"scores": self.scores((ordered * weights.unsqueeze(-1)).mean(1)), "other": other.to(x.dtype)}


class StreamModel(nn.Module):
    """Model whose layers pass two float streams and integer places; it has no `forward` of its own."""

    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.start = StreamStart()
        self.blocks = nn.ModuleList(StreamBlock(number % 2 == 0) for number in range(blocks))
        self.end = StreamEnd()


def plan_of(blocks: int, kinds: Mapping[str, Split] | None = None) -> ModelPlan:
    split = {
        "start": Replicated(),
        "blocks.*": Replicated(),
        "blocks.*.up": Column(),
        "blocks.*.down": Row(),
        "end": Replicated(),
        **(kinds or {}),
    }
    layers = ("start", *(f"blocks.{number}" for number in range(blocks)), "end")
    recompute = {"full": ("blocks.*",)}
    return ModelPlan(split, layers, (1.0,) * len(layers), _initial, recompute=recompute)


def _initial(name: str) -> Initial:
    if name.endswith("norm.weight"):
        return Constant(1.0)
    return Normal(0.1 if name.endswith("bias") else 0.5)


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(700 + step)


def masked_batch(step: int, samples: int = 24) -> dict[str, Tensor]:
    """Return a batch whose samples have labels at different shares of positions, the last one at none."""
    made = _generator(step)
    ids = torch.randint(WORDS, (samples, LENGTH), generator=made)
    labels = torch.randint(CLASSES, (samples, LENGTH), generator=made)
    share = torch.linspace(0, 1.05, samples).unsqueeze(1)
    labels[torch.rand(labels.shape, generator=made) < share] = -100
    return {"ids": ids, "keep": torch.rand(ids.shape, generator=made) < 0.7, "labels": labels}


def stream_batch(step: int, samples: int = 24) -> Streams:
    made = _generator(step)
    ids = torch.randint(WORDS, (samples, LENGTH), generator=made)
    features = torch.randn(samples, OTHER_LENGTH, OTHER_WIDTH, generator=made, dtype=torch.float64)
    return Streams(ids, features, torch.randint(CLASSES, (samples,), generator=made))


def _token_terms(output: Tensor, batch: dict[str, Tensor]) -> dict[str, Tensor | LossTerm]:
    labels = batch["labels"].flatten()
    return {
        "tokens": F.cross_entropy(output.flatten(0, 1), labels, ignore_index=-100, reduction="sum"),
        "size": LossTerm(output.square().mean((1, 2)).sum(), 0.3),
    }


def _token_counts(batch: dict[str, Tensor]) -> dict[str, Tensor | float]:
    return {"tokens": (batch["labels"] != -100).sum(), "size": float(len(batch["labels"]))}


def mean_loss(output: dict[str, Tensor], batch: Streams) -> Tensor:
    return F.cross_entropy(output["scores"], batch.targets) + 0.1 * output["other"].square().mean()


masked_loss = CountedLoss(_token_terms, _token_counts)


@dataclass(frozen=True)
class CustomCase:
    """User's own model, its batches and its loss, in a layout."""

    make: Callable[[], nn.Module]
    plan: ModelPlan
    batches: Callable[[int], Any]
    loss: LossFunction
    case: Case = field(default_factory=Case)


def custom_case(kind: str, blocks: int = 3, **case: Any) -> CustomCase:
    given = Case(**{"optimizer": "sgd", "layers": blocks, **case})
    if kind == "masked":
        return CustomCase(partial(MaskedModel, blocks), plan_of(blocks), masked_batch, masked_loss, given)
    return CustomCase(partial(StreamModel, blocks), plan_of(blocks), stream_batch, mean_loss, given)


FROZEN = {
    "first layers": ("start.**", "blocks.0.**", "blocks.1.**"),
    "last layers": ("blocks.3.**", "end.**"),
    "some of each": ("start.offset", "blocks.*.up.weight", "blocks.1.down.bias", "blocks.*.gain", "end.norm.*"),
    "all but one": ("start.**", "blocks.**", "end.scores.weight"),
}
"""Names of frozen parameters, by a readable description."""


def _freezing(make: Callable[[], nn.Module], patterns: Sequence[str]) -> nn.Module:
    """Make a model with some parameters frozen, as a user's constructor may leave them."""
    model = make()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(matches(name, pattern) for pattern in patterns))
    return model


def frozen_case(which: str, **layout: object) -> CustomCase:
    own = custom_case("masked", blocks=4, **layout)
    make = partial(_freezing, own.make, FROZEN[which])
    frozen = frozenset(name for name, parameter in make().named_parameters() if not parameter.requires_grad)
    assert frozen
    return replace(own, make=make, plan=replace(own.plan, frozen=frozen))


@dataclass(frozen=True)
class CustomBatches(BatchSource):
    """Global batches made by a function of the step."""

    make: Callable[[int], Any]
    masked: bool = False

    def read(self, config: Config, step: int, part: BatchSlice) -> Any:
        rows = torch.from_numpy(part.rows)
        return map_tensors(self.make(step), lambda tensor: tensor[rows])


def one_process(own: CustomCase) -> Trace:
    """Run the plain model with the whole batch in one pass."""
    config, batches = own.case.config, CustomBatches(own.batches)
    return Trace.last(reference.one_process(own.make, own.plan, config, batches, own.case.steps, own.loss))


def make_engine(own: CustomCase) -> Engine:
    config = own.case.config
    return Engine(
        own.make, own.plan, Mesh(Layout.from_config(config.parallel), in_tree=config.train.exact), config, loss=own.loss
    )


def in_layout(own: CustomCase) -> Trace:
    """Run the engine on this rank of the layout."""
    engine, batches = make_engine(own), CustomBatches(own.batches)
    dp, config = engine.mesh.dp, own.case.config
    return trained(engine, own.case.steps, lambda step: batches.batch(config, step, dp.index, dp.size))
