"""A run in the Language Model Evaluation Harness, against the harness's `hf` model of the exported run."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.command import Command

lm_eval = pytest.importorskip("lm_eval")

CLOSE = 1e-6
"""Relative: in fp64, transformers still computes the angles of positions, and the harness its softmax, in fp32."""
LINES = [f"The {n}th sentence says that {n} and {n} are {2 * n}, which is even." for n in range(40)]
DOCUMENTS = [
    {"text": f"{LINES[n]} {LINES[n + 1]}", "start": f"The {n}th sentence says that {n} and {n}", "gold": n % 2}
    | {"choices": [" are", f" are {2 * n}, which"]}
    for n in range(12)
]


def task(name: str, kind: str, metrics: list[str], **more: Any) -> dict[str, Any]:
    import datasets

    return {
        "task": name,
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(DOCUMENTS)},
        "test_split": "test",
        "output_type": kind,
        "metric_list": [{"metric": metric} for metric in metrics],
        **more,
    }


def tasks() -> list[dict[str, Any]]:
    until = {"until": [",", "\n"], "max_gen_toks": 12, "do_sample": False}
    likelihoods = ["word_perplexity", "byte_perplexity", "bits_per_byte"]
    return [
        task("chosen", "multiple_choice", ["acc", "acc_norm"], doc_to_text="{{start}}", doc_to_target="gold")
        | {"doc_to_choice": "{{choices}}"},
        task("rolling", "loglikelihood_rolling", likelihoods, doc_to_text="", doc_to_target="{{text}}"),
        task("written", "generate_until", ["exact_match"], doc_to_text="{{start}}", doc_to_target="{{choices[1]}}")
        | {"generation_kwargs": until},
    ]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a Llama with a context of 64 tokens, and its export."""
    folder = tmp_path_factory.mktemp("harness")
    (folder / "text.txt").write_text("\n<|endoftext|>\n".join(LINES * 10))
    (folder / "run.yaml").write_text(
        """data: {path: tokens, sequence_length: 64}
model: {architecture: llama, num_layers: 2, hidden_size: 48, num_attention_heads: 4}
train: {max_steps: 60, global_batch_size: 8, eval_every: 0}
optimizer: {lr: 5e-3}
"""
    )
    for command in (
        "data prepare text.txt --out tokens --vocab-size 320 --workers 1",
        "train run.yaml --run-dir run",
        "checkpoint export run --out exported",
    ):
        ran = subprocess.run([sys.executable, "-m", "threefold", *command.split()], cwd=folder, capture_output=True)
        assert ran.returncode == 0, ran.stderr
    return folder / "run", folder / "exported"


def results(model: Any) -> dict[str, dict[str, Any]]:
    found = lm_eval.simple_evaluate(model, tasks=tasks(), bootstrap_iters=0, log_samples=True, verbosity="ERROR")
    responses = {name: [sample["filtered_resps"] for sample in found["samples"][name]] for name in found["samples"]}
    return {"results": found["results"], "responses": responses}


def numbers(value: Any) -> list[Any]:
    """The numbers of a nesting, in order, without its texts."""
    if isinstance(value, dict):
        return [leaf for key in sorted(value) for leaf in numbers(value[key])]
    return (
        [leaf for each in value for leaf in numbers(each)]
        if isinstance(value, list | tuple)
        else [value] * (not isinstance(value, str))
    )


@pytest.mark.slow
def test_its_numbers_are_those_of_the_exported_model(folders: tuple[Path, Path]) -> None:
    """All of them; also of texts that are longer than the context."""
    import transformers
    from lm_eval.models.huggingface import HFLM

    from threefold.inference.harness import ThreefoldLM

    run, exported = folders
    ours = ThreefoldLM(run, dtype="fp64", device="cpu", batch_size=5)
    end = "<|endoftext|>"
    tokenizer = transformers.AutoTokenizer.from_pretrained(exported, eos_token=end, pad_token=end)
    theirs = HFLM(str(exported), tokenizer=tokenizer, dtype="float64", device="cpu", batch_size=1, max_length=64)
    assert (ours.max_length, ours.prefix_token_id) == (64, theirs.prefix_token_id)
    one, other = results(ours), results(theirs)
    assert one["responses"]["written"] == other["responses"]["written"]
    assert len({text for (text,) in one["responses"]["written"]}) > 2
    for name in ("chosen", "rolling"):
        assert numbers(one["responses"][name]) == pytest.approx(numbers(other["responses"][name]), rel=CLOSE), name
    assert numbers(one["results"]) == pytest.approx(numbers(other["results"]), rel=CLOSE)
    longest = max(len(ours.tok_encode(document["text"])) for document in DOCUMENTS)
    requests = [SimpleNamespace(args=(" ".join(LINES[:size]),)) for size in (1, 3, 12)]
    assert longest < 2 * 64 < len(ours.tok_encode(requests[-1].args[0]))
    assert ours.loglikelihood_rolling(requests) == pytest.approx(theirs.loglikelihood_rolling(requests), rel=CLOSE)
    whole = [SimpleNamespace(args=("", LINES[0])), SimpleNamespace(args=("The ", "first"))]
    assert numbers(ours.loglikelihood(whole)) == pytest.approx(numbers(theirs.loglikelihood(whole)), rel=CLOSE)


@pytest.mark.slow
def test_the_command_line_of_the_harness_has_it(folders: tuple[Path, Path], tmp_path: Path) -> None:
    run, _ = folders
    lines = "".join(json.dumps(document) + "\n" for document in DOCUMENTS)
    (tmp_path / "documents.jsonl").write_text(lines)
    (tmp_path / "chosen.yaml").write_text(
        f"""task: chosen
dataset_path: json
dataset_kwargs: {{data_files: {{test: {tmp_path / "documents.jsonl"}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{start}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: gold
"""
    )
    command = [sys.executable, "-m", "threefold.inference.harness", "--model", "threefold", "--tasks", "chosen"]
    options = ["--model_args", f"run={run}", "--include_path", tmp_path, "--batch_size", "auto"]
    homes = {"HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    ran = subprocess.run([*command, *options], env={**os.environ, **homes}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "acc_norm" in ran.stdout
    options[1] = f"run={tmp_path}/none"
    refused = subprocess.run([*command, *options], env={**os.environ, **homes}, capture_output=True, text=True)
    assert refused.returncode == 1
    assert refused.stderr.splitlines()[-1].startswith("Error: "), refused.stderr
    assert "Traceback" not in refused.stderr


def test_what_is_not_there_is_said(tmp_path: Path, threefold: Command) -> None:
    from threefold.errors import UserError
    from threefold.inference.harness import ThreefoldLM

    with pytest.raises(UserError, match="dtype is int8 but must be one of"):
        ThreefoldLM(tmp_path, dtype="int8")
