"""The table of families in docs/models.md: each cell of a row is what the family does."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.huggingface.small_models import MODELS as ROUND_TRIPS
from tests.support.exact import EXACT, exact_run, spread
from tests.support.exact import check as check_bits
from tests.support.layouts import laid_out
from tests.support.parity import BIASED_SIZES, DEEPSEEK, LLAMA, LLAMA_SIZES, OSS_SIZES, Case, Trace, check
from tests.support.sweep import sweep
from tests.verify.support import task, verify
from threefold.config import Config, ModelConfig, resolve
from threefold.config.presets import PRESETS
from threefold.config.schedules import SCHEDULES
from threefold.errors import UserError
from threefold.huggingface.files import choose_type, read_model, write_model
from threefold.huggingface.mapping import huggingface_types
from threefold.models.llama import LlamaConfig
from threefold.planner.block import block_shapes, describe_model
from threefold.planner.estimate import estimate
from threefold.planner.hardware import find_hardware
from threefold.verify.verifier import EQUAL
from threefold.verify.worker_pool import WorkerPool

PAGE = (Path(__file__).parents[2] / "docs/models.md").read_text(encoding="utf-8")
(TABLE,) = re.findall(r"\| Family \| Models.*?\n\n", PAGE, re.DOTALL)
ROWS: dict[str, dict[str, str]] = {}
"""Cells of each family's row, by the first word of the column's title."""


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


for line in TABLE.strip().splitlines()[2:]:
    titles = [re.findall(r"\w+", title)[0] for title in cells(TABLE.splitlines()[0])]
    row = dict(zip(titles, cells(line), strict=True))
    ROWS[re.findall(r"`(\w+)`", row["Family"])[0]] = row


def named(cell: str) -> set[str]:
    """Return the names of settings in a cell."""
    return set(re.findall(r"`(\w+)", cell))


def resolved(model: dict[str, Any], **train: object) -> Config:
    given = {"model": model, "data": {"path": "unused", "sequence_length": 16}, "train": train}
    return resolve(Config.model_validate(given), model.get("vocab_size", 512))


def shown(model: ModelConfig, name: str) -> str:
    value = getattr(model, name)
    return str(value).lower() if isinstance(value, bool) else str(value)


def models_of(family: str) -> Iterator[dict[str, Any]]:
    """Yield the settings of a model with the family's defaults, and of each of its presets."""
    yield {"architecture": family}
    for name, preset in PRESETS.items():
        if preset.get("architecture", "gpt") == family:
            yield {"preset": name}


def test_every_built_in_family_has_a_row() -> None:
    of_presets = {preset.get("architecture", "gpt") for preset in PRESETS.values()}
    assert sorted(ROWS) == sorted({kind.architecture for kind in huggingface_types().values()})
    assert of_presets == {*ROWS}


@pytest.mark.parametrize("family", ROWS)
def test_settings(family: str) -> None:
    model = resolved({"architecture": family}).model
    cell = ROWS[family]["Settings"]
    for name, value in re.findall(r"`(\w+): ([\w.]+)`", cell):
        assert shown(model, name) == value or (family, name) == ("gpt", "position_embedding")
        assert shown(resolved({"architecture": "llama"}).model, name) != value or family == "gpt"
    if family != "gpt":  # all defaults that differ are in the row
        own, usual = type(model).model_fields, LlamaConfig.model_fields
        differing = {name for name in LlamaConfig.unlisted & own.keys() if own[name].default != usual[name].default}
        assert differing <= named(cell)


@pytest.mark.parametrize("family", ROWS)
def test_exact_runs_take_it_or_refuse_the_named_settings(family: str) -> None:
    cell, refused = ROWS[family]["Exact"], set[str]()
    for place, model in enumerate(models_of(family)):
        names = list(refused_by_exact_runs(model))
        refused |= {*names}
        if place == 0:
            assert cell.startswith("no" if names else "yes")
    assert refused == ({"architecture"} if cell == "no: latent attention" else named(cell))


def refused_by_exact_runs(model: dict[str, Any]) -> Iterator[str]:
    """Yield settings that an exact run refuses until each has the value that the error names."""
    settings = dict(model)
    while True:
        try:
            assert resolved(settings, exact=True).train.exact
            return
        except UserError as error:
            ((name, works),) = re.findall(r"^model\.(\w+) is .* but train\.exact is true, .*; use (.+)\.$", str(error))
        yield name
        assert name not in settings or name == "architecture"
        if name == "architecture":
            return
        settings[name] = yaml.safe_load(works)


@pytest.mark.parametrize("family", ROWS)
def test_files_of_each_type_are_read_and_written(family: str) -> None:
    """Their weights, logits and bits are compared in `tests/huggingface/test_models.py`."""
    row, kinds = ROWS[family], {kind.name: kind for kind in huggingface_types().values() if kind.architecture == family}
    assert row["Import"] == ", ".join(kinds)
    assert row["Export"].startswith("the same")
    tried = {name: [settings for kind, settings in ROUND_TRIPS.values() if kind == name] for name in kinds}
    assert all(tried.values())
    for name, each in tried.items():
        for given in each:
            kind, settings = read_model({"model_type": name, **given}, "config.json")
            model = resolved(settings).model
            assert choose_type(model, name) is kind is kinds[name]
            assert read_model(write_model(model, kind, "float32", None, {}), "config.json")[1] == settings
            if "mtp_layers" not in type(model).model_fields or name == "deepseek_v2":
                continue
            further = resolved({**settings, "mtp_layers": 1}).model
            if "mtp_layers" in named(row["Export"]):
                with pytest.raises(UserError, match=r"has a place for this model: .*model\.mtp_layers 1"):
                    choose_type(further, name)
            else:
                assert write_model(further, choose_type(further, name), "float32", None, {})


@pytest.mark.parametrize("family", ROWS)
def test_the_planner_knows_its_blocks(family: str) -> None:
    assert ROWS[family]["Planner"] == "yes"
    for model in models_of(family):
        config = resolved(model)
        assert len(block_shapes(describe_model(config.model, 16))) == config.model.num_layers
        assert estimate(config, find_hardware("h100")).step_seconds > 0


SIZES: tuple[tuple[str, Any], ...] = (("num_key_value_heads", 6), ("head_dim", 4), ("sliding_window", 5))
EXPERTS: tuple[tuple[str, Any], ...] = (("num_experts", 4), ("experts_per_token", 2), ("expert_ffn_hidden_size", 18))
LATENT: tuple[tuple[str, Any], ...] = (
    *DEEPSEEK.model,
    *(each for each in BIASED_SIZES if each[0] not in ("architecture", "num_key_value_heads", "head_dim")),
)
YARN = (("rope_scaling", "yarn"), ("rope_factor", 2.0), ("rope_original_positions", 7))
SMALL: dict[str, tuple[tuple[str, Any], ...]] = {
    "gpt": (),
    "llama": LLAMA_SIZES,
    "olmo": (*SIZES, ("attention_pattern", "3 sliding : 1 full"), *YARN),
    "gemma": (
        *(*SIZES, ("attention_pattern", "1 sliding : 1 full"), ("sliding_rope_theta", 30.0), ("qk_norm", True)),
        *(("attention_scale", 0.4), ("attention_softcap", 0.7), ("logit_softcap", 0.9)),
    ),
    "glm": SIZES[:2],
    "deepseek": (*LATENT, ("mtp_layers", 1)),
    "gpt_oss": (*SIZES, *OSS_SIZES[3:], ("attention_pattern", "1 sliding : 1 full"), *YARN),
}
"""Settings of a small model of each family, as of its presets."""
LAYOUTS = {
    "dp": ("dp2",),
    "tp": ("tp2",),
    "sequence_parallel": ("tp2 sp",),
    "pp": ("pp2", *(f"pp2 {schedule} micro4" for schedule in SCHEDULES if schedule != "1f1b")),
    "cp": ("cp2", "cp2 ring"),
    "zero": ("dp2 zero1", "dp2 zero2", "dp2 zero3"),
    "ep": ("dp2 ep2", "dp2,tp2 sp zero3 ep2"),
    "": ("dp2,cp2 ring zero3", "tp2,pp2 zbv sp micro4", "dp2,tp2,pp2 interleaved sp zero1 micro4"),
}
"""Layouts of each word of the table; of none, those of several words."""


def case_of(family: str) -> Case:
    model = tuple({**dict(SMALL[family]), "architecture": family}.items())
    return replace(LLAMA, model=model, layers=4, batch=8, positions="learned" if family == "gpt" else "rope")


def case_in(family: str, word: str, words: str) -> Case:
    """Return the case in a layout of a word of the table; for `ep`, with experts if it has none."""
    case = case_of(family)
    if word == "ep" and "num_experts" not in dict(case.model):
        case = replace(case, model=(*case.model, *EXPERTS))
    return laid_out(case, words)


def refused_layouts(family: str) -> set[str]:
    cell = ROWS[family]["Layouts"]
    assert re.fullmatch(r"all( but `\w+`(, `\w+`)*)?", cell)
    return named(cell)


def test_the_layouts_are_those_that_the_page_names() -> None:
    (sentence,) = re.findall(r"All layouts are (.*?):", PAGE, re.DOTALL)
    assert named(sentence) == LAYOUTS.keys() - {""}


NEW = ("olmo", "gemma", "glm", "gpt_oss")  # of whose layouts no other file has quick tests
PROVEN = [
    (family, word, words)
    for family in ROWS
    for word, several in LAYOUTS.items()
    for words in several
    if word not in refused_layouts(family)
]


@sweep(
    ("family", "word", "words"),
    PROVEN,
    quick=[place for place, (family, _, words) in enumerate(PROVEN) if family in NEW and words == "tp2 sp"],
    slow=slice(0, None, 2),
    ids=[f"{family} {words}" for family, _, words in PROVEN],
)
def test_a_layout_computes_what_one_process_does(
    pool: WorkerPool, expected: Callable[[Case], Trace], family: str, word: str, words: str
) -> None:
    check(pool, expected, case_in(family, word, words))


@pytest.mark.parametrize("family", ROWS)
def test_a_layout_is_taken_or_refused_by_name(family: str) -> None:
    refused = refused_layouts(family)
    for word, words in ((word, words) for word, several in LAYOUTS.items() for words in several):
        if word not in refused:
            _ = case_in(family, word, words).config
        else:
            with pytest.raises(UserError, match=r"^(parallel|model)\.\w+ is \d+ but model\.[^.]*; use .*\.$"):
                _ = case_in(family, word, words).config


@pytest.mark.slow
@pytest.mark.parametrize("family", [family for family, row in ROWS.items() if row["Exact"].startswith("yes")])
def test_bits_of_an_exact_run_are_the_same_in_other_layouts(pool: WorkerPool, family: str) -> None:
    case = case_of(family)
    model = tuple(each for each in case.model if each[0] not in named(ROWS[family]["Exact"]))
    case = replace(case, model=model, dtype="fp32", vocab=68, settings=(EXACT,))
    (alone,) = pool.run(1, exact_run, spread(case, "dp1"))
    for words in ("tp2 sp", "dp2,pp2"):
        check_bits(pool, alone, spread(case, words))


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
SHRUNK = ("gemma-3-1b", "olmo-3-7b", *MIXTURES, "glm-4-9b-0414", "gemma-2-2b", "olmo-2-1b", "phi-4", "gemma-3-270m")


@sweep("preset", SHRUNK, slow=(*range(4), 9))
def test_a_shrunk_preset_computes_in_each_layout_what_one_process_does(pool, tmp_path: Path, preset: str) -> None:
    given = {"model": {"preset": preset}, "data": {"path": "none", "sequence_length": 512}}
    layouts = ("tp2·cp2", "dp2·pp2", *(("dp2·tp2·ep2",) if preset in MIXTURES else ()))
    todo = task(*layouts, given=Config.model_validate({**given, "train": {"global_batch_size": 16}}))
    for result in verify(pool, todo, tmp_path, *layouts):
        assert result.verdict == EQUAL, (str(result.spec), result.worst, result.message)
