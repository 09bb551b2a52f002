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
        if case.kind in ("megatron", "fleet-flags") and value is True:  # a bare flag: without it
            other = {each: given for each, given in case.settings.items() if each != key}
        if _outcome(tmp_path, case, other) == plain:
            lost.append(key)
    assert lost == []


_SCRIPT = (
    "python -m paddle.distributed.launch run_pretrain.py --model_type gpt --model_name_or_path gpt2-small-en "
    "--input_dir data --output_dir out --local_batch_size 8 --dp_degree 1"
)


def _of_text(folder: Path, name: str, text: str) -> tuple[Settings, dict[str, str]]:
    """Return the converted settings and the notes' reasons."""
    (folder / name).write_text(text)
    found = convert(folder / name)
    settings = {
        f"{section}.{key}": value for section, values in found.sections.items() for key, value in values.items()
    }
    return settings, {note.key: note.reason for note in found.notes}


def test_a_word_is_a_value(tmp_path: Path) -> None:
    """The word none asks for a constant rate; it does not mean that the flag is not given."""
    settings, notes = _of_text(tmp_path, "a.sh", f"{_SCRIPT} --lr_decay_style none --max_lr 1e-4\n")
    assert settings["optimizer.decay"] == "constant"
    assert (settings["optimizer.lr"], settings["optimizer.warmup_steps"]) == (1e-4, 0)
    assert notes["lr_decay_style"] == "max_lr in all steps: optimizer.decay is constant, warmup_steps is 0"
    settings, notes = _of_text(tmp_path, "a.sh", f"{_SCRIPT} --lr_decay_style cosine\n")
    assert "optimizer.decay" not in settings  # cosine, our default
    assert "lr_decay_style" not in notes
    with pytest.raises(UserError, match="lr_decay_style is 'step' but must be cosine or none"):
        _of_text(tmp_path, "a.sh", f"{_SCRIPT} --lr_decay_style step\n")


def test_defaults_of_the_script(tmp_path: Path) -> None:
    settings, _ = _of_text(tmp_path, "a.sh", f"{_SCRIPT}\n")
    assert (settings["optimizer.lr"], settings["optimizer.min_lr"]) == (1e-5, 5e-5)
    assert (settings["train.micro_batch_size"], settings["optimizer.clip_grad_norm"]) == (8, 0.0)
    assert "precision.dtype" not in settings
    for flags, scale in (("--use_amp True", 128), ("--use_pure_fp16 True", 32768)):
        settings, _ = _of_text(tmp_path, "a.sh", f"{_SCRIPT} {flags}\n")
        assert (settings["precision.dtype"], settings["precision.loss_scale"]) == ("fp16", scale)


@pytest.mark.parametrize(("flag", "on"), [("", False), (" yes", True), (" 1", True), (" n", False), (" False", False)])
def test_switches_are_read_as_the_script_reads_them(tmp_path: Path, flag: str, on: bool) -> None:
    settings, notes = _of_text(tmp_path, "a.sh", f"{_SCRIPT} --use_recompute{flag} --use_pure_fp16{flag}\n")
    assert (settings.get("train.recompute"), settings.get("precision.dtype")) == (
        ("full", "fp16") if on else (None, None)
    )
    assert ("use_recompute" in notes) == (flag == "")  # a bare flag is false there, which is worth a note
    with pytest.raises(UserError, match="use_recompute is 'perhaps' but must be true or false"):
        _of_text(tmp_path, "a.sh", f"{_SCRIPT} --use_recompute perhaps\n")


def test_checking_accuracy_turns_dropout_off(tmp_path: Path) -> None:
    settings, notes = _of_text(tmp_path, "a.sh", f"{_SCRIPT} --hidden_dropout_prob 0.2 --check_accuracy True\n")
    assert settings.get("model.hidden_dropout", 0.0) == settings.get("model.attention_dropout", 0.0) == 0.0
    assert "check_accuracy" in notes


def test_decay_steps_count_steps_with_increments_too(tmp_path: Path) -> None:
    """Fleet multiplies them by the batch, and moves its schedule on by a batch per step."""
    text = "Global: {{local_batch_size: 8}}\nOptimizer: {{lr: {{decay_steps: 7200, warmup_rate: 0.01{}}}}}\n"
    for more in ("", ", use_increments: True"):
        settings, _ = _of_text(tmp_path, "a.yaml", text.format(more))
        assert (settings["optimizer.decay_steps"], settings["optimizer.warmup_steps"]) == (7200, 72)


def test_a_fleet_config_that_gives_little_has_fleets_defaults(tmp_path: Path) -> None:
    settings, _ = _of_text(
        tmp_path,
        "a.yaml",
        "Global: {local_batch_size: 8}\nEngine: {max_steps: 900}\nOptimizer: {lr: {warmup_rate: 0.1}}\n"
        "Distributed: {sharding: {sharding_degree: 4}}\n",
    )
    assert settings["parallel.zero"] == 2
    assert (settings["train.eval_every"], settings["checkpoint.every"]) == (0, 0)
    assert (settings["optimizer.decay_steps"], settings["optimizer.warmup_steps"]) == (900, 90)


def test_a_fleet_run_by_epochs(tmp_path: Path) -> None:
    settings, notes = _of_text(
        tmp_path,
        "a.yaml",
        "Global: {local_batch_size: 8}\n"
        "Engine: {run_mode: epoch, num_train_epochs: 3, max_steps: 900, eval_freq: 1, eval_iters: 20}\n",
    )
    assert (settings["train.epochs"], settings["train.eval_every_epochs"], settings["train.eval_every"]) == (3, 1, 0)
    assert "train.max_steps" not in settings
    assert notes["Engine.max_steps"] == "Engine.run_mode is epoch, so epochs are the length"


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


def test_programs_of_fleet_that_train_no_gpt_are_unsupported(tmp_path: Path) -> None:
    for module in ("GPTGenerationModuleAuto", "GPTEvalModule", "GPTFinetuneModule", "MoEModule"):
        (tmp_path / "a.yaml").write_text(f"Global: {{local_batch_size: 8}}\nModel: {{module: {module}, name: GPT}}\n")
        assert [note.key for note in convert(tmp_path / "a.yaml").unsupported] == ["Model.module"]


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
