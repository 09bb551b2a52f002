"""Small user models that keep state, draw random numbers, or depend on the local samples, and their data."""

import random
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.models.plan import Plan
from threefold.models.sharding import Column, Replicated, Row, Vocab
from threefold.random.dropout import Dropout

WORDS, WIDTH, LENGTH = 50, 8, 16


class Sums(torch.utils.data.Dataset):
    """Rows of tokens, with the following tokens as labels."""

    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        row = (torch.arange(LENGTH + 1) * (index + 3) + index) % WORDS
        return row[:-1], row[1:]


class Block(nn.Module):
    """Residual MLP around a part that `kind` names."""

    def __init__(self, kind: str, name: str) -> None:
        super().__init__()
        self.part = PARTS[kind](f"{name}.part")
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, samples: object) -> Tensor:
        x = self.part(x, samples)
        return x + self.down(F.gelu(self.up(self.norm(x))))


RULES = {
    "embed": Vocab(),
    "blocks.*.part": Replicated(),
    "blocks.*.up": Column(),
    "blocks.*.down": Row(),
    "head": Vocab(),
}
PLAN = Plan(layers=["embed", "blocks.*", "head"], shard=RULES)


class Model(nn.Module):
    """Embedding, blocks and head; the blocks have a part of one kind."""

    plan = PLAN

    def __init__(self, vocab_size: int = WORDS, kind: str = "plain") -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, WIDTH)
        self.blocks = nn.ModuleList(Block(kind, f"blocks.{number}") for number in range(2))
        self.head = nn.Linear(WIDTH, vocab_size)


class Cut(Model):
    """Model with a part whose layers are sharded too."""

    plan = Plan(layers=PLAN.layers, shard={**RULES, "blocks.*.part.up": Column(), "blocks.*.part.down": Row()})


class Whole(Model):
    """Model with a forward that does more than call the layers in order."""

    def forward(self, ids: Tensor, samples: object = None) -> Tensor:
        x = self.embed(ids) * 3.0
        for block in self.blocks:
            x = block(x, samples)
        return self.head(x)


def loss(logits: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())


class Part(nn.Module):
    """Base of all parts, with a gain, so that there is a weight to compare.

    Args:
        name: name in the whole model.
        compute: function of this part and the activation.
        buffers: functions that make buffers, by name.
        plain: plain attributes, by name.
    """

    def __init__(
        self,
        name: str,
        compute: "Compute | None" = None,
        buffers: Mapping[str, Callable[[], Tensor | None]] = {},
        plain: Mapping[str, Any] = {},
    ) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.compute = compute
        for buffer, make in buffers.items():
            self.register_buffer(buffer, make())
        for attribute, value in plain.items():
            setattr(self, attribute, value)

    def forward(self, x: Tensor, samples: object) -> Tensor:
        return x * self.gain if self.compute is None else self.compute(self, x)


Compute = Callable[[Any, Tensor], Tensor]
PARTS: dict[str, Callable[[str], nn.Module]] = {}


def part(kind: str, **state: Any) -> Callable[[Compute], Compute]:
    """Add the part of a kind that a function computes, with the state that `Part` takes."""

    def add(compute: Compute) -> Compute:
        PARTS[kind] = partial(Part, compute=compute, **state)
        return compute

    return add


def ones() -> Tensor:
    return torch.ones(WIDTH)


def one() -> Tensor:
    return torch.ones(())


@part("batch norm by hand")
def normalize_by_hand(part: Any, x: Tensor) -> Tensor:
    """Normalize by the mean and variance of the local samples."""
    mean, variance = x.mean((0, 1)), x.var((0, 1), correction=0)
    return (x - mean) / (variance + 1e-3).sqrt() * part.gain


@part("running range", buffers={"largest": one})
def scale_by_range(part: Any, x: Tensor) -> Tensor:
    """Scale by the largest activation of all samples so far, which is not a mean of the ranks' largest."""
    part.largest = torch.maximum(part.largest, x.detach().abs().max())
    return x * part.gain / part.largest


@part("variance", buffers={"variance": one})
def scale_evaluations(part: Any, x: Tensor) -> Tensor:
    """Keep a running variance of each batch, for evaluations alone; it is not a mean of the replicas' variances."""
    if not part.training:
        return x * part.gain / part.variance
    with torch.no_grad():
        part.variance.mul_(0.5).add_(0.5 * x.mean((1, 2)).var())
    return x * part.gain


@part("samples seen", buffers={"seen": lambda: torch.zeros((), dtype=torch.int64)})
def count_samples(part: Any, x: Tensor) -> Tensor:
    part.seen += (x[:, 0, 0] > 0).sum()
    return x * part.gain


@part("large batches")
def double_in_large_batches(part: Any, x: Tensor) -> Tensor:
    """Compute something else for more samples than those of a small check."""
    return x * part.gain * (2 if len(x) > 5 else 1)


@part("counter", plain={"calls": 0})
def warm_up(part: Any, x: Tensor) -> Tensor:
    """Warm up by a Python number."""
    part.calls += 1
    return x * part.gain * min(1.0, 0.1 * part.calls)


@part("first batch", plain={"is_set": False})
def set_by_first_batch(part: Any, x: Tensor) -> Tensor:
    """Set a weight from the first batch, remembered in a plain attribute."""
    if not part.is_set:
        part.gain.data.copy_(1 / (0.1 + x.detach().std((0, 1))))
        part.is_set = True
    return x * part.gain


@part("late buffer", buffers={"size": lambda: None})
def create_buffer(part: Any, x: Tensor) -> Tensor:
    """Create a buffer in the first forward pass."""
    if part.size is None:
        part.size = torch.ones(WIDTH)
    scaled = x * part.gain / part.size
    part.size = 0.9 * part.size + 0.1 * x.detach().abs().mean((0, 1))
    return scaled


@part("written data", buffers={"size": ones, "decayed": ones})
def write_data(part: Any, x: Tensor) -> Tensor:
    """Update running means in ways that autograd does not see."""
    scaled = x * part.gain / (0.5 + part.size.clone()) * part.decayed.clone()
    if part.training:
        part.size.data.mul_(0.9).add_(0.1 * x.detach().abs().mean((0, 1)))
        part.decayed.numpy()[:] *= 0.9
    return scaled


@part("rotated", buffers={"turns": lambda: torch.polar(torch.ones(WIDTH // 2), torch.rand(WIDTH // 2))})
def rotate(part: Any, x: Tensor) -> Tensor:
    """Rotate pairs of features by a complex buffer."""
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * part.turns).flatten(-2).to(x.dtype) * part.gain


@part("normed weight")
def normalize_weight(part: Any, x: Tensor) -> Tensor:
    """Normalize a trained weight in place."""
    with torch.no_grad():
        part.gain.div_(part.gain.norm())
    return x * part.gain


@part("held tensor", plain={"held": None})
def hold_mean(part: Any, x: Tensor) -> Tensor:
    """Add a running mean kept in a plain attribute, which the first forward pass creates."""
    before = torch.zeros(WIDTH) if part.held is None else part.held
    part.held = 0.9 * before.to(x) + 0.1 * x.detach().mean((0, 1))
    return x * part.gain + part.held


@part("noted", plain={"calls": 0, "last": None})
def note(part: Any, x: Tensor) -> Tensor:
    """Count calls and keep the last result, without reading either."""
    part.calls += 1
    part.last = x.detach()
    return x * part.gain


@part("cached", plain={"table": None})
def scale_by_table(part: Any, x: Tensor) -> Tensor:
    """Keep a table computed in the first forward pass."""
    if part.table is None or part.table.device != x.device:
        part.table = torch.linspace(0.9, 1.1, WIDTH, device=x.device, dtype=x.dtype)
    return x * part.gain * part.table


class Tracked(Part):
    """Scale by a running mean of the activations' size, which `forward` updates; drop by the samples' keys."""

    def __init__(self, name: str) -> None:
        super().__init__(name, buffers={"size": ones})
        self.dropout = Dropout(0.1, name)
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, samples: object) -> Tensor:
        scaled = x * self.gain / (0.5 + self.size)
        if self.training:
            self.size.mul_(0.9).add_(0.1 * x.detach().abs().mean((0, 1)))
            self.updates = self.updates + 1
        return self.dropout(scaled, samples.keys)  # type: ignore[attr-defined]


class CountedGradients(Part):
    """Warm up by the number of passes with gradients, forward or backward."""

    def __init__(self, name: str, backward: bool = False) -> None:
        super().__init__(name)
        self.calls, self.backward = 0, backward
        self.inner = nn.Linear(WIDTH, WIDTH)
        if backward:
            self.inner.register_full_backward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.calls += 1

    def forward(self, x: Tensor, samples: object) -> Tensor:
        if torch.is_grad_enabled() and not self.backward:
            self._count()
        return x + self.inner(x) * self.gain * min(1.0, 0.1 * (1 + self.calls))


class Scaled(torch.autograd.Function):
    """Scale gradients by a factor that grows with each backward pass."""

    calls = 0

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        Scaled.calls += 1
        return gradient * (1 + 0.1 * Scaled.calls)


class Numbered(Part):
    """Divide by the number of instances created so far."""

    made = 0

    def __init__(self, name: str) -> None:
        super().__init__(name)
        Numbered.made += 1
        self.number = Numbered.made

    def forward(self, x: Tensor, samples: object) -> Tensor:
        return x * self.gain / self.number


class DrawnAttributes(Part):
    """Keep numbers drawn in the constructor in attributes and buffers that torch does not create."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.scale, self.shifts = random.random(), np.random.rand(WIDTH)
        self.register_buffer("slopes", torch.from_numpy(np.random.rand(WIDTH)).float(), persistent=False)

    def forward(self, x: Tensor, samples: object) -> Tensor:
        return x * self.gain * (1 + self.scale) * self.slopes + torch.tensor(self.shifts, dtype=x.dtype)


class Evaluated(Part):
    """Contain a part that the constructor sets to evaluation mode for good."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.inner = Trained().eval()

    def forward(self, x: Tensor, samples: object) -> Tensor:
        return self.inner(x) * self.gain


class Trained(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 1.5 * x if self.training else x


class KeptTensor(Part):
    """Add a tensor that the constructor keeps in a plain attribute."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.held = torch.zeros(WIDTH)

    def forward(self, x: Tensor, samples: object) -> Tensor:
        return x * self.gain + self.held


class DrawnWeights(Part):
    """Set the initial weight to values that the constructor draws."""

    def __init__(self, name: str, draw: Callable[[], Any]) -> None:
        super().__init__(name)
        self.gain = nn.Parameter(torch.tensor(draw(), dtype=torch.float32, device="cpu"))


class SplitStatistics(Part):
    """Normalize a sharded activation over the local features."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, samples: object) -> Tensor:
        y = self.up(x * self.gain)
        return x + self.down(y / y.square().mean(-1, keepdim=True).sqrt())


PARTS |= {
    "plain": Part,
    "tracked": Tracked,
    "gradients counter": CountedGradients,
    "backward counter": lambda name: CountedGradients(name, backward=True),
    "scaled gradients": lambda name: Part(name, lambda part, x: Scaled.apply(x * part.gain)),
    "numbered": Numbered,
    "drawn attributes": DrawnAttributes,
    "evaluated": Evaluated,
    "own forward": Part,
    "kept tensor": KeptTensor,
    "F.dropout": lambda name: Part(name, lambda part, x: F.dropout(x * part.gain, 0.1)),
    "unkeyed weights": lambda name: DrawnWeights(name, lambda: np.random.default_rng().random(WIDTH)),
    "split statistics": SplitStatistics,
    "random": lambda name: Part(name, lambda part, x: x * part.gain * (0.9 + 0.2 * random.random())),
    "numpy": lambda name: Part(name, lambda part, x: x * part.gain * (0.9 + 0.2 * np.random.rand())),
    "numpy weights": lambda name: DrawnWeights(name, lambda: np.random.rand(WIDTH) + random.random()),
}
KINDS = tuple(PARTS)  # before other tests add theirs
