"""Wrong calls of `prepare` and what it returns: one sentence that says what is wrong and what to write instead."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import threefold as t3
from tests.support.sentences import sentence
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh

X, Y = torch.arange(12.0).view(6, 2), torch.tensor([0, 1, 2, 0, 1, 2])


class Parts:
    """A model, an optimizer and a loader, as a script has them."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        self.loader = DataLoader(TensorDataset(X, Y), batch_size=4)

    def loss(self, model: nn.Module) -> torch.Tensor:
        return F.cross_entropy(model(X), Y)


def _other_optimizer(p: Parts) -> Any:
    return t3.prepare(p.model, torch.optim.SGD(nn.Linear(2, 3).parameters()))


def _plain_backward(p: Parts) -> Any:
    model, optimizer = t3.prepare(p.model, p.optimizer)
    p.loss(model).backward()
    optimizer.step()


def _no_backward(p: Parts) -> Any:
    t3.prepare(p.model, p.optimizer)[1].step()


def _after_step(p: Parts, call: Callable[[Any, Any], Any]) -> Any:
    model, optimizer = t3.prepare(p.model, p.optimizer)
    t3.backward(p.loss(model))
    return call(model, optimizer)


def _two_backward_passes(p: Parts) -> Any:
    """As a script does that leaves autograd to add the gradients of two losses."""
    model, optimizer = t3.prepare(p.model, p.optimizer)
    optimizer.zero_grad()
    t3.backward(p.loss(model))
    t3.backward(p.loss(model))


def _twice(p: Parts) -> Any:
    return t3.prepare(t3.prepare(p.model), p.optimizer, zero=1)


def _distributed_sampler(p: Parts) -> Any:
    data = TensorDataset(X, Y)
    return t3.prepare(DataLoader(data, 4, sampler=DistributedSampler(data, num_replicas=2, rank=0)))


def _gather_too_early(p: Parts) -> Any:
    return t3.gather_for_metrics(X, t3.prepare(p.loader))


def _gather_mean(p: Parts) -> Any:
    loader = t3.prepare(p.loader)
    return [t3.gather_for_metrics(x.mean(), loader) for x, _ in loader]


def _frozen(p: Parts) -> Any:
    return t3.prepare(p.model.requires_grad_(False))


def _lazy(p: Parts) -> Any:
    return t3.prepare(nn.LazyLinear(3))


def _wrong_state(p: Parts) -> Any:
    return t3.prepare(p.model).load_state_dict({"weight": X[:3]})


def _wrong_shape(p: Parts) -> Any:
    return t3.prepare(p.model).load_state_dict({"weight": X[:3], "bias": X})


def _no_valid_tokens(p: Parts) -> Any:
    return t3.backward(p.loss(t3.prepare(p.model)), count=0)


def _loss_while_accumulating(p: Parts) -> Any:
    model, optimizer = t3.prepare(p.model, p.optimizer, accumulate=3)
    for _ in range(2):
        t3.backward(p.loss(model))
        optimizer.step()
    return optimizer.loss


def _two_reductions(p: Parts) -> Any:
    model = t3.prepare(p.model, accumulate=2)
    t3.backward(p.loss(model))
    t3.backward(p.loss(model), reduction="sum")


WRONG: list[tuple[Callable[[Parts], Any], str]] = [
    (lambda p: t3.prepare(), "prepare was called without objects; pass a model, an optimizer or a DataLoader."),
    (lambda p: t3.prepare(p.model, "cuda"), "prepare got an object of the type str but takes an nn.Module"),
    (lambda p: t3.prepare(p.model, nn.Linear(1, 1)), "prepare got 2 models but takes one; call it once for each"),
    (lambda p: t3.prepare(p.optimizer), "prepare got a Adam without its model; pass the model"),
    (lambda p: t3.prepare(p.model, precision="bf61"), "precision is 'bf61' but must be .*; the nearest is bf16."),
    (lambda p: t3.prepare(p.model, zero=4), "zero is 4 but must be 0, 1, 2 or 3; use 3."),
    (lambda p: t3.prepare(p.model, accumulate=0), "accumulate is 0 but must be a whole number of at least 1; use 1."),
    (lambda p: t3.prepare(p.model, compress="fp8"), "compress is 'fp8' but must be .*; the nearest is fp16."),
    (_other_optimizer, "2 of the optimizer's 2 parameters are not of the model; make it of model.parameters()"),
    (lambda p: t3.prepare(p.model, torch.optim.LBFGS(p.model.parameters())), "The optimizer is LBFGS, .*; use AdamW."),
    (_twice, "The model is prepared already, so precision, zero, accumulate and compress are decided; leave them out."),
    (
        _plain_backward,
        "loss.backward\\(\\) was called on the loss of a prepared model, .*; call threefold.backward\\(loss",
    ),
    (_no_backward, "optimizer.step was called without gradients; call threefold.backward\\(loss\\) instead of"),
    (lambda p: _after_step(p, lambda m, o: o.step(lambda: 0.0)), "optimizer.step was given a closure"),
    (lambda p: _after_step(p, lambda m, o: o.add_param_group({})), "add_param_group was called on a prepared"),
    (lambda p: _after_step(p, lambda m, o: t3.clip_grad_norm_(m, 0)), "max_norm is 0 but must be above 0; use 1.0."),
    (lambda p: t3.clip_grad_norm_(p.model, 1.0), "model is of the type Linear but clip_grad_norm_ needs the one that"),
    (lambda p: t3.clip_grad_norm_(t3.prepare(p.model), 1.0), "clip_grad_norm_ was called before threefold.backward"),
    (lambda p: t3.prepare(p.model, p.optimizer)[1].loss, "There is no loss yet; call threefold.backward"),
    (
        _loss_while_accumulating,
        r"There is no loss yet: 2 of the 3 backward passes of the first update are made \(accumul",
    ),
    (lambda p: t3.backward(p.loss(p.model)), "The loss does not come from a model that prepare returned"),
    (lambda p: t3.backward(1.5), "loss is of the type float but must be a scalar tensor."),
    (lambda p: t3.backward(t3.prepare(p.model)(X)), r"loss has the shape \[6, 3\] but must be a scalar; use loss.mean"),
    (lambda p: t3.backward(p.loss(p.model), reduction="avg"), "reduction is 'avg' but must be 'mean' or 'sum'"),
    (
        _two_backward_passes,
        "the backward pass before were used, which would be lost; add the losses up and call it once",
    ),
    (_two_reductions, "reduction is 'sum' but this update began with 'mean'; use one for all backward passes"),
    (_no_valid_tokens, "count adds up to 0 over the update but must be above 0"),
    (lambda p: t3.prepare(DataLoader(TensorDataset(X), batch_size=None)), "The DataLoader has batch_size=None"),
    (_distributed_sampler, "The DataLoader has a DistributedSampler, which would divide its batches a second time"),
    (lambda p: t3.gather_for_metrics(X, p.loader), "loader is of the type DataLoader but gather_for_metrics needs"),
    (_gather_too_early, "gather_for_metrics was called before the loader yielded a batch"),
    (_gather_mean, r"A tensor of shape \[\] does not have one value for each of the replica's 4 rows"),
    (_frozen, "The model has no parameters that require gradients; pass one that is trained."),
    (_lazy, "The parameter 'weight' has no values yet; initialise it, or load its weights, first."),
    (_wrong_state, "The state lacks 'bias'; pass that of the same model, or strict=False."),
    (_wrong_shape, r"The state has 'bias' of shape \[6, 2\] but the model's has \[3\]; pass that of the same model."),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_a_wrong_call_is_one_sentence(call: Callable[[Parts], Any], message: str) -> None:
    with pytest.raises(t3.UserError, match=message) as raised:
        call(Parts())
    assert str(raised.value).endswith(".")
    assert "\n" not in str(raised.value)


def _in_a_world() -> list[str]:
    """Wrong calls that need several ranks."""
    parts = Parts()
    parts.loss(parts.model).backward()
    parts.optimizer.step()
    return [
        sentence(t3.prepare, parts.model, parts.optimizer, zero=1),
        sentence(t3.prepare, parts.model, mesh=Mesh(Layout(pp=2))),
    ]


def test_a_wrong_call_of_several_ranks_is_one_sentence(pool) -> None:
    for said in pool.run(2, _in_a_world):
        assert said == [
            "The optimizer has stepped already, so that its state is of whole weights; prepare it before its first "
            "step, and load a state after that.",
            "The mesh has pp 2 but prepare is for dp and tp; use pp=1, or threefold.parallelize with a plan of the "
            "model.",
        ]


def test_the_loss_of_the_update_before_while_gradients_are_accumulated() -> None:
    p = Parts()
    model, optimizer = t3.prepare(p.model, p.optimizer, accumulate=2)
    first = p.loss(model).item()
    for _ in range(2):
        t3.backward(p.loss(model))
        optimizer.step()
    t3.backward(p.loss(model))
    optimizer.step()
    assert optimizer.loss == pytest.approx(first, rel=1e-6)
