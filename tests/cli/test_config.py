"""`threefold config schema`, `presets` and `diff`."""

import json
import shutil
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator
from typer.testing import CliRunner

from threefold.cli.main import app
from threefold.config import load_config
from threefold.config.presets import PRESETS
from threefold.planner.reference import FEATURES, Feature, config_with

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*.yaml"))


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    ended = CliRunner().invoke(app, ["config", "schema"])
    assert ended.exit_code == 0
    document = json.loads(ended.stdout)
    Draft202012Validator.check_schema(document)
    return Draft202012Validator(document)


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_examples_satisfy_the_schema(schema: Draft202012Validator, path: Path) -> None:
    schema.validate(json.loads(json.dumps(load_config(path).given())))


@pytest.mark.parametrize("feature", FEATURES, ids=lambda feature: feature.name)
def test_resolved_configs_satisfy_the_schema(schema: Draft202012Validator, feature: Feature) -> None:
    schema.validate(json.loads(json.dumps(config_with((feature,)).sections())))


@pytest.mark.parametrize(
    "wrong", [{"data": {"path": "x"}, "modell": {}}, {"data": {"path": "x"}, "parallel": {"tp": 0}}, {"model": {}}]
)
def test_mistakes_do_not(schema: Draft202012Validator, wrong: dict[str, object]) -> None:
    assert not schema.is_valid(wrong)


def test_settings_that_differ_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = "data: {path: tokens, sequence_length: 32}\nmodel: {num_layers: 2, hidden_size: 32, vocab_size: 61}\n"
    Path("a.yaml").write_text(text)
    Path("run").mkdir()
    Path("run/config.yaml").write_text(text + "parallel: {dp: 2, zero: 1}\n")
    ended = CliRunner().invoke(app, ["config", "diff", "a.yaml", "run"])
    assert ended.exit_code == 1
    rows = [line.split() for line in ended.stdout.splitlines()]
    assert ["parallel.dp", "1", "2"] in rows
    assert ["parallel.zero", "0", "1"] in rows
    assert ["parallel.zero_shards", "1", "2"] in rows  # follows from dp

    shutil.copy("a.yaml", "b.yaml")
    ended = CliRunner().invoke(app, ["config", "diff", "a.yaml", "b.yaml"])
    assert (ended.exit_code, ended.stdout) == (0, "All settings are equal.\n")


def test_presets_are_listed_with_their_sizes() -> None:
    """At 80 columns, no name in two lines."""
    ended = CliRunner().invoke(app, ["config", "presets"], env={"COLUMNS": "80"})
    assert ended.exit_code == 0, ended.output
    rows = {line.split()[0]: line.split()[1:] for line in ended.stdout.splitlines() if line.strip()}
    assert rows.keys() > PRESETS.keys()
    assert rows["gpt2-124m"] == ["0.12", "12", "768", "12", "50,257", "1,024"]
    assert rows["qwen3-30b-a3b"] == ["30.53", "3.35", "48", "2,048", "32/4", "151,936", "40,960"]
