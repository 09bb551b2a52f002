"""`prepare` of a model written with parallel layers: dp around tp, against one process."""

from typing import Any

import torch
from torch import nn

import threefold as t3
from tests.compat.prepared.scripts import Updates, gradient, worst
from tests.support.layer_models import Split, both, loss_of
from tests.support.sentences import sentence
from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh


def one_process(model: nn.Module, steps: int) -> Updates:
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4), Updates()
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        found.losses.append(loss.item())
        found.gradients.append({name: each.grad.clone() for name, each in model.named_parameters()})
        found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        found.weights.append({name: each.clone() for name, each in model.state_dict().items()})
    return found


def on_ranks(dp: int, tp: int, zero: int) -> tuple[float, list[str]]:
    torch.set_num_threads(1)
    mesh = Mesh(Layout(dp=dp, tp=tp))
    plain, split = both(mesh.tp)
    if mesh.dp.index:  # every replica starts from the weights of the first
        with torch.no_grad():
            for parameter in split.parameters():
                parameter.add_(1.0)
    model: Any = split
    optimizer: Any = torch.optim.AdamW(split.parameters(), lr=0.01, eps=1e-4)
    model, optimizer = t3.prepare(model, optimizer, mesh=mesh, zero=zero)
    found = Updates()
    for step in range(4):
        part = slice(mesh.dp.index, None, dp)
        t3.backward(loss_of(model, step, part))
        found.losses.append(optimizer.loss)
        found.gradients.append({name: gradient(each) for name, each in model.named_parameters()})
        # torch's own function too, where each rank has the whole of what it does not share
        clip = t3.clip_grad_norm_(model, 0.3) if zero or step % 2 else nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        found.norms.append(float(clip))
        optimizer.step()
        found.weights.append({name: each.clone() for name, each in model.state_dict().items()})
    said = []
    for number in range(3):
        wrong = Split(mesh.tp if number else mesh.dp)
        wrong.up.sequence_dim = 1 if number == 1 else None  # type: ignore[assignment]
        wrong.up.weight.register_hook(lambda grad: 2 * grad)
        said.append(sentence(t3.prepare, wrong, mesh=mesh))
    return worst(found, one_process(plain, 4)), said


@sweep(("dp", "tp", "zero"), [(2, 2, 0), (3, 1, 1), (1, 3, 0), (2, 2, 3)], quick=(0,), slow=(1, 3))
def test_a_model_of_parallel_layers_is_prepared_without_a_table(pool, dp: int, tp: int, zero: int) -> None:
    for error, (of_dp, of_sequence, of_hook) in pool.run(dp * tp, on_ranks, dp, tp, zero):
        assert error < 1e-12
        assert of_dp.startswith("'embed' is split over the ranks (")
        assert of_sequence.startswith("'up' has sequence_dim, with which whole weights get partial gradients; ")
        assert of_hook.startswith("The parameter 'up.weight' has a gradient hook, which would see the gradient of a ")
