"""Public examples of other systems by key and value: what the originals compute, and no setting lost."""

from collections.abc import Callable
from math import cos, pi
from pathlib import Path
from typing import Any

import pytest

from tests.convert.public_configs import CASES, Case, Settings, written
from threefold.config import Config, load_config, resolve
from threefold.convert.conversion import Converted, convert
from threefold.errors import UserError
from threefold.planner.model_size import ModelSize
from threefold.train.optim import learning_rate

Rate = Callable[[int], float]
_QUICK = (
    "Fleet, ppfleetx 175B mp8 pp16",
    "Fleet, auto 6.7B sharding16",
    "Fleet, examples 345M single card",
    "Fleet, July 2022 hybrid",
    "PaddleNLP, last",
    "Colossal-AI, gpt2_1d",
    "Colossal-AI, gpt2_2p5d",
    "Colossal-AI, gpt2_zero3",
    "Megatron-LM, gpt 345M, distributed",
    "Megatron-LM, llama3 8B",
)


def _cases(*quick: str, kinds: str = "fleet-yaml fleet-flags colossal megatron", but: str = "") -> list[Any]:
    """Return the names of all cases as parameters, of which only the quick ones are not slow."""
    chosen = [name for name, case in CASES.items() if case.kind in kinds.split() and not (but and but in name)]
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in chosen]


def _convert(folder: Path, case: Case, settings: Settings | None = None) -> Converted:
    name, text = written(case.kind, case.settings if settings is None else settings)
    (folder / name).write_text(text)
    return convert(folder / name, world_size=case.world)


def _resolved(found: Converted, folder: Path) -> Config:
    (folder / "converted.yaml").write_text(found.to_yaml())
    return resolve(load_config(folder / "converted.yaml"), found.sections["model"].get("vocab_size", 50257))


@pytest.mark.parametrize("name", _cases(*_QUICK))
def test_layout_batch_and_size_are_those_of_the_original(tmp_path: Path, name: str) -> None:
    case = CASES[name]
    found = _convert(tmp_path, case)
    assert (found.invalid, tuple(note.key for note in found.unsupported)) == ("", case.unsupported)
    assert not [note for note in found.notes if "unknown" in note.reason]
    config = _resolved(found, tmp_path)
    assert (config.parallel.dp, config.parallel.tp, config.parallel.pp) == case.layout
    assert (config.train.global_batch_size, config.train.micro_batch_size) == case.batch
    assert ModelSize(config).parameters == case.parameters


def _fleet_rate(case: Case) -> Rate:
    """Return the rate after n steps of the schedule, as Fleet's CosineAnnealingWithWarmupDecay computes it."""
    given = {key.rpartition(".")[2]: value for key, value in case.settings.items()}
    highest, last = given.get("max_lr", 1e-5), given.get("min_lr", 5e-5)
    end = given.get("decay_steps", 360000)
    warmup = given.get("warmup_rate", 0.01) * end

    def rate(n: int) -> float:
        if warmup > 0 and n <= warmup:
            return float(highest * n / warmup)
        if n > end:
            return float(last)
        return float(last + 0.5 * (cos(pi * (n - warmup) / (end - warmup)) + 1) * (highest - last))

    return rate


def _megatron_rate(case: Case) -> Rate:
    """Return the rate after n steps of the schedule, which Megatron-LM counts in samples."""
    given, total = case.settings, case.batch[0]
    end = given.get("lr-decay-samples") or given["lr-decay-iters"] * total
    fraction = given.get("lr-warmup-fraction", given.get("warmup", 0.0))
    warmup = given.get("lr-warmup-samples", fraction * end)

    def rate(n: int) -> float:
        samples = n * total
        if warmup > 0 and samples <= warmup:
            return float(given["lr"] * samples / warmup)
        if samples > end:
            return float(given["min-lr"])
        down = 0.5 * (cos(pi * (samples - warmup) / (end - warmup)) + 1)
        return float(given["min-lr"] + down * (given["lr"] - given["min-lr"]))

    return rate


@pytest.mark.parametrize("name", _cases(*_QUICK, kinds="fleet-yaml fleet-flags megatron"))
def test_the_rate_is_that_of_the_original(tmp_path: Path, name: str) -> None:
    """At the first step, the end of the warm-up, in the middle, at the end of the decay, and later; rising, too."""
    case = CASES[name]
    optimizer = _resolved(_convert(tmp_path, case), tmp_path).optimizer
    rate = _megatron_rate(case) if case.kind == "megatron" else _fleet_rate(case)
    warmup, end = optimizer.warmup_steps, optimizer.decay_steps
    steps = (1, warmup // 2, warmup, (warmup + end) // 2, end - 1, end, end + 1000)
    # Megatron-LM's numbers of samples need not be whole steps: one step is 1 / warm-up of the rate
    tolerance = 1.5 / warmup if any("samples" in key for key in case.settings) else 1e-12
    assert [learning_rate(n, optimizer) for n in steps] == pytest.approx([rate(n) for n in steps], rel=tolerance)


_EQUAL_WITHOUT = ("calculate-per-token-loss",)
"""Flags without which nothing differs as long as no label is masked."""
_OTHER_WORDS = {"false": "true", "no": "yes", "t": "f", "y": "n", "True": "False", "False": "True"}


def _changed(value: Any) -> Any:
    """Return another value of the same kind, as somebody would write it who wants another training."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value * 2 if value > 1 else value + 1
    if isinstance(value, float):
        return value / 2 if value else 0.25
    if isinstance(value, list):
        return [_changed(value[0]), *value[1:]]
    if isinstance(value, dict):
        return {"frobnicate": 1}
    return _OTHER_WORDS.get(value, f"{value}x" if not value[:1].isdecimal() else f"9{value}")


def _outcome(folder: Path, case: Case, settings: Settings) -> object:
    try:
        found = _convert(folder, case, settings)
    except UserError as error:
        return str(error)
    return found.sections, [(note.key, str(note.value), note.reason) for note in found.notes], found.invalid


@pytest.mark.parametrize("name", _cases("PaddleNLP, last", "Colossal-AI, gpt2_zero3", but="single card"))
def test_no_setting_is_lost(tmp_path: Path, name: str) -> None:
    """Whatever is changed, the config, a note or an error changes with it: nothing is read and then dropped."""
    case = CASES[name]
    plain = _outcome(tmp_path, case, case.settings)
    lost = []
    for key, value in case.settings.items():
        if value is None or key in _EQUAL_WITHOUT:
            continue
        other = case.settings | {key: _changed(value)}
        if case.kind in ("megatron", "fleet-flags") and value is True:  # a flag without a value: without it
            other = {each: given for each, given in case.settings.items() if each != key}
        if _outcome(tmp_path, case, other) == plain:
            lost.append(key)
    assert lost == []


def _of_text(folder: Path, name: str, text: str) -> tuple[Settings, dict[str, str]]:
    """Return the converted settings and the notes' reasons."""
    (folder / name).write_text(text)
    found = convert(folder / name)
    settings = {
        f"{section}.{key}": value for section, values in found.sections.items() for key, value in values.items()
    }
    return settings, {note.key: note.reason for note in found.notes}


def test_a_script_that_names_only_a_config(tmp_path: Path) -> None:
    """The single-card examples have no launcher and no flags but -c; overrides are read as Python reads them."""
    text = "Global: {local_batch_size: 8}\nModel: {ffn_hidden_size: 4096}\nDistributed: {dp_degree: , mp_degree: 2}\n"
    (tmp_path / "gpt.yaml").write_text(text)
    settings, _ = _of_text(tmp_path, "a.sh", "export CUDA_VISIBLE_DEVICES=0\npython ./tools/train.py -c ./gpt.yaml\n")
    assert settings["model.ffn_hidden_size"] == 4096
    settings, _ = _of_text(
        tmp_path,
        "a.sh",
        "python -m paddle.distributed.launch --devices 0,1,2,3 tools/train.py -c gpt.yaml -o Model.ffn_hidden_size=None "
        "-o Data.Train.dataset.split=[9,1,0] -o Engine.mix_precision.enable=False\n",
    )
    assert "model.ffn_hidden_size" not in settings
    assert (settings["data.split"], settings["parallel.dp"], settings["parallel.tp"]) == ("9,1,0", 2, 2)


def test_zero_of_colossal_computes_in_fp16(tmp_path: Path) -> None:
    case = CASES["Colossal-AI, gpt2_zero3"]
    settings = {**case.settings, "zero.optimizer_config": {"initial_scale": 32}}
    found = _convert(tmp_path, case, settings)
    assert found.sections["precision"] == {"dtype": "fp16", "loss_scale": 32.0}
    assert found.sections["parallel"]["zero"] == 3
    assert _convert(tmp_path, case).sections["precision"] == {"dtype": "fp16", "loss_scale": 2.0**32}


def test_the_loss_scale_of_megatron_begins_where_megatrons_does(tmp_path: Path) -> None:
    case = CASES["Megatron-LM, gpt 345M"]
    assert _convert(tmp_path, case).sections["precision"] == {"dtype": "fp16", "loss_scale": 2.0**32}
    given = {key: value for key, value in case.settings.items() if key != "fp16"} | {"loss-scale": 128}
    found = _convert(tmp_path, case, given)
    assert "precision" not in found.sections
    assert {note.key: note.reason for note in found.notes}["loss-scale"] == "only --fp16 reads it"
