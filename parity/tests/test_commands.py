"""`threefold-parity` on a script of plain PyTorch that is not ours: FSDP2 and tensor parallelism, right and wrong."""

import json
import os
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import torch
from parity_support import parity, sweep

from threefold_parity.command import main

SCRIPT = Path(__file__).parents[2] / "examples/parity/train.py"
WITH_LINES = 80
TORCH = tuple(map(int, torch.__version__.split(".")[:2]))
TRUE = ("run", "--reference", "true", "--candidate", "true")


RUN = ("run", "--reference", f"python {SCRIPT}", "--steps", "2", "--out", "records")


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Records of one process and of dp 2 · tp 2."""
    if TORCH < (2, 7):
        pytest.skip("FSDP2 of this PyTorch does not run on CPUs")
    folder = tmp_path_factory.mktemp("right")
    ended = parity(*RUN, "--candidate", f"torchrun --standalone --nproc-per-node 4 {SCRIPT} --tp 2", folder=folder)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Equal up to rounding in 2 steps: 29 initial weights" in ended.stdout
    return folder / "records"


MISTAKES = {
    "accumulated gradients not divided": (
        ("(loss / MICRO_BATCHES)", "loss"),
        "all 29 are 2 (dp or tp or micro-batches) times the reference",
    ),
    "attention scaled by another width": (
        ("is_causal=True)", "is_causal=True, scale=HEADS**-0.5)"),
        "first the output of blocks.0.attention.out:",
    ),
    "replicas read the same samples": (
        ("batch.chunk(dp)[replica]", "batch.chunk(dp)[0]"),
        "The runs read different samples at step 1: they are fewer: 4 of 8 are missing",
    ),
    "embeddings and head left out of FSDP": (
        ("(*model.blocks, model) if", "model.blocks if"),
        "5 of 29, first the gradient of head.weight, which differs from rank to rank, and the mean over ranks",
    ),
    "a bias summed over tensor ranks twice": (
        ("        recorder.after", "        model.blocks[1].up.bias.grad.mul_(tp)\n        recorder.after"),
        "first the gradient of blocks.1.up.bias: it is 2 (dp or tp or micro-batches) times the reference",
    ),
}


@sweep("mistake", MISTAKES, slow=(3,))
def test_a_mistake_in_a_script_is_named(mistake: str, right: Path, tmp_path: Path) -> None:
    (old, new), said = MISTAKES[mistake]
    text = SCRIPT.read_text()
    assert text.count(old) == 1
    (tmp_path / "wrong.py").write_text(text.replace(old, new))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "THREEFOLD_PARITY": "wrong", "THREEFOLD_PARITY_STEPS": "2"}
    environment |= {"THREEFOLD_PARITY_LOAD": str(right / "weights"), "THREEFOLD_PARITY_STOP": "1"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    subprocess.run([*torchrun, "wrong.py", "--tp", "2"], cwd=tmp_path, env=environment, check=True, capture_output=True)
    noise = [option for number in (1, 2) for option in ("--noise", str(right / f"noise-{number}"))]
    ended = parity("compare", str(right / "reference"), "wrong", *noise, "--html", "page.html", folder=tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert said in ended.stdout, ended.stdout
    assert said.split(":")[0] in unescape((tmp_path / "page.html").read_text())


def test_the_script_is_short() -> None:
    """Three of its lines are the recorder's."""
    lines = SCRIPT.read_text().splitlines()
    assert len([line for line in lines if line.strip()]) <= WITH_LINES
    assert sum("parity" in line or "recorder" in line for line in lines) == 3


@pytest.mark.slow
def test_a_mistake_under_tensor_parallelism_is_named(tmp_path: Path) -> None:
    """In every PyTorch that the package supports."""
    (tmp_path / "wrong.py").write_text(SCRIPT.read_text().replace("(loss / MICRO_BATCHES)", "loss"))
    for script, status, said in (
        (SCRIPT, 0, "Equal up to"),
        ("wrong.py", 1, "all 29 are 2 (tp or micro-batches) times"),
    ):
        candidate = f"torchrun --standalone --nproc-per-node 2 {script} --tp 2"
        options = ("--steps", "1", "--noise", "1", "--candidate", candidate)
        ended = parity("run", "--reference", f"python {SCRIPT}", *options, folder=tmp_path)
        assert ended.returncode == status, ended.stdout + ended.stderr
        assert said in ended.stdout, ended.stdout


@pytest.mark.slow
def test_a_verdict_as_json(right: Path, tmp_path: Path) -> None:
    ended = parity("compare", str(right / "reference"), str(right / "candidate"), "--json", folder=tmp_path)
    found = json.loads(ended.stdout)
    assert ended.returncode == 0
    assert found["equal"]
    assert found["compared"]["gradient"] == 58


@pytest.mark.slow
def test_records_are_kept_and_small(right: Path) -> None:
    names = {"reference", "noise-1", "noise-2", "candidate", "weights"}
    assert names <= {path.name for path in right.iterdir()}
    assert sum(path.stat().st_size for path in (right / "candidate").iterdir()) < 5_000_000


SMALL = """
import sys
import torch
import threefold_parity as parity

torch.manual_seed(0)
model = torch.nn.Linear(5, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = parity.Recorder(model, optimizer)
for step in range(9):
    model(torch.eye(5)).square().sum().backward()
    model.weight.grad *= float(sys.argv[1])
    recorder.after_backward()
    optimizer.step()
    optimizer.zero_grad()
print("all nine steps")
"""


@pytest.mark.sweep
def test_two_runs_of_a_small_script(tmp_path: Path) -> None:
    (tmp_path / "small.py").write_text(SMALL)
    options = ("--noise", "1", "--steps", "1")
    run = (
        "run",
        "--reference",
        "python small.py 1",
        "--candidate",
        "python small.py 0.5",
        *options,
        "--out",
        "records",
    )
    ended = parity(*run, folder=tmp_path)
    assert ended.returncode == 1, ended.stderr
    assert "first the gradient of weight: it is 1/2 times the reference" in ended.stdout, ended.stdout
    assert (tmp_path / "records/candidate.log").read_text() == "", "the script ends with the recorded steps"
    again = parity("compare", "records/reference", "records/reference", "--json", folder=tmp_path)
    assert json.loads(again.stdout)["equal"]


_NARROW = ("model = torch", "dtype = getattr(torch, sys.argv[2])\nmodel = torch"), ("(5, 3)", "(5, 3).to(dtype)")


def in_a_dtype() -> str:
    """Return `SMALL` in a dtype of its arguments, which offers fp64."""
    text = SMALL.replace("optimizer)", "optimizer, wide=True)").replace("torch.eye(5)", "torch.eye(5, dtype=dtype)")
    for old, new in _NARROW:
        text = text.replace(old, new)
    return text


def both(script: str, dtype: str, *more: str, folder: Path) -> "subprocess.CompletedProcess[str]":
    """Compare two runs of a script, the second with all gradients times 1.01."""
    reference, candidate = (f"python {script} {scale} {dtype}" for scale in ("1", "1.01"))
    runs = ("--reference", reference, "--candidate", candidate)
    return parity("run", *runs, "--noise", "1", "--steps", "1", *more, folder=folder)


@pytest.mark.slow
def test_a_script_that_offers_fp64(tmp_path: Path) -> None:
    """The reference runs in fp64 where its script offers it."""
    (tmp_path / "able.py").write_text(in_a_dtype())
    ended = both("able.py", "bfloat16", "--out", "records", folder=tmp_path)
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert "tolerances learned from 1 run with noise and one in fp64" in ended.stdout
    assert "times the reference" in ended.stdout
    records = [str(Path("records", name)) for name in ("reference", "candidate", "noise-1", "wide")]
    noise = (*records[:2], "--noise", records[2])
    assert parity("compare", *noise, folder=tmp_path).returncode == 0, "a factor of 1.01 hides in noise"
    assert parity("compare", *noise, "--wide", records[3], folder=tmp_path).returncode == 1


@pytest.mark.sweep
def test_a_script_that_cannot_run_in_fp64(tmp_path: Path) -> None:
    """A note says so, and --wide is refused; with --no-wide, none is tried."""
    (tmp_path / "able.py").write_text(in_a_dtype())
    (tmp_path / "unable.py").write_text(in_a_dtype().replace(".square()", ".mm(torch.eye(3, dtype=dtype)).square()"))
    assert "one in fp64" not in both("able.py", "float32", "--no-wide", folder=tmp_path).stdout
    ended = both("unable.py", "bfloat16", folder=tmp_path)
    assert "Note: In fp64, the command of --reference ended with exit status 1; its last line was" in ended.stdout
    ended = both("unable.py", "bfloat16", "--wide", folder=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr.rstrip().endswith("leave out --wide."), ended.stderr


BAD_INPUT = {
    ("run", "--reference", "python nowhere.py", "--candidate", "true"): "of --reference ended with exit status 2",
    ("run", "--reference", "no-such-program", "--candidate", "true"): "--reference cannot be started",
    TRUE: "of --reference ended without a record",
    ("run", "--reference", "python 'x", "--candidate", "true"): "cannot be split into words",
    ("run", "--reference", " ", "--candidate", "true"): "--reference is empty",
    ("run", "--reference", "sleep 60", "--candidate", "true", "--timeout", "1"): "did not end within 1 s",
    (*TRUE, "--out", "."): "--out . is not empty",
    (*TRUE, "--wide", "--after", "2"): "--wide does not go with --aft",
    (*TRUE, "--wide", "--noise", "0"): "--wide does not go with --noi",
    (*TRUE, "--whole", "much"): "'much' is not a size such as 500MB",
    ("compare", "nowhere", "nowhere"): "There is no record at nowhere",
    ("compare", ".", "."): "has no rank-00000.json",
    ("compare", "nowhere", "nowhere", "--html", "/nowhere/page.html"): "cannot be written",
    ("compare", "nowhere", "nowhere", "--html", __file__): "is not a page of this program",
}


@pytest.mark.parametrize("arguments", BAD_INPUT, ids=BAD_INPUT.values())
def test_bad_input_is_one_sentence(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    (tmp_path / "file").write_text("x")
    assert main(arguments) == 2
    output, error = capsys.readouterr()
    assert output == ""
    assert BAD_INPUT[arguments] in error
    assert error.startswith("Error: ")
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["file"], "the folder is as it was"
