"""Steps that are skipped on purpose, after a bad value, or by a rollback: bit-equal to a run that never made them."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.resilience.faults import Fault, train_with
from tests.support.sweep import sweep
from tests.train.support import Run, engine_of, losses_of, manifest, same, steps_of, train_rank
from threefold.checkpoint.folder import path_of
from threefold.checkpoint.manifest import Facts
from threefold.config import Config
from threefold.data.dataset import open_dataset
from threefold.data.loader import Loader
from threefold.data.order import ConsumedSamples
from threefold.report.metrics import read_metrics
from threefold.resilience.anomalies import AnomalyPolicy, BadSteps
from threefold.resilience.remote import RemoteCheckpoints
from threefold.resilience.rules import StepRanges
from threefold.train.callbacks.base import BadStep, Callback, RunContext
from threefold.train.run import open_loader, open_samples
from threefold.verify.worker_pool import WorkerError, WorkerPool

STEPS = 8
NAN = Fault("output", "blocks.1.mlp.up", 0, 5)


def tensors(run_dir: Path, step: int = STEPS) -> dict[str, str]:
    """Checksums of the tensors of a checkpoint."""
    files = manifest(path_of(run_dir, step))["files"]
    return {name: held["checksum"] for name, held in files.items() if name.endswith(".bin")}


def made(run_dir: Path) -> dict[int, float]:
    """The losses of the steps that made an update."""
    return {step: line["loss"] for step, line in steps_of(run_dir).items() if not line.get("skipped")}


def assert_same(run_dir: Path, other: Path, step: int = STEPS) -> None:
    """Two runs made the same steps, and have the same checkpoint after the last."""
    assert made(run_dir) == made(other)
    assert tensors(run_dir, step) == tensors(other, step)


def reasons(run_dir: Path) -> dict[int, str]:
    return {step: line["reason"] for step, line in steps_of(run_dir).items() if "reason" in line}


def by_hand(run: Run, skipped: list[Any]) -> dict[int, float]:
    """Losses of a loop that never hears of the skipped steps."""
    engine, ranges = engine_of(run.config), StepRanges.parse(skipped)
    loader = open_loader(run.config, open_samples(run.config, open_dataset(run.config)), engine.mesh.dp)
    steps = [step for step in range(1, run.steps + 1) if step not in ranges]
    losses = {step: engine.train_step(loader.batch(step - 1), step - 1).loss for step in steps}
    loader.close()
    return losses


def with_settings(run: Run, **settings: Any) -> Run:
    return run.but(set=(*run.set, *((key.replace("__", "."), value) for key, value in settings.items())))


@sweep(
    "layout",
    [{"dp": 2}, *(pytest.param(layout, marks=pytest.mark.sweep) for layout in ({"tp": 2}, {"pp": 2}))],
    ids=str,
    quick=(0,),
)
def test_skipped_on_purpose(pool: WorkerPool, small_run: Run, tmp_path: Path, layout: dict[str, int]) -> None:
    """The other steps have the losses of a loop without them, in one layout to the bit, also when it is resumed within
    a range; their samples are read by nobody."""
    plain = small_run.but(steps=STEPS, **layout)
    run = with_settings(plain, data__skip_steps=[2, "4-6"], checkpoint__keep=0)
    pool.run(run.world_size, train_rank, run, tmp_path / "whole")
    assert made(tmp_path / "whole") == pool.run(run.world_size, by_hand, plain, [2, "4-6"])[0]
    assert reasons(tmp_path / "whole") == {
        2: "data.skip_steps has step 2",
        **dict.fromkeys((4, 5, 6), "data.skip_steps has steps 4 to 6"),
    }
    lines = steps_of(tmp_path / "whole")
    assert [lines[step]["tokens"] for step in (2, 4, 5, 6)] == [0] * 4
    assert lines[2]["loss"] is None
    one = with_settings(small_run.but(steps=STEPS), data__skip_steps=[2, "4-6"])
    pool.run(1, train_rank, one, tmp_path / "one")
    losses, expected = made(tmp_path / "whole"), made(tmp_path / "one")
    assert list(losses) == list(expected) == [1, 3, 7, 8]
    assert same(list(losses.values()), list(expected.values()), "fp32")
    pool.run(run.world_size, train_rank, run.but(steps=5), tmp_path / "parts")
    pool.run(run.world_size, train_rank, run, tmp_path / "parts", True)
    assert tensors(tmp_path / "parts") == tensors(tmp_path / "whole")
    assert steps_of(tmp_path / "parts").keys() == steps_of(tmp_path / "whole").keys()


def reads_of(run: Run, run_dir: Path) -> list[int]:
    """The steps whose batches a run reads."""
    read: list[int] = []
    plain = Loader._read_train
    with patch.object(Loader, "_read_train", lambda self, step, *_: read.append(step + 1) or plain(self, step, *_)):
        train_rank(run, run_dir)
    return read


def test_skipped_samples_are_not_read(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = with_settings(small_run.but(steps=6), data__skip_steps=[1, "4-6"])
    assert set(pool.run(1, reads_of, run, tmp_path)[0]) == {2, 3, 7}  # what follows is prefetched, as ever


@sweep(
    ("layout", "zero"),
    [
        ({"dp": 2}, 0),
        *(
            pytest.param(*case, marks=pytest.mark.sweep)
            for case in [({"tp": 2}, 0), ({"pp": 2}, 0), ({"dp": 2}, 2), ({}, 0)]
        ),
    ],
    ids=str,
    quick=(0,),
)
def test_a_bad_step_is_skipped_as_if_on_purpose(
    pool: WorkerPool, small_run: Run, tmp_path: Path, layout: dict[str, int], zero: int
) -> None:
    run = with_settings(
        small_run.but(steps=STEPS, **layout), train__on_nan="skip", checkpoint__every=3, parallel__zero=zero
    )
    pool.run(run.world_size, train_with, [NAN], run, tmp_path / "bad")
    pool.run(run.world_size, train_rank, with_settings(run, data__skip_steps=[5]), tmp_path / "purpose")
    assert_same(tmp_path / "bad", tmp_path / "purpose")
    (reason,) = reasons(tmp_path / "bad").values()
    assert reason.startswith("the loss is nan and the gradient norm nan; the first value that is not finite is a NaN ")
    assert "skipped: " + reason in (tmp_path / "bad" / "train.log").read_text()
    facts = manifest(path_of(tmp_path / "bad", STEPS))["anomalies"]
    assert (facts["skips"], facts["consecutive"], facts["skipped"]) == (1, 0, [])
    assert manifest(path_of(tmp_path / "purpose", STEPS))["anomalies"] is None


@sweep(("step", "skipped"), [(5, "4-5"), (4, "4-4"), (3, "1-3")], ids=str, quick=(0,))
def test_a_rollback_skips_what_led_to_it(
    pool: WorkerPool, small_run: Run, tmp_path: Path, step: int, skipped: str
) -> None:
    """Checkpoints after steps 3 and 6. Step 4 is bad at once after one; before step 3 there is none to go back to."""
    run = with_settings(small_run.but(steps=STEPS, dp=2), train__on_nan="rollback", checkpoint__every=3)
    fault = Fault("gradient", "blocks.1.mlp.up", 1, step)
    if step == 3:
        with pytest.raises(
            WorkerError, match=r"at step 3.* there is no good checkpoint to go back to; .*no checkpoint"
        ):
            pool.run(2, train_with, [fault], run, tmp_path / "bad")
        return
    pool.run(2, train_with, [fault], run, tmp_path / "bad")
    pool.run(2, train_rank, with_settings(run, data__skip_steps=[skipped]), tmp_path / "purpose")
    assert_same(tmp_path / "bad", tmp_path / "purpose")
    assert list(steps_of(tmp_path / "bad")) == list(range(1, STEPS + 1))
    words = f"step {step}" if step == 4 else f"steps 4 to {step}"
    assert reasons(tmp_path / "bad")[step].startswith(f"a rollback to step 3 skips {words}: the loss is ")
    assert f"global step {step}, rolled back to step 3: the loss is " in (tmp_path / "bad" / "train.log").read_text()


class DamagesTheNewest(Callback):
    """Flips a bit of the checkpoint of step 3 before step 5, once it has been copied to an address."""

    ranks = "first"

    def __init__(self, address: str) -> None:
        self.address = address

    def setup(self, run: RunContext) -> None:
        self.file = path_of(run.run_dir, 3) / "tensors-00000.bin"

    def before_step(self, step: int, batch: Any) -> None:
        if step == 5:
            while self.address and RemoteCheckpoints(self.address).steps() != [3]:
                pass
            content = bytearray(self.file.read_bytes())
            content[len(content) // 2] ^= 1
            self.file.write_bytes(content)


@pytest.mark.parametrize("has_copy", [False, True])
def test_a_rollback_to_a_damaged_checkpoint_takes_its_copy(
    pool: WorkerPool, small_run: Run, tmp_path: Path, has_copy: bool
) -> None:
    run = with_settings(small_run.but(steps=STEPS, dp=2), train__on_nan="rollback", checkpoint__every=3)
    address = f"file://{tmp_path / 'there'}" if has_copy else ""
    faulty = with_settings(run, checkpoint__remote=address or None)
    arguments = ([Fault("gradient", "blocks.1.mlp.up", 1, 5)], faulty, tmp_path / "bad", False)
    if not has_copy:
        with pytest.raises(WorkerError, match=r"The run cannot go back to .*/step_00000003, which is damaged \("):
            pool.run(2, train_with, *arguments, [DamagesTheNewest(address)])
        return
    printed, _ = pool.run(2, train_with, *arguments, [DamagesTheNewest(address)])
    assert f"its copy at {address} has replaced it." in printed
    pool.run(2, train_rank, with_settings(run, data__skip_steps=["4-5"]), tmp_path / "purpose")
    assert made(tmp_path / "bad") == made(tmp_path / "purpose")


@pytest.mark.sweep
def test_a_rollback_makes_the_steps_before_the_bad_ones_again(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    settings = {"train__on_nan": "rollback", "train__rollback_steps": 1, "checkpoint__every": 3}
    run = with_settings(small_run.but(steps=STEPS, pp=2), **settings)
    pool.run(2, train_with, [NAN], run, tmp_path / "bad")
    pool.run(2, train_rank, with_settings(run, data__skip_steps=[5]), tmp_path / "purpose")
    assert_same(tmp_path / "bad", tmp_path / "purpose")


@pytest.mark.slow
def test_a_checkpoint_that_is_bad_itself_gives_way_to_the_one_before(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    """Weights that are spoilt before the checkpoint of step 6 make every step after it bad, also after a rollback to
    it; the second goes back to step 3, where the fault is no more."""
    run = with_settings(small_run.but(steps=10), train__on_nan="rollback", checkpoint__every=3, checkpoint__keep=0)
    faults = [Fault("output", "blocks.1.mlp.up", 0, step) for step in (7, 8)]
    pool.run(1, train_with, faults, run, tmp_path / "bad")
    pool.run(1, train_rank, with_settings(run, data__skip_steps=["4-8"]), tmp_path / "purpose")
    assert_same(tmp_path / "bad", tmp_path / "purpose", 10)
    assert (tmp_path / "bad" / "checkpoints" / "step_00000006.diverged").is_dir()


@pytest.mark.slow
def test_weights_that_are_bad_when_a_save_is_due_lead_to_a_rollback(
    pool: WorkerPool, small_run: Run, tmp_path: Path
) -> None:
    """The update of step 6 is bad: its checkpoint is not saved, and the run goes back to that of step 3."""
    settings = {"train__on_nan": "rollback", "checkpoint__every": 3}
    run = with_settings(small_run.but(steps=STEPS, dp=2), **settings)
    pool.run(2, train_with, [Fault("updated", "blocks.1.mlp.up", 1, 6)], run, tmp_path / "bad")
    pool.run(2, train_rank, with_settings(run, data__skip_steps=["4-6"]), tmp_path / "purpose")
    assert tensors(tmp_path / "bad") == tensors(tmp_path / "purpose")
    assert reasons(tmp_path / "bad")[6] == (
        "a rollback to step 3 skips steps 4 to 6: weights or optimizer state are not finite after it"
    )


def test_limits_end_the_run(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    faults = [Fault("output", "blocks.1.mlp.up", 0, step) for step in (2, 4, 5, 6)]
    run = with_settings(small_run.but(steps=STEPS), train__on_nan="skip", train__max_consecutive_skips=2)
    with pytest.raises(WorkerError) as caught:
        pool.run(1, train_with, faults, run, tmp_path)
    sentence = str(caught.value.error)
    assert sentence.startswith("Training diverged at step 6: the loss is nan ")
    assert "; train.on_nan is skip, and train.max_consecutive_skips allows 2 skipped steps in a row; " in sentence
    assert list(reasons(tmp_path)) == [2, 4, 5]


@sweep("policy", ["skip", "rollback"], slow=(0,))
def test_a_spike(pool: WorkerPool, small_run: Run, tmp_path: Path, policy: str) -> None:
    """A gradient far above the others; a run that is resumed before it has the same medians."""
    settings = {"train__spike_factor": 20.0, "train__spike_window": 3, "train__on_spike": policy}
    run = with_settings(small_run.but(steps=STEPS, dp=2), checkpoint__every=4, **settings)
    fault = Fault("gradient", "blocks.1.mlp.up", 1, 6, number=1e4)
    pool.run(2, train_with, [fault], run, tmp_path / "bad")
    skipped = [6] if policy == "skip" else ["5-6"]
    pool.run(2, train_rank, with_settings(run, data__skip_steps=skipped), tmp_path / "purpose")
    assert_same(tmp_path / "bad", tmp_path / "purpose")
    recent = [manifest(path_of(tmp_path / name, STEPS))["anomalies"]["recent"] for name in ("bad", "purpose")]
    assert recent[0] == recent[1]
    words = r"the gradient norm is \S+, more than 20 \(train.spike_factor\) times \S+, its median over the last 3 steps"
    assert re.search(words, reasons(tmp_path / "bad")[6])
    pool.run(2, train_rank, run.but(steps=5), tmp_path / "parts")
    pool.run(2, train_with, [fault], run, tmp_path / "parts", True)
    if policy == "skip":  # a rollback would go back to the checkpoint of step 5
        assert tensors(tmp_path / "parts") == tensors(tmp_path / "bad")
        assert reasons(tmp_path / "parts") == reasons(tmp_path / "bad")


@pytest.mark.slow
def test_a_resumed_run_counts_on(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    faults = [Fault("output", "blocks.1.mlp.up", 0, step) for step in (2, 6)]
    run = with_settings(small_run.but(steps=STEPS), train__on_nan="skip", train__max_skipped_steps=1)
    pool.run(1, train_with, faults, run.but(steps=4), tmp_path)
    with pytest.raises(WorkerError, match=r"at step 6: .* train.max_skipped_steps allows 1 skipped steps in a run"):
        pool.run(1, train_with, faults, run, tmp_path, True)


def test_the_last_steps_may_be_skipped(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """The checkpoint after them is measured with samples that made a step, not with those that are bad."""
    run = with_settings(small_run.but(steps=4), train__on_nan="skip")
    pool.run(1, train_with, [Fault("output", "blocks.1.mlp.up", 0, 4)], run, tmp_path / "bad")
    pool.run(1, train_rank, with_settings(run, data__skip_steps=[4]), tmp_path / "purpose")
    assert tensors(tmp_path / "bad", 4) == tensors(tmp_path / "purpose", 4)
    assert losses_of(tmp_path / "purpose")[-1] is None
    assert list(read_metrics(tmp_path / "purpose" / "metrics.jsonl"))[-1]["reason"]


def test_a_rollback_goes_back_to_the_samples_of_its_checkpoint() -> None:
    """Which the run has consumed in batches of another size than since it was resumed."""
    train = {"on_spike": "rollback", "spike_factor": 2.0, "global_batch_size": 4}
    config = Config.model_validate({"data": {"path": "unused", "sequence_length": 8}, "train": train})
    engine, loader = SimpleNamespace(config=config), SimpleNamespace(consumed=ConsumedSamples(4, 3, 24))
    store = SimpleNamespace(load=lambda path: Facts(2, 16, 0, None, None, 0, 0))
    saving = SimpleNamespace(roll_back=lambda: Path("step_00000002"), store=store)
    guard = BadSteps(engine, loader, saving, AnomalyPolicy(config))  # type: ignore[arg-type]
    assert guard.respond(BadStep(5, "the loss is 9", None, None, torch.zeros(()), {})).start == 2
    assert loader.consumed == ConsumedSamples(4, 2, 16)
