"""Norms of each layer (`log.layers`), which are those of one process in every layout."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.parity import LLAMA, Case, global_batch, make_engine, over, shard_of, with_recompute
from tests.train.support import Run, record, train_rank
from threefold.errors import UserError
from threefold.models.family import make_model
from threefold.parallel.parameter import offset
from threefold.report.document import make_page, report_of
from threefold.report.layers import LayerNorms
from threefold.report.metrics import read_metrics_file
from threefold.report.record import RunRecord
from threefold.train.callbacks.base import RunContext
from threefold.verify.worker_pool import WorkerPool

GPT = Case(dtype="fp64", dropout=0.0, sequence=12, steps=2, model=(("activation", "relu"),))
SHARED = ("parallel.sequence_parallel", True)
LAYOUTS = {
    "dp2 ZeRO 1": GPT.with_layout(2, 1, 1, settings=(("parallel.zero", 1),)),
    "dp2 ZeRO 3": GPT.with_layout(2, 1, 1, settings=(("parallel.zero", 3),)),
    "tp3": GPT.with_layout(1, 3, 1),
    "tp2 sp": GPT.with_layout(1, 2, 1, settings=(SHARED,)),
    "pp2": GPT.with_layout(1, 1, 2),
    "pp2 zbv": GPT.with_layout(1, 1, 2, schedule="zbv", layers=5, accumulation=4),
    "cp2": GPT.with_layout(1, 1, 1, cp=2),
    "tp2 pp2 sp, recompute": with_recompute(LLAMA.with_layout(1, 2, 2, settings=(SHARED,)), "full"),
    "dp2 tp2 ZeRO 3": LLAMA.with_layout(2, 2, 1, settings=(("parallel.zero", 3),)),
    "pp2 frozen": GPT.with_layout(1, 1, 2, tie=False, update=(("optimizer.frozen", ["embed.**", "blocks.0.**"]),)),
    "ep2": over(2, 1, 1, ep=2),
    "ep2 tp2 sp": over(2, 2, 1, SHARED, ep=2),
}
QUICK = ("tp2 sp",)


def logged(case: Case) -> list[dict[str, float]]:
    """Return what a rank logs for each step; some units of the first block are dead from the beginning."""
    engine = make_engine(case)
    with torch.no_grad():
        for weight in engine.model.weights:
            if weight.name == "blocks.0.mlp.up.bias":
                weight.master[: max(0, 7 - offset(weight.parameter)[0])] = -1e3
    engine.gradients.weights_changed()
    callback = LayerNorms(1, case.config.parallel.sequence_parallel)
    run = RunContext(case.config, Path(), engine.mesh, view=engine.view)
    callback.setup(run.of(callback))
    found = []
    for step in range(case.steps):
        batch = shard_of(case, step, engine.mesh.dp.index)
        callback.before_step(step + 1, batch)
        result = engine.train_step(batch, step)
        line = record(step + 1, grad_norm=result.grad_norm)
        callback.after_step(line)
        found.append(line.logged)
    return found


@pytest.mark.parametrize(
    "name", [each if each in QUICK else pytest.param(each, marks=pytest.mark.slow) for each in LAYOUTS]
)
def test_layers_have_the_norms_of_one_process(pool: WorkerPool, expected: Any, name: str) -> None:
    case = LAYOUTS[name]
    (alone,) = pool.run(1, logged, case.unsplit)
    for steps in pool.run(case.world_size, logged, case):
        for found, wanted in zip(steps, alone, strict=True):
            assert found == pytest.approx(wanted, rel=1e-11, abs=1e-14)
    kinds = {each.split("/")[1] for each in alone[0]}
    assert kinds == {"gradient", "update", "activation", "dead"}
    layers = [f"blocks.{number}" for number in range(case.layers)]
    assert [each for each in alone[0] if "activation" in each] == [
        f"layers/activation/{layer}" for layer in ("embed", *layers)
    ]
    assert "layers/gradient/head" in alone[0]


def test_a_unit_is_dead_for_the_whole_global_batch(pool: WorkerPool) -> None:
    """With two samples, most units of a wide layer are alive in only one of them."""
    case = replace(GPT, batch=2, accumulation=1, ffn=240, sequence=4, steps=1, uneven=False)
    (alone,) = pool.run(1, logged, case.unsplit)
    for (found,) in pool.run(2, logged, case.with_layout(2, 1, 1)):
        assert found == pytest.approx(alone[0], rel=1e-11)


def test_the_numbers_are_those_of_plain_pytorch(pool: WorkerPool) -> None:
    (alone,) = pool.run(1, logged, GPT.unsplit)
    (wanted,) = pool.run(1, by_hand, GPT.unsplit)
    assert alone[0] == pytest.approx(wanted, rel=1e-11)
    assert wanted["layers/dead/blocks.0"] >= 7 / 60


def by_hand(case: Case) -> dict[str, float]:
    """Compute the first step's numbers with plain PyTorch: hooks, autograd and AdamW."""
    engine = make_engine(case)
    model = make_model(case.config.model).double()
    names = {name for name, _ in model.named_parameters()}
    model.load_state_dict({name: each.detach() for name, each in engine.view.named_parameters()}, strict=False)
    with torch.no_grad():
        model.get_parameter("blocks.0.mlp.up.bias")[:7] = -1e3
    outputs: dict[str, torch.Tensor] = {}
    hidden: dict[str, torch.Tensor] = {}
    layers = ["embed", *(f"blocks.{number}" for number in range(case.layers)), "head"]
    for layer in layers[:-1]:
        model.get_submodule(layer).register_forward_hook(lambda _, given, out, at=layer: outputs.update({at: out}))
    for layer in layers[1:-1]:
        down = model.get_submodule(f"{layer}.mlp.down")
        down.register_forward_pre_hook(lambda _, given, at=layer: hidden.update({at: given[0]}))
    tokens, labels = global_batch(case, 0)
    loss = model(tokens, labels) / (labels != -100).sum()
    loss.backward()
    found = {}
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    groups = {layer: [n for n in sorted(names) if n.startswith(f"{layer}.")] for layer in layers}

    def norm(tensors: Any) -> float:
        return float(sum(each.square().sum() for each in tensors)) ** 0.5

    gradients = {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}
    torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)
    config = case.config.optimizer
    decays = [each for name, each in model.named_parameters() if each.dim() > 1]
    others = [each for name, each in model.named_parameters() if each.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decays}, {"params": others, "weight_decay": 0.0}],
        lr=config.lr / config.warmup_steps,
        betas=config.betas,
        eps=config.eps,
        weight_decay=config.weight_decay,
    )
    optimizer.step()
    after = dict(model.named_parameters())
    for layer in layers:
        mine = [name for name in groups[layer] if name in gradients]
        found[f"layers/gradient/{layer}"] = norm(gradients[name] for name in mine)
        changed = norm(after[name].detach() - before[name] for name in mine)
        found[f"layers/update/{layer}"] = changed / norm(before[name] for name in mine)
    for layer, output in outputs.items():
        found[f"layers/activation/{layer}"] = float(output.square().mean()) ** 0.5
    for layer, units in hidden.items():
        least = 1e-3 * float(units.square().mean()) ** 0.5
        found[f"layers/dead/{layer}"] = float((units.abs().flatten(0, 1).amax(0) <= least).double().mean())
    return found


def test_a_run_logs_its_layers_and_the_report_has_them(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(steps=5, pp=2, set=(("log.layers", 2), ("train.eval_every", 4)))
    pool.run(2, train_rank, run, tmp_path)
    lines = read_metrics_file(tmp_path / "metrics.jsonl").logged
    assert [line["step"] for line in lines] == [2, 4]
    names = list(lines[0]["logged"])
    assert names[:5] == [f"layers/gradient/{layer}" for layer in ("embed", "blocks.0", "blocks.1", "blocks.2", "head")]
    assert all(isinstance(value, float) for line in lines for value in line["logged"].values())
    kept = RunRecord(tmp_path)
    kept.update()
    document = report_of([kept])
    assert list(document["runs"][0]["logged"]["values"]) == names
    assert "layers/update/blocks.2" in make_page(document)
    assert "log:\n  every: 2\n  format: short\n  layers: 2" in run.config.to_yaml()
    assert "  layers:" not in small_run.config.to_yaml()


def test_what_cannot_be_looked_at_is_refused(small_run: Run) -> None:
    with pytest.raises(UserError) as caught:
        small_run.but(set=(("log.layers", 2), ("train.compile", True))).config  # noqa: B018
    assert "log.layers is 2 but train.compile is true, and compiled layers show no activations; use 0" in str(
        caught.value
    )


def test_a_step_without_samples_and_a_rollback_log_nothing(small_run: Run, pool: WorkerPool) -> None:
    assert pool.run(1, without_samples, GPT.unsplit) == [({}, 0)]


def without_samples(case: Case) -> tuple[dict[str, float], int]:
    engine = make_engine(case)
    callback = LayerNorms(1)
    callback.setup(RunContext(case.config, Path(), engine.mesh, view=engine.view))
    callback.before_step(1, None)
    callback.after_rollback(1, 0, "a reason")
    line = record(2)
    callback.after_step(line)
    return line.logged, len(engine.watches._watches)
