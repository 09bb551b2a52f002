"""A step with ranks in threads computes, and sends, what one with ranks in processes does."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import threefold as t3
from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.presets import PRESETS
from threefold.errors import UserError
from threefold.lesson.lesson import Lesson
from threefold.models.source import ConfigSource
from threefold.train.step import Engine
from threefold.verify.batches import RandomBatches

GPT = {"num_layers": 3, "hidden_size": 12, "num_attention_heads": 4, "vocab_size": 61}
LLAMA = {
    "architecture": "llama",
    "num_layers": 3,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "ffn_hidden_size": 22,
    "vocab_size": 53,
}
MIXTURE = {**LLAMA, "num_experts": 4, "ffn_hidden_size": 20}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tp2": ("tp2", GPT),
    "pp2": ("pp2", GPT),
    "cp2 ring": ("cp2 ring", GPT),
    "dp2 zero3": ("dp2 zero3", GPT),
    "dp2·ep2": ("dp2·ep2", MIXTURE),
    "dp2·tp2·pp2": ("dp2·tp2·pp2", GPT),
    "dp3": ("dp3", GPT),
    "dp2 zero1": ("dp2 zero1", GPT),
    "tp2 sp": ("tp2 sp", LLAMA),
    "tp4": ("tp4", {**GPT, "ffn_hidden_size": 44}),
    "pp3 gpipe": ("pp3 gpipe", GPT),
    "pp2 zbv": ("pp2 zbv", GPT),
    "pp2 interleaved": ("pp2 interleaved", {**GPT, "num_layers": 4}),
    "cp3": ("cp3", GPT),
    "cp2·tp2 ring sp selective": ("cp2·tp2 ring sp selective", LLAMA),
    "dp2·tp2 zero3 full": ("dp2·tp2 zero3 full accumulation2", LLAMA),
    "dp4 zero3 shards2": ("dp4 zero3 shards2", GPT),
    "dp2·ep2·tp2 zero1": ("dp2·ep2·tp2 zero1", MIXTURE),
    "dp2·ep2·pp2 zero-bubble": ("dp2·ep2·pp2 zero-bubble", MIXTURE),
}


def lesson_of(layout: str, model: dict[str, Any] = GPT, **options: Any) -> Lesson:
    return t3.explain({"model": model}, layout=layout, **options)


def recorded(config: Config) -> list[tuple[str, str, int]]:
    """Return this process's collectives in the step of a lesson's config."""
    mesh, (make_model, plan) = Mesh(Layout.from_config(config.parallel)), ConfigSource().load(config)
    engine = Engine(make_model, plan, mesh, config)
    batch = RandomBatches(masked=False).batch(config, 0, mesh.dp.index, mesh.dp.size)
    with mesh.recorder.recording() as events:
        engine.train_step(batch, 0)
    return [(event.axis, event.operation, event.nbytes) for event in events]


@sweep("name", LAYOUTS, quick=(0, 1, 2, 3, 4), slow=slice(None))
def test_a_lesson_is_as_one_process_and_lists_the_collectives_of_processes(pool: Any, name: str) -> None:
    layout, model = LAYOUTS[name]
    lesson = lesson_of(layout, model)
    assert lesson.difference < 1e-12
    assert lesson.loss == pytest.approx(lesson.expected_loss, rel=1e-12)
    assert lesson.gradients.keys() == lesson.expected_gradients.keys()
    ranks = range(len(lesson.coordinates))
    ours = [[(e.axis, e.operation, e.nbytes) for e in lesson if e.rank == rank] for rank in ranks]
    assert ours == pool.run(len(ranks), recorded, lesson.config)
    for event in lesson:
        assert event.rank in event.ranks
        assert event.module or event.phase in ("batch", "update")
        assert event.sent
        assert event.source
        assert [e.order for e in lesson if e.rank == event.rank] == [*range(1, 1 + len(ours[event.rank]))]


def test_a_lesson_is_the_same_each_time_and_leaves_no_process_group() -> None:
    state = torch.get_rng_state()
    first, second = lesson_of("tp2·pp2"), lesson_of("tp2·pp2", here=3)
    facts = [
        [(e.phase, e.axis, e.operation, e.module, e.source) for e in each if e.rank == 1] for each in (first, second)
    ]
    assert facts[0] == facts[1]
    assert all(torch.equal(first.gradients[name], whole) for name, whole in second.gradients.items())
    assert not dist.is_initialized()
    assert torch.equal(state, torch.get_rng_state())
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_a_tensor_parallel_pair() -> None:
    """The second product of a pair is summed in the forward pass, the input of the first in the backward pass."""
    lesson = lesson_of("tp2").filter(module="blocks.1.mlp.*")
    found = [(e.rank, e.phase, e.operation, e.module) for e in lesson]
    assert sorted(found) == [
        (rank, *each)
        for rank in (0, 1)
        for each in (
            ("backward", "all_reduce", "blocks.1.mlp.up"),
            ("forward", "all_reduce", "blocks.1.mlp.down"),
        )
    ]
    forward = [e for e in lesson if e.phase == "forward"]
    assert torch.equal(forward[0].sent[0] + forward[1].sent[0], forward[0].received[0])
    assert torch.equal(forward[0].received[0], forward[1].received[0])
    assert "0 1    forward 0   tp    all_reduce  blocks.1.mlp.down" in lesson.table()


def test_a_step_of_1f1b() -> None:
    lesson = lesson_of("pp2")
    assert lesson.order == ("rank 0 (pp 0): F0 F1 B0 F2 B1 F3 B2 B3\nrank 1 (pp 1): F0 B0 F1 B1 F2 B2 F3 B3")
    sends = lesson.filter(operation="send")
    assert {(e.ranks, e.phase, e.module) for e in sends} == {
        ((0, 1), "forward", "activations"),
        ((1, 0), "backward", "gradients"),
    }
    tied = lesson.filter(axis="tie")
    assert [e.module for e in tied] == ["embed.tokens.weight"] * 2


def test_a_ring() -> None:
    """Each rank sends its keys and values on once, and every rank has seen those of all."""
    forward = lesson_of("cp2 ring").filter(phase="forward", module="blocks.0.attn.*")
    assert [(e.operation, e.ranks) for e in forward] == [("send", (0, 1)), ("send", (1, 0))]


def test_zero_3_gathers_a_block_in_both_passes_and_shards_its_gradients() -> None:
    lesson = lesson_of("dp2 zero3").filter(rank=0, module="blocks.1.*")
    assert [(e.phase, e.operation) for e in lesson] == [
        ("forward", "all_gather"),
        ("backward", "all_gather"),
        ("backward", "reduce_scatter"),
    ]


class Block(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(6, 14) for _ in range(2)])
        self.head = nn.Linear(6, 3)


def squares(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
    return (output - batch[1]).square().mean()


def test_a_model_of_ones_own() -> None:
    pair = {"blocks.*.up": t3.Column(), "blocks.*.down": t3.Row()}
    plan = t3.Plan(layers=["blocks.*", "head"], shard={**pair, "head": t3.Replicated()})
    generator = torch.Generator().manual_seed(0)
    batch = (
        torch.randn(4, 6, dtype=torch.float64, generator=generator),
        torch.randn(4, 3, dtype=torch.float64, generator=generator),
    )
    for layout in ("tp2", "dp2·pp2", "dp2 zero3"):
        lesson = t3.explain(Net, batch, layout, plan=plan, loss=squares)
        assert lesson.difference < 1e-12, layout
    assert {e.module for e in t3.explain(Net, batch, "tp2", plan=plan, loss=squares) if e.phase == "forward"} == {
        "blocks.0.down",
        "blocks.1.down",
    }


def test_a_batch_of_ones_own() -> None:
    tokens = torch.randint(61, (6, 13), generator=torch.Generator().manual_seed(1))
    lesson = t3.explain({"model": GPT}, tokens, "dp3·tp2")
    assert lesson.difference < 1e-12
    assert lesson.loss == t3.explain({"model": GPT}, (tokens[:, :-1], tokens[:, 1:]), "dp3·tp2").loss


def test_every_rank_reaches_the_code_of_a_run_and_may_stop_at_each_collective() -> None:
    """What a debugger's breakpoint in `threefold.parallel` would see."""
    seen: list[tuple[int, str, str]] = []

    def note(event: Any) -> None:
        seen.append((event.rank, threading.current_thread().name, event.source.split(":")[0]))

    lesson = lesson_of("dp2 zero1", on_event=note, here=1, values=False)
    assert {(rank, name) for rank, name, _ in seen} == {(0, "rank 0"), (1, threading.current_thread().name)}
    assert "parallel/zero.py" in {source for _, _, source in seen}
    assert not any(event.sent or event.received for event in lesson)


def test_filters_and_texts() -> None:
    lesson = lesson_of("dp2·tp2")
    assert {e.rank for e in lesson.filter(rank=3)} == {3}
    assert {e.axis for e in lesson.filter(axis="tp", phase="backward")} == {"tp"}
    assert len(lesson) == len(list(lesson)) == len(lesson.events)
    assert str(lesson[0]).startswith("rank ")
    text, page = str(lesson), lesson._repr_html_()
    assert "gradients equal to one process within" in text
    assert page.count("<tr") == 1 + len(lesson.table().splitlines()) - 1
    assert "gives" in page


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: lesson_of("dp16"), r"The layout dp16.* has 16 ranks but a lesson has at most 8.*; use fewer"),
        (lambda: lesson_of("xp2"), r"has 'xp2', which is neither an axis"),
        (lambda: lesson_of("tp3"), r"tp"),
        (lambda: lesson_of("tp2", here=2), r"here is 2 but the layout tp2.* has ranks 0 to 1; use 1"),
        (lambda: lesson_of("tp2", dtype="bf16"), r"dtype is 'bf16' but must be fp64 or fp32; use fp64"),
        (lambda: lesson_of("tp2").filter(axis="dpp"), r"axis is 'dpp' but the step has tp, world; use 'tp'"),
        (lambda: lesson_of("tp2").filter(rank=5), r"rank is 5 but the layout tp2 has ranks 0 to 1; use 1"),
        (lambda: lesson_of("tp2").filter(module="block.0"), r"module is 'block.0' but no collective .* use 'blocks.0"),
        (lambda: t3.explain("no-such-preset"), r"model is 'no-such-preset' but must be a preset such as"),
        (lambda: t3.explain({"model": GPT}, torch.ones(2, 3)), r"batch must be tokens int64"),
        (lambda: t3.explain({"model": GPT}, torch.full((1, 9), 99)), r"token 99 but model.vocab_size is 61"),
        (lambda: t3.explain({"model": GPT, "train": {"exact": True}}, layout="dp2"), r"train.exact is true"),
        (lambda: t3.explain({"model": GPT}, config={}), r"config is given with a model of settings"),
    ],
)
def test_a_wrong_call_is_answered_in_one_sentence(call: Any, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        call()


def test_a_preset_is_made_small() -> None:
    lesson = t3.explain(next(iter(PRESETS)), layout="tp2")
    assert lesson.difference < 1e-12
    assert sum(whole.numel() for whole in lesson.gradients.values()) < 100_000
