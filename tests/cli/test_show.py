"""`threefold show`: its table, its JSON document, its page, and what it refuses."""

import json
from pathlib import Path
from typing import Any

import pytest

CONFIG = """
model: {num_layers: 2, hidden_size: 32, num_attention_heads: 4, vocab_size: 100}
data: {path: nowhere, sequence_length: 16}
parallel: {dp: 2, tp: 2, pp: 2}
train: {global_batch_size: 8, device: cpu}
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = Path("run.yaml")
    path.write_text(CONFIG)
    return path


def test_the_table(threefold, config: Path) -> None:
    status, output, error = threefold("show", config, "--compare", "dp4,tp2")
    assert (status, error) == (0, "")
    lines = output.splitlines()
    assert lines[0] == "GPT, 29,184 parameters: dp 2 · tp 2 · pp 2, 8 ranks, fp32."
    assert lines[1].startswith("1f1b: 4 micro-batches, bubble ")
    words = [line.split() for line in lines]
    assert ["blocks.*.attn.qkv.weight", "96", "×", "32", "tp", "48", "×", "32"] in words
    assert ["blocks.*.attn.proj.weight", "32", "×", "32", "tp", "32", "×", "16"] in words
    assert any(row[:2] == ["tp", "all_reduce"] and row[-2:] == ["each", "pass"] for row in words)
    assert "To dp 4 · tp 2 · pp 1, weights of each rank:" in lines


def test_names_of_weights_fit_the_terminal_and_a_further_block_is_one_row(
    threefold, config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = "preset: deepseek-v3, num_layers: 6, mtp_layers: 2"
    config.write_text(CONFIG.replace("num_layers: 2, hidden_size: 32, num_attention_heads: 4, vocab_size: 100", sizes))
    command = ("show", config, "--no-traffic", "--set", "parallel.ep=2")
    lines = {}
    for columns in ("80", "120"):
        monkeypatch.setenv("COLUMNS", columns)
        status, output, error = threefold(*command)
        assert (status, error) == (0, "")
        lines[columns] = [line.strip() for line in output.splitlines()]
        assert max(map(len, output.splitlines()[1:])) <= int(columns)
        assert [line.split() for line in lines[columns] if ".block." in line] == [
            [f"head.depths.{depth}.block.*", "as", "blocks.*"] for depth in (0, 1)
        ]
    at = next(place for place, line in enumerate(lines["80"]) if line.startswith("blocks.*.mlp.shared. "))
    assert lines["80"][at + 1] == "gate_up.weight"
    assert any(line.startswith("blocks.*.mlp.shared.gate_up.weight ") for line in lines["120"])


@pytest.mark.parametrize("command", [("show",), ("show", "--json"), ("dry-run", "--all-stages"), ("dry-run", "--json")])
def test_work_of_minutes_tells_where_it_is(
    threefold, config: Path, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("threefold.report.progress.QUIET", 0.0)
    name, *options = command
    status, output, error = threefold(name, config, *options)
    assert status == 0
    assert output.startswith("{") == ("--json" in options)
    assert error.splitlines()[:2] == ["Running rank 0 (0 of 4 done)", "Running rank 0 (1 of 4 done)"]


def test_json_and_page_have_the_same_document(threefold, config: Path) -> None:
    status, output, error = threefold("show", config, "--json", "--html", "layout.html", "--no-traffic")
    assert (status, error) == (0, "")
    document = json.loads(output)
    assert document["version"] == 1
    assert document["collectives"] == {"ranks": None, "why": "they were not asked for"}
    page = Path("layout.html").read_text()
    assert json.loads(page.split('id="document">')[1].split("</script>")[0]) == document
    assert len(page.encode()) < 300_000
    assert "http://www.w3.org/2000/svg" in page  # a name, which nothing loads
    assert page.count("://") == 1
    assert threefold("show", config, "--html", "layout.html", "--no-traffic").status == 0, "a page is replaced"


def test_another_config_and_a_report(threefold, config: Path) -> None:
    Path("other.yaml").write_text(CONFIG.replace("dp: 2, tp: 2, pp: 2", "tp: 4, pp: 2"))
    worst: dict[str, Any] = {"embed.tokens.weight": 1e-16, "blocks.1.mlp.up.bias": 3e-15}
    report = {"model": "GPT", "dtype": "fp64", "steps": 3, "full": False, "tolerance": 1e-12}
    report["layouts"] = [{"layout": "dp2·tp2·pp2", "verdict": "equal", "worst_by_parameter": worst}]
    Path("report.json").write_text(json.dumps(report))
    options = ("--no-traffic", "--compare", "other.yaml", "--verify", "report.json")
    status, output, error = threefold("show", config, *options)
    assert (status, error) == (0, "")
    assert "To dp 1 · tp 4 · pp 2, weights of each rank:" in output
    assert "1 of 1 layout equal; the worst error is 3.0e-15, of blocks.1.mlp.up.bias, and 1e-12 is allowed." in output
    worst["embed.tokens.weight"] = float("inf")
    report["layouts"] = [{"layout": "dp2·tp2·pp2", "verdict": "departs", "worst_by_parameter": worst}]
    Path("report.json").write_text(json.dumps(report))
    output = threefold("show", config, *options).output
    assert "0 of 1 layout equal; the worst error is inf, of embed.tokens.weight, and 1e-12 is allowed." in output


def test_a_model_of_ones_own(threefold) -> None:
    """Its memory has no formulas and, with stages, its collectives cannot be counted; the rest is shown."""
    own = Path(__file__).parents[2] / "examples/own_model"
    layout = ("parallel.dp=1", "parallel.tp=2", "parallel.pp=2", "model.vocab_size=64")
    overrides = [word for setting in layout for word in ("--set", setting)]
    status, output, error = threefold("show", own / "own.yaml", "--json", "--model", own / "model.py", *overrides)
    assert (status, error) == (0, "")
    document = json.loads(output)
    assert document["memory"]["stages"] is None
    assert "whose operations have no formulas" in document["memory"]["why"]
    assert document["collectives"]["ranks"] is None
    assert [kind["name"] for kind in document["tensors"] if kind["cuts"]]


HALF_PLANNED = """\
from torch import nn

from threefold.models.sharding import Constant, ModelPlan, Replicated


class Two(nn.Sequential):
    plan = ModelPlan({"embed": Replicated()}, ("embed", "head"), (1.0, 1.0), lambda name: Constant(0.0))

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 8)
        self.head = nn.Linear(8, vocab_size)
"""


@pytest.mark.parametrize("command", [("show",), ("show", "--no-traffic"), ("config", "size")], ids=" ".join)
def test_a_plan_without_a_rule_for_a_weight_is_refused(threefold, config: Path, command: tuple[str, ...]) -> None:
    Path("two.py").write_text(HALF_PLANNED)
    config.write_text("data: {path: none}\nmodel: {vocab_size: 64}\nparallel: {dp: 2}")
    status, output, error = threefold(*command, config, "--model", "two.py:Two")
    assert (status, output) == (2, "")
    expected = "Error: split says nothing about the parameter 'head.weight'; give 'head' Replicated().\n"
    assert error == expected


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--html", "layout.htm"), "The page layout.htm must end in .html; use layout.html."),
        (("--html", "no/layout.html"), "--html no/layout.html cannot be written: there is no folder no."),
        (("--html", "mine.html"), "mine.html exists already and is not a page of this program; use another name."),
        (("--compare", "dp2tp3"), "parallel.tp is 3"),
        (("--compare", "tpp4"), "The layout 'tpp4' has 'tpp4', which is neither an axis"),
        (("--compare", "none.yaml"), "Cannot read the config none.yaml: No such file or directory."),
        (("--compare", "other.yaml"), "The two layouts are of different models: "),
        (("--verify", "none.json"), "Cannot read the report none.json: No such file or directory."),
        (("--verify", "run.yaml"), "Cannot read the report run.yaml: it is not JSON"),
        (
            ("--verify", "empty.json"),
            "The report empty.json is not a report of threefold verify (it has no 'layouts');",
        ),
        (("--hardware", "h1000"), "The hardware h1000 is unknown;"),
        (("--set", "parallel.tp=3"), "parallel.tp is 3"),
    ],
)
def test_what_is_refused(threefold, config: Path, options: tuple[str, ...], sentence: str) -> None:
    Path("mine.html").write_text("<p>Mine.</p>")
    Path("empty.json").write_text("{}")
    Path("other.yaml").write_text(CONFIG.replace("hidden_size: 32", "hidden_size: 64"))
    status, output, error = threefold("show", config, "--no-traffic", *options)
    assert (status, output) == (2, "")
    assert error.startswith("Error: ")
    assert sentence in error
    assert error.count("\n") == 1
    assert Path("mine.html").read_text() == "<p>Mine.</p>"
    assert not Path("layout.html").exists()
