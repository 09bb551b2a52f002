"""What the backward pass computes again: the same gradients bit for bit, and the memory that the formula says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.parallel.support import sizes
from tests.support.parity import BOTH, WIDE, Case, Trace, in_layout, make_engine, shard_of, with_recompute
from tests.support.saved_tensors import recording_saved
from tests.support.sweep import sweep
from threefold.comm.mesh import Event
from threefold.config import Config
from threefold.config.resolve import resolve
from threefold.errors import UserError
from threefold.models.gpt.sharding import gpt_plan
from threefold.models.layers.decoder import NOTHING, SampleInfo
from threefold.models.sharding import Constant, ModelPlan, Replicated
from threefold.parallel.leaf import local
from threefold.parallel.parameter import replace_parameters
from threefold.parallel.pipeline.stage import Stage
from threefold.parallel.recompute import Recomputed, apply_recompute, chosen_layers, unwrapped
from threefold.planner.activations import block_bytes
from threefold.planner.model_size import described_blocks
from threefold.planner.rank_block import built_in_attention, rank_block
from threefold.random.dropout import sample_keys

SEQUENCE_PARALLEL = (("parallel.sequence_parallel", True),)
MODES = [("selective", 1), ("full", 1), ("full", 2)]


def traces(case: Case, modes: list[tuple[str, int]]) -> list[Trace]:
    """Without recompute, and with each of the modes."""
    return [in_layout(case), *(in_layout(with_recompute(case, *mode)) for mode in modes)]


@sweep(
    ("layout", "changes"),
    [
        ((1, 1, 1), {"dtype": "fp32"}),
        ((1, 1, 1), {"dtype": "bf16"}),
        ((2, 1, 1), {}),
        ((1, 4, 1), {}),
        ((1, 1, 2), {"schedule": "gpipe"}),
        ((1, 2, 3), {"accumulation": 4}),
        ((2, 2, 2), {"dtype": "fp32"}),
        ((1, 2, 2), {"schedule": "zero-bubble", "layers": 4, "accumulation": 4}),
        ((1, 1, 2), {"schedule": "zbv", "layers": 4, "accumulation": 4}),
        ((1, 2, 2), {"sequence": 12, "settings": SEQUENCE_PARALLEL}),
        ((1, 2, 1), {"sequence": 12, "cp": 2}),
    ],
    ids=str,
    quick=(1,),
    slow=slice(0, None, 2),
)
def test_gradients_keep_every_bit(pool, layout: tuple[int, int, int], changes: dict[str, Any]) -> None:
    """Gradients, losses and weights after two steps with dropout, on every rank."""
    case = Case(**{"dtype": "fp64", "dropout": 0.2, "steps": 2, **changes}).with_layout(*layout)
    for plain, *others in pool.run(case.world_size, traces, case, MODES):
        for other in others:
            assert other.losses == plain.losses
            assert other.norms == plain.norms
            for got, expected in zip([*other.gradients, other.final], [*plain.gradients, plain.final], strict=True):
                assert all(tensor.equal(expected[name]) for name, tensor in got.items())


def names_and_events(case: Case) -> tuple[list[str], list[Event]]:
    engine = make_engine(case)
    with engine.mesh.recorder.recording() as events:
        engine.train_step(shard_of(case, 0, engine.mesh.dp.index), 0)
    return [name for stage in engine.stages for name, _ in stage.named_parameters()], list(events)


def test_the_replay_repeats_the_collectives_on_all_ranks_alike(pool) -> None:
    """A block has two sums forward and two backward; replayed, both again with dropout, and one without: the replay
    ends at the last tensor that the backward pass needs, which then lies before the second sum."""
    for dropout, replayed in ((0.1, 2), (0.0, 1)):
        case = Case(accumulation=1, dropout=dropout).with_layout(1, 3, 1)
        (names, plain), *_ = pool.run(3, names_and_events, case)
        seen = pool.run(3, names_and_events, with_recompute(case, "full"))
        assert all(each == seen[0] for each in seen)
        assert seen[0][0] == names
        sums = [len([event for event in events if event.axis == "tp"]) for events in (plain, seen[0][1])]
        assert sums[1] - sums[0] == replayed * case.layers


def kept(case: Case, mode: str, every: int = 1) -> tuple[int, int]:
    """Bytes that a stage of blocks keeps of a micro-batch, and that it keeps without gradients."""
    engine = make_engine(with_recompute(case, mode, every))
    stage, keys = engine.stages[0], sample_keys(1, 0, torch.arange(case.batch)) if case.dropout else None
    dtype = engine.settings.dtype
    positions = case.sequence // engine.parallelism.context.cut.shares
    x = torch.randn(case.batch, positions, case.heads * case.head_dim).to(dtype).requires_grad_()

    def run() -> Tensor:
        out = x * 1  # a leaf is not an activation
        for number in range(case.layers):
            out = stage.get_submodule(f"blocks.{number}")(out, NOTHING if keys is None else SampleInfo(keys))
        return out

    parameters = [local(parameter) for parameter in stage.parameters()]
    with recording_saved(parameters) as saved:
        result = run()
    with torch.no_grad(), recording_saved(parameters) as without:
        run()
    found = saved.nbytes, without.nbytes
    result.sum().backward()
    return found


@sweep("tp", [1, 2], quick=(1,), slow=())
@sweep(
    "changes",
    [{}, {"dropout": 0.1}, {"dtype": "bf16"}, {"dtype": "bf16", "dropout": 0.1}, {"dtype": "fp64"}],
    ids=str,
    quick=(0, 3),
)
def test_blocks_keep_what_the_formula_says(pool, changes: dict[str, Any], tp: int) -> None:
    _check_kept(pool, Case(layers=3, sequence=17, batch=2, accumulation=1, **changes).with_layout(1, tp, 1))


@sweep("dtype", ["fp32", "bf16"], quick=(0,))
@sweep("tp", [1, 2], quick=(1,), slow=(0,))
def test_other_norms_and_gates_keep_what_the_formula_says(pool, tp: int, dtype: str) -> None:
    """With QK-norm over the width, the formula is an upper bound."""
    for kind, most in ((BOTH, 1.0), (WIDE, 1.12)):
        model = tuple((name, value) for name, value in kind.model if "sliding" not in name and "pattern" not in name)
        case = replace(kind, model=model, layers=2, batch=2, accumulation=1, dropout=0.0, documents=False, dtype=dtype)
        case = case.with_layout(1, tp, 1)
        block = described_blocks(case.config)[0]
        of_rank = rank_block(case.config, block, attention=built_in_attention(case.config, block, "cpu"))
        for mode in ("none", "selective", "full"):
            formula = case.layers * block_bytes(of_rank, mode)
            for found, _ in pool.run(tp, kept, case, mode):
                assert found <= formula <= most * found


def test_shares_of_the_sequence_keep_what_the_formula_says(pool) -> None:
    case = Case(layers=2, sequence=18, batch=2, accumulation=1, dropout=0.1, settings=SEQUENCE_PARALLEL)
    _check_kept(pool, case.with_layout(1, 3, 1))


@sweep("changes", [{}, {"dropout": 0.1}, {"dtype": "bf16"}], ids=str, quick=(0,))
def test_context_ranks_keep_what_the_formula_says(pool, changes: dict[str, Any]) -> None:
    case = Case(layers=2, sequence=24, batch=2, accumulation=1, cp=2, **changes)
    for mode in ("none", "selective", "full"):
        found = [nbytes for nbytes, _ in pool.run(2, kept, case, mode)]
        assert found == [case.layers * block_bytes(sizes(case), mode)] * 2


def _check_kept(pool, case: Case) -> None:
    of_one = {mode: block_bytes(sizes(case), mode) for mode in ("none", "selective", "full")}
    assert of_one["none"] > of_one["selective"] > of_one["full"]
    for mode, every in [("none", 1), *MODES]:
        treated = len(range(0, case.layers, every)) if mode != "none" else 0
        formula = treated * of_one[mode] + (case.layers - treated) * of_one["none"]
        assert pool.run(case.tp, kept, case, mode, every) == [(formula, 0)] * case.tp


def test_long_sequences_keep_no_attention_matrix_in_any_precision(pool) -> None:
    case = Case(layers=1, sequence=600, batch=1, heads=2, dtype="bf16", accumulation=1)
    assert pool.run(1, kept, case, "none") == [(block_bytes(sizes(case)), 0)]


def test_layers_are_counted_over_the_whole_model() -> None:
    plan = gpt_plan(Case(layers=5).config.model, 8)
    assert chosen_layers(plan.layers, plan.recompute, "full", 2) == ["blocks.0", "blocks.2", "blocks.4"]
    assert chosen_layers(plan.layers, plan.recompute, "selective") == [f"blocks.{number}" for number in range(5)]
    assert chosen_layers(plan.layers, plan.recompute, "none") == []


class Core(nn.Module):
    """A module of one's own, with a parameter, a submodule and an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 0.5))
        self.inner = nn.ModuleDict({"up": nn.Linear(4, 4)})
        self.width, self.calls = 4, 0

    def forward(self, x: Tensor, samples: Any = None) -> Tensor:
        self.calls += 1
        return torch.tanh(self.inner["up"](x) * self.scale) * (2 if self.training else 1)


class Layer(nn.Module):
    def __init__(self, core: Core) -> None:
        super().__init__()
        self.core = core

    def forward(self, x: Tensor, labels: Tensor | None = None, samples: Any = None) -> Tensor:
        return self.core(x)


def own_stage(mode: str) -> Stage:
    """Two layers that have one core in common, its activations recomputed."""
    torch.manual_seed(0)
    core = Core()
    model = nn.ModuleDict({"first": Layer(core), "second": Layer(core)})
    recompute = {"selective": ("*.core", "*.core.inner"), "full": ("*",)}
    plan = ModelPlan(
        {"**": Replicated()}, ("first", "second"), (1.0, 1.0), lambda name: Constant(1.0), recompute=recompute
    )
    stage = Stage(model, plan, 0, 2)
    apply_recompute([stage], mode)
    return stage


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_modules_of_ones_own_keep_names_attributes_and_gradients(mode: str) -> None:
    plain, stage = own_stage("none"), own_stage(mode)
    core = stage.get_submodule("first.core")
    assert list(stage.state_dict()) == list(plain.state_dict())
    assert [name for name, _ in stage.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert isinstance(unwrapped(core), Core)
    assert (core.width, core.scale.numel()) == (4, 4)
    assert stage.get_submodule("second.core") is core
    for each in (plain, stage):
        replace_parameters(each, lambda parameter: nn.Parameter(parameter.detach() * 3))
        each(torch.linspace(-1, 1, 8).view(2, 4)).sum().backward()
    for (name, got), expected in zip(stage.named_parameters(), plain.parameters(), strict=True):
        assert got.grad is not None and expected.grad is not None, name  # noqa: PT018
        assert got.grad.equal(expected.grad), name
    assert (plain.get_submodule("first.core").calls, core.calls) == (2, 4)


def test_evaluation_mode_reaches_what_is_recomputed() -> None:
    stage, x = own_stage("selective"), torch.ones(2, 4)
    layer = stage.get_submodule("first")
    training = layer(x)
    stage.eval()
    assert training.equal(2 * layer(x))


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ({"recompute_every": 2}, "train.recompute_every is 2 but train.recompute is none"),
        (
            {"recompute_every": 2, "recompute": "selective"},
            "train.recompute_every is 2 but train.recompute is selective",
        ),
        (
            {"recompute_every": 9, "recompute": "full"},
            "train.recompute_every is 9 but model.num_layers is 3; use at most 3",
        ),
    ],
)
def test_settings_that_say_nothing_are_refused(train: dict[str, Any], sentence: str) -> None:
    given = {"model": {"num_layers": 3}, "data": {"path": "unused"}, "train": train}
    with pytest.raises(UserError, match=sentence):
        resolve(Config.model_validate(given), 67)


@pytest.mark.slow
def test_a_compiled_module_is_compiled_inside_its_recomputation() -> None:
    """The backward pass runs the compiled code again; compiled around it, it would run once and keep everything."""
    runs: list[torch.Size] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        def run(*given: Tensor) -> Any:
            runs.append(given[-1].shape)
            return graph(*given)

        return run

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))
    x = torch.randn(4, 3, requires_grad=True)
    expected = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    recomputed = Recomputed(module)
    recomputed.compile(backend=backend)
    loss = recomputed(x).square().sum()
    assert len(runs) == 1
    found = torch.autograd.grad(loss, [x, *recomputed.parameters()])
    assert len(runs) == 2
    assert all(gradient.equal(other) for gradient, other in zip(found, expected, strict=True))
