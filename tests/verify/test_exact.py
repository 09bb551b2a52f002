"""Verifying bits: layouts inside the grain are equal to one process, and one bit flipped on one rank is placed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.exact import slow_but
from tests.support.mistakes import Patch
from tests.verify.support import MistakenPool, config
from threefold.comm.layout import parse
from threefold.config import Config
from threefold.errors import UserError
from threefold.train.step import Engine
from threefold.verify.batches import RandomBatches
from threefold.verify.compare import GRADIENT, INITIAL, NORM, WEIGHT
from threefold.verify.exact import ExactResult, ExactVerifier
from threefold.verify.layouts import by_validity, prepare_exact, select_exact, shrink_exact
from threefold.verify.verifier import DEPARTS, EQUAL, Verification
from threefold.verify.worker_pool import WorkerPool

LAYOUTS = ("dp2 full accumulation4", "dp2·tp2 sp", "pp2 zbv", "tp8")
NAME = "blocks.1.mlp.up.weight"


def given(**sections: dict[str, Any]) -> Config:
    return config(**{"model": {"vocab_size": 50304}, **sections})


def small(*layouts: str) -> Config:
    return shrink_exact(prepare_exact(given(), None, vocab_size=1), [parse(layout) for layout in layouts])


def trained_alone(pool: WorkerPool, folder: Path, *layouts: str) -> ExactVerifier:
    check = ExactVerifier(Verification(small(*layouts), 2, RandomBatches()), pool, folder)
    check.run_one_process()
    return check


@pytest.fixture(scope="module")
def one_process(pool: WorkerPool, tmp_path_factory: pytest.TempPathFactory) -> ExactVerifier:
    """A verifier that has trained in one process."""
    return trained_alone(pool, tmp_path_factory.mktemp("exact"), *LAYOUTS)


@pytest.mark.parametrize("layout", slow_but(LAYOUTS, "dp2·tp2 sp", "pp2 zbv"))
def test_layouts_have_the_bits_of_one_process(one_process: ExactVerifier, layout: str) -> None:
    result = one_process.verify(parse(layout))
    assert (result.verdict, result.first) == (EQUAL, None), result
    assert result.fingerprint == one_process.fingerprint


@pytest.mark.slow
def test_threads_leave_the_bits(one_process: ExactVerifier) -> None:
    result = one_process.verify_threads(2)
    assert (result.verdict, result.first) == (EQUAL, None), result


MIXTURE = given(model={"architecture": "llama", "vocab_size": 50304, "num_experts": 8, "expert_capacity_factor": 1.0})


def test_expert_parallelism_is_inside_the_grain() -> None:
    base = shrink_exact(prepare_exact(MIXTURE, None, vocab_size=1), [parse("dp8·ep8")])
    selection = select_exact(base, 8, everything=True)
    assert {spec.layout.ep for spec in selection.specs} == {1, 2, 4, 8}
    outside = [each.spec for each in selection.unsupported]
    assert [str(spec) for spec in outside if spec.layout.cp == 1 and "looped-bfs" not in str(spec)] == []


def mistaken(check: ExactVerifier, mistake: Callable[[], list[Patch]], layout: str) -> ExactResult:
    other = ExactVerifier(check.task, MistakenPool(check.pool, mistake, None), check.folder)  # type: ignore[arg-type]
    other.fingerprints, other._places = check.fingerprints, check._places
    return other.verify(parse(layout))


def flip(tensor: torch.Tensor) -> None:
    tensor.detach().view(torch.int32).flatten()[5] ^= 1


def gradient_bit_flipped() -> list[Patch]:
    """The lowest bit of one element, on the last rank alone, in the second step."""
    right = Engine.compute_gradients

    def compute_gradients(self: Engine, batch: Any, step: int, *rest: Any) -> Any:
        found = right(self, batch, step, *rest)
        if step == 1 and self.mesh.rank == self.mesh.world.size - 1:
            flip(next(entry.gradient for entry in self.optimizer.entries if entry.name == NAME))
        return found

    return [(Engine, "compute_gradients", compute_gradients)]


def weight_bit_flipped() -> list[Patch]:
    """The same of a weight after the first update."""
    right = Engine.update

    def update(self: Engine, loss: Any, tokens: int, step: int, *rest: Any) -> Any:
        result = right(self, loss, tokens, step, *rest)
        if step == 0 and self.mesh.rank == self.mesh.world.size - 1:
            flip(next(weight.master for weight in self.model.weights if weight.name == NAME))
        return result

    return [(Engine, "update", update)]


def norm_of_a_rank_alone() -> list[Patch]:
    """The last digit of the norm, on one rank."""
    right = Engine._loss_and_norm

    def loss_and_norm(self: Engine, loss: Any) -> Any:
        mean, norm, terms = right(self, loss)
        return mean, norm * (1 + 2**-52) if self.mesh.rank == 1 else norm, terms

    return [(Engine, "_loss_and_norm", loss_and_norm)]


@pytest.mark.parametrize(
    ("mistake", "layout", "what", "step", "parameter", "rank"),
    [
        (gradient_bit_flipped, "dp2·tp2", GRADIENT, 2, NAME, 3),
        (weight_bit_flipped, "dp2", WEIGHT, 1, NAME, 1),
        (norm_of_a_rank_alone, "dp2", NORM, 1, "", 1),
    ],
)
def test_one_bit_of_one_rank_is_placed(
    one_process: ExactVerifier, mistake: Any, layout: str, what: str, step: int, parameter: str, rank: int
) -> None:
    result = mistaken(one_process, mistake, layout)
    assert result.verdict == DEPARTS
    assert result.first is not None
    assert (result.first.what, result.first.step, result.first.parameter) == (what, step, parameter)
    assert result.ranks == (rank,)
    if parameter:
        assert result.first.values.startswith("1 of ")


def test_other_first_weights_are_a_difference(one_process: ExactVerifier) -> None:
    other = one_process.task.config
    seeded = other.model_copy(update={"train": other.train.model_copy(update={"seed": 6})})
    check = ExactVerifier(replace(one_process.task, config=seeded), one_process.pool, one_process.folder)
    check.fingerprints, check._places = one_process.fingerprints, one_process._places
    result = check.verify(parse("dp2"))
    assert result.first is not None
    assert (result.first.what, result.first.step) == (INITIAL, 0)
    assert result.ranks == (0, 1)


def test_sizes_are_multiples_of_the_grain() -> None:
    found = small("dp2")
    model, train = found.model, found.train
    assert (train.exact, train.grain_samples, train.grain_tensor) == (True, 8, 8)
    sizes = (model.num_attention_heads, model.ffn_hidden_size, model.vocab_size, found.data.sequence_length)
    assert not any(size % 8 for size in sizes)
    assert train.global_batch_size % 8 == 0
    assert model.hidden_dropout > 0 < model.attention_dropout


def test_layouts_outside_the_grain_are_listed() -> None:
    base = small("dp2·tp2", "dp4")
    selection = select_exact(base, 4, everything=True)
    assert {"dp2·tp2", "dp4", "tp4", "tp2·pp2"} <= {spec.axes for spec in selection.specs}
    assert {spec.setting("train.recompute") for spec in selection.specs} == {None, "selective", "full"}
    assert not {str(spec) for spec in selection.specs} & {str(each.spec) for each in selection.unsupported}
    assert all("exact" in each.reason or "grain" in each.reason for each in selection.unsupported)
    chosen = by_validity(base, [parse("dp2"), parse("dp16")])
    assert [str(each) for each in chosen.specs] == ["dp2"]
    assert "grain_samples" in chosen.unsupported[0].reason


def test_context_axis_decides_the_context_pieces_unless_they_are_given() -> None:
    base = small("dp2", "cp2", "dp2·cp4")
    assert (base.train.grain_context, base.data.sequence_length % 8) == (4, 0)
    chosen = by_validity(base, [parse("cp4"), parse("cp4 ring"), parse("cp8")])
    assert [str(each) for each in chosen.specs] == ["cp4"]
    assert ["cp_method" in each.reason or "grain_context" in each.reason for each in chosen.unsupported] == [True, True]
    fixed = shrink_exact(prepare_exact(given(train={"grain_context": 2, "exact": True}), None, 1), [parse("cp4")])
    assert fixed.train.grain_context == 2
    assert small("dp2").train.grain_context == 1
    long = given(train={"global_batch_size": 64, "grain_leaf": 8, "exact": True}, data={"sequence_length": 16})
    assert shrink_exact(prepare_exact(long, None, 1), [parse("dp2")]).train.grain_leaf == 2
    mixture = {"architecture": "llama", "num_experts": 4, "vocab_size": 64}
    assert shrink_exact(prepare_exact(config(model=mixture), None, 1), [parse("cp2")]).train.grain_context == 1


def test_odd_vocabulary_leaves_the_tensor_axis_outside() -> None:
    odd = prepare_exact(given(model={"vocab_size": 50257}), None, vocab_size=1)
    base = shrink_exact(odd, [parse("tp2"), parse("dp2")])
    assert base.train.grain_tensor == 1
    selection = select_exact(base, 2, everything=True)
    assert all(spec.layout.tp == 1 for spec in selection.specs)
    assert "tp2" in [str(each.spec) for each in selection.unsupported]


def test_model_that_cannot_be_exact_is_refused() -> None:
    with pytest.raises(UserError, match="exact"):
        prepare_exact(given(), "fp64", vocab_size=1)


def write_config(folder: Path) -> Path:
    path = folder / "config.yaml"
    path.write_text(given().to_yaml())
    return path


@pytest.mark.slow
def test_command(threefold: Callable[..., Any], tmp_path: Path) -> None:
    path = write_config(tmp_path)
    ended = threefold("verify", path, "--exact", "dp2", "dp2 zero1", "--steps", "1", "--json")
    document = json.loads(ended.output)
    assert ended.status == 0
    assert [each["layout"] for each in document["layouts"]] == ["dp2", "dp2 zero1"]
    assert {each["fingerprint"] for each in document["layouts"]} == {document["fingerprint"]}
