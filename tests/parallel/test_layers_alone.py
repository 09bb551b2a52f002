"""Models written with parallel layers, trained by torch's own optimizers and functions, against one process."""

import io
from collections.abc import Callable
from copy import deepcopy
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.support.layer_models import INNER, WIDTH, batch, both, loss_of
from tests.support.sweep import sweep
from threefold.comm.axis import Axis
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.parallel.parameter import whole

Optimizer = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda of: torch.optim.SGD(of, lr=0.1),
    "momentum": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adamw": lambda of: torch.optim.AdamW(of, lr=0.01, eps=1e-4),
    "adam foreach": lambda of: torch.optim.Adam(of, lr=0.01, eps=1e-4, foreach=True),
    "adamw fused": lambda of: torch.optim.AdamW(of, lr=0.01, eps=1e-4, fused=True),
    "adafactor": lambda of: torch.optim.Adafactor(of, lr=0.01),
    **{
        f"{name}{' foreach' * foreach}": lambda of, name=name, foreach=foreach: getattr(torch.optim, name)(
            of, lr=0.01, foreach=foreach
        )
        for name in ("NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
        for foreach in (False, True)
    },
}


class Trace(NamedTuple):
    """Of each step: loss, norm and whole gradients before the update; and the weights in the end."""

    losses: list[float]
    norms: list[float]
    gradients: list[dict[str, Tensor]]
    weights: dict[str, Tensor]


def limit(clip: dict[str, Any]) -> float:
    """The norm that gradients are clipped to, below those of the model."""
    return 0.05 if clip.get("norm_type") == torch.inf else 0.3


def trained(model: nn.Module, optimizer: str, clip: dict[str, Any], dp: Axis | None = None) -> Trace:
    of = OPTIMIZERS[optimizer](model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(of, 2, gamma=0.5)
    found = Trace([], [], [], {})
    for step in range(5):
        part = slice(None) if dp is None else slice(dp.index, None, dp.size)
        loss = loss_of(model, step, part)
        of.zero_grad()
        loss.backward()
        if dp is not None:  # the mean over the replicas, whose parts are equal
            for parameter in model.parameters():
                dp.all_reduce_(parameter.grad).div_(dp.size)  # type: ignore[arg-type]
            loss = dp.all_reduce(loss.detach()) / dp.size
        found.losses.append(loss.item())
        assert all(each.grad is not None for each in model.parameters())
        found.gradients.append({name: whole(each.grad).clone() for name, each in model.named_parameters()})  # type: ignore[arg-type]
        found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit(clip), **clip).item())
        of.step()
        schedule.step()
    found.weights.update({name: whole(each.detach()) for name, each in model.named_parameters()})
    return found


def assert_equal(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def against_one_process(optimizer: str, clip: dict[str, Any], dp: int) -> None:
    torch.set_num_threads(1)
    mesh = Mesh(Layout(dp=dp, tp=torch.distributed.get_world_size() // dp))
    plain, split = both(mesh.tp)
    before = {name: whole(each.detach()).clone() for name, each in split.named_parameters()}
    expected = trained(plain, optimizer, clip)
    got = trained(split, optimizer, clip, mesh.dp if dp > 1 else None)
    assert min(expected.norms) > limit(clip), "nothing is clipped"
    assert_equal(got, expected)
    least = 1e-7 if optimizer == "adafactor" else 1e-4  # its steps are relative to a weight's size
    assert all((got.weights[name] - each).abs().max() > least for name, each in before.items())


CASES = [(1, 3, "adam foreach", {}), (2, 2, "adamw", {}), (1, 2, "sgd", {})]
CASES += [(1, 4, "adamw fused", {"foreach": True}), (1, 1, "momentum", {"foreach": True}), (2, 2, "adafactor", {})]
CASES += [(1, 4, "momentum", {"norm_type": torch.inf}), (3, 1, "adamw", {"norm_type": 1.0}), (1, 4, "adafactor", {})]
CASES += [(1, 3, name, {"norm_type": 0.5}) for name in OPTIMIZERS]


@sweep(("dp", "tp", "optimizer", "clip"), CASES, quick=(0, 1), slow=range(2, 9))
def test_a_model_of_parallel_layers_trains_as_one_process(
    pool, dp: int, tp: int, optimizer: str, clip: dict[str, Any]
) -> None:
    pool.run(dp * tp, against_one_process, optimizer, clip, dp)


def saved(tp: Axis) -> None:
    """A state of weights and of an optimizer of mixed lists, saved and loaded, goes on as if it had not been."""
    _, split = both(tp)
    adam = torch.optim.Adam(split.parameters(), lr=0.01, foreach=True)
    loss_of(split).backward()
    adam.step()
    file = io.BytesIO()
    torch.save({"model": split.state_dict(), "optimizer": adam.state_dict()}, file)
    file.seek(0)
    state = torch.load(file)
    _, again = both(tp)
    other = torch.optim.Adam(again.parameters(), lr=0.01, foreach=True)
    again.load_state_dict(state["model"])
    other.load_state_dict(state["optimizer"])
    for model, optimizer in ((split, adam), (again, other)):
        optimizer.zero_grad()
        loss_of(model, 1).backward()
        optimizer.step()
    assert_equal([whole(p.detach()) for p in again.parameters()], [whole(p.detach()) for p in split.parameters()])


def copied(tp: Axis) -> None:
    plain, split = both(tp)
    averages = []
    for model in (plain, split):
        average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # a deep copy
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            average.update_parameters(model)
        averages.append([whole(each.detach()) for each in average.module.parameters()])
    assert_equal(*averages)
    twin = deepcopy(split)
    assert_equal(whole(twin.up.weight.grad), whole(split.up.weight.grad))  # type: ignore[arg-type]
    with torch.no_grad():
        twin.up.weight.zero_()
    assert whole(split.up.weight.detach()).any()


def narrowed(tp: Axis) -> None:
    found = []
    for model in both(tp):
        loss_of(model).backward()
        model.zero_grad()
        model.float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loss_of(model).backward()
        optimizer.step()
        found.append([whole(each.detach()) for each in model.parameters()])
    assert {each.dtype for each in found[1]} == {torch.float32}
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def tripled_(parameter: Tensor) -> None:
    parameter.grad.mul_(3)  # type: ignore[union-attr]


def hooked(tp: Axis) -> None:
    plain, split = both(tp)
    seen: list[tuple[int, ...]] = []
    for model in (plain, split):
        model.up.weight.register_hook(lambda grad: seen.append(tuple(grad.shape)) or 2 * grad)
        model.head.weight.register_post_accumulate_grad_hook(tripled_)
        model.middle.requires_grad_(False)
        model.down.requires_grad_(False)
        loss_of(model).backward()
    assert seen == [(INNER, WIDTH)] * 2
    for one, other in zip(plain.parameters(), split.parameters(), strict=True):
        assert (one.grad is None) == (other.grad is None)
        if one.grad is not None:
            assert_equal(whole(other.grad), one.grad)  # type: ignore[arg-type]


def scaled(tp: Axis) -> None:
    """An infinity in the last rank's shard alone makes all ranks skip the update and halve the scale."""
    found = []
    for model in both(tp):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, foreach=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            last = torch.arange(INNER).view(-1, 1) == (INNER - 1 if step == 1 else INNER)
            hook = model.up.weight.register_hook(lambda grad, last=last: grad.masked_fill(last, torch.inf))
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            scaler.step(optimizer)
            scaler.update()
            hook.remove()
        found.append([scaler.get_scale(), *(whole(each.detach()) for each in model.parameters())])
    assert found[0][0] == 4.0
    assert_equal(found[1], found[0])


INITIAL = [nn.init.xavier_normal_, nn.init.kaiming_uniform_, nn.init.trunc_normal_, nn.init.orthogonal_, nn.init.eye_]


def filled(tp: Axis) -> None:
    """Initializers of torch, and values of one process, set the whole weight whatever the number of ranks."""
    plain, split = both(tp)
    for initial in (*INITIAL, lambda weight: nn.init.constant_(weight, 0.5)):
        for model in (plain, split):
            torch.manual_seed(3)
            initial(model.up.weight)
        assert_equal(whole(split.up.weight.detach()), plain.up.weight.detach())
    with torch.no_grad():
        split.up.weight.copy_(2 * plain.up.weight)
        plain.up.weight.copy_(split.up.weight)
    for model in (plain, split):
        model.up.weight.data = 3 * model.up.weight.data
        model.up.weight.data[:, 2] = 1.0
        model.up.weight.data[model.up.weight < 0.5] = 0.5
    assert_equal(whole(split.up.weight.detach()), plain.up.weight.detach())


def in_a_loss(tp: Axis) -> None:
    """Weights in the loss itself: their squares, and the whole table, gathered, as a head tied to it."""
    plain, split = both(tp)
    for model in (plain, split):
        squares = sum(each.square().sum() for each in model.parameters())
        table = model.embed.weight if model is plain else model.embed.weight.full_tensor()
        logits = model.embed(batch(0)[0]) @ table.T
        (loss_of(model) + 0.1 * squares + logits.square().mean()).backward()
    assert_equal([whole(p.grad) for p in split.parameters()], [p.grad for p in plain.parameters()])  # type: ignore[arg-type]


def tied(tp: Axis) -> None:
    found = []
    for model in both(tp):
        model.head.weight = model.embed.weight
        assert len(list(model.parameters())) == 11
        found.append(trained(model, "adamw", {}))
    assert_equal(found[1], found[0])


def penalized(tp: Axis) -> None:
    """A penalty of the gradients' norm: gradients of gradients, through the collectives of the layers."""
    plain, split = both(tp)
    for model in (plain, split):
        of = torch.autograd.grad(loss_of(model), list(model.parameters()), create_graph=True)
        sum(each.square().sum() for each in of).backward()  # type: ignore[union-attr]
    for one, other in zip(plain.parameters(), split.parameters(), strict=True):
        zero = torch.zeros_like(one)  # a bias of the loss's last sum has none
        assert_equal(zero if other.grad is None else whole(other.grad), zero if one.grad is None else one.grad)


WAYS = (penalized, saved, copied, narrowed, hooked, scaled, filled, in_a_loss, tied)


def of_axis(way: Callable[[Axis], None]) -> None:
    torch.set_num_threads(1)
    way(Mesh(Layout(tp=torch.distributed.get_world_size())).tp)


@sweep("ranks", [3, 1, 4], quick=(0,), slow=())
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_what_torch_does_with_parameters(pool, way: Callable[[Axis], None], ranks: int) -> None:
    pool.run(ranks, of_axis, way)


def sharded_by_torch() -> None:
    """torch's FSDP around the layers: two replicas share each rank's shards."""
    torch.set_num_threads(1)
    mesh = Mesh(Layout(dp=2, tp=2))
    plain, split = both(mesh.tp)
    fully_shard(split, mesh=mesh.dp.device_mesh)
    for model, part in ((plain, slice(None)), (split, slice(mesh.dp.index, None, 2))):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(model, step, part).backward()
            optimizer.step()
    got = [each.full_tensor().detach() for each in split.parameters()]  # type: ignore[attr-defined]
    assert_equal(got, [each.detach() for each in plain.parameters()])


@pytest.mark.slow
def test_fully_shard_around_the_layers(pool) -> None:
    pool.run(4, sharded_by_torch)


def numbers_of(weight: Tensor) -> dict[str, Any]:
    """What scripts log and test."""
    return {
        "sum": weight.sum(),
        "mean": weight.mean(),
        "of rows": weight.mean(-1),
        "of columns": weight.mean(0),
        "largest": weight.abs().max(),
        "finite": weight.isfinite().all().item(),
        "norm": weight.norm().item(),
        "rows": weight.norm(dim=1),
        "products": weight @ weight.T,
        "one column": weight[:, 3],
        "masked": weight * (torch.arange(INNER).view(-1, 1) > 3),
        "plain": torch.ones(INNER, WIDTH, dtype=weight.dtype).add_(weight),
    }


def measured() -> list[str]:
    tp = Mesh(Layout(tp=torch.distributed.get_world_size())).tp
    plain, split = both(tp)
    expected, got = numbers_of(plain.up.weight.detach()), numbers_of(split.up.weight.detach())
    for name, value in expected.items():
        assert_equal(whole(got[name]) if isinstance(value, Tensor) else got[name], value)
    x, said = torch.ones(2, WIDTH, dtype=torch.float64), []
    wrong: list[Callable[[], Any]] = [
        lambda: F.linear(x, split.up.weight),
        lambda: split.up.weight.std(),
        lambda: split.up.weight[3],
        lambda: nn.utils.parameters_to_vector(split.parameters()),
        lambda: tp.all_reduce_(split.up.weight.detach()),
    ]
    for call in wrong:
        with pytest.raises(UserError) as raised:
            call()
        said.append(str(raised.value))
    return said


def test_what_is_not_computed_of_a_shard_is_one_sentence(pool) -> None:
    for said in pool.run(3, measured):
        assert said == [
            "mm of a weight that ranks share and an ordinary tensor is not computed, as the shapes (6 × 11 here) are "
            "those of the whole weight; call the layer that has it, or use its to_local() for this rank's part or "
            "full_tensor() for all of it.",
            "std is not computed of a weight that ranks share; use std of its full_tensor().",
            "select is not computed of a weight that ranks share; use select of its full_tensor().",
            "view is not computed of a weight that ranks share; use view of its full_tensor().",
            "The tensor is cut over tp, so that its ranks hold different elements, which are no summands; sum over "
            "another axis, such as mesh.dp, or use tensor.full_tensor().",
        ]
