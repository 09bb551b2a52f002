"""The table of families in docs/models.md says what each family has."""

import re
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.sweep import sweep
from tests.verify.support import task, verify
from threefold.config import Config, resolve
from threefold.config.model import ModelConfig
from threefold.errors import UserError
from threefold.huggingface.mapping import huggingface_types
from threefold.models.llama import LlamaConfig
from threefold.planner.block import block_shapes, describe_model
from threefold.verify.verifier import EQUAL

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
(TABLE,) = re.findall(r"\| Family \| Defaults.*?\n\n", PAGE, re.DOTALL)
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in TABLE.strip().splitlines()[2:]]


def resolved(family: str, **train: object) -> Config:
    given = {"model": {"architecture": family}, "data": {"path": "unused", "sequence_length": 64}, "train": train}
    return resolve(Config.model_validate(given), 512)


def shown(model: ModelConfig, name: str) -> str:
    value = getattr(model, name)
    return str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_a_family_is_what_its_row_says(row: list[str]) -> None:
    family, defaults, types, exact, planned = row
    family = family.strip("`")
    model = resolved(family).model
    assert types.split(", ") == [kind.name for kind in huggingface_types().values() if kind.architecture == family]
    for name, value in re.findall(r"`(\w+): ([\w.]+)`", defaults):
        assert shown(model, name) == value
        assert shown(resolved("llama").model, name) != value
    if family != "gpt":  # all defaults that differ are in the row
        own, usual = type(model).model_fields, LlamaConfig.model_fields
        differing = {name for name in LlamaConfig.unlisted & own.keys() if own[name].default != usual[name].default}
        assert differing <= {*re.findall(r"`(\w+)", defaults)}
    is_exact = False
    with suppress(UserError):
        is_exact = resolved(family, exact=True).train.exact
    assert is_exact == (exact == "yes")
    assert planned == "yes"
    assert len(block_shapes(describe_model(model, 64))) == model.num_layers


def test_operations_of_further_blocks_are_counted() -> None:
    given = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "vocab_size": 512}
    flops = []
    for depths in range(3):
        model = {"architecture": "llama", "mtp_layers": depths, **given}
        made = resolve(Config.model_validate({"model": model, "data": {"path": "unused", "sequence_length": 64}}), 512)
        flops.append(describe_model(made.model, 64).flops_per_token / 6)
    block = (flops[0] - 512 * 64) / 2
    assert [flops[1] - flops[0], flops[2] - flops[1]] == [block + 2 * 64 * 64 + 512 * 64] * 2


@pytest.mark.slow
def test_further_blocks_are_verified_over_every_axis(pool, tmp_path: Path) -> None:
    sizes = {"num_experts": 8, "expert_ffn_hidden_size": 32, "shared_expert_ffn_hidden_size": 32, "dense_layers": 1}
    given = {"model": {"architecture": "deepseek", "num_layers": 3, "mtp_layers": 2, **sizes}}
    given |= {"data": {"path": "none", "sequence_length": 64}, "train": {"global_batch_size": 16}}
    layouts = ("tp2·cp2", "dp2·pp2")
    for result in verify(pool, task(*layouts, given=Config.model_validate(given)), tmp_path, *layouts):
        assert result.verdict == EQUAL, (str(result.spec), result.worst, result.message)


MIXTURES = ("gpt-oss-20b", "deepseek-v3", "deepseek-v2-lite")
PRESETS = ("gemma-3-1b", "olmo-3-7b", *MIXTURES, "glm-4-9b-0414", "gemma-2-2b", "olmo-2-1b", "phi-4", "gemma-3-270m")


@sweep("preset", PRESETS, slow=(*range(4), 9))
def test_a_shrunk_preset_computes_in_each_layout_what_one_process_does(pool, tmp_path: Path, preset: str) -> None:
    given = {"model": {"preset": preset}, "data": {"path": "none", "sequence_length": 512}}
    layouts = ("tp2·cp2", "dp2·pp2", *(("dp2·tp2·ep2",) if preset in MIXTURES else ()))
    todo = task(*layouts, given=Config.model_validate({**given, "train": {"global_batch_size": 16}}))
    for result in verify(pool, todo, tmp_path, *layouts):
        assert result.verdict == EQUAL, (str(result.spec), result.worst, result.message)
