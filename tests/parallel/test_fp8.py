"""Float8 products in layouts: rows that ranks cut are rounded as whole ones, and the same layers are in float8."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.parity import LLAMA, Case, Trace, in_layout, make_engine
from tests.support.sweep import sweep
from threefold.config.resolve import resolve
from threefold.errors import UserError
from threefold.models.family import make_model, model_plan
from threefold.models.layers.decoder import Linear
from threefold.models.sharding import Column, ModelPlan, Normal, Replicated, Split
from threefold.ops import fp8
from threefold.ops.arithmetic import FLOAT8
from threefold.parallel.shard_modules import float8_layers, use_fp8
from threefold.parallel.split_layer import SplitLinear

ON = (("precision.fp8", True),)
GPT = Case(layers=2, heads=4, head_dim=8, ffn=48, sequence=12, dropout=0.1, steps=2, settings=ON)
CASES = {
    "dp 2, ZeRO 3": GPT.with_layout(2, 1, 1, settings=(*ON, ("parallel.zero", 3))),
    "tp 4": GPT.with_layout(1, 4, 1),
    "tp 2, sequence parallel": GPT.with_layout(1, 2, 1, settings=(*ON, ("parallel.sequence_parallel", True))),
    "tp 2, pp 2, zero-bubble": GPT.with_layout(1, 2, 2, schedule="zero-bubble"),
    "pp 2, further": replace(
        LLAMA, pp=2, dtype="fp32", settings=ON, model=(*LLAMA.model, ("mtp_layers", 1), ("tie_embeddings", True))
    ),
    "dp 2, tp 2, llama, recomputed": replace(
        LLAMA, dp=2, tp=2, dtype="fp32", settings=(*ON, ("train.recompute", "full"))
    ),
}
LIMIT = 1e-4
"""Most that gradients may differ by: rounding in fp32 moves hardly a number to the next one in float8."""


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    # The gradient of key biases is rounding alone, as softmax ignores a constant.
    names = [name for name in one if not name.endswith("bias")]
    return max(float((one[name] - other[name]).norm() / one[name].norm()) for name in names)


@sweep("name", list(CASES), quick=(1,))
def test_a_layout_computes_what_one_process_does(pool, name: str) -> None:
    case = CASES[name]
    alone = replace(case.with_layout(1, 1, 1), settings=ON, schedule="1f1b")
    (one,) = pool.run(1, in_layout, alone)
    (plain,) = pool.run(1, in_layout, replace(alone, settings=()))
    traces: list[Trace] = pool.run(case.world_size, in_layout, case)
    for found in traces:
        for step, loss in enumerate(found.losses):
            assert loss == pytest.approx(one.losses[step], rel=1e-4)
        held = {name: one.gradients[0][name] for name in found.gradients[0]}
        assert furthest(held, found.gradients[0]) <= LIMIT
    assert furthest(plain.gradients[0], one.gradients[0]) > 10 * LIMIT, "nothing was in float8"


def in_fp8(case: Case) -> dict[str, bool]:
    engine = make_engine(case)
    return {
        name: module.arithmetic is FLOAT8
        for stage in engine.model.stages
        for name, module in stage.named_modules()
        if isinstance(module, Linear | SplitLinear)
    }


@pytest.mark.parametrize("tp", [1, 2])
def test_the_linear_layers_of_blocks_are_in_float8(pool, tp: int) -> None:
    for found in pool.run(tp, in_fp8, GPT.with_layout(1, tp, 1)):
        names = {name for name, is_on in found.items() if is_on}
        blocks = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")
        assert names == {f"blocks.{block}.{name}" for block in range(2) for name in blocks}
        assert {name for name in found if name not in names} == {"head.output"}


def test_those_of_further_blocks_are_too() -> None:
    config = replace(LLAMA, model=(*LLAMA.model, ("mtp_layers", 2))).config
    with torch.device("meta"):
        model = make_model(config.model)
    names = float8_layers(model, model_plan(config.model, config.data.sequence_length))
    in_block = [name.removeprefix("blocks.2.") for name in names if name.startswith("blocks.2.")]
    assert len(in_block) == 4
    further = [name for name in names if not name.startswith("blocks.")]
    assert further == [f"head.depths.{depth}.block.{name}" for depth in range(2) for name in in_block]


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.proj, self.head = nn.Embedding(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4)


def custom_plan(rule: Split) -> ModelPlan:
    split = {"embed": Replicated(), "proj.0": rule, "head": Column()}
    return ModelPlan(split, ("embed", "proj", "head"), (1.0, 1.0, 1.0), lambda name: Normal(0.02))


def test_a_model_of_torch_layers() -> None:
    model = Own()
    names = float8_layers(model, custom_plan(Column()))
    assert names == ["proj.0"]
    use_fp8([model], names)
    x = torch.randn(3, 4)
    linear = model.proj[0]
    assert torch.equal(linear(x), fp8.linear(x, linear.weight, linear.bias))
    assert torch.equal(model.head(x), F.linear(x, model.head.weight, model.head.bias))


def test_a_plan_without_split_layers_in_blocks_is_refused() -> None:
    with pytest.raises(UserError, match="the model's plan splits no linear layer of a block"):
        float8_layers(Own(), custom_plan(Replicated()))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"precision": {"dtype": "fp16", "fp8": True}}, "use false or precision.dtype bf16"),
        ({"precision": {"fp8": True}, "train": {"exact": True}}, "precision.fp8 is true but train.exact is true"),
        (
            {
                "precision": {"fp8": True},
                "train": {"compile": True, "micro_batch_size": 6, "gradient_accumulation_steps": 4},
                "parallel": {"pp": 2, "schedule": "zero-bubble"},
            },
            "use false or train.compile false",
        ),
    ],
)
def test_what_it_does_not_go_with(settings: dict[str, dict[str, Any]], words: str) -> None:
    config = GPT.with_layout(1, 1, 1, settings=()).config
    sections = {name: {**section, **settings.get(name, {})} for name, section in config.sections().items()}
    given = type(config).model_validate({name: section for name, section in sections.items() if section})
    with pytest.raises(UserError, match=words):
        resolve(given, 67)
