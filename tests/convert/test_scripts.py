"""Shell scripts of Megatron-LM in every form that its examples have: no flag is lost on the way."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.convert.foreign_configs import MEGATRON_EXPECTED as EXPECTED
from tests.convert.foreign_configs import MEGATRON_SCRIPTS as SCRIPTS
from threefold.config import load_config
from threefold.convert.conversion import Converted, convert
from threefold.convert.megatron import read
from threefold.errors import UserError

_COMMENT = re.compile(r"(?:^|(?<=\s))#(?!SBATCH).*$", re.MULTILINE)
_FLAG = re.compile(r"(?<![\w-])--([A-Za-z][\w-]*)")
_BRANCHING = {
    "llama_fp8": "if [[ $DTYPE == fp8 ]]",
    "mixtral": "if [ -n ${WANDB_API_KEY} ]",
    "case": "case ${SCALE} in",
    "sourced": "source $(dirname $SCRIPT_PATH)/common.sh",
    "sbatch": "`pwd`",
    "arguments": "while [[ $# -gt 0 ]]",
    "qwen_conf": "if [ -z ${HF_MODEL_CKPT} ]",
    "experts": "for extra in --clip-grad 0.5 --bf16",
}
"""Scripts with more than assignments, arrays and commands, and what of each the sentence names."""
_MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64"


def _written(folder: Path, name: str) -> Path:
    file = folder / ("args.yaml" if name == "model_args" else "train.sh")
    file.write_text(SCRIPTS[name])
    (folder / "common.sh").write_text(SCRIPTS["common"])
    return file


def _settings(found: Converted, folder: Path) -> dict[str, object]:
    (folder / "converted.yaml").write_text(found.to_yaml())
    sections = load_config(folder / "converted.yaml").sections()
    return {f"{section}.{key}": value for section, values in sections.items() for key, value in values.items()}


def _convert(folder: Path, text: str) -> Converted:
    (folder / "train.sh").write_text(text)
    return convert(folder / "train.sh")


def _check(found: Converted, folder: Path, name: str) -> None:
    assert (found.kind, found.invalid) == ("megatron", "")
    assert _settings(found, folder).items() >= EXPECTED[name]["settings"].items()
    assert sorted(note.key for note in found.unsupported) == EXPECTED[name]["unsupported"]


def _flags_lost(file: Path) -> set[str]:
    """Flags of the text that are not read, and that no note names; `KeyMapping` sees to those that are read."""
    flags = {flag.replace("_", "-") for flag in _FLAG.findall(_COMMENT.sub("", file.read_text()))} - {"use-flash-attn"}
    given = read(file)
    noted = {flag.replace("_", "-") for note in given.notes for flag in _FLAG.findall(f"{note.value} {note.reason}")}
    assert flags
    return flags - set(given.given) - noted


@pytest.mark.parametrize("name", [name for name in EXPECTED if name not in _BRANCHING])
def test_a_script_is_converted(tmp_path: Path, name: str) -> None:
    file = _written(tmp_path, name)
    _check(convert(file), tmp_path, name)
    assert _flags_lost(file) == set()


@pytest.mark.parametrize(("name", "what"), _BRANCHING.items())
def test_a_script_that_branches_is_converted_from_its_arguments(tmp_path: Path, name: str, what: str) -> None:
    """The sentence says how to get them, and so they are got."""
    file = _written(tmp_path, name)
    with pytest.raises(UserError) as error:
        convert(file)
    assert str(error.value) == (
        f"{file}: {what} is not read, as only assignments, arrays and simple commands are; pass the arguments instead: "
        "put echo before the training command, and convert a text file with what it prints."
    )
    (tmp_path / "pretrain_gpt.py").touch()
    text = re.sub(r"^( *)(torchrun|srun)", r"\1echo \2", file.read_text(), flags=re.MULTILINE)
    file.write_text(text if text != SCRIPTS[name] else f"{text}echo $MODEL_ARGS\n")
    printed = subprocess.run(
        ["bash", file.name], cwd=tmp_path, env={"PATH": os.defpath}, capture_output=True, check=True
    )
    (tmp_path / "arguments.txt").write_bytes(printed.stdout)
    _check(convert(tmp_path / "arguments.txt", world_size=16 if name == "sbatch" else None), tmp_path, name)
    assert _flags_lost(tmp_path / "arguments.txt") == set()


def test_a_flag_read_is_converted_or_noted(tmp_path: Path) -> None:
    """Whatever flag is given, the config differs or a note names it."""
    plain = _convert(tmp_path, f"torchrun pretrain_gpt.py {_MODEL} --lr 1e-4\n")
    for flag in ("--seed 7", "--frobnicate 3", "--fp8-format hybrid", "--adam-eps 1e-5", "--decoupled-lr 1"):
        found = _convert(tmp_path, f"torchrun pretrain_gpt.py {_MODEL} --lr 1e-4 {flag}\n")
        noted = {note.key for note in found.notes} - {note.key for note in plain.notes}
        assert found.sections != plain.sections or noted == {flag.split()[0][2:]}, flag


def test_flags_appended_to_a_text_or_to_an_array(tmp_path: Path) -> None:
    for begin, more in (
        (f'ARGS="{_MODEL}"', 'ARGS+=" --seed 7"'),
        (f"ARGS=({_MODEL})", "ARGS+=(--seed 7)"),
        (f'ARGS="{_MODEL}"', 'ARGS="$ARGS --seed 7"'),
        (f'ARGS="{_MODEL}"', 'ARGS="${ARGS} --seed 7"'),
    ):
        found = _convert(tmp_path, f"{begin}\n{more}\ntorchrun pretrain_gpt.py ${{ARGS[@]}}\n")
        assert (found.sections["train"]["seed"], found.sections["model"]["num_layers"]) == (7, 2), more


def test_each_example_form_has_its_own_way_of_gathering_flags() -> None:
    assert len(EXPECTED) >= 12
    assert any("+=(" in SCRIPTS[name] for name in EXPECTED)
    assert _BRANCHING.keys() < EXPECTED.keys()


def test_unknown_flags_words_and_variables_are_unsupported(tmp_path: Path) -> None:
    text = f"torchrun pretrain_gpt.py {_MODEL} --bf16 stray --lr $RATE --frobnicate 3 --swiglu $EXTRA\n"
    found = _convert(tmp_path, text)
    assert {note.key for note in found.unsupported} == {"stray", "lr", "frobnicate", "swiglu"}
    assert "flags in it are not known" in next(note.reason for note in found.notes if note.key == "$EXTRA")
    assert found.sections["precision"]["dtype"] == "bf16"


def test_variables_that_grow_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="its variables grow beyond 1,000,000 characters"):
        _convert(tmp_path, "A=xxxxxxxx\n" + 'A="$A$A"\n' * 40 + "--lr $A\n")


def test_a_variable_inside_a_word(tmp_path: Path) -> None:
    line = (
        "A=/data; B=c4; torchrun pretrain_gpt.py --data-path $A/$B.tokens-$C/part $A/$B$A.x --load '$A' --save $A/run"
    )
    (tmp_path / "train.sh").write_text(f"# it's a comment \\\n{line}\\\n_7\n")
    flags = {"data-path": ["/data/c4.tokens-$C/part", "/data/c4/data.x"], "load": "$A", "save": "/data/run_7"}
    assert read(tmp_path / "train.sh").given == flags


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "run"
    text = f"touch {marker}\nX=$(touch {marker})\nY=`touch {marker}`\nmkdir $(touch {marker})\n"
    _convert(tmp_path, f"{text}torchrun pretrain_gpt.py {_MODEL} --lr 1e-4\n")
    assert not marker.exists()


def test_pieces_of_the_language(tmp_path: Path) -> None:
    text = r"""
A=24; export B='1024' NAME="a b" # it's set
N=$((A * 2))  # never used
declare -a MORE=(--num-attention-heads 16 "--split '9,1,0'" # in an array
  --data-path "/my data/$B")
MORE+=(--lr 1e-3); WIDTH="--hidden-size="; WIDTH+=$B
MORE+=("--moe-layer-freq [1]")
mkdir -p "$(dirname $OUT)"
set -x
CUDA_VISIBLE_DEVICES=0 torchrun --nproc_per_node ${RANKS:-2} pretrain_gpt.py --num-layers ${A} $WIDTH --save "$NAME" \
  "${MORE[@]}" --max-position-embeddings 1024 --seq-length ${SEQ:-"512"} --swiglu $EXTRA "$@" 2>&1 | tee -a log &
wait
"""
    (tmp_path / "train.sh").write_text(text)
    given = read(tmp_path / "train.sh")
    assert given.given == {
        "num-layers": "24",
        "hidden-size": "1024",
        "save": "a b",
        "num-attention-heads": "16",
        "split": "9,1,0",
        "data-path": "/my data/1024",
        "lr": "1e-3",
        "moe-layer-freq": "[1]",
        "max-position-embeddings": "1024",
        "seq-length": "512",
        "swiglu": True,
        "world-size": 2,
    }
    assert [note.key for note in given.notes] == ["$EXTRA", "$@", "launcher"]


def test_numbers_that_are_counted_otherwise(tmp_path: Path) -> None:
    """Samples instead of steps, a path that is given twice, and an evaluation of no batches."""
    flags = (
        "--num-layers 2 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 "
        "--micro-batch-size 2 --global-batch-size 8 --train-samples 16000 --lr 1e-3 --lr-decay-samples 4000 "
        "--lr-warmup-samples 800 --eval-iters 0 --data-path 0.25 one 0.5 two 0.25 one --vocab-size 64"
    )
    found = _convert(tmp_path, f"python pretrain_gpt.py {flags}\n").sections
    assert (found["train"]["max_steps"], found["train"].get("eval_every", 0)) == (2000, 0)
    assert (found["optimizer"]["decay_steps"], found["optimizer"]["warmup_steps"]) == (500, 100)
    assert found["data"]["mixture"] == {"one": 0.5, "two": 0.5}
