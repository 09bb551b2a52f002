"""The recorder in a training loop of plain PyTorch, in this process."""

import copy
import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_support import on_ranks, rewrite, sweep
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import threefold_parity as parity
from threefold_parity.compare import Findings, compare
from threefold_parity.departure import LOSS, RATE
from threefold_parity.files import seal
from threefold_parity.record import GRADIENT, INITIAL, OUTPUT, OUTPUT_GRADIENT, UPDATE, Record
from threefold_parity.text import UserError
from threefold_parity.verdict import compared_whole, judge


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width: int = 12, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.embed = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.head = nn.Linear(width, 31)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return self.head(x)


def train(
    folder: Path | None,
    *,
    micro_batches: int = 1,
    recompute: bool = False,
    steps: int = 3,
    lr: float = 1e-2,
    dtype: torch.dtype = torch.float32,
    before_backward: Callable[[Model], Any] = lambda model: None,
    after_backward: Callable[[Model, int], Any] = lambda model, step: None,
    skip: int = 0,
    scale: float = 1.0,
    adapter: parity.Adapter | None = None,
    recorded: int | None = None,
    rows: int = 6,
    save: Path | None = None,
    load: Path | None = None,
) -> Model:
    """Train for some steps with a recorder; the arguments put mistakes into it."""
    torch.manual_seed(3)
    model = Model(recompute=recompute).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    made = 0
    if load is not None:
        model_state, optimizer_state, made = torch.load(load)
        model.load_state_dict(model_state)
        optimizer.load_state_dict(optimizer_state)
    recorder = parity.Recorder(model, optimizer, adapter, folder=folder, steps=recorded, updates=made)
    data = torch.Generator().manual_seed(5)
    batches = [torch.randint(31, (6, 9), generator=data) for _ in range(steps + skip)][skip:]
    before_backward(model)
    for step, batch in enumerate(batches):
        total = 0.0
        for part in batch[:rows].chunk(micro_batches):
            loss = F.cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / micro_batches
            (loss * scale).backward()
            total += loss.item()
        after_backward(model, step)
        recorder.after_backward(total)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if save is not None and step == 1:
            torch.save((model.state_dict(), optimizer.state_dict(), 2), save)
    return model


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reference") / "record"
    train(folder)
    return folder


@pytest.fixture(scope="module")
def noisy(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("noise")
    with pytest.MonkeyPatch.context() as patch:
        for seed in (1, 2):
            patch.setenv("THREEFOLD_PARITY_PERTURB", str(seed))
            train(folder / str(seed))
    return [folder / "1", folder / "2"]


def compared(reference: Path, candidate: Path, noisy: list[Path]) -> Findings:
    return compare(Record(reference), Record(candidate), [Record(each) for each in noisy])


def test_the_same_run_has_the_same_record(reference: Path, noisy: list[Path], tmp_path: Path) -> None:
    train(tmp_path / "again")
    found = compared(reference, tmp_path / "again", noisy)
    assert found.equal
    assert found.notes == []
    assert max(found.worst.values()) == 0.0
    assert found.compared[OUTPUT] == found.compared[OUTPUT_GRADIENT] == 3 * 6 * 11  # steps, samples, modules
    assert found.compared[GRADIENT] == found.compared[UPDATE] == 3 * found.compared[INITIAL] == 3 * 15


@pytest.mark.parametrize(
    "layout",
    [{"micro_batches": 2}, {"micro_batches": 3}, {"recompute": True}, {"micro_batches": 6, "recompute": True}],
    ids=str,
)
def test_micro_batches_and_recompute_are_equal(
    layout: dict[str, Any], reference: Path, noisy: list[Path], tmp_path: Path
) -> None:
    train(tmp_path / "other", **layout)
    found = compared(reference, tmp_path / "other", noisy)
    assert found.equal, judge(found).sentence
    assert found.compared[OUTPUT] == found.compared[OUTPUT_GRADIENT] == 3 * 6 * 11


def test_training_is_not_changed(reference: Path, tmp_path: Path) -> None:
    with_record, without = train(tmp_path / "record"), train(None)
    for one, other in zip(with_record.parameters(), without.parameters(), strict=True):
        assert torch.equal(one, other)


def test_hooks_end_with_the_recorded_steps(tmp_path: Path) -> None:
    model = train(tmp_path / "record", steps=4)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert Record(tmp_path / "record").steps == 3


def test_without_a_folder_there_are_no_hooks() -> None:
    model = Model()
    recorder = parity.Recorder(model, torch.optim.SGD(model.parameters()))
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    recorder.batch(torch.zeros(1, 1))
    recorder.after_backward(1.0)
    recorder.scalar("x", 1.0)
    recorder.after_update()
    recorder.close()


def double(name: str) -> Callable[[Model, int], None]:
    def change(model: Model, step: int) -> None:
        dict(model.named_parameters())[name].grad.mul_(2)

    return change


def module_of(model: Model) -> nn.Linear:
    return model.blocks[1].up  # type: ignore[return-value]


MISTAKES: list[tuple[dict[str, Any], str, str, str]] = [
    ({"after_backward": double("blocks.1.up.weight")}, GRADIENT, "blocks.1.up.weight", "is 2 times the reference"),
    ({"scale": 3.0, "micro_batches": 3}, GRADIENT, "head.bias", "is 3 (micro-batches) times the reference"),
    ({"lr": 2e-2}, "counter", "lr of embed.weight", "is 0.02 instead of 0.01"),
    ({"skip": 1}, "samples", "", "are those of step 2 of the reference"),
    (
        {"before_backward": lambda model: module_of(model).register_forward_hook(lambda module, args, y: y * 1.01)},
        OUTPUT,
        "blocks.1",
        "",
    ),
    (
        {
            "before_backward": lambda model: module_of(model).register_full_backward_hook(
                lambda module, inputs, outputs: (inputs[0] * 0.5,)
            )
        },
        OUTPUT_GRADIENT,
        "blocks.1.norm",
        "is 1/2 times the reference",
    ),
    (
        {"before_backward": lambda model: module_of(model).weight.data[:18].zero_()},
        OUTPUT,
        "blocks.1.up",
        "",
    ),
]


@sweep(("mistake", "kind", "name", "shape"), MISTAKES, ids=[f"{k} {n}" for _, k, n, _ in MISTAKES], quick=(0, 2, 4))
def test_a_mistake_is_named(
    mistake: dict[str, Any], kind: str, name: str, shape: str, reference: Path, noisy: list[Path], tmp_path: Path
) -> None:
    train(tmp_path / "wrong", **mistake)
    verdict = judge(compared(reference, tmp_path / "wrong", noisy))
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.kind) == (1, kind), verdict.sentence
    assert verdict.first.name.startswith(name), verdict.sentence
    assert shape in verdict.first.shape, verdict.sentence


def test_samples_that_are_missing_are_named(reference: Path, noisy: list[Path], tmp_path: Path) -> None:
    train(tmp_path / "fewer", rows=4)
    verdict = judge(compared(reference, tmp_path / "fewer", noisy))
    assert verdict.sentence == "The runs read different samples at step 1: they are fewer: 2 of 6 are missing."


def with_facts(record: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A copy of a record with other facts of its only rank."""
    shutil.copytree(record, folder)
    facts = json.loads((folder / "rank-00000.json").read_text())
    change(facts)
    rewrite(folder, **{name: value for name, value in facts.items() if name != "checksum"})
    return folder


def test_a_counter_of_any_rank_departs(reference: Path, noisy: list[Path], tmp_path: Path) -> None:
    """Of two ranks with copies of all weights, of which the second has another rate."""
    folder = with_facts(reference, tmp_path / "two", lambda facts: facts.update(world_size=2))
    for path in list(folder.iterdir()):
        shutil.copy(path, folder / path.name.replace("00000", "00001", 1))
    facts = json.loads((folder / "rank-00001.json").read_text())
    facts["rank"] = 1
    for numbers in facts["numbers"].values():
        for counters in numbers.get("counters", {}).values():
            counters["lr"] = 0.5
    facts.pop("checksum")
    (folder / "rank-00001.json").write_text(json.dumps(seal(facts)))
    verdict = judge(compared(reference, folder, noisy))
    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.where) == (RATE, "on rank 1")


def test_a_loss_that_is_not_a_number_departs(reference: Path, noisy: list[Path], tmp_path: Path) -> None:
    folder = with_facts(reference, tmp_path / "nan", lambda facts: facts["numbers"]["2"]["scalars"].update(loss="nan"))
    verdict = judge(compared(reference, folder, noisy))
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.kind) == (2, LOSS)


def test_the_lowest_precision_says_what_is_rounding(reference: Path, tmp_path: Path) -> None:
    """Without runs with noise, a thousandth is rounding in bf16, and none in fp32."""
    train(tmp_path / "other", scale=1.001)
    found = []
    for dtypes in (["float32"], ["float32", "bfloat16"]):
        records = [
            Record(with_facts(each, tmp_path / f"{each.name} {len(dtypes)}", lambda facts: facts.update(dtypes=dtypes)))  # noqa: B023
            for each in (reference, tmp_path / "other")
        ]
        found.append({each.kind for each in compare(*records, steps=1).departures})
    assert GRADIENT in found[0]
    assert GRADIENT not in found[1]


class HalfOfAGradient(parity.Adapter):
    """Gives one half of a gradient, as an adapter of a sharded optimizer whose other rank says nothing."""

    def gradient(self, name: str, parameter: nn.Parameter) -> list[tuple[Tensor, parity.Placement]]:
        found = super().gradient(name, parameter)
        if name != "head.weight":
            return found
        return [(tensor[:10], parity.Placement(tuple(tensor.shape), (ten_rows(tensor),))) for tensor, _ in found]


def ten_rows(tensor: Tensor) -> parity.Piece:
    return parity.Piece((0, 0), (0, 0), (10, tensor.shape[1]))


def test_what_is_not_recorded_is_not_equal(reference: Path, noisy: list[Path], tmp_path: Path) -> None:
    train(tmp_path / "half", adapter=HalfOfAGradient())
    verdict = judge(compared(reference, tmp_path / "half", noisy))
    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.name) == (GRADIENT, "head.weight"), verdict.sentence
    assert verdict.first.shape == "lacks 252 elements", verdict.sentence


@pytest.mark.parametrize("wrong", [True, False], ids=["the candidate's", "the reference's"])
def test_a_gradient_that_is_not_finite_departs(wrong: bool, reference: Path, noisy: list[Path], tmp_path: Path) -> None:
    def spoil(model: Model, step: int) -> None:
        if step == 2:
            model.head.bias.grad[3] = torch.nan  # type: ignore[index]

    train(tmp_path / "nan", after_backward=spoil)
    pair = (reference, tmp_path / "nan") if wrong else (tmp_path / "nan", reference)
    verdict = judge(compared(*pair, noisy))
    assert verdict.first is not None
    assert (verdict.first.step, verdict.first.name) == (3, "head.bias"), verdict.sentence


def test_a_small_gradient_has_its_update_compared(tmp_path: Path) -> None:
    """A gradient a millionth of the others' is not noise, and an optimizer makes a whole update of it."""

    def shrink(model: Model, step: int) -> None:
        model.head.bias.grad.mul_(1e-6)  # type: ignore[union-attr]

    train(tmp_path / "right", dtype=torch.float64, steps=1, recorded=1, after_backward=shrink)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THREEFOLD_PARITY_PERTURB", "1")
        train(tmp_path / "noise", dtype=torch.float64, steps=1, recorded=1, after_backward=shrink)
    found = compared(tmp_path / "right", tmp_path / "right", [tmp_path / "noise"])
    assert found.compared[UPDATE] == 15


def test_fp64_of_other_micro_batches_is_equal(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THREEFOLD_PARITY_PERTURB", "1")
        train(tmp_path / "noise", dtype=torch.float64)
    train(tmp_path / "one", dtype=torch.float64)
    train(tmp_path / "three", dtype=torch.float64, micro_batches=3)
    found = compared(tmp_path / "one", tmp_path / "three", [tmp_path / "noise"])
    assert found.equal, judge(found).sentence
    train(tmp_path / "wrong", dtype=torch.float64, scale=1 + 1e-7)
    assert not compared(tmp_path / "one", tmp_path / "wrong", [tmp_path / "noise"]).equal


def test_the_readers_of_a_wrong_gradient_are_named(reference: Path, noisy: list[Path], tmp_path: Path) -> None:
    train(tmp_path / "wrong", **MISTAKES[5][0])
    sentence = judge(compared(reference, tmp_path / "wrong", noisy)).sentence
    assert "the gradient of the output of blocks.1.norm, which blocks.1.up reads" in sentence


@pytest.mark.slow
def test_a_small_factor_shows_in_bf16(tmp_path: Path) -> None:
    def factor(model: Model, step: int) -> None:
        model.head.weight.grad.mul_(1.03)  # type: ignore[union-attr]

    train(tmp_path / "right", dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        for seed in ("1", "2"):
            patch.setenv("THREEFOLD_PARITY_PERTURB", seed)
            train(tmp_path / seed, dtype=torch.bfloat16)
    noisy = [tmp_path / "1", tmp_path / "2"]
    train(tmp_path / "split", dtype=torch.bfloat16, recompute=True)
    assert compared(tmp_path / "right", tmp_path / "split", noisy).equal
    train(tmp_path / "wrong", dtype=torch.bfloat16, after_backward=factor)
    verdict = judge(compared(tmp_path / "right", tmp_path / "wrong", noisy))
    assert verdict.first is not None
    assert (verdict.first.kind, verdict.first.name) == (GRADIENT, "head.weight")


def test_metrics_must_be_alike(tmp_path: Path) -> None:
    for name, value in (("one", 0.25), ("two", 0.5)):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        recorder = parity.Recorder(model, folder=tmp_path / name, steps=1)
        model(torch.ones(2, 3)).sum().backward()
        recorder.scalar("accuracy", value)
        recorder.after_backward()
        recorder.after_update()
    verdict = judge(compare(Record(tmp_path / "one"), Record(tmp_path / "two")))
    assert verdict.first is not None
    assert (verdict.first.name, verdict.first.shape) == ("accuracy", "is 0.5 instead of 0.25: 2 (samples) times")


def test_a_folder_with_a_record_is_refused(reference: Path) -> None:
    before = sorted(path.name for path in reference.iterdir())
    with pytest.raises(UserError, match="has a record of rank 0 already; give a new folder in THREEFOLD_PARITY"):
        train(reference)
    assert sorted(path.name for path in reference.iterdir()) == before


def test_an_environment_that_is_no_number_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THREEFOLD_PARITY_STEPS", "many")
    with pytest.raises(UserError, match="THREEFOLD_PARITY_STEPS is many but must be a whole number; use 3"):
        parity.Recorder(nn.Linear(2, 2), folder=tmp_path / "record")


def test_initial_weights_are_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THREEFOLD_PARITY_SAVE", str(tmp_path / "weights"))
    train(tmp_path / "record")
    monkeypatch.delenv("THREEFOLD_PARITY_SAVE")
    monkeypatch.setenv("THREEFOLD_PARITY_LOAD", str(tmp_path / "weights"))
    torch.manual_seed(99)
    model = Model()
    parity.Recorder(model, folder=tmp_path / "other")
    torch.manual_seed(3)
    for one, other in zip(model.parameters(), Model().parameters(), strict=True):
        assert torch.equal(one, other)
    with pytest.raises(UserError, match="has the whole shape"):
        parity.Recorder(Model(width=13), folder=tmp_path / "third")
    with pytest.raises(UserError, match=r"The reference has no parameter 0\.weight; it has "):
        parity.Recorder(nn.Sequential(nn.Linear(2, 2)), folder=tmp_path / "fourth")


def test_a_record_is_small(reference: Path) -> None:
    facts = json.loads((reference / "rank-00000.json").read_text())
    assert facts["steps"] == 3
    assert sum(path.stat().st_size for path in reference.iterdir()) < 1_000_000


def test_a_run_that_goes_on_beside_an_unbroken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records begin after the same update; a state that a checkpoint lacks is named."""
    monkeypatch.setenv("THREEFOLD_PARITY_AFTER", "2")
    train(tmp_path / "unbroken", steps=5, save=tmp_path / "saved.pt", recorded=2)
    train(tmp_path / "resumed", steps=3, skip=2, load=tmp_path / "saved.pt", recorded=2)
    unbroken, resumed = Record(tmp_path / "unbroken"), Record(tmp_path / "resumed")
    assert unbroken.steps == resumed.steps == 2
    found = compare(unbroken, resumed)
    assert judge(found).equal
    assert not found.notes

    model, optimizer, made = torch.load(tmp_path / "saved.pt")
    for state in optimizer["state"].values():
        state["exp_avg"].zero_()
    torch.save((model, optimizer, made), tmp_path / "wrong.pt")
    train(tmp_path / "wrong", steps=3, skip=2, load=tmp_path / "wrong.pt", recorded=2)
    verdict = judge(compare(unbroken, Record(tmp_path / "wrong")))
    assert verdict.sentence.startswith("All gradients are right and updates depart at step 1"), verdict.sentence
    with pytest.raises(UserError, match=r"goes on after 3 updates, but its record begins after 2 .*; use 3"):
        parity.Recorder(Model(), folder=tmp_path / "late", updates=3)


def test_whole_tensors_within_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of recording, as far as they fit; records with different budgets are compared in what both keep."""
    records, sizes = {}, {}
    for budget in (0, 100_000, 10_000_000):
        monkeypatch.setenv("THREEFOLD_PARITY_WHOLE", str(budget))
        train(tmp_path / str(budget), steps=2, recorded=2)
        records[budget] = Record(tmp_path / str(budget))
        sizes[budget] = sum(path.stat().st_size for path in (tmp_path / str(budget)).glob("*.safetensors"))
    usual, some, every = records.values()
    assert sizes[100_000] <= sizes[0] + 100_000

    def whole(record: Record) -> set[str]:
        outputs = {key: each for key, each in record.step(1).items() if key[0] == OUTPUT}
        return {key[1] for key in outputs} - {key[1] for key, each in outputs.items() if each.kept.projections}

    assert whole(every) - whole(some) == {"blocks.1.up"}
    assert whole(some) - whole(usual) == {"blocks.0.up"}
    for other in (usual, some):
        found = compare(every, other)
        assert judge(found).equal, judge(found).sentence
        assert {name for (kind, name), is_whole in found.whole.items() if kind == OUTPUT and is_whole} == whole(other)
    assert "10 of 11 outputs (not blocks.1.up)" in compared_whole(compare(every, some))
    assert set(judge(compare(some, every)).document(compare(some, every))["whole"]["output"]) == whole(some)


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Record]:
    """Records of a model in bf16: as it is, with noise, and in fp64."""
    folder = tmp_path_factory.mktemp("narrow")
    train(folder / "reference", dtype=torch.bfloat16)
    with pytest.MonkeyPatch.context() as patch:
        for seed in (1, 2):
            patch.setenv("THREEFOLD_PARITY_PERTURB", str(seed))
            train(folder / f"noise-{seed}", dtype=torch.bfloat16)
        patch.delenv("THREEFOLD_PARITY_PERTURB")
        patch.setenv("THREEFOLD_PARITY_WIDE", "1")
        train(folder / "wide", dtype=torch.bfloat16, steps=1, recorded=1)
    return {path.name: Record(path) for path in folder.iterdir()}


@pytest.mark.slow
def test_a_run_in_fp64_tells_factors_in_bf16(narrow: dict[str, Record], tmp_path: Path) -> None:
    """Noise in the last place is larger than rounding, and hides a factor of 1.01."""
    reference, noisy = narrow["reference"], [narrow["noise-1"], narrow["noise-2"]]
    assert narrow["wide"].facts["dtypes"] == narrow["wide"].facts["activation_dtypes"] == ["float64"]

    def larger(model: Model, step: int) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(1.01)

    train(tmp_path / "wrong", dtype=torch.bfloat16, after_backward=larger)
    train(tmp_path / "right", dtype=torch.bfloat16, micro_batches=3)
    wrong, right = Record(tmp_path / "wrong"), Record(tmp_path / "right")
    assert all(each.kind != GRADIENT for each in compare(reference, wrong, noisy).departures)
    verdict = judge(compare(reference, wrong, noisy, wide=narrow["wide"]))
    assert verdict.first is not None
    assert verdict.first.kind == GRADIENT, verdict.sentence
    assert "gradients of parameters depart at step 1: all 15 are 1.0" in verdict.sentence
    assert verdict.first.scale == pytest.approx(1.01, abs=0.001)
    verdict = judge(compare(reference, right, noisy, wide=narrow["wide"]))
    assert verdict.equal, verdict.sentence


@pytest.mark.slow
def test_updates_below_the_last_place_of_a_weight(narrow: dict[str, Record], tmp_path: Path) -> None:
    """They are measured in last places, and no tolerance exceeds four times an update."""
    noisy = [narrow["noise-1"], narrow["noise-2"]]
    train(tmp_path / "wrong", dtype=torch.bfloat16, lr=1.0)
    found = compare(narrow["reference"], Record(tmp_path / "wrong"), noisy)
    updates = {each.name: each for each in found.departures if each.kind == UPDATE and each.step == 1}
    assert set(updates) == {key[1] for key in narrow["reference"].step(1) if key[0] == UPDATE}
    assert max(each.tolerance for each in updates.values()) <= 4


def test_a_run_in_fp64_that_is_of_no_use(narrow: dict[str, Record], tmp_path: Path) -> None:
    reference, noisy = narrow["reference"], [narrow["noise-1"]]
    with pytest.raises(UserError, match=r"--wide .* is of no use: it was recorded without THREEFOLD_PARITY_WIDE"):
        compare(reference, reference, noisy, wide=reference)
    with pytest.raises(UserError, match="--wide goes with --noise"):
        compare(reference, reference, wide=narrow["wide"])
    narrowed = tmp_path / "narrowed"
    shutil.copytree(narrow["wide"].folder, narrowed)
    rewrite(narrowed, activation_dtypes=["bfloat16", "float64"])
    with pytest.raises(UserError, match="computes in bfloat16 in spite of fp64 weights and inputs; leave it out"):
        compare(reference, reference, noisy, wide=Record(narrowed))
    numbers = {**reference.facts["numbers"]}
    numbers["1"] = {**numbers["1"], "drew_random_numbers": True}
    drew = tmp_path / "drew"
    shutil.copytree(reference.folder, drew)
    rewrite(drew, numbers=numbers)
    with pytest.raises(UserError, match="draws random numbers"):
        compare(Record(drew), reference, noisy, wide=narrow["wide"])


def test_a_framework_with_weights_of_its_own_refuses_fp64(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Own(parity.Adapter):
        name, converts = "own", False

    monkeypatch.setenv("THREEFOLD_PARITY_WIDE", "1")
    with pytest.raises(UserError, match="--wide cannot convert the weights that own keeps to fp64"):
        parity.Recorder(Model(), adapter=Own(), folder=tmp_path / "record")


def sharded_and_wide(folder: Path) -> None:
    model = fully_shard(Model(), mesh=init_device_mesh("cpu", (1,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("THREEFOLD_PARITY_WIDE", "1")
        with pytest.raises(UserError, match=r"--wide cannot convert embed\.weight, a DTensor, to fp64"):
            parity.Recorder(model, folder=folder)


def test_a_sharded_model_refuses_fp64(tmp_path: Path) -> None:
    on_ranks(1, sharded_and_wide, tmp_path / "record")


def test_a_recorded_model_can_be_copied(tmp_path: Path) -> None:
    """As for an average of its weights: the copy has no recorder and no optimizer of its own."""
    model = train(tmp_path, steps=1, recorded=3)
    before = len([each for each in gc.get_objects() if isinstance(each, torch.optim.Optimizer)])
    again = copy.deepcopy(model)
    assert len([each for each in gc.get_objects() if isinstance(each, torch.optim.Optimizer)]) == before
    tokens = torch.zeros(2, 5, dtype=torch.int64)
    torch.testing.assert_close(again.eval()(tokens), model.eval()(tokens))
