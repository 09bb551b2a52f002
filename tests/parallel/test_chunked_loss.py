"""The head's product and loss together, some columns of the logits at a time: less memory, the same numbers."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from tests.parallel.support import sizes
from tests.support.mistakes import Patch, with_mistake
from tests.support.parity import Case, check, departures, in_layout, make_engine
from tests.support.saved_tensors import recording_saved
from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.constants import IGNORE_INDEX
from threefold.models.layers.decoder import Linear, LinearCrossEntropy
from threefold.ops import cross_entropy
from threefold.parallel.cross_entropy import ParallelCrossEntropy
from threefold.parallel.leaf import local
from threefold.parallel.parallelize import ChunkSizes
from threefold.parallel.tensor import ColumnParallelLinear
from threefold.planner.activations import head_bytes
from threefold.planner.systems import Kernels

CHUNK = ("train.loss_chunk_size", 7)
HIDDEN = 6


class Problem:
    """Inputs, and what `F.cross_entropy` makes of all their logits in fp64: the losses and both gradients."""

    def __init__(self, vocab: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> None:
        generator = torch.Generator().manual_seed(vocab)
        draw = partial(torch.randn, generator=generator, dtype=torch.float64)
        self.x, self.weight = draw(3, 5, HIDDEN).to(dtype), (draw(vocab, HIDDEN) * scale).to(dtype)
        self.labels = torch.randint(0, vocab, (3, 5), generator=generator)
        self.labels[0] = IGNORE_INDEX  # a sample without a token that counts
        self.labels[2, 3] = IGNORE_INDEX
        self.weights = torch.rand(3, 5, generator=generator)  # of the tokens' losses
        x, weight = (each.double().clone().requires_grad_() for each in (self.x, self.weight))
        logits = F.linear(x, weight).flatten(0, 1)
        losses = F.cross_entropy(logits, self.labels.flatten(), ignore_index=IGNORE_INDEX, reduction="none").view(3, 5)
        (losses * self.weights).sum().backward()
        self.expected = [losses.detach(), x.grad, weight.grad]

    def solved(self, chunk: int, at_once: int = 0) -> list[Tensor]:
        """The same by the module."""
        output = Linear(HIDDEN, len(self.weight), bias=False)
        output.weight = torch.nn.Parameter(self.weight.clone())
        loss = LinearCrossEntropy(chunk, at_once=at_once)
        x = self.x.clone().requires_grad_()
        losses = loss(x, output, self.labels)
        (losses * self.weights).sum().backward()
        assert x.grad is not None
        assert output.weight.grad is not None
        return [losses.detach(), x.grad, output.weight.grad]

    def errors(self, solved: list[Tensor]) -> list[float]:
        """Of each result: the largest difference over the largest magnitude."""
        pairs = zip(solved, self.expected, strict=True)
        return [float((got - expected).abs().max() / expected.abs().max()) for got, expected in pairs]


@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("vocab", [37, 5, 1])
def test_equals_cross_entropy(vocab: int, scale: float) -> None:
    """Chunks of one column, that do not divide the vocabulary, that are larger than it."""
    problem = Problem(vocab, scale)
    for chunk in (1, 7, vocab - 1, vocab, 100):
        for got, expected in zip(problem.solved(chunk), problem.expected, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12 * scale)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("chunk", [1, 7, 37])
def test_kept_logits_give_the_bits_of_those_computed_again(dtype: torch.dtype, chunk: int) -> None:
    problem = Problem(37, 10.0, dtype)
    for kept, again in zip(problem.solved(0, 15 * chunk), problem.solved(chunk), strict=True):
        assert kept.equal(again)


def test_widths_that_a_gpu_multiplies_slowly_are_padded(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU as if it were a GPU: a padded column's exponential, of a logit of 0, may be infinite."""
    monkeypatch.setattr(
        cross_entropy, "_aligned", lambda rows: F.pad(rows, (0, 0, 0, -len(rows) % 8)) if len(rows) % 8 else rows
    )
    problem = Problem(37, 1.0)
    problem.weight[:, 0], problem.x[..., 0] = 1, -800  # every logit
    padded = [problem.solved(0, 15 * 11), problem.solved(11), problem.solved(37)]
    monkeypatch.undo()
    for solved in padded:
        for got, expected in zip(solved, problem.solved(11), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("scale", [1.0, 1e3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounds_no_worse_than_all_at_once(dtype: torch.dtype, scale: float) -> None:
    """The losses in fp32; the weight's gradient rounded once, that of the input once a chunk before it is added up."""
    problem = Problem(37, scale, dtype)
    at_once = problem.errors(problem.solved(0))
    for chunk in (3, 37):
        solved = problem.solved(chunk)
        assert [each.dtype for each in solved] == [torch.float32, dtype, dtype]
        assert all(error <= 3 * limit + 1e-6 for error, limit in zip(problem.errors(solved), at_once, strict=True))


def test_the_gradient_of_the_input_of_many_chunks_does_not_stagnate() -> None:
    """In bf16 a sum of equal numbers stops growing at 256 of them."""
    x, weight = torch.zeros(1, 2, dtype=torch.bfloat16, requires_grad=True), torch.ones(512, 2, dtype=torch.bfloat16)
    weight[7] = 0  # that of the label; all tokens are as probable
    cross_entropy.chunked_cross_entropy(x, weight, torch.tensor([7]), 1).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [[pytest.approx(511 / 512, rel=2**-8)] * 2]


class _Largest(TorchDispatchMode):
    """Elements of the largest tensor that any operator gave."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        found = [each.numel() for each in (out if isinstance(out, tuple | list) else [out]) if isinstance(each, Tensor)]
        self.elements = max(self.elements, *found, 0)
        return out


@pytest.mark.parametrize(("chunk", "most"), [(50, 100 * 50), (0, 100 * 1000)])
def test_logits_are_never_all_in_memory(chunk: int, most: int) -> None:
    output, loss = Linear(4, 1000, bias=False), LinearCrossEntropy(chunk)
    x, labels = torch.randn(2, 50, 4, requires_grad=True), torch.randint(0, 1000, (2, 50))
    with _Largest() as forward:
        losses = loss(x, output, labels).sum()
    with _Largest() as backward:
        losses.backward()
    assert (forward.elements, backward.elements) == (most, most)


@pytest.mark.parametrize(("chunk", "kept"), [(7, 0), (0, 70)])
def test_evaluation_keeps_nothing_and_gives_the_same(chunk: int, kept: int) -> None:
    output, loss = Linear(4, 30, bias=False), LinearCrossEntropy()
    x, labels = torch.randn(2, 5, 4), torch.randint(0, 30, (2, 5))
    at_once = loss(x, output, labels)
    chunked = LinearCrossEntropy(chunk, loss.cross_entropy, kept)
    with torch.no_grad(), recording_saved(output.parameters()) as saved:
        torch.testing.assert_close(chunked(x, output, labels), at_once.detach())
    assert saved.nbytes == 0


def test_what_cannot_be_computed_is_an_error() -> None:
    loss = LinearCrossEntropy(7)
    with pytest.raises(ValueError, match="chunk_size is 7 but the output layer has a bias"):
        loss(torch.zeros(1, 4), Linear(4, 10), torch.tensor([1]))
    with pytest.raises(RuntimeError, match="neither in the vocabulary of 10 nor -100"):
        loss(torch.zeros(1, 4), Linear(4, 10, bias=False), torch.tensor([99]))


def split(vocab: int, scale: float, chunk: int) -> dict[str, Any]:
    """This rank's results beside its parts of the expected ones, and the largest thing that travelled for the loss."""
    axis = Mesh(Layout(tp=torch.distributed.get_world_size())).tp
    problem = Problem(vocab, scale)
    whole = Linear(HIDDEN, vocab, bias=False)
    whole.weight = torch.nn.Parameter(problem.weight)
    output = ColumnParallelLinear.from_linear(whole, axis, gather_output=False)
    loss = ParallelCrossEntropy(vocab, axis)
    x = problem.x.clone().requires_grad_()
    with axis.recorder.recording() as events:
        losses = output.with_weight(lambda x, weight: loss.chunked(x, weight, problem.labels, chunk), x)
    (losses * problem.weights).sum().backward()
    of_losses, of_x, of_weight = problem.expected
    return {
        "losses": (losses.detach(), of_losses),
        "x": (x.grad, of_x),
        "weight": (output.weight.grad.to_local(), of_weight[loss.start : loss.end]),
        "largest": max((event.nbytes for event in events), default=0),
    }


@sweep("scale", [1.0, 1e4], quick=(1,))
@pytest.mark.parametrize(("size", "vocab"), [(2, 37), (3, 37), (4, 5)])  # of 5 the fourth of four ranks has none
def test_split_vocabulary(pool, size: int, vocab: int, scale: float) -> None:
    for chunk in (2, 100):
        for found in pool.run(size, split, vocab, scale, chunk):
            for name in ("losses", "x", "weight"):
                got, expected = found[name]
                torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12 * scale)
            assert found["largest"] <= 15 * 2 * 8  # two numbers per token travel at most


LAYOUTS: list[dict[str, Any]] = [
    {"tp": 2},
    {"tp": 3, "tie": False},
    {"tp": 3, "sequence": 12, "settings": (("parallel.sequence_parallel", True),)},
    {"pp": 2},
    {"pp": 2, "schedule": "gpipe"},
    {"pp": 2, "schedule": "zbv", "layers": 4, "accumulation": 4},
    {"pp": 2, "schedule": "zero-bubble", "layers": 4, "accumulation": 4, "tie": False},
    {"dp": 2, "settings": (("parallel.zero", 3),)},
    {"cp": 2, "sequence": 12},
    {"tp": 2, "model": (("architecture", "llama"),), "positions": "rope", "head_dim": 4},
    {"dp": 2, "tp": 2, "pp": 2, "dropout": 0.1},
]


def chunked(layout: dict[str, Any]) -> Case:
    settings = (*layout.get("settings", ()), CHUNK)
    return Case(**{"dtype": "fp64", "steps": 2, **layout, "settings": settings})


@sweep("layout", LAYOUTS, ids=str, quick=(0, 2, 5, 7, 8, 9, 10))  # of the others, those have the parts
def test_layout(pool, expected, layout: dict[str, Any]) -> None:
    case = chunked(layout)
    check(pool, expected, case)


def logits_kept() -> list[Patch]:
    """As on a GPU."""
    return [(ChunkSizes, "of_device", classmethod(lambda cls, device: cls(kept_logits_at_once=200)))]


@sweep("layout", LAYOUTS, ids=str, quick=(0, 10), slow=(5,))
def test_layout_that_keeps_the_logits(pool, expected, layout: dict[str, Any]) -> None:
    case = replace(chunked(layout), settings=(*layout.get("settings", ()), ("train.loss_chunk_size", 0)))
    found = departures(expected(case), pool.run(case.world_size, with_mistake, logits_kept, in_layout, case), case)
    assert not found, "\n".join(found[:10])


def kept(case: Case, at_once: int = 0) -> int:
    """Bytes that this rank's head keeps of the whole batch."""
    engine = make_engine(case, chunks=ChunkSizes(kept_logits_at_once=at_once))
    stage, cut = engine.stages[0], engine.parallelism.context.cut
    x = torch.randn(case.batch, case.sequence // cut.shares, case.heads * case.head_dim)
    labels = torch.zeros(case.batch, case.sequence, dtype=torch.int64)
    with recording_saved([local(parameter) for parameter in stage.parameters()]) as saved:
        out = stage.get_submodule("head")(x.to(engine.settings.dtype).requires_grad_() * 1, labels)
    found = saved.nbytes
    out.backward()
    return found


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@sweep("tp", [1, 2], quick=(1,))
def test_the_head_keeps_what_the_formula_says(pool, tp: int, dtype: str) -> None:
    shared = [(), (("parallel.sequence_parallel", True),)][:tp]
    for settings in shared:
        for size in (0, 7):
            chosen = (*settings, ("train.loss_chunk_size", size))
            case = Case(layers=2, sequence=18, batch=2, accumulation=1, dtype=dtype, tp=tp, settings=chosen)
            assert pool.run(tp, kept, case)[0] == head_bytes(sizes(case), case.vocab, size)
        by_columns = replace(sizes(case), kernels=Kernels(loss_by_columns=True))
        case = replace(case, settings=(*settings, ("train.loss_chunk_size", 0)))
        assert pool.run(tp, kept, case, 200)[0] == head_bytes(by_columns, case.vocab, 0)


@pytest.mark.parametrize(
    ("vocab", "parallel", "size"),
    [
        (8192, {}, 0),  # 32 MiB
        (32768, {}, 0),  # 128
        (32769, {}, 32768),
        (128256, {}, 32768),
        (128256, {"tp": 4}, 0),
        (128256, {"cp": 2}, 65536),
    ],
)
def test_default_size_bounds_the_logits(vocab: int, parallel: dict[str, int], size: int) -> None:
    given = {"data": {"path": "x"}, "parallel": parallel, "train": {"micro_batch_size": 4}}
    assert resolve(Config.model_validate(given), vocab).train.loss_chunk_size == size
