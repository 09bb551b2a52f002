"""What `prepare` keeps of the parameters and modules that it makes anew: frozen weights, as of adapters, and marks."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

import threefold as t3
from tests.compat.prepared.scripts import Updates, gradient, worst
from tests.support.sentences import sentence
from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.models.sharding import Column, Row, Split, Vocab
from threefold.parallel.leaf import local, stored


class Adapted(nn.Module):
    """Frozen linear layer with a trained adapter of rank 3, as PEFT's LoRA makes it."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, 3, bias=False), nn.Linear(3, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + 2 * self.b(self.a(x))


class Model(nn.Module):
    """Frozen table, adapted linear layers, a linear layer of which only the bias is trained, and frozen logits."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6, padding_idx=2).requires_grad_(False)
        self.up, self.down = Adapted(6, 11), Adapted(11, 6)
        self.norm, self.mixed = nn.LayerNorm(6), nn.Linear(6, 7)
        self.head = nn.Linear(7, 13, bias=False).requires_grad_(False)
        self.mixed.weight.requires_grad_(False)
        self.mixed.bias.no_weight_decay = True  # type: ignore[attr-defined]
        self.up.b.weight.group = "adapter"  # type: ignore[attr-defined]
        self.down.base.eval()
        self.up.base.scaling = 0.5  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.mixed(self.norm(self.down(torch.tanh(self.up(self.embed(x)))))))


TABLE: Mapping[str, Split] = {
    "embed": Vocab(),
    "up.base": Column(),
    "up.b": Column(),
    "down.base": Row(),
    "down.a": Row(),
    "mixed": Column(),
    "head": Row(),
}


def make() -> Model:
    torch.manual_seed(3)
    return Model().double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(0, 13, (4, 5), generator=torch.Generator().manual_seed(step))
    return ids, ids.roll(1, 1)


def loss_of(model: nn.Module, ids: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(model(ids).flatten(0, 1), labels.flatten())


def one_process() -> Updates:
    model, found = make(), Updates()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    for step in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, *batch(step))
        loss.backward()
        found.losses.append(loss.item())
        found.gradients.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1).item())
        optimizer.step()
        found.weights.append({name: each.detach().clone() for name, each in model.state_dict().items()})
    return found


def kept(model: nn.Module) -> list[tuple[Any, ...]]:
    """What a script reads of parameters and modules to choose what it does with them."""
    marks = ("no_weight_decay", "group")
    found: list[tuple[Any, ...]] = []
    for name, parameter in model.named_parameters():
        for each in {id(each): each for each in (parameter, stored(parameter), local(stored(parameter)))}.values():
            values = (getattr(each, mark, None) for mark in marks)
            found.append((name, each.requires_grad, each.dtype, *values))
    for name, module in model.named_modules():
        sizes = (getattr(module, size, None) for size in ("in_features", "out_features", "num_embeddings", "scaling"))
        found.append((name, module.training, *sizes))
    return list(dict.fromkeys(found))


def on_ranks(dp: int, tp: int, zero: int) -> tuple[Updates, list[tuple[Any, ...]], dict[str, Tensor]]:
    mesh = Mesh(Layout(dp=dp, tp=tp))
    model: Any = make()
    first = {name: each.clone() for name, each in model.state_dict().items()}
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1)
    model, optimizer = t3.prepare(model, optimizer, mesh=mesh, zero=zero, tensor_parallel=TABLE)
    found, same = Updates(), kept(model.module)
    for step in range(3):
        ids, labels = (each.tensor_split(dp)[mesh.dp.index] for each in batch(step))
        t3.backward(loss_of(model, ids, labels), count=ids.numel())
        found.losses.append(optimizer.loss)
        found.gradients.append({name: gradient(each) for name, each in model.named_parameters()})
        found.norms.append(float(t3.clip_grad_norm_(model, 0.1)))
        optimizer.step()
        found.weights.append({name: each.clone() for name, each in model.state_dict().items()})
    return found, same, first


@sweep(("dp", "tp", "zero"), [(1, 2, 0), (2, 2, 1), (1, 3, 0), (2, 2, 3), (3, 1, 2)], quick=(0, 3), slow=(1, 2, 4))
def test_frozen_weights_and_marks_are_kept(pool, dp: int, tp: int, zero: int) -> None:
    expected, plain = one_process(), kept(make())
    for found, same, first in pool.run(dp * tp, on_ranks, dp, tp, zero):
        assert worst(found, expected) < 1e-12
        assert same == plain
        for name, parameter in make().named_parameters():
            assert torch.equal(found.weights[-1][name], first[name]) != parameter.requires_grad, name


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def refused() -> list[str]:
    """What a cut layer would not have, each in a model of two layers."""
    mesh = Mesh(Layout(tp=2))

    def hooked(model: nn.Sequential) -> None:
        model[0].register_forward_hook(lambda *_: None)

    def hooked_weight(model: nn.Sequential) -> None:
        model[0].weight.register_hook(lambda grad: 2 * grad)  # type: ignore[operator, union-attr]

    def custom_forward(model: nn.Sequential) -> None:
        model[0] = Scaled(4, 6)

    def set_forward(model: nn.Sequential) -> None:
        model[0].forward = lambda x: x  # type: ignore[method-assign]

    def masked(model: nn.Sequential) -> None:
        model[0].register_buffer("mask", torch.ones(6))

    def normed(model: nn.Sequential) -> None:
        nn.utils.parametrizations.weight_norm(model[0])

    said = []
    for change in (hooked, hooked_weight, custom_forward, set_forward, masked, normed):
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3))
        change(model)
        said.append(sentence(t3.prepare, model, mesh=mesh, tensor_parallel={"0": Column(), "1": Row()}))
    table = nn.Sequential(nn.Embedding(5, 4, max_norm=1.0))
    return [*said, sentence(t3.prepare, table, mesh=mesh, tensor_parallel={"0": Vocab()})]


def test_what_a_cut_layer_would_not_have_is_refused(pool) -> None:
    start = "tensor_parallel has Column() for '0', a "
    for said in pool.run(2, refused):
        assert said == [
            f"{start}Linear with a hook, which would see a part of the features with tp 2; register it on a module "
            "around it that is not cut.",
            "The parameter '0.weight' has a gradient hook, which would see the gradient of a shard with tp 2; change "
            "gradients in the optimizer, or the computation in forward.",
            f"{start}Scaled with a forward of its own, which a cut layer would not have; leave it out, or name the "
            "module inside it.",
            f"{start}Linear with a forward of its own, which a cut layer would not have; leave it out, or name the "
            "module inside it.",
            f"{start}Linear with the buffer 'mask', which that rule does not cut; leave it out.",
            f"{start}ParametrizedLinear with the parameter 'parametrizations.weight.original0', which that rule does "
            "not cut; leave it out.",
            "tensor_parallel has Vocab() for '0', a Embedding with max_norm, which a cut table does not have; make the "
            "embedding without it.",
        ]
