"""Causal language models of `transformers`, tensor parallel by a table of module names, against one process."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import threefold as t3
from tests.compat.prepared.scripts import Updates, gradient, worst
from tests.support.sentences import sentence
from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.models.sharding import Column, PerHead, Row, Split, Vocab

transformers = pytest.importorskip("transformers")

TABLE: Mapping[str, Split] = {
    "**.self_attn.*_proj": Column(),
    "**.self_attn.o_proj": Row(),
    "**.gate_proj": Column(),
    "**.up_proj": Column(),
    "**.down_proj": Row(),
    "**.embed_tokens": Vocab(),
    "lm_head": Vocab(),
}


@dataclass(frozen=True)
class Foreign:
    """A small model of `transformers`, and how it is trained."""

    family: str = "llama"
    tied: bool = False
    dropout: float = 0.0
    zero: int = 0

    def make(self) -> nn.Module:
        torch.manual_seed(1)
        sizes = {
            "vocab_size": 53,
            "hidden_size": 24,
            "intermediate_size": 38,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 32,
            "tie_word_embeddings": self.tied,
            "initializer_range": 0.2,
            "attention_dropout": self.dropout,
        }
        if self.family == "qwen3":
            sizes["head_dim"] = 6
        config = transformers.AutoConfig.for_model(self.family, **sizes)
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64)

    @property
    def table(self) -> dict[str, Split]:
        return {**TABLE, **({"**.q_norm": PerHead(), "**.k_norm": PerHead()} if self.family == "qwen3" else {})}

    def batch(self, step: int) -> Tensor:
        return torch.randint(0, 53, (4, 9), generator=torch.Generator().manual_seed(step))


def one_process(case: Foreign) -> Updates:
    torch.set_num_threads(1)
    model = case.make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    found = Updates()
    for step in range(3):
        ids = case.batch(step)
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        found.losses.append(loss.item())
        found.gradients.append({name: each.grad.clone() for name, each in model.named_parameters()})
        found.norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        found.weights.append({name: each.detach().clone() for name, each in model.state_dict().items()})
    return found


def on_ranks(case: Foreign, dp: int, tp: int) -> Updates:
    torch.set_num_threads(1)
    mesh = Mesh(Layout(dp=dp, tp=tp))
    model: Any = case.make()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=3e-3, eps=1e-4)
    model, optimizer = t3.prepare(model, optimizer, mesh=mesh, zero=case.zero, tensor_parallel=case.table)
    found = Updates()
    for step in range(3):
        ids = case.batch(step).tensor_split(dp)[mesh.dp.index]
        t3.backward(model(input_ids=ids, labels=ids).loss, count=len(ids))
        found.losses.append(optimizer.loss)
        found.gradients.append({name: gradient(each) for name, each in model.named_parameters()})
        found.norms.append(float(t3.clip_grad_norm_(model, 0.5)))
        optimizer.step()
        found.weights.append({name: each.clone() for name, each in model.state_dict().items()})
    return found


@sweep(
    ("case", "dp", "tp"),
    [
        (Foreign("qwen3", tied=True), 1, 2),
        (Foreign("llama", zero=1), 2, 2),
        (Foreign("mistral", tied=True, zero=3), 2, 2),
        (Foreign("qwen2"), 1, 2),
        (Foreign("llama", tied=True), 3, 2),
    ],
    slow=(0, 2, 3),
    ids=str,
)
def test_losses_gradients_and_weights_are_those_of_one_process(pool, case: Foreign, dp: int, tp: int) -> None:
    expected = pool.run(1, one_process, case)[0]
    for found in pool.run(dp * tp, on_ranks, case, dp, tp):
        # The models compute norms and rotations in fp32 whatever their dtype.
        assert worst(found, expected) < 1e-4


def wrong_tables() -> list[str]:
    mesh = Mesh(Layout(tp=torch.distributed.get_world_size()))
    wrong: list[tuple[bool, Any]] = [
        (False, None),
        (False, {"**.q_poj": Column()}),
        (False, {"**.q_proj": "column"}),
        (False, {"**.input_layernorm": Row()}),
        (False, {"lm_head": Column()}),
        (False, {"**.k_proj": Column()}),
        (True, {"**.embed_tokens": Vocab()}),
    ]
    return [sentence(t3.prepare, Foreign(tied=tied).make(), mesh=mesh, tensor_parallel=table) for tied, table in wrong]


@pytest.mark.slow
def test_a_wrong_table_is_one_sentence(pool) -> None:
    for said in pool.run(4, wrong_tables):
        assert said == [
            "The mesh has tp 4 but tensor_parallel names no modules of the model; pass a table such as "
            '{"**.up": Column(), "**.down": Row()}, or use tp=1.',
            "tensor_parallel has '**.q_poj', which is not a module of the model; the nearest is "
            "'model.layers.0.self_attn.q_proj'.",
            "tensor_parallel has 'column' for '**.q_proj' but takes Column(), Row(), Vocab(), PerHead(), Replicated(); "
            "use one of them.",
            "tensor_parallel has Row() for 'model.layers.0.input_layernorm', a LlamaRMSNorm, but that rule is for "
            "Linear; leave it out to keep the module whole.",
            "tensor_parallel has Column() for 'lm_head', which gives the model's logits; use Vocab(), which gathers "
            "them.",
            "The mesh has tp 4 but it must divide the 2 heads of 'model.layers.0.self_attn.k_proj'; use tp=2.",
            "tensor_parallel has a rule for 'model.embed_tokens.weight', the same weight as 'lm_head.weight'; give "
            "their modules one rule.",
        ]
