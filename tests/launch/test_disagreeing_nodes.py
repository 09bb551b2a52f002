"""Two launchers, as on two nodes: each setting of the config in turn differs on one, and is named before a step."""

import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from tests.support.processes import free_port
from threefold.config import load_config, resolve
from threefold.config.loading import config_of
from threefold.config.schema import section_settings
from threefold.errors import UserError
from threefold.train.terms import NOT_COMPARED, settings_of

CONFIG = """
data: {{path: {tokens}, sequence_length: 16, split: '8,2'}}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4}}
parallel: {{dp: 2}}
train: {{max_steps: 2, global_batch_size: 4, device: cpu, eval_every: 0}}
"""
TRIED = (*range(9), 16, 32, 48, 0.001, 0.01, 0.5, 1.5, 2.5, True, False, "none", "full", "fp16", "bf16", "fp64")
WORDS = (
    "llama",
    "sgd",
    "cosine",
    "linear",
    "relu",
    "gelu",
    "ring",
    "gpipe",
    "uniform",
    "gradients",
    "skip",
    "rollback",
)
OTHERS = (
    *TRIED,
    *WORDS,
    "fleet",
    "all",
    "text",
    "7,3",
    "memory://r",
    [3],
    [0.8, 0.9],
    ["dp1"],
    {"tokens": 2.0},
    "a.safetensors",
)
"""Values of which each setting takes at least one."""


_LLAMA = {"model": {"architecture": "llama", "num_layers": 4, "sliding_window": 8}}
_EXPERTS = {"model": {"architecture": "llama", "num_layers": 4, "num_experts": 4, "expert_capacity_factor": 1.0}}
_SHARED = {"model": {**_EXPERTS["model"], "shared_expert_ffn_hidden_size": 16}}
_YARN = {"model": {"architecture": "llama", "rope_scaling": "yarn", "rope_factor": 2.0, "rope_original_positions": 8}}
_LLAMA3 = {"model": {**_YARN["model"], "rope_scaling": "llama3"}}
BASES: tuple[dict[str, dict[str, Any]], ...] = (
    *({}, _LLAMA, _EXPERTS, _SHARED, _YARN, _LLAMA3, {"train": {"exact": True}}, {"train": {"recompute": "full"}}),
    *({"parallel": {"dp": 1, "tp": 2}}, {"parallel": {"dp": 1, "pp": 2, "schedule": "interleaved"}}),
    *({"optimizer": {"name": name}} for name in ("sgd", "momentum", "adafactor", "lion", "muon")),
    *({"optimizer": {"decay": "wsd"}}, {"precision": {"dtype": "bf16"}}, {"checkpoint": {"every": 1, "keep": 1}}),
)
"""Sections added to the config, of which each setting has an effect with at least one."""


def changed(file: Path, key: str) -> tuple[dict[str, dict[str, Any]], Any] | None:
    """Sections to add, and a value of a setting that then changes the resolved config; None if none was found."""
    section, name = key.split(".")
    annotation = section_settings()[section][name].annotation
    words = [
        word for each in (annotation, *get_args(annotation)) if get_origin(each) is Literal for word in get_args(each)
    ]
    for added in BASES:
        given = load_config(file).given()
        for other, settings in added.items():
            given[other] = given.get(other, {}) | settings
        with suppress(UserError):
            before = settings_of(resolve(config_of(given), 64))
            for value in (*words, *OTHERS):
                with suppress(UserError):
                    varied = given | {section: given.get(section, {}) | {name: value}}
                    if settings_of(resolve(config_of(varied), 64)).get(key) != before.get(key):
                        return added, value
    return None


WITHOUT_ANOTHER_VALUE = {"model.vocab_size", "model.arguments", "optimizer.arguments", "train.grain_leaf"}
"""The data decides the first; the next two belong to code of one's own, and the last has one value in such a run."""
KEYS = [f"{section}.{key}" for section, settings in section_settings().items() for key in settings]


def test_a_setting_that_differs_is_a_term_of_the_run(tmp_path: Path) -> None:
    """Each setting with a value that a small run takes; the others need a model or a layout of their own."""
    file = tmp_path / "c.yaml"
    file.write_text(CONFIG.format(tokens=tmp_path))
    silent = {key for key in KEYS if key not in NOT_COMPARED and changed(file, key) is None}
    assert silent == WITHOUT_ANOTHER_VALUE


def started(node: int, port: int, file: Path, *settings: str) -> "subprocess.Popen[str]":
    command = [str(Path(sys.executable).parent / "torchrun"), "--nnodes", "2", "--node-rank", str(node)]
    command += ["--nproc-per-node", "1", "--master-addr", "127.0.0.1", "--master-port", str(port)]
    command += ["-m", "threefold", "train", str(file), "--run-dir", str(file.parent / f"run{port}")]
    command += [word for setting in settings for word in ("--set", setting)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def ended(file: Path, *settings: str) -> tuple[list[int], str]:
    """Exit statuses and output of two nodes, of which the second has further settings."""
    port = free_port()
    nodes = [started(0, port, file), started(1, port, file, *settings)]
    texts = [node.communicate(timeout=300)[0] for node in nodes]
    return [node.returncode for node in nodes], "".join(texts)


@pytest.fixture
def file(tmp_path: Path, tokens: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(tokens=tokens))
    return path


@pytest.mark.slow
def test_two_nodes_with_different_rates_do_not_train(file: Path) -> None:
    statuses, text = ended(file, "optimizer.lr=0.005")
    assert statuses == [1, 1]
    assert "optimizer.lr is 0.0006 on rank 0" in text
    assert text.count("start every rank with the same config, data, code and environment") == 1
    assert not list(file.parent.glob("run*/metrics.jsonl"))


@pytest.mark.sweep
@pytest.mark.parametrize("key", KEYS)
def test_each_setting_differs_on_one_of_two_nodes(file: Path, key: str) -> None:
    found = None if key in NOT_COMPARED else changed(file, key)
    if found is None:
        pytest.skip("compared by content, or no other value suits this run")
    added, value = found
    common = yaml.safe_load(file.read_text())
    for section, settings in added.items():
        common[section] = common.get(section, {}) | settings
    file.write_text(yaml.safe_dump(common))
    statuses, text = ended(file, f"{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}")
    assert 0 not in statuses, text
    assert key in text or "layout" in text, text
