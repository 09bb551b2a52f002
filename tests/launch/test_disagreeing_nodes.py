"""Two launchers, as on two nodes: each setting of the config in turn differs on one, and is named before a step."""

import json
import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from socket import gethostname
from typing import Any, Literal, get_args, get_origin

import pytest
import yaml

from tests.cli.runs import losses
from tests.support import custom_token_model
from tests.support.hosts import Host, NotAllowed, two_hosts
from tests.support.processes import BOUND, free_port
from tests.support.ready import ReadyProcess
from tests.train.support import write_tokens
from threefold.config import resolve
from threefold.config.loading import config_of
from threefold.config.schema import section_settings
from threefold.errors import UserError
from threefold.resilience.terms import NOT_COMPARED, settings_of

CONFIG = """
data: {{path: {tokens}, sequence_length: 16, split: '8,2'}}
model: {{num_layers: 2, hidden_size: 32, num_attention_heads: 4}}
parallel: {{dp: 2}}
train: {{max_steps: 2, global_batch_size: 4, device: cpu, eval_every: 0}}
"""
TRIED = (*range(9), 16, 32, 48, 0.001, 0.01, 0.5, 1.5, 2.5, True, False, "none", "full", "fp16", "bf16", "fp64")
OTHERS = (
    *(*TRIED, "llama", "sgd", "cosine", "linear", "relu", "gelu", "ring", "gpipe", "uniform", "gradients", "skip"),
    *("rollback", "fleet", "all", "text", "7,3", "memory://r", [3], [0.8, 0.9], ["dp1"], {"tokens": 2.0}),
    "a.safetensors",
    [{"match": "head", "lr_scale": 0.5}],
)
"""Values of which each setting takes at least one."""


_LLAMA = {"model": {"architecture": "llama", "num_layers": 4, "sliding_window": 8}}
_EXPERTS = {"model": {"architecture": "llama", "num_layers": 4, "num_experts": 4, "expert_capacity_factor": 1.0}}
_SHARED = {"model": {**_EXPERTS["model"], "shared_expert_ffn_hidden_size": 16}}
_YARN = {"model": {"architecture": "llama", "rope_scaling": "yarn", "rope_factor": 2.0, "rope_original_positions": 8}}
_LLAMA3 = {"model": {**_YARN["model"], "rope_scaling": "llama3"}}
_LONGROPE = {
    "model": {
        **_YARN["model"],
        "rope_scaling": "longrope",
        "num_attention_heads": 4,
        "head_dim": 4,
        "rope_short_factors": [1.0, 2.0],
        "rope_long_factors": [2.0, 3.0],
    }
}
_SLIDING = {"model": {**_YARN["model"], "sliding_window": 8, "qk_norm": True}}
_LATENT = {"model": {**_YARN["model"], "architecture": "deepseek", "num_experts": 4, "router_groups": 2}}
_FURTHER = {"model": {**_LLAMA["model"], "mtp_layers": 1}}
BASES: tuple[dict[str, dict[str, Any]], ...] = (
    *(
        {},
        _LLAMA,
        _EXPERTS,
        _SHARED,
        _YARN,
        _LLAMA3,
        _LONGROPE,
        _SLIDING,
        _LATENT,
        _FURTHER,
        {"train": {"exact": True}},
        {"train": {"recompute": "full"}},
    ),
    *({"parallel": {"dp": 1, "tp": 2}}, {"parallel": {"dp": 1, "pp": 2, "schedule": "interleaved"}}),
    *({"optimizer": {"name": name}} for name in ("sgd", "momentum", "adafactor", "lion", "muon")),
    *({"optimizer": {"ema_decay": 0.9}, "train": {"eval_every": 1}}, {"adapter": {"rank": 2}}),
    {"preference": {"beta": 0.1}},
    *({"optimizer": {"decay": "wsd"}}, {"precision": {"dtype": "bf16"}}, {"checkpoint": {"every": 1, "keep": 1}}),
)
"""Sections added to the config, of which each setting has an effect with at least one."""


@cache
def resolved_bases() -> list[tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]], dict[str, str]]]:
    """Return sections to add, the given settings with them, and the terms of the resolved config."""
    found = []
    for added in BASES:
        given: dict[str, dict[str, Any]] = yaml.safe_load(CONFIG.format(tokens="tokens"))
        for other, settings in added.items():
            given[other] = given.get(other, {}) | settings
        with suppress(UserError):
            found.append((added, given, settings_of(resolve(config_of(given), 64))))
    return found


def changed(key: str) -> tuple[dict[str, dict[str, Any]], Any] | None:
    """Sections to add, and a value of a setting that then changes the resolved config; None if none was found."""
    section, name = key.split(".")
    annotation = section_settings()[section][name].annotation
    words = [
        word for each in (annotation, *get_args(annotation)) if get_origin(each) is Literal for word in get_args(each)
    ]
    for added, given, before in resolved_bases():
        for value in (*words, *OTHERS):
            with suppress(UserError):
                varied = given | {section: given.get(section, {}) | {name: value}}
                if settings_of(resolve(config_of(varied), 64)).get(key) != before.get(key):
                    return added, value
    return None


WITHOUT_ANOTHER_VALUE = {"model.vocab_size", "model.arguments", "optimizer.arguments", "train.grain_leaf"} | {
    *("train.init_step", "train.init_average")
}
"""The data decides the first; the next two belong to code of one's own, the fourth has one value in such a run, and the
others need another run."""
KEYS = [f"{section}.{key}" for section, settings in section_settings().items() for key in settings]


def test_a_setting_that_differs_is_a_term_of_the_run() -> None:
    """Each setting with a value that a small run takes; the others need a model or a layout of their own."""
    silent = {key for key in KEYS if key not in NOT_COMPARED and changed(key) is None}
    assert silent == WITHOUT_ANOTHER_VALUE


@dataclass(frozen=True)
class Nodes:
    """Two nodes, each of which starts one rank of a run: network namespaces, or this host where those are forbidden."""

    hosts: tuple[Host, Host] | None

    def end(
        self,
        file: Path,
        *settings: str,
        launcher: bool = False,
        other: Path | None = None,
        folders: tuple[str, str] = ("run", "run"),
    ) -> tuple[int, str]:
        """Train on both, the second one with further settings, another config, or another run folder; return the
        number of nodes that failed, and what both printed.

        `launcher` has torchrun start the rank of each; otherwise its variables are set, which takes less time.
        """
        address = self.hosts[0].address if self.hosts else "127.0.0.1"
        port, started = free_port(), []  # also free where nothing runs
        for node, more in enumerate(((), settings)):
            train = [
                "threefold",
                "train",
                str((other or file) if node else file),
                "--run-dir",
                str(file.parent / folders[node]),
            ]
            train += [word for setting in more for word in ("--set", setting)]
            variables = {"RANK": node, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            variables |= {"MASTER_ADDR": address, "MASTER_PORT": port}
            if launcher:
                options = ["--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1", "--master-addr", address]
                train = ["torch.distributed.run", *options, "--master-port", str(port), "-m", *train]
                variables = {}
            host = self.hosts[node] if self.hosts else None
            given = {name: str(value) for name, value in variables.items()}
            command = host.module(*train) if host else [sys.executable, "-m", *train]
            started.append(ReadyProcess(command, env=os.environ | {"OMP_NUM_THREADS": "1"} | given))
        texts = [text for each in started for text in each.communicate(timeout=BOUND)]
        return sum(each.returncode != 0 for each in started), "".join(texts)


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(two_hosts())
        except NotAllowed as error:
            warnings.warn(f"two launchers on loopback stand for two nodes: {error}", stacklevel=1)
            hosts = None
        yield Nodes(hosts)


@pytest.fixture
def file(tmp_path: Path, tokens: Path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(CONFIG.format(tokens=tokens))
    return path


def add(file: Path, sections: dict[str, dict[str, Any]]) -> None:
    """Add settings to a config."""
    common = yaml.safe_load(file.read_text())
    for section, settings in sections.items():
        common[section] = common.get(section, {}) | settings
    file.write_text(yaml.safe_dump(common))


@pytest.mark.slow
def test_two_nodes_with_different_rates_do_not_train(file: Path, nodes: Nodes) -> None:
    failed, text = nodes.end(file, "optimizer.lr=0.005", launcher=True)
    assert failed == 2
    names = ("node0", "node1") if nodes.hosts else (gethostname(),) * 2
    sentence = f"optimizer.lr is 0.0006 on rank 0 ({names[0]}) but 0.005 on rank 1 ({names[1]}), and "
    assert text.count(sentence) == text.count("start every rank with the same config, data, code and environment") == 1
    assert not (file.parent / "run" / "metrics.jsonl").exists()


@pytest.mark.sweep
@pytest.mark.parametrize("key", [key for key in KEYS if key not in NOT_COMPARED])
def test_each_setting_differs_on_one_of_two_nodes(file: Path, nodes: Nodes, key: str) -> None:
    found = changed(key)
    if found is None:
        assert key in WITHOUT_ANOTHER_VALUE
        return
    more, value = found
    add(file, more)
    failed, text = nodes.end(file, f"{key}={yaml.safe_dump(value, default_flow_style=True).splitlines()[0]}")
    assert failed == 2, text
    assert key in text or (key.startswith("parallel.") and "The layout" in text), text
    assert not (file.parent / "run" / "metrics.jsonl").exists()


@pytest.mark.slow
def test_two_nodes_that_do_not_share_the_folder_do_not_train(file: Path, nodes: Nodes) -> None:
    failed, text = nodes.end(file, folders=("here", "there"))
    assert failed == 2
    names = ("node0", "node1") if nodes.hosts else (gethostname(),) * 2
    here, there = file.parent / "here", file.parent / "there"
    sentence = (
        f"--run-dir is {here} of host {names[0]} on rank 0, but another folder, {there} of host {names[1]}, on rank 1; "
        "all ranks write the checkpoints there, so name a folder that all hosts share."
    )
    assert text.count(sentence) == 1, text
    assert not list(file.parent.glob("*/metrics.jsonl"))
    assert not list(file.parent.glob("*/.shared-*"))


@pytest.mark.slow
def test_two_nodes_with_the_same_config_train(file: Path, nodes: Nodes) -> None:
    """Else nothing would follow from the refusals of the other tests."""
    failed, text = nodes.end(file)
    assert failed == 0, text
    assert len(losses(file.parent / "run")) == 2


@dataclass(frozen=True)
class Place:
    """Setting that names a place: values of two nodes that mean the same, and one that means something else.

    Attributes:
        settings: settings of both nodes, of which the sections are added to the config.
        same: further settings of the second node that are without effect.
        other: further settings of the second node that have one; None if all values mean the same.
        told: what the error then names.
    """

    settings: dict[str, dict[str, Any]]
    same: str
    other: str | None = None
    told: str = ""


def places(folder: Path, tokens: Path) -> dict[str, Place]:
    """Return a case for each setting that ranks do not compare."""
    model = Path(custom_token_model.__file__).read_text()
    others = write_tokens(folder / "others", [f"Document {n} is none of the others." for n in range(400)])
    for name in ("one", "two", "three"):  # the first two have the same files
        vocabulary = others if name == "three" else tokens
        shutil.copytree(tokens, folder / name)
        shutil.copy(vocabulary / "tokenizer.json", folder / name)
        (folder / name / "mine.py").write_text(model.replace("0.3", "0.2") if name == "three" else model)
        part = "content" if name == "three" else "role"
        (folder / name / "a.jinja").write_text(
            f"{{% for m in messages %}}{{{{ m.{part} + ': ' + m.content }}}} {{% endfor %}}"
        )
    text = folder / "chats.jsonl"
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2, I think."}]
    text.write_text(50 * (json.dumps({"messages": turns}) + "\n"))

    def all_three(key: str, told: str, sections: dict[str, dict[str, Any]], name: str) -> Place:
        section, setting = key.split(".")
        there = [f"{folder / each}{name}" for each in ("one", "two", "three")]
        given = sections | {section: sections.get(section, {}) | {setting: there[0]}}
        return Place(given, f"{key}={there[1]}", f"{key}={there[2]}", told)

    held = [folder / f"held-{name}.jsonl" for name in ("one", "two", "three")]
    for number, file in enumerate(held):
        file.write_text("".join(f'{{"text": "held-out line {line + number // 2}"}}\n' for line in range(9)))
    one, two = str(folder / "one"), str(folder / "two")
    chats = {"path": str(text), "tokenizer": f"{one}/tokenizer.json", "chat_template": f"{one}/a.jinja"}
    mixture = {"data": {"path": None, "mixture": {str(tokens): 2, one: 1}}}
    own, data = {"model": {"architecture": None}}, "the data at data.path"
    return {
        "data.path": Place({}, f"data.path={one}", f"data.path={others}", data),
        "data.mixture": Place(
            mixture,
            f"data.mixture={{{two}: 2, {one}: 1}}",
            f"data.mixture={{{two}: 3, {one}: 1}}",
            "the weight of data.mixture 1",
        ),
        "data.validation": Place(
            {"data": {"validation": str(held[0])}},
            f"data.validation={held[1]}",
            f"data.validation={held[2]}",
            "the data at data.validation",
        ),
        "data.tokenizer": all_three("data.tokenizer", data, {"data": chats}, "/tokenizer.json"),
        "data.chat_template": all_three("data.chat_template", data, {"data": chats}, "/a.jinja"),
        "data.cache": Place({"data": chats}, f"data.cache={folder / 'elsewhere'}"),
        "model.file": all_three("model.file", "the code of the model", own, "/mine.py:Tiny"),
        "train.device": Place({}, "train.device=auto"),
    }


@pytest.mark.sweep
def test_each_setting_that_is_not_compared_has_a_case(tmp_path: Path, tokens: Path) -> None:
    assert set(places(tmp_path, tokens)) == set(NOT_COMPARED)


@pytest.mark.sweep
@pytest.mark.parametrize("key", NOT_COMPARED)
def test_a_place_that_differs_is_without_effect_and_its_content_is_named(
    file: Path, tokens: Path, tmp_path: Path, nodes: Nodes, key: str
) -> None:
    case = places(tmp_path, tokens)[key]
    add(file, case.settings)
    run = tmp_path / "run"
    failed, text = nodes.end(file)
    assert failed == 0, text
    alike = losses(run)
    shutil.rmtree(run)
    failed, text = nodes.end(file, case.same)
    assert failed == 0, text
    assert losses(run) == alike
    shutil.rmtree(run)
    if case.other:
        failed, text = nodes.end(file, case.other)
        assert failed == 2, text
        assert case.told in text
        assert not (run / "metrics.jsonl").exists()


RULE = """
import torch

class Sign(torch.optim.Optimizer):
    def __init__(self, params, lr, momentum=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad.sign(), alpha=group["lr"] * group["momentum"])
"""


def custom_code(folder: Path) -> dict[str, tuple[dict[str, dict[str, Any]], str]]:
    """Sections and a setting of the second node, for each setting of which `changed` finds no other value."""
    (folder / "mine.py").write_text(Path(custom_token_model.__file__).read_text())
    (folder / "rule.py").write_text(RULE)
    model = {"architecture": None, "file": f"{folder / 'mine.py'}:Tiny", "arguments": {"blocks": 2}}
    return {
        "model.vocab_size": ({}, "model.vocab_size=4000"),
        "model.arguments": ({"model": model}, "model.arguments={blocks: 3}"),
        "optimizer.arguments": (
            {"optimizer": {"name": f"{folder / 'rule.py'}:Sign", "arguments": {"momentum": 0.9}}},
            "optimizer.arguments={momentum: 0.8}",
        ),
        "train.grain_leaf": ({"train": {"exact": True}}, "train.grain_leaf=2"),
        "train.init_step": ({}, "train.init_step=7"),  # refused without a run to begin from
        "train.init_average": ({}, "train.init_average=true"),
    }


@pytest.mark.sweep
@pytest.mark.parametrize("key", sorted(WITHOUT_ANOTHER_VALUE))
def test_a_setting_of_custom_code_is_named(file: Path, tmp_path: Path, nodes: Nodes, key: str) -> None:
    settings, other = custom_code(tmp_path)[key]
    add(file, settings)
    failed, text = nodes.end(file, other)
    assert failed == 2, text
    assert key in text
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
