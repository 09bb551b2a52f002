"""Runs and checkpoints that an earlier commit wrote resume and generate as they did with that commit.

The archive holds the runs after two steps; its expected.json holds the losses of the same runs continued to step five,
and texts generated greedily from step two.
"""

import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest

from tests.support.sweep import sweep
from tests.train.support import losses_of, train
from threefold.config import Config, load_config, resolve
from threefold.data.dataset import open_dataset
from threefold.inference.generate import GenerationRequest, Sampling, generate
from threefold.verify.worker_pool import WorkerPool

ARCHIVE = Path(__file__).parent / "data" / "recorded.tar.xz"
STEP = Path("checkpoints/step_00000002")
TOLERANCE = {"gpt": 1e-6, "llama": 1e-12, "mixture": 1e-2}
"""By the dtype of the run: fp32 on tp 2 with sequence parallelism, fp64 on dp 2 with ZeRO 3, bf16 on dp 2 · pp 2 with
ep 2, ZeRO 1 and two stages on each rank."""


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The extracted archive; a test that writes there writes into a copy."""
    folder = tmp_path_factory.mktemp("recorded")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture(scope="module")
def recorded(old: Path) -> dict[str, Any]:
    return dict(json.loads((old / "expected.json").read_text(encoding="utf-8")))


def config_of(old: Path, kind: str, *overrides: str) -> Config:
    given = load_config(old / kind / STEP / "config.yaml", [f"data.path={old / 'tokens'}", *overrides])
    return resolve(given, open_dataset(given).vocab_size)


def copy_of(run: Path, to: Path) -> Path:
    """A copy in which a run may be resumed."""
    for path in run.rglob("*"):
        if path.is_file():
            target = to / path.relative_to(run)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    return to


@pytest.mark.parametrize("kind", TOLERANCE)
def test_a_run_resumes_with_the_recorded_losses(
    pool: WorkerPool, old: Path, recorded: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    """Up to rounding: libraries choose kernels by more of a processor than its model, and add in another order."""
    config = config_of(old, kind, "train.max_steps=5")
    ranks = config.parallel.dp * config.parallel.tp * config.parallel.pp
    run = copy_of(old / kind, tmp_path / kind)
    assert losses_of(run) == recorded[kind]["losses"][:2]
    pool.run(ranks, train, config, run, True)
    assert losses_of(run) == pytest.approx(recorded[kind]["losses"], rel=TOLERANCE[kind], abs=0.0)


@sweep(
    ("kind", "layout"),
    [
        ("gpt", ("parallel.tp=1", "parallel.sequence_parallel=false", "parallel.pp=2")),
        ("llama", ("parallel.dp=1", "parallel.zero=0", "parallel.tp=2")),
    ],
    quick=(0,),
)
def test_a_run_resumes_in_another_layout(
    pool: WorkerPool, old: Path, recorded: dict[str, Any], tmp_path: Path, kind: str, layout: tuple[str, ...]
) -> None:
    run = copy_of(old / kind, tmp_path / kind)
    pool.run(2, train, config_of(old, kind, "train.max_steps=5", *layout), run, True)
    assert losses_of(run) == pytest.approx(recorded[kind]["losses"], rel={"gpt": 1e-5, "llama": 1e-12}[kind])


@pytest.mark.parametrize("kind", TOLERANCE)
def test_it_generates_the_recorded_text(old: Path, recorded: dict[str, Any], kind: str) -> None:
    greedy = GenerationRequest(max_new_tokens=20, sampling=Sampling(temperature=0.0))
    assert generate(old / kind, ["The function", "for"], greedy) == recorded[kind]["text"]


@pytest.mark.parametrize("kind", TOLERANCE)
def test_the_stored_config_is_written_as_it_was_read(old: Path, kind: str) -> None:
    stored = (old / kind / STEP / "config.yaml").read_text(encoding="utf-8")
    written = config_of(old, kind).to_yaml_as_given(resolved=("model", "data"))
    path = re.compile(r"^  path: .*$", re.MULTILINE)
    settings = (
        "activation|embedding_dropout|watch|watch_every|timeout|max_restarts|on_nan|on_spike|spike_window"
        "|max_skipped_steps|max_consecutive_skips|max_rollbacks|memory_every|backend|verify|exact|format|fp8"
    )
    newer = re.compile(rf"^  ({settings}): .*\n", re.MULTILINE)  # they have come since
    assert newer.sub("", path.sub("", written)) == path.sub("", stored)
