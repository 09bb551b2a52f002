"""From an imported model to its answers, by the commands that a user types."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import ready
from tests.support.chats import CONVERSATIONS, write_tokenizer
from tests.support.command import Command


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a tokenizer of transformers and conversations, in which the commands are typed."""
    monkeypatch.chdir(tmp_path)
    write_tokenizer(tmp_path / "hf", "llama3")
    lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in CONVERSATIONS * 2)
    (tmp_path / "chats.jsonl").write_text(lines)
    return tmp_path


def test_show_tells_what_counts_without_colour(base: Path, threefold: Command) -> None:
    prepared = threefold("data", "prepare", "chats.jsonl", "--tokenizer", "hf/tokenizer.json", "--out", "tokens")
    assert prepared.status == 0, prepared.error
    assert "those of the answers" in prepared.output
    shown = threefold("data", "show", "tokens", "--sequence-length", "128", "--split", "1").output
    assert "⟦It is 4.<|eot_id|>⟧" in shown or "⟦Fine.<|eot_id|>⟧" in shown or "⟦Welcome<|eot_id|>⟧" in shown
    assert "⟦<|start_header_id|>" not in shown
    assert "Tokens in ⟦…⟧ have labels" in shown
    assert "8 conversations are packed into" in shown


def test_show_tells_how_text_was_read(threefold: Command, tokens: Path) -> None:
    shown = threefold("data", "show", tokens)
    assert shown.status == 0, shown.error
    assert "parsed in text" in shown.output


def typed(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """A command as a process of its own."""
    return ready.run([sys.executable, "-m", "threefold", *arguments], timeout=600)


@pytest.mark.slow
def test_from_an_import_to_an_answer(base: Path) -> None:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(base / "hf")
    transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=48,
            max_position_embeddings=256,
            eos_token_id=tokenizer.eos_token_id,
        )
    ).save_pretrained(base / "hf")
    settings = {
        "train.max_steps": 60,
        "train.global_batch_size": 4,
        "train.eval_every": 0,
        "train.device": "cpu",
        "optimizer.lr": 0.01,
        "data.split": '"1"',
    }
    given = [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    for command in (
        ("checkpoint", "import", "hf", "--out", "model"),
        ("data", "prepare", "chats.jsonl", "--tokenizer", "model/tokenizer.json", "--out", "tokens"),
        ("train", "model/config.yaml", "--run-dir", "tuned", *given),
        ("eval", "tuned", "--data", "chats.jsonl", "--json", "eval.json", "--device", "cpu"),
    ):
        ended = typed(*command)
        assert ended.returncode == 0, ended.stderr
    figures = json.loads((base / "eval.json").read_text())
    assert figures["loss"] < 1
    answer = typed(
        *("generate", "tuned", "--chat", "--prompt", "What is 2 + 2?", "--temperature", "0", "--device", "cpu")
    )
    assert answer.stdout == "It is 4.\n"
    exported = typed("checkpoint", "export", "tuned", "--out", "out")
    assert exported.returncode == 0, exported.stderr
    for model in ("tuned", "out"):
        talk = [sys.executable, "-m", "threefold", "chat", model, "--temperature", "0", "--device", "cpu"]
        lines = "What is 2 + 2?\nThanks\n/reset\nHello there, how are you?\n"
        talked = subprocess.run(talk, input=lines, capture_output=True, text=True, timeout=300)
        assert talked.returncode == 0, talked.stderr
        first, _, *others = talked.stdout.splitlines()
        assert (first, others[-1]) == ("It is 4.", "Fine.")
    refused = typed("eval", "tuned", "--data", "chats.jsonl", "--task", "lambada", "--device", "cpu")
    assert refused.returncode == 2
    assert "chats.jsonl:1 is not a text, which --task lambada needs" in refused.stderr
