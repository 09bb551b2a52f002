"""Sizes of one tensor rank's part that do not go together are a sentence before a rank starts, and so are other usual
errors of a user's own layers."""

# ruff: noqa: E501 tables of one-line sentences

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import threefold
from threefold import Column, PerHead, Replicated, Row, Sharded, Vocab
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.models.sharding import ModelPlan, Split
from threefold.parallel.parallelize import TrainingSettings
from threefold.train.step import GradientStep
from threefold.verify.module_check import explaining_passes
from threefold.verify.plan_check import check_cuts, check_forward, check_plan

WORDS, WIDTH = 23, 8
BATCH = tuple(torch.randint(WORDS, (2, 8, 5), generator=torch.Generator().manual_seed(900)))


class Attended(nn.Module):
    """Four heads; `use` computes with what it has of them."""

    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.use = use
        self.query, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("slopes", torch.rand(4, 1), persistent=False)
        self.register_buffer("kept", torch.rand(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.use(self, self.query(x)))


class Model(nn.Module):
    def __init__(self, use: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.blocks = nn.ModuleList(Attended(use) for _ in range(2))


RULES: dict[str, Split] = {
    "embed": Vocab(),
    "blocks.*": Replicated(),
    "blocks.*.query": Column(heads=4),
    "blocks.*.out": Row(heads=4),
    "head": Vocab(),
}


def planned(model: Callable[[], nn.Module], more: Mapping[str, Split] | None = None) -> ModelPlan:
    with torch.device("meta"):
        made = model()
        plan = threefold.Plan(["embed", "blocks.*", "head"], {**RULES, **(more or {})}).build(made)
        check_plan(made, plan)
    return plan


def alike(module: Any, features: Tensor) -> Tensor:
    return features


def by_slopes(module: Any, features: Tensor) -> Tensor:
    return (features.unflatten(-1, (-1, 2)) * module.slopes).flatten(-2)


def by_gain(module: Any, features: Tensor) -> Tensor:
    return features * module.gain


def by_view(module: Any, features: Tensor) -> Tensor:
    return features.view(2, 5, 4, 2).flatten(-2)


def by_value(module: Any, features: Tensor) -> Tensor:
    return features * module.gain if features.sum().item() > 0 else features


def by_kernel(module: Any, features: Tensor) -> Tensor:
    return features[features > 0] * module.gain


def wrong_in_any_layout(module: Any, features: Tensor) -> Tensor:
    return features * torch.ones(WIDTH + 1)


@pytest.mark.parametrize(
    ("use", "more", "sentence"),
    [
        (alike, {}, None),
        (by_slopes, {}, r"With tp 2, 'blocks.0' fails on tensor rank 0: .*\[4, 1\].*'blocks.0.slopes' \(4 × 1\) .* add 'blocks.\*.slopes': Sharded\(0\) to shard\.$"),
        (by_slopes, {"blocks.*.slopes": Sharded(0, heads=4)}, None),
        (by_gain, {}, r"'blocks.0' fails .*if the parameter 'blocks.0.gain' \(8\) .* add 'blocks.\*.gain': Sharded\(0\)"),
        (by_gain, {"blocks.*.gain": Sharded(0)}, None),
        (by_view, {}, r"'blocks.0' fails on tensor rank 0: shape '\[2, 5, 4, 2\]' is invalid for input of size 40; name in shard .* -1 in view\.$"),
        (by_value, {}, None),
        (by_kernel, {}, None),
        (wrong_in_any_layout, {}, None),
    ],
)  # fmt: skip
def test_sizes_of_a_part_that_do_not_go_together(use: Any, more: dict[str, Split], sentence: str | None) -> None:
    make, tokens = partial(Model, use), torch.empty(2, 5, dtype=torch.int64, device="meta")
    plan = planned(make, more)
    check_forward(make, plan, 1, (tokens, tokens))
    if sentence is None:
        check_forward(make, plan, 2, (tokens, tokens))
        return
    with pytest.raises(UserError, match=sentence):
        check_forward(make, plan, 2, (tokens, tokens))


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"blocks.*.kept": Sharded(0)}, r"shard has Sharded at 'blocks.\*.kept', and the buffer 'blocks.0.kept' is persistent, .* persistent=False"),
        ({"blocks.*.slopes": Sharded(2)}, r"shard has Sharded\(2\) at 'blocks.\*.slopes', a buffer of 4 × 1, which has no such dim; use Sharded\(0\)"),
        ({"blocks.*.slopes": Sharded(0, heads=3)}, "with heads=3, which must divide dim 0 of 4 × 1; use heads=2"),
        ({"blocks.*.slopes": PerHead()}, "a buffer, has for a name as well; use Replicated"),
        ({"blocks.*.slops": Sharded(0)}, r"which no module or parameter of the model has for a name; the nearest is 'blocks.\d.slopes'"),
    ],
)  # fmt: skip
def test_rules_of_buffers_that_do_not_suit_them(more: dict[str, Split], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        planned(partial(Model, alike), more)


class Doubled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def test_a_weight_of_a_cut_layer_by_itself() -> None:
    def itself(self: Attended, q: Tensor) -> Tensor:
        return F.linear(q.to(self.out.weight.dtype), self.out.weight)

    class Tied(Model):
        def __init__(self) -> None:
            super().__init__(itself)

    sentence = (
        r"Row cuts 'blocks.0.out' for tp, so that a rank has a part of its weight, but the model computes with that by "
        r"itself, as in F.linear\(x, layer.weight\); call the layer, or use Replicated\(\) for it\.$"
    )
    with pytest.raises(UserError, match=sentence):
        check_forward(Tied, planned(Tied), 2, BATCH)
    mixed = RuntimeError("aten.mm.default got mixed torch.Tensor and DTensor, need to convert all torch.Tensor")
    with (
        pytest.raises(UserError, match=r"a weight that tensor ranks share \(tp 3\) is used by itself, as in F.linear"),
        explaining_passes([nn.Linear(2, 2)], tp=3),
    ):
        raise mixed


def test_what_a_cut_layer_would_not_compute() -> None:
    def changed(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
        def make() -> nn.Module:
            made = Model(alike)
            change(made.blocks[1])
            return made

        return make

    with pytest.raises(UserError, match=r"'blocks.1.query' is a Doubled with a forward of its own, .*; use Replicated"):
        planned(changed(lambda block: setattr(block, "query", Doubled(WIDTH, WIDTH))))
    hooked = changed(lambda block: block.query.register_forward_hook(lambda module, inputs, output: 2 * output))
    plan = planned(hooked)
    check_cuts(hooked(), plan, 1, 0)
    with pytest.raises(UserError, match=r"'blocks.1.query' has a hook, .* with tp 2, as Column cuts it"):
        check_cuts(hooked(), plan, 2, 0)
    scalar = changed(lambda block: setattr(block, "scale", nn.Parameter(torch.tensor(1.0))))
    check_cuts(scalar(), plan, 1, 0)
    with pytest.raises(UserError, match=r"'blocks.1.scale' is a parameter without dims, which ZeRO \(1\) cannot shard"):
        check_cuts(scalar(), plan, 1, 1)


def overwriting(module: Any, features: Tensor) -> Tensor:
    result = torch.sigmoid(features)
    result.add_(1)
    return result


def changing_input(module: Any, features: Tensor) -> Tensor:
    return _Same.apply(features.view_as(features)).add_(1)  # type: ignore[no-untyped-call]


class _Same(torch.autograd.Function):
    """Returns views of its input, as the hooks of sharded weights do."""

    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient


def loss(output: Tensor, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())


def detached(output: Tensor, batch: Any) -> Tensor:
    return loss(output, batch).detach()


def by_hidden(module: Any, features: Tensor) -> Tensor:
    return features * module.hidden.table


class Hidden:
    """Hides a tensor from the module."""

    def __init__(self) -> None:
        self.table = torch.ones(WIDTH)


@pytest.mark.parametrize(
    ("use", "custom_loss", "sentence"),
    [
        (overwriting, loss, r"A forward pass changes the result of Sigmoid in place, .*y = y \+ 1 instead of y.add_"),
        (changing_input, loss, r"In the forward pass of 'blocks.0' an input is changed in place, which sharded weights"),
        (alike, detached, r"The loss does not depend on any parameter, as detach\(\)"),
        (by_hidden, loss, r"In the forward pass of 'blocks.0' a tensor has no values .*; use register_buffer"),
    ],
)  # fmt: skip
def test_usual_errors_of_a_pass_name_what_to_write(use: Any, custom_loss: Any, sentence: str) -> None:
    def make() -> nn.Module:
        made = Model(use)
        for block in made.blocks:
            block.hidden = Hidden()
        return made

    step = GradientStep(make, planned(make), Mesh.alone(), TrainingSettings(dtype=torch.float64, micro_batches=1))
    with pytest.raises(UserError, match=sentence):
        step.train_batch(BATCH, 0, custom_loss)
    fine = dataclasses.replace(step.settings, micro_batches=2)
    assert GradientStep(partial(Model, alike), planned(partial(Model, alike)), Mesh.alone(), fine).train_batch(
        BATCH, 0, loss
    ).samples == len(BATCH[0])


def test_sizes_in_a_pass_of_several_tensor_ranks() -> None:
    module = nn.Sequential(nn.Linear(3, 4))
    sentence = r"With tp 2, the forward pass of '0' fails .*mat1 and mat2.*name in shard"
    with pytest.raises(UserError, match=sentence), explaining_passes([module], tp=2):
        module(torch.ones(2, 5))
    with pytest.raises(RuntimeError, match="mat1 and mat2") as plain, explaining_passes([module]):
        module(torch.ones(2, 5))
    assert not isinstance(plain.value, UserError)
