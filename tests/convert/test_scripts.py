"""Shell scripts of Megatron-LM in every form that its examples have: no flag is lost on the way."""

import re
import sys
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


@pytest.mark.parametrize("name", EXPECTED)
def test_a_script_is_converted(tmp_path: Path, name: str) -> None:
    found = convert(_written(tmp_path, name))
    assert (found.kind, found.invalid) == ("megatron", "")
    assert _settings(found, tmp_path).items() >= EXPECTED[name]["settings"].items()
    assert sorted(note.key for note in found.unsupported) == EXPECTED[name]["unsupported"]


@pytest.mark.parametrize("name", EXPECTED)
def test_no_flag_is_lost(tmp_path: Path, name: str) -> None:
    """Each flag of the text is read, or a note names it: read flags are converted or noted, which `KeyMapping` sees to."""
    file = _written(tmp_path, name)
    text = file.read_text() + (SCRIPTS["common"] if name == "sourced" else "")
    loops = text.index("while [[") if "while [[" in text else len(text)
    text = text[:loops] + text[text.index("done", loops) :] if loops < len(text) else text
    text = re.sub(r"^\s*echo.*$", "", _COMMENT.sub("", text), flags=re.MULTILINE)
    flags = {flag.replace("_", "-") for flag in _FLAG.findall(text)} - {"use-flash-attn"}
    given = read(file)
    noted = {flag.replace("_", "-") for note in given.notes for flag in _FLAG.findall(f"{note.value} {note.reason}")}
    assert flags
    assert flags - set(given.given) - noted == set()


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


@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("pretrain_bert.py", "bert"),
        ("pretrain_t5.py", "t5"),
        ("pretrain_mamba.py", "mamba"),
        ("../../pretrain_hybrid.py", "hybrid"),
        ("pretrain_vlm.py", "vlm"),
    ],
)
def test_other_models_are_refused(tmp_path: Path, script: str, what: str) -> None:
    with pytest.raises(UserError, match=f"trains {what} models, and Threefold trains decoder-only"):
        _convert(tmp_path, f"ARGS=({_MODEL})\ntorchrun --nproc_per_node 8 {script} ${{ARGS[@]}}\n")


def test_flags_of_other_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="--hybrid-layer-pattern, so its model has Mamba layers"):
        _convert(tmp_path, f"torchrun pretrain_gpt.py {_MODEL} --hybrid-layer-pattern M-M-\n")


def test_a_missing_file_whose_variables_are_needed_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        _convert(tmp_path, "#!/bin/bash\n\nsource env.sh\ntorchrun pretrain_gpt.py --num-layers $LAYERS\n")
    assert "line 3: it reads" in str(error.value)
    assert "env.sh, which does not exist, and $LAYERS is used and nothing else sets it" in str(error.value)
    found = _convert(tmp_path, f"source env.sh\ntorchrun pretrain_gpt.py {_MODEL}\n")
    assert any("line 1 reads this file, which does not exist" in note.reason for note in found.notes)


def test_unknown_flags_words_and_variables_are_unsupported(tmp_path: Path) -> None:
    text = f"torchrun pretrain_gpt.py {_MODEL} --bf16 stray --lr $RATE --frobnicate 3 --swiglu $EXTRA\n"
    found = _convert(tmp_path, text)
    assert {note.key for note in found.unsupported} == {"stray", "lr", "frobnicate", "swiglu"}
    assert "flags in it are not known" in next(note.reason for note in found.notes if note.key == "$EXTRA")
    assert found.sections["precision"]["dtype"] == "bf16"


def test_reduced_gradients_in_bf16(tmp_path: Path) -> None:
    text = f"torchrun --nproc_per_node 4 pretrain_gpt.py {_MODEL} --lr 1e-4 --grad-reduce-in-bf16"
    assert _convert(tmp_path, text).sections["parallel"] == {"dp": 4, "gradient_compression": "bf16"}
    found = _convert(tmp_path, f"{text} --use-distributed-optimizer\n")
    assert found.sections["parallel"] == {"dp": 4, "zero": 1}
    assert "does not go with parallel.zero" in next(n.reason for n in found.notes if n.key == "grad-reduce-in-bf16")


def test_branches_that_are_not_taken_are_told(tmp_path: Path) -> None:
    found = convert(_written(tmp_path, "mixtral"))
    (branch,) = (note for note in found.notes if note.value == "a branch")
    left_out = "left out: --wandb-project, --wandb-exp-name"
    assert branch.reason == f"not taken, as though WANDB_API_KEY were not set; {left_out}"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("if [ -z $X ]; then\n--lr 1\n", "if without fi"),
        ("case $X in\na) --lr 1 ;;\n", "case without esac"),
        ("for x in a b; do\n--lr 1\n", "for without done"),
        ("f() --lr 1\n", "function f without {"),
        ("ARGS=(--lr 1\n", "the array ARGS does not close"),
        ("--lr $(echo 1\n", "a ) is missing in it"),
        ("--lr 1 )\n", ") is out of place"),
        ("A=xxxxxxxx\nfor i in " + "1 " * 40 + '; do A="$A$A"; done\n--lr 1\n', "grows beyond 1,000,000 characters"),
        ("f() { f; }\nf --lr 1\n", "call each other more than 12 deep"),
        ("{ " * 500 + "--lr 1", "nested too deeply"),
    ],
)
def test_scripts_that_cannot_be_read(tmp_path: Path, text: str, sentence: str) -> None:
    with pytest.raises(UserError) as error:
        _convert(tmp_path, text)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_without_its_extra_only_a_shell_script_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tree_sitter_bash", None)
    with pytest.raises(UserError, match=r"install it with pip install 'threefold\[convert\]'"):
        _convert(tmp_path, f"torchrun pretrain_gpt.py {_MODEL}\n")
    assert convert(_written(tmp_path, "model_args")).sections["model"]["num_layers"] == 12


def test_a_variable_inside_a_word(tmp_path: Path) -> None:
    line = "A=/data; B=c4; torchrun pretrain_gpt.py --data-path $A/$B.tokens-$C/part $A/$B$A.x --load ${A:$1+1} --save $A/run"
    (tmp_path / "train.sh").write_text(f"# a comment \\\n{line}\\\n_7\n")
    flags = {"data-path": ["/data/c4.tokens-${C}/part", "/data/c4/data.x"], "load": "${A:$1+1}", "save": "/data/run_7"}
    assert read(tmp_path / "train.sh").given == flags


def test_nothing_of_a_script_is_run(tmp_path: Path) -> None:
    marker = tmp_path / "run"
    text = f"touch {marker}\nX=$(touch {marker})\nY=`touch {marker}`\neval touch {marker}\nsource /dev/stdin\n"
    _convert(tmp_path, f"{text}torchrun pretrain_gpt.py {_MODEL} --lr 1e-4\n")
    assert not marker.exists()


def test_pieces_of_the_language(tmp_path: Path) -> None:
    text = r"""
A=24; B='1024'; C=(x y 16)
NAME=model-xl.tar.gz
base=${NAME%.tar.gz}; SIZE=${base##*-}; [[ $SIZE == x* ]] && HEADS=${C[2]}
declare -a MORE=(--seq-length "$((B / 2))"); MORE[2]=--lr; MORE+=("1e-${#C[@]}")
if [ $A -gt 12 -a "$B" != 7 ]; then WIDTH=$B; elif true; then WIDTH=1; else WIDTH=2; fi
cat <<'END' > notes.txt
torchrun pretrain_gpt.py --num-layers 1 # not a command
END
torchrun --nproc_per_node 1 pretrain_gpt.py --num-layers ${A} --hidden-size="$WIDTH" \
  --num-attention-heads $HEADS ${MORE[@]} --max-position-embeddings `expr 256 \* 4` ${NONE:+--seed 9} > log 2>&1
"""
    found = _convert(tmp_path, text)
    wanted = {
        "model.num_layers": 24,
        "model.hidden_size": 1024,
        "model.num_attention_heads": 16,
        "model.max_position_embeddings": 1024,
        "data.sequence_length": 512,
        "optimizer.lr": 1e-3,
    }
    assert _settings(found, tmp_path).items() >= wanted.items()
    assert "seed" not in {note.key for note in found.notes}


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
