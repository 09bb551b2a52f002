"""Layouts and schedules in a notebook: the documents of the commands, as HTML and SVG that a cell shows."""

import json
from html import unescape
from pathlib import Path

import pytest

import threefold as t3
from tests.support.command import Command
from threefold.errors import UserError

CONFIG = """data: {path: none, sequence_length: 16}
model: {num_layers: 4, hidden_size: 32, num_attention_heads: 4, vocab_size: 99}
parallel: {dp: 1, tp: 2, pp: 2}
train: {max_steps: 1, global_batch_size: 8}
"""


def test_a_page_is_the_one_of_the_command(tmp_path: Path, threefold: Command) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(CONFIG)
    page = t3.show(t3.load_config(path), traffic=False, height=400)
    printed = json.loads(threefold("show", path, "--json", "--no-traffic").output)
    assert json.loads(json.dumps(page.document)) == printed
    ended = threefold("show", path, "--no-traffic", "--html", tmp_path / "a.html")
    assert ended.status == 0, ended.error
    shown = page._repr_html_()
    assert "height: 400px" in shown
    assert unescape(shown.partition('srcdoc="')[2].removesuffix('"></iframe>')) == page.html
    assert page.html == (tmp_path / "a.html").read_text()
    assert t3.show(str(path), traffic=False).document == page.document


def test_a_simulation_is_the_one_of_the_command(threefold: Command) -> None:
    step = t3.simulate("zbv", 3, 6, forward=[2, 1, 1.5], backward_weight=0.5, transfer=0.1)
    options = ("--forward", "2,1,1.5", "--backward-weight", "0.5", "--transfer", "0.1")
    printed = threefold("simulate", "--schedule", "zbv", "--stages", "3", "--microbatches", "6", *options, "--json")
    assert json.loads(json.dumps(step.facts)) == json.loads(printed.output)
    picture = step._repr_svg_()
    assert picture.startswith("<?xml")
    assert "</svg>" in picture
    assert "<path" in picture


def test_a_schedule_that_does_not_exist() -> None:
    with pytest.raises(UserError, match="zbw"):
        t3.simulate("zbw")
    with pytest.raises(UserError, match="has 0 micro-batches but needs at least 1"):
        t3.simulate("interleaved", 4, 0)
