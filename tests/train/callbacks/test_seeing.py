"""Callbacks that see the model: norms by name and activations are those of one process in every layout."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.parity import LLAMA, MOE, Case, make_engine, over, shard_of, with_recompute
from tests.train.support import Run, record, train
from threefold.errors import UserError
from threefold.report.metrics import read_metrics_file
from threefold.report.record import RunRecord
from threefold.torch_private.runtime import backward_pass
from threefold.train.callbacks.base import Callback, RunContext
from threefold.train.callbacks.records import EvaluationRecord, StepRecord
from threefold.train.model_view import squares
from threefold.verify.worker_pool import WorkerPool

GPT = Case(dtype="fp64", dropout=0.1, sequence=12, steps=2)
SHARED = ("parallel.sequence_parallel", True)
LAYOUTS = {
    "dp2": GPT.with_layout(2, 1, 1),
    "dp2 ZeRO 1": GPT.with_layout(2, 1, 1, settings=(("parallel.zero", 1),)),
    "dp2 ZeRO 3": GPT.with_layout(2, 1, 1, settings=(("parallel.zero", 3),)),
    "tp3": GPT.with_layout(1, 3, 1),
    "tp2 sp": GPT.with_layout(1, 2, 1, settings=(SHARED,)),
    "pp2": GPT.with_layout(1, 1, 2),
    "pp2 interleaved": GPT.with_layout(1, 1, 2, schedule="interleaved", layers=5),
    "pp2 zbv": GPT.with_layout(1, 1, 2, schedule="zbv", layers=5, accumulation=4),
    "cp2": GPT.with_layout(1, 1, 1, cp=2),
    "full recompute": with_recompute(GPT.with_layout(1, 2, 1), "full"),
    "selective recompute": with_recompute(LLAMA.with_layout(2, 1, 1), "selective"),
    "tp2 pp2 sp, recompute": with_recompute(LLAMA.with_layout(1, 2, 2, settings=(SHARED,)), "full"),
    "dp2 tp2 ZeRO 3": LLAMA.with_layout(2, 2, 1, settings=(("parallel.zero", 3),)),
    "ep2": over(2, 1, 1, ep=2),
    "ep2 ZeRO 3": over(2, 1, 1, ("parallel.zero", 3), ep=2),
    "ep2 tp2 sp": over(2, 2, 1, SHARED, ep=2),
}
QUICK = ("tp2 sp", "dp2 tp2 ZeRO 3")
BLOCKS, UP, DOWN = "blocks.*", "blocks.*.mlp.*up", "blocks.*.mlp.down"


def seen(case: Case) -> list[dict[str, dict[str, float]]]:
    """Return, for each step, the norms of gradients, and the sums of squares and numbers of activations."""
    engine = make_engine(case)
    view, mesh = engine.view, engine.mesh
    shares = case.config.parallel.sequence_parallel
    sums: dict[str, Any] = defaultdict(float)
    found: list[dict[str, dict[str, float]]] = []

    def whole(name: str, x: Tensor, step: int) -> None:
        assert not x.requires_grad
        assert step == len(found) + 1, "an evaluation or another step"
        if shares or mesh.tp.is_first:
            sums[name] += squares(x)
            sums[f"number of {name}"] += x.numel()

    def split(name: str, x: Tensor, step: int) -> None:
        sums[name] += squares(x)
        sums[f"number of {name}"] += x.numel()

    view.activations(BLOCKS, whole)
    watches = [view.activations(UP, split)] if case.model != MOE.model else []
    if watches:
        view.activations(DOWN, lambda name, x, step: split(f"input of {name}", x, step), True)
    for step in range(case.steps):
        sums.clear()
        batch = shard_of(case, step, mesh.dp.index)
        engine.eval_batch(batch)  # which no function sees
        loss, tokens = engine.compute_gradients(batch, step)
        before = view.gradient_norms()
        result = engine.update(loss, tokens, step)
        after = view.gradient_norms()
        assert result.grad_norm > case.clip, "this step is to be clipped"
        everything = {}
        for held in mesh.world.gather_objects({name: float(value) for name, value in sums.items()}):
            for name, value in held.items():
                everything[name] = everything.get(name, 0.0) + value
        weights = view.norms({name: each for name, each in view.named_parameters() if each.requires_grad})
        total = math.sqrt(sum(norm**2 for norm in after.values()))
        found.append(
            {
                "before clipping": before,
                "after clipping": after,
                "activations": dict(sorted(everything.items())),
                "weights": weights,
                "whole": {"norm": result.grad_norm, "sum": total},
            }
        )
        for watch in (*watches, *watches):
            watch.remove()
    return found


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]
)
def test_a_callback_sees_the_same_in_every_layout(pool: WorkerPool, expected: Any, name: str) -> None:
    case = LAYOUTS[name]
    results = pool.run(case.world_size, seen, case)
    (alone,) = pool.run(1, seen, case.unsplit)
    trace = expected(case.unsplit)
    for steps in results:
        for step, (found, wanted) in enumerate(zip(steps, alone, strict=True)):
            plain = {each: float(squares(gradient)) ** 0.5 for each, gradient in trace.gradients[step].items()}
            assert found["before clipping"] == pytest.approx(plain, rel=1e-12, abs=1e-14)
            assert found["after clipping"] == pytest.approx(plain, rel=1e-12, abs=1e-14)
            assert found["whole"]["sum"] == pytest.approx(found["whole"]["norm"], rel=1e-12)
            assert found.keys() == wanted.keys()
            assert any(each.startswith("blocks.") for each in found["activations"])
            for kind, values in wanted.items():
                assert found[kind] == pytest.approx(values, rel=1e-12, abs=1e-14), kind
        final = {each: float(squares(weight)) ** 0.5 for each, weight in trace.final.items()}
        assert steps[-1]["weights"] == pytest.approx(final, rel=1e-12)
    if case.model != MOE.model:
        ups = [any(each.endswith("up") for each in step["activations"]) for step in alone]
        assert ups == [True, False], "it was removed"


def test_activations_are_those_of_plain_pytorch(pool: WorkerPool) -> None:
    (found,) = pool.run(1, against_hooks, replace(GPT, dropout=0.0, steps=1))
    for name, (ours, plain) in found.items():
        assert ours == pytest.approx(plain, rel=1e-12), name


def against_hooks(case: Case) -> dict[str, tuple[float, float]]:
    from threefold.models.family import make_model

    engine = make_engine(case.unsplit)
    ours: dict[str, float] = defaultdict(float)
    plain: dict[str, float] = defaultdict(float)

    def add(name: str, x: Tensor, step: int) -> None:
        ours[name] += float(squares(x))

    engine.view.activations("blocks.*", add)
    model = make_model(case.config.model).double()
    weights = {name: each.detach().clone() for name, each in engine.view.named_parameters()}
    model.load_state_dict(weights, strict=False)
    for name, module in model.named_modules():
        if name.startswith("blocks.") and name.count(".") == 1:
            module.register_forward_hook(lambda _, given, out, name=name: plain.update({name: float(squares(out))}))
    batch = shard_of(case.unsplit, 0, 0)
    engine.compute_gradients(batch, 0)
    with torch.no_grad():
        model(batch.tokens)
    assert ours.keys() == plain.keys()
    return {name: (ours[name], plain[name]) for name in ours}


class Seeing(Callback):
    """Logs what it sees, on all ranks."""

    ranks = "all"

    def __init__(self) -> None:
        self.calls: list[tuple[str, int, bool]] = []

    def setup(self, run: RunContext) -> None:
        self.run = run
        self.watch = run.activations("blocks.0", self.look)

    def look(self, name: str, x: Tensor, step: int) -> None:
        assert backward_pass() == -1
        self.calls.append((name, step, x.requires_grad))

    def after_step(self, record: StepRecord) -> None:
        norms = self.run.gradient_norms()
        record.log("norms/all", math.sqrt(sum(norm**2 for norm in norms.values())) / record.grad_norm)
        record.log("calls", len(self.calls) + 100 * self.run.mesh.rank)
        if record.step == 3:
            self.watch.remove()

    def after_evaluation(self, record: EvaluationRecord) -> None:
        record.log("calls at evaluation", torch.tensor(len(self.calls)))


def run_seeing(run: Run, folder: Path, callback: Any, resume: bool = False) -> str:
    try:
        train(run.config, folder, resume, callbacks=(callback,))
    except UserError as error:
        return str(error)
    return ""


def test_logged_values_are_in_the_metrics_the_report_and_tensorboard(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    settings = (("train.eval_every", 2), ("train.recompute", "full"), ("train.gradient_accumulation_steps", 2))
    run = small_run.but(steps=4, tp=2, set=(*settings, ("checkpoint.every", 2)))
    assert pool.run(2, run_seeing, run, tmp_path, Seeing()) == ["", ""]
    found = read_metrics_file(tmp_path / "metrics.jsonl")
    steps = [line["logged"] for line in found.logged if "logged" in line]
    assert [line["calls"] for line in steps] == [2, 4, 6, 6], "twice a step, on the first rank, until it was removed"
    assert [line["norms/all"] for line in steps] == pytest.approx([1.0] * 4, rel=1e-5)
    assert [line for line in found.logged if "valid_logged" in line] == [
        {"step": 2, "valid_logged": {"calls at evaluation": 4.0}},
        {"step": 4, "valid_logged": {"calls at evaluation": 6.0}},
    ]
    assert (found.repeated, found.damaged) == ((), ())
    kept = RunRecord(tmp_path)
    kept.update()
    assert kept.logged.means("calls") == [2.0, 4.0, 6.0, 6.0]
    assert kept.valid_logged.means("calls at evaluation") == [4.0, 6.0]
    assert kept.warnings() == []
    events = b"".join(path.read_bytes() for path in (tmp_path / "tensorboard").iterdir())
    assert all(name in events for name in (b"calls at evaluation", b"norms/all"))
    # A resumed run drops the lines of the steps that come again.
    longer = run.but(steps=5)
    assert pool.run(2, run_seeing, longer, tmp_path, Seeing(), True) == ["", ""]
    again = read_metrics_file(tmp_path / "metrics.jsonl")
    assert [line["step"] for line in again.logged if "logged" in line] == [1, 2, 3, 4, 5]
    assert not again.repeated


class OnTheFirst(Callback):
    def setup(self, run: RunContext) -> None:
        self.run = run

    def after_step(self, record: StepRecord) -> None:
        self.run.gradient_norms()


class TooEarly(Seeing):
    def before_step(self, step: int, batch: Any) -> None:
        self.run.gradient_norms()


class Unknown(Seeing):
    def setup(self, run: RunContext) -> None:
        run.activations("block.*", self.look)


class Failing(Seeing):
    def look(self, name: str, x: Tensor, step: int) -> None:
        raise ValueError("no")


class Taking(Seeing):
    def after_step(self, record: StepRecord) -> None:
        record.log("loss", 1.0)


@pytest.mark.parametrize(
    ("callback", "ranks", "sentence"),
    [
        (OnTheFirst(), 2, "Norms of the model's tensors are asked for by a callback of the first rank alone, but"),
        (TooEarly(), 1, "There are no gradients before the first step; ask for them in after_step."),
        (Unknown(), 1, "run.activations has the pattern block.*, which no module of the model matches; the nearest "),
        (Failing(), 1, "The function given to run.activations failed at blocks.0 in step 1 on rank 0 with ValueError:"),
        (Taking(), 1, "record.log has the name loss, which the run itself logs; use own/loss."),
    ],
)
def test_wrong_uses_are_one_sentence(
    pool: WorkerPool, small_run: Run, tmp_path: Path, callback: Callback, ranks: int, sentence: str
) -> None:
    run = small_run.but(steps=2, dp=ranks)
    if isinstance(callback, OnTheFirst):
        (found,) = pool.run(1, alone_of_two, run, callback)
    else:
        found = pool.run(ranks, run_seeing, run, tmp_path, callback)[0]
    assert found.startswith(sentence)


def alone_of_two(run: Run, callback: Any) -> str:
    """Return what a callback of the first of two ranks is told; no second rank is there, which a collective needs."""
    from tests.train.support import engine_of
    from threefold.comm.layout import Layout

    engine = engine_of(replace(run, dp=1).config)
    context = RunContext(run.config, Path(), engine.mesh, view=engine.view)
    layout = Layout(2)
    engine.mesh.layout = layout  # type: ignore[misc]
    callback.setup(context.of(callback))
    try:
        callback.after_step(record(1))
    except UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("name", "value", "sentence"),
    [
        ("valid_loss", 1, "record.log has the name valid_loss, which the run itself logs; use own/valid_loss."),
        ("term/a", 1, "record.log has the name term/a, which the run itself logs; use own/term/a."),
        ("a\nb", 1, "record.log has the name a\\nb, but it must be text on one line."),
        (
            "a",
            "much",
            "record.log has a with a value of type str, but it must be a number, or a tensor with one element.",
        ),
        ("a", torch.ones(2), "record.log has a with a value of type Tensor, but it must be a number, or a tensor with"),
    ],
)
def test_names_and_values_that_cannot_be_logged(name: str, value: Any, sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        record(3).log(name, value)
    assert str(caught.value).startswith(sentence)


def test_a_name_is_logged_once_a_step_and_nothing_that_is_not_finite_breaks_the_file() -> None:
    step = record(3)
    step.log("a", float("nan"))
    with pytest.raises(UserError, match=r"record.log has the name a twice at step 3; give each value its own\."):
        step.log("a", 2.0)
    assert json.dumps(step.logged) == '{"a": NaN}'
    assert record(4).logged == {}
