"""`threefold verify` from end to end, as a user sees it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ready
from threefold.comm.layout import parse
from threefold.config import load_config
from threefold.data.dataset import vocabulary
from threefold.planner.model_size import ModelSize
from threefold.verify.layouts import compose, prepare

VERIFY = [sys.executable, "-m", "threefold", "verify"]


def verify(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return ready.run([*VERIFY, *arguments])


@pytest.mark.slow
def test_table_of_layouts_that_are_equal(config_file: Path) -> None:
    """On the config's own data."""
    ended = verify(config_file, "dp2", "tp2,pp2:gpipe")
    assert (ended.returncode, ended.stderr) == (0, "")
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert ["dp2", "✓", "equal"] in [row[:3] for row in rows]
    assert ["tp2·pp2", "gpipe", "✓", "equal"] in [row[:4] for row in rows]
    assert "All 2 layouts compute what one process computes" in ended.stdout
    assert "the rows of " in ended.stdout


@pytest.mark.slow
def test_the_table_has_the_parameters_of_the_largest_rank(config_file: Path) -> None:
    """As counted from the shapes alone; a replica without ZeRO holds the whole model."""
    layouts = ("dp2", "tp2", "pp2", "dp2 zero3")
    ended = verify(config_file, "--full", "--steps", "1", *layouts)
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    head = next(line for line in lines if line.startswith("layout"))
    end = head.index("params/rank") + len("params/rank")
    rows = {line.split("✓")[0].strip(): line for line in lines if "✓ equal" in line}
    assert set(rows) == set(layouts)
    shown = {layout: int(row[:end].split()[-1].replace(",", "")) for layout, row in rows.items()}
    config = load_config(config_file)
    base = prepare(config, "fp64", vocabulary(config) or 0)
    sizes = {layout: ModelSize(compose(base, parse(layout))) for layout in layouts}
    assert shown == {
        layout: max(size.largest_rank(rank).parameters for rank in range(parse(layout).layout.pp))
        for layout, size in sizes.items()
    }
    assert shown["dp2"] == sizes["dp2"].parameters > max(shown[layout] for layout in layouts[1:])


@pytest.mark.slow
def test_json_document(config_file: Path) -> None:
    ended = verify(config_file, "--layouts", "dp2; tp2", "--json", "--dtype", "fp32", "--set", "data.path=nowhere")
    assert ended.returncode == 0
    progress = ["one process (0 of 2 done)", "dp2 (0 of 2 done)", "tp2 (1 of 2 done)"]
    assert ended.stderr.splitlines() == [f"Verifying {each}" for each in progress]
    document = json.loads(ended.stdout)
    assert [each["layout"] for each in document["layouts"]] == ["dp2", "tp2"]
    assert document["counts"] == {"equal": 2, "departs": 0, "error": 0, "unsplit": 0}
    assert (document["dtype"], document["tolerance"], document["data"]) == ("fp32", 1e-5, "random tokens")
    worst = document["layouts"][0]["worst"]
    assert 0 < worst["relative"] <= 1e-5
    assert worst["parameter"]


UNSPLIT = """
from torch import nn
from threefold import Plan

class Net(nn.Module):
    plan = Plan(layers=["table", "head"])

    def __init__(self, vocab_size):
        super().__init__()
        self.table, self.head = nn.Embedding(vocab_size, 6), nn.Linear(6, vocab_size)

plan = Net.plan

def loss(output, batch):
    return nn.functional.cross_entropy(output.flatten(0, 1), batch[1].flatten())
"""


@pytest.mark.slow
def test_one_layout_that_is_not_equal_decides_the_status(tmp_path: Path) -> None:
    """Here one whose tensor axis splits nothing of the model."""
    (tmp_path / "net.py").write_text(UNSPLIT)
    (tmp_path / "run.yaml").write_text(
        f"data: {{path: nowhere, sequence_length: 4}}\nmodel: {{file: {tmp_path / 'net.py'}:Net, vocab_size: 11}}\n"
    )
    ended = verify(tmp_path / "run.yaml", "dp2", "tp2", "--steps", "1")
    assert (ended.returncode, ended.stderr) == (1, "")
    rows = [line.split()[:3] for line in ended.stdout.splitlines()]
    assert ["dp2", "✓", "equal"] in rows
    assert ["tp2", "⚠", "unsplit"] in rows
    assert "1 of 2 layouts with nothing split of the model over one of the axes" in ended.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("dp2 zvb",), "Error: The layout 'dp2 zvb' has 'zvb'"),
        (("tp3",), "Error: Unsupported layout tp3: parallel.tp is 3 but must divide"),
        (("dp2", "--model", "nowhere.py"), "Error: --model is nowhere.py but nowhere.py is not a file"),
        (("dp2", "--all"), "Error: Layouts are given and --all too; leave one of the two out.\n"),
    ],
)
def test_misuse_is_one_sentence(threefold, config_file: Path, arguments: tuple[str, ...], sentence: str) -> None:
    status, output, error = threefold("verify", config_file, *arguments)
    assert (status, output) == (2, "")
    assert sentence in error


@pytest.mark.slow
def test_interrupt_is_quiet_and_leaves_no_worker(config_file: Path) -> None:
    process = ready.ReadyProcess([*VERIFY, config_file, "dp2", "--steps", "300"], new_session=True)
    try:
        assert process.stdout is not None
        assert any(line.startswith("layout") for line in process.stdout)  # one process is through, the layout begins
        os.killpg(process.pid, signal.SIGINT)
        _, error = process.communicate(timeout=300)
    finally:
        process.kill()
    assert (process.returncode, error) == (130, "")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
