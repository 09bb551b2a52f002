"""What a user's model keeps that would not be trained as one process trains it: each is refused in one sentence."""

# ruff: noqa: E501 a table of one-line sentences

from collections.abc import Callable

import pytest
import torch
from torch import nn

from threefold.errors import UserError
from threefold.models.plan import Plan
from threefold.models.sharding import ModelPlan, Replicated
from threefold.models.source import call
from threefold.verify.plan_check import check_plan


class Layer(nn.Module):
    """A layer that `change` makes odd."""

    def __init__(self, change: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.linear, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        change(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class Around(nn.Module):
    def __init__(self, change: Callable[[nn.Module], object]) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), Layer(change))


def checked(change: Callable[[nn.Module], object]) -> ModelPlan:
    with torch.device("meta"):
        model = Around(change)
    plan = Plan(["body.0", "body.1"], {"body": Replicated()}).build(model)
    check_plan(model, plan)
    return plan


def view(start: int, shape: tuple[int, ...], stride: tuple[int, ...]) -> Callable[[nn.Module], object]:
    """Two parameters in the memory of one tensor."""

    def change(layer: nn.Module) -> None:
        flat = torch.zeros(16)
        layer.first = nn.Parameter(flat.as_strided((4, 2), (4, 1)))
        layer.second = nn.Parameter(flat.as_strided(shape, stride, start))

    return change


def twice(layer: nn.Module) -> None:
    layer.other.weight = nn.Parameter(layer.linear.weight)


def buffer_of_parameter(layer: nn.Module) -> None:
    layer.register_buffer("row", layer.linear.weight.data[1])


def with_parameter(made: Callable[[], torch.Tensor]) -> Callable[[nn.Module], object]:
    return lambda layer: setattr(layer, "gain", nn.Parameter(made()))


def with_attribute(made: Callable[[nn.Module], object]) -> Callable[[nn.Module], object]:
    return lambda layer: setattr(layer, "kept", made(layer))


REFUSED = [
    (with_parameter(lambda: torch.zeros(0, 3)), "'body.1.gain' is a parameter without elements; leave it out."),
    (with_parameter(lambda: torch.zeros(3, dtype=torch.complex64)), "'body.1.gain' is a parameter of complex64, whose imaginary part would be lost; .*view_as_real"),
    (lambda layer: setattr(layer, "gain", nn.Parameter(torch.arange(3), requires_grad=False)), r"'body.1.gain' is a parameter of int64, and weights are floats; use self.register_buffer\('gain', …\)."),
    (with_parameter(lambda: torch.zeros(1, 3).expand(4, 3)), "'body.1.gain' is an expanded parameter, .* expand it in forward."),
    (with_parameter(lambda: torch.zeros(9).as_strided((4, 3), (1, 2))), "'body.1.gain' is an expanded parameter"),
    (view(2, (4, 2), (4, 1)), None),
    (view(1, (4, 2), (4, 1)), "'body.1.second' is a parameter in the memory of 'body.1.first', .*; make them one parameter"),
    (twice, "'body.1.other.weight' is a parameter in the memory of 'body.1.linear.weight'"),
    (buffer_of_parameter, "the buffer 'body.1.row' is in the memory of the parameter 'body.1.linear.weight'"),
    (lambda layer: layer.linear.weight.register_hook(lambda gradient: gradient), "'body.1.linear.weight' has a gradient hook, .* layout would change the result; change gradients in the optimizer"),
    (lambda layer: layer.linear.weight.register_post_accumulate_grad_hook(lambda parameter: None), "'body.1.linear.weight' has a gradient hook"),
    (lambda layer: setattr(layer, "kept", nn.LazyLinear(4)), "'body.1.kept' is a LazyLinear, .*; give them: use nn.Linear."),
    (lambda layer: setattr(layer, "kept", nn.Embedding(3, 4, sparse=True)), "'body.1.kept' is an Embedding with sparse=True, .*; use sparse=False"),
    (with_attribute(lambda layer: torch.arange(4)), r"'body.1' keeps the tensor 'kept' as a plain attribute, .*; use self.register_buffer\('kept', …\)."),
    (with_attribute(lambda layer: {"mask": [torch.arange(4)]}), "'body.1' keeps the tensor in 'kept' as a plain attribute"),
    (with_attribute(lambda layer: layer.linear.weight * 2), "'body.1' keeps the tensor 'kept' as a plain attribute"),
    (with_attribute(lambda layer: [nn.Parameter(torch.zeros(3))]), "'body.1' keeps the parameter in 'kept' as a plain attribute, .*; use nn.ParameterList"),
    (with_attribute(lambda layer: [nn.Linear(4, 4)]), "'body.1' keeps a Linear in 'kept', no list of modules, .*; use nn.ModuleList"),
    (with_attribute(lambda layer: [layer.linear, nn.Identity()]), None),
    (with_attribute(lambda layer: torch.arange(4, device="cpu")), None),
    (lambda layer: nn.utils.weight_norm(layer.linear), None),
    (lambda layer: nn.utils.parametrizations.weight_norm(layer.linear), None),
    (lambda layer: layer.register_forward_hook(lambda module, inputs, output: None), None),
    (with_parameter(lambda: torch.zeros(6, 4).t()[::2]), None),
]  # fmt: skip


@pytest.mark.parametrize(("change", "sentence"), REFUSED)
def test_what_would_not_be_trained_alike_is_one_sentence(
    change: Callable[[nn.Module], object], sentence: str | None
) -> None:
    if sentence is None:
        assert checked(change).layers == ("body.0", "body.1")
        return
    with pytest.raises(UserError, match=sentence) as caught:
        checked(change)
    assert str(caught.value).count("\n") == 0


def test_a_constructor_that_reads_a_value_is_told_where_to_make_it() -> None:
    sentence = r"mine.py: Model\(\) raises RuntimeError: .* on meta tensors, as ranks .*; give device='cpu' to a tensor"
    with pytest.raises(UserError, match=sentence), torch.device("meta"):
        call(lambda: torch.linspace(0, 1, 3)[0].item(), (), {}, "mine.py: Model()")


@pytest.mark.parametrize("inside", ["", "body"])
def test_a_hook_around_the_layers_would_not_be_called(inside: str) -> None:
    with torch.device("meta"):
        model = Around(lambda layer: None)
    model.get_submodule(inside).register_forward_pre_hook(lambda module, inputs: None)
    plan = Plan(["body.0", "body.1"], {"body": Replicated()}).build(model)
    with pytest.raises(UserError, match=f"{repr(inside) if inside else 'the model'} has a hook, .*; register the hook"):
        check_plan(model, plan)
