"""Fault policies of another package: one file and an entry point, named in `train.on_nan` or `train.on_spike`."""

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.resilience.faults import Fault, train_with
from tests.support.plugin_package import write_package
from tests.train.support import Run, steps_of
from threefold.config.loading import config_of
from threefold.errors import UserError
from threefold.resilience.anomalies import AnomalyPolicy
from threefold.resilience.rules import check_fault_policies
from threefold.verify.worker_pool import WorkerError, WorkerPool

GROUP = "threefold.fault_policies"
MODULE = """
def patient(fault):
    \"\"\"Skip the first bad step of a run, and go back from the second on.\"\"\"
    return "skip" if fault.skips < 1 else "rollback"


def confused(fault):
    return "pause"


NUMBER = 7
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    names = ("patient", "confused", "NUMBER")
    folder = write_package(
        tmp_path / "site", GROUP, {name.lower(): f"toy_policies:{name}" for name in names}, MODULE, "toy_policies"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "toy_policies", raising=False)
    return folder


def on_nan(run: Run, policy: str) -> Run:
    settings: tuple[tuple[str, Any], ...] = (("train.on_nan", policy), ("checkpoint.every", 2))
    return run.but(steps=6, set=(*run.set, *settings))


def train_in(folder: Path, faults: list[Fault], run: Run, run_dir: Path) -> None:
    """Train as a rank that finds the package."""
    sys.path.insert(0, str(folder))
    try:
        train_with(faults, run, run_dir)
    finally:
        sys.path.remove(str(folder))


def test_a_policy_of_another_package_decides(pool: WorkerPool, small_run: Run, tmp_path: Path, package: Path) -> None:
    faults = [Fault("output", "blocks.1.mlp.up", 0, step) for step in (3, 6)]
    run = on_nan(small_run.but(dp=2), "patient")
    pool.run(2, train_in, package, faults, run, tmp_path / "run")
    reasons = {step: line["reason"] for step, line in steps_of(tmp_path / "run").items() if "reason" in line}
    assert sorted(reasons) == [3, 5, 6]
    assert reasons[3].startswith("the loss is nan")
    assert reasons[5] == "a rollback skips steps 5 to 6"
    assert reasons[6].startswith("a rollback to step 4 skips steps 5 to 6: the loss is nan")


def test_a_policy_of_a_file_ends_the_run_at_its_limit(
    pool: WorkerPool, small_run: Run, tmp_path: Path, package: Path
) -> None:
    name = f"{package / 'toy_policies.py'}:patient"
    faults = [Fault("output", "blocks.1.mlp.up", 0, step) for step in (3, 5)]
    run = on_nan(small_run, name)
    run = run.but(set=(*run.set, ("train.max_rollbacks", 0)))
    with pytest.raises(
        WorkerError, match=r"at step 5: .*; train\.on_nan is .*:patient, and train\.max_rollbacks allows 0"
    ):
        pool.run(1, train_with, faults, run, tmp_path / "run")


def test_an_unknown_name_lists_the_known_ones(package: Path) -> None:
    known = "stop, skip, rollback, confused, number, patient"
    with pytest.raises(UserError, match=rf"on_nan is 'patent' but must be one of {known}; the nearest is patient"):
        config_of({"data": {"path": "x"}, "train": {"on_nan": "patent"}})


def test_what_is_no_policy_is_one_sentence(small_run: Run, package: Path) -> None:
    check_fault_policies(config_of({"data": {"path": "x"}, "train": {"on_nan": "patient"}}))
    with pytest.raises(UserError, match=r"train\.on_spike is number, which is declared as 7 but must be a function"):
        check_fault_policies(config_of({"data": {"path": "x"}, "train": {"on_spike": "number"}}))
    policy = AnomalyPolicy(on_nan(small_run, "confused").config)
    with pytest.raises(
        UserError,
        match=r"train\.on_nan is confused, which answers 'pause' at step 2 but must answer one of stop, skip, ",
    ):
        policy.action("nan", 2, "the loss is nan")
