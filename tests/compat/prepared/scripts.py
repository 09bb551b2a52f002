"""A training script, plain on one process and prepared on ranks: what every update gives, parameter by parameter."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import threefold as t3
from threefold.compat.prepared.optimizer import PreparedOptimizer
from threefold.parallel.leaf import like, local, stored
from threefold.parallel.parameter import whole

CLASSES = 5
FEATURES = 7


class Encoder(nn.Module):
    """Embedded tokens, a list of blocks and a classification head; weights and sizes without symmetry."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 12)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 3, 17, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        return self.head(y.mean(1))


class ConvNet(nn.Module):
    """Convolutions with batch normalization, a frozen parameter, and one that some rows alone use."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(1, 6, 3)
        self.norm1 = nn.BatchNorm1d(6)
        self.conv2 = nn.Conv1d(6, 4, 2, bias=False)
        self.norm2 = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, CLASSES)
        self.rare = nn.Linear(4, CLASSES)
        self.never = nn.Linear(4, CLASSES)
        self.scale = nn.Parameter(torch.tensor([1.5]), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(self.norm1(self.conv1(x.to(self.conv1.weight.dtype).unsqueeze(1))))
        y = self.norm2(self.conv2(y)).amax(-1) * self.scale
        out = self.head(y)
        chosen = x[:, 0] == 0
        if chosen.any():
            out = out + self.rare(y) * chosen.unsqueeze(1)
        return out


class Stack(nn.Module):
    """Several layers in a list and a bias of the model itself, with integer and float inputs in a mapping."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(FEATURES, 11), nn.Linear(11, 9), nn.Linear(9, CLASSES)])
        self.offset = nn.Parameter(torch.linspace(-1, 1, CLASSES))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x.to(self.offset.dtype) / 6 - 1
        for layer in self.layers:
            y = torch.tanh(layer(y))
        return {"logits": y + self.offset}


MODELS: dict[str, Callable[[], nn.Module]] = {"encoder": Encoder, "conv": ConvNet, "stack": Stack}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1, eps=1e-5),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.01),
}


@dataclass(frozen=True)
class Script:
    """What is trained and how."""

    model: str = "encoder"
    optimizer: str = "adamw"
    dtype: str = "float32"
    rows: int = 23
    batch: int = 5  # the last has 3 rows
    epochs: int = 2
    accumulate: int = 1
    clip: float = 0.0
    workers: int = 0
    options: tuple[tuple[str, Any], ...] = ()  # of prepare, that change no result

    def make(self) -> tuple[nn.Module, torch.optim.Optimizer, DataLoader]:
        torch.manual_seed(3)
        model = MODELS[self.model]().to(getattr(torch, self.dtype))
        generator = torch.Generator().manual_seed(5)
        x = torch.randint(0, 13, (self.rows, FEATURES), generator=generator)
        y = torch.randint(0, CLASSES, (self.rows,), generator=generator)
        loader = DataLoader(
            TensorDataset(x, y),
            self.batch,
            shuffle=True,
            num_workers=self.workers,
            generator=torch.Generator().manual_seed(9),
        )
        trained = [each for each in model.parameters() if each.requires_grad]
        return model, OPTIMIZERS[self.optimizer](trained), loader


@dataclass
class Updates:
    """Of each update: the mean loss, the gradient of each parameter (None where it has none), norm and new weights."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    rows: list[list[int]] = field(default_factory=list)


def logits_of(output: Any) -> Tensor:
    return output["logits"] if isinstance(output, dict) else output


def plain(script: Script) -> Updates:
    """The script on one process, with torch alone."""
    torch.set_num_threads(1)
    model, optimizer, loader = script.make()
    found = Updates()
    for _ in range(script.epochs):
        batches = list(loader)
        for start in range(0, len(batches), script.accumulate):
            window = batches[start : start + script.accumulate]
            total = sum(len(y) for _, y in window)
            optimizer.zero_grad()
            mean = 0.0
            for x, y in window:
                loss = F.cross_entropy(logits_of(model(x)), y) * (len(y) / total)
                loss.backward()
                mean += loss.item()
            found.losses.append(mean)
            found.gradients.append(
                {name: None if each.grad is None else each.grad.clone() for name, each in model.named_parameters()}
            )
            if script.clip:
                norm = nn.utils.clip_grad_norm_(model.parameters(), script.clip)
                found.norms.append(norm.item())
            optimizer.step()
            found.weights.append({name: each.detach().clone() for name, each in model.state_dict().items()})
    return found


def prepared(script: Script) -> Updates:
    """The same on the ranks of this world."""
    torch.set_num_threads(1)
    if script.workers:
        gc.collect()  # or a worker of the loader, a fork, may crash as it collects the process groups of earlier tests
    model, optimizer, loader = script.make()
    if torch.distributed.get_rank():  # every rank starts from the weights of rank 0
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
    model, optimizer, loader = t3.prepare(
        model, optimizer, loader, accumulate=script.accumulate, **dict(script.options)
    )
    return run(script, model, optimizer, loader)


def run(script: Script, model: Any, optimizer: PreparedOptimizer, loader: Any) -> Updates:
    """The loop of the prepared script."""
    found = Updates()
    for _ in range(script.epochs):
        for x, y in loader:
            t3.backward(F.cross_entropy(logits_of(model(x)), y))
            if not model.sync.is_accumulating:
                found.losses.append(optimizer.loss)
                found.gradients.append({name: gradient(each) for name, each in model.named_parameters()})
            if script.clip:
                norm = t3.clip_grad_norm_(model, script.clip)
                if norm is not None:
                    found.norms.append(norm.item())
            accumulating = model.sync.is_accumulating
            optimizer.step()
            if not accumulating:
                found.weights.append({name: each.clone() for name, each in model.state_dict().items()})
            optimizer.zero_grad()
    return found


def first_half(script: Script) -> dict[str, Any]:
    """Half of the epochs; the states as one process has them."""
    torch.set_num_threads(1)
    model, optimizer, loader = t3.prepare(*script.make(), **dict(script.options))
    run(script, model, optimizer, loader)
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def continued(script: Script, states: dict[str, Any]) -> Updates:
    """The other half, with torch's way to load."""
    torch.set_num_threads(1)
    model, optimizer, loader = t3.prepare(*script.make(), **dict(script.options))
    model.load_state_dict(states["model"])
    optimizer.load_state_dict(states["optimizer"])
    return run(script, model, optimizer, loader)


def gradient(parameter: nn.Parameter) -> Tensor | None:
    held = stored(parameter)
    return None if parameter.grad is None else whole(like(held, local(held).grad)).clone()  # type: ignore[arg-type]


def worst(ours: Updates, theirs: Updates) -> float:
    """The largest error of any number, relative to the largest of its tensor; inf where the two do not correspond."""
    shapes = [(len(each.losses), len(each.norms), len(each.weights)) for each in (ours, theirs)]
    if shapes[0] != shapes[1]:
        return torch.inf
    errors = [
        _error(_numbers(ours.losses), _numbers(theirs.losses)),
        _error(_numbers(ours.norms), _numbers(theirs.norms)),
    ]
    for one, other in zip(ours.gradients, theirs.gradients, strict=True):
        if one.keys() != other.keys():
            return torch.inf
        for name, expected in other.items():
            found = one[name]
            if found is None or expected is None:
                errors.append(0.0 if found is expected else torch.inf)
            else:
                errors.append(_error(found, expected))
    for ours_now, theirs_now in zip(ours.weights, theirs.weights, strict=True):
        if ours_now.keys() != theirs_now.keys():
            return torch.inf
        errors += [_error(ours_now[name], theirs_now[name]) for name in theirs_now]
    return max(errors)


def _error(found: Tensor, expected: Tensor) -> float:
    if found.shape != expected.shape:
        return torch.inf
    if not expected.numel():
        return 0.0
    scale = max(expected.abs().max().item(), 1e-3)
    error = (found.double() - expected.double()).abs().max().item() / scale
    return torch.inf if isnan(error) else error  # which `max` would pass over


def _numbers(values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
