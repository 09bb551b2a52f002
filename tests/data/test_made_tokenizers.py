"""Tokenizers of characters and of bytes: each text is spelled exactly, and what is not known is one token."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.support.command import Command
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.data.preparation import prepare
from threefold.data.tokenizer import (
    END_OF_DOCUMENT,
    UNKNOWN,
    TextEncoder,
    TextRule,
    byte_tokenizer,
    character_tokenizer,
    decoded,
    loaded,
)
from threefold.errors import UserError

EVERY = "".join(map(chr, (*range(0xD800), *range(0xE000, 0x110000))))
"""All characters, among them spaces and ends of lines of all kinds, marks that combine, and those of no meaning."""

PRINTED = "".join(map(chr, range(33, 127)))


def stored(tokenizer: Tokenizer) -> Tokenizer:
    """As a run reads it from the text of its tokenizer.json."""
    return loaded(tokenizer.to_str(), "the tokenizer", is_tried=True)


def test_the_ids_of_bytes_are_their_values() -> None:
    tokenizer = stored(byte_tokenizer())
    ids = TextEncoder(tokenizer, TextRule("text")).encode(EVERY)
    assert bytes(ids) == EVERY.encode()
    assert decoded(tokenizer, ids) == EVERY
    assert tokenizer.get_vocab_size() == 257 == len(set(range(257)) & set(tokenizer.get_vocab().values()))
    assert TextEncoder(tokenizer, TextRule("parse")).encode("<|endoftext|>") == [256]


def test_each_character_is_a_token_of_its_own() -> None:
    known = EVERY[:2000] + "日本🙂"
    text = "".join(random.Random(3).choices(known, k=5000)) + "\r\n \u0301e\u0301"
    tokenizer = stored(character_tokenizer([known[:900], known[900:]]))
    ids = TextEncoder(tokenizer, TextRule("text")).encode(text)
    assert ids == [2 + known.index(character) for character in text]
    assert decoded(tokenizer, ids) == text
    assert TextEncoder(tokenizer, TextRule("text")).encode("a語語b") == [2 + ord("a"), 1, 1, 2 + ord("b")]
    assert TextEncoder(tokenizer, TextRule("parse")).encode("a<|endoftext|>") == [2 + ord("a"), 0]


@pytest.mark.parametrize(
    ("text", "size", "unknown"),
    [(PRINTED, 94, ""), (PRINTED + "~|", 92, "{}"), ("abca", 2, "c")],
    ids=("all", "most", "few"),
)
def test_the_size_is_a_number_of_characters(tmp_path: Path, text: str, size: int, unknown: str) -> None:
    """Those that are most frequent, and of equals the first in Unicode."""
    (tmp_path / "a.txt").write_text(text)
    files = prepare([tmp_path / "a.txt"], tmp_path / "out", size, Path("char"))
    assert files.vocab_size == size + 2
    ids = files.tokens[:].tolist()
    assert [text[place] for place, token in enumerate(ids[:-1]) if token == 1] == list(unknown)
    assert ids[-1] == files.eod == 0


def test_transformers_reads_them(tmp_path: Path) -> None:
    import transformers

    text = "It's  a\n\n text ,  with\tspaces . 日本"
    for made in (byte_tokenizer(), character_tokenizer([text])):
        made.save(str(tmp_path / "tokenizer.json"))
        read = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
        ids = read(text + "é").input_ids
        assert ids == TextEncoder(made, TextRule()).encode(text + "é")
        assert read.decode(read(text).input_ids) == text


@pytest.mark.parametrize(
    ("tokenizer", "size", "message"),
    [
        ("byte", 94, "--vocab-size is 94 but --tokenizer byte has 257 tokens, 256 bytes .*; leave --vocab-size out"),
        ("char", 0, "--vocab-size is 0 but must be at least 1"),
        (
            "gpt2-like",
            94,
            "--vocab-size is 94 .* is 257, or give --tokenizer char for a token for each character",
        ),
        ("char", None, "holds conversations or prompts, whose special tokens no vocabulary learned here would have"),
    ],
)
def test_what_cannot_be_made(tmp_path: Path, tokenizer: str, size: int | None, message: str) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "completion": "b"} if size is None else {"text": "a"}))
    with pytest.raises(UserError, match=message):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", size, Path(tokenizer))
    assert not (tmp_path / "out").exists()


def test_the_name_of_the_default(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some words, and some words again " * 20)
    named = prepare([tmp_path / "a.txt"], tmp_path / "named", 270, Path("gpt2-like"))
    plain = prepare([tmp_path / "a.txt"], tmp_path / "plain", 270)
    assert named.meta.tokenizer_sha256 == plain.meta.tokenizer_sha256
    assert (named.tokens[:] == plain.tokens[:]).all()


@pytest.mark.slow
def test_a_run_of_characters_is_generated_from_and_exported(tmp_path: Path, threefold: Command) -> None:
    import transformers

    text = "The quick brown fox jumps over the lazy dog.\n\n" * 60
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "run.yaml").write_text(
        f"""data: {{path: {tmp_path / "tokens"}, sequence_length: 32, split: "1"}}
model: {{architecture: llama, num_layers: 2, hidden_size: 32, num_attention_heads: 4}}
train: {{max_steps: 60, global_batch_size: 8, eval_every: 0}}
optimizer: {{lr: 1e-2}}
"""
    )
    run, out = tmp_path / "runs/characters", tmp_path / "exported"
    for command in (
        ("data", "prepare", tmp_path / "a.txt", "--out", tmp_path / "tokens", "--tokenizer", "char", "--workers", "1"),
        ("train", tmp_path / "run.yaml", "--run-dir", run),
        ("checkpoint", "export", run, "--out", out),
    ):
        ended = threefold(*command)
        assert ended.status == 0, ended.error
    assert TokenFiles.open(tmp_path / "tokens").vocab_size == 2 + len(set(text))
    said = threefold("generate", run, "--prompt", "The qüick bro", "--temperature", "0", "--max-new-tokens", "15")
    assert said.output.startswith("The qüick brown fox jumps"), "a character that is not known does no harm"
    read = transformers.AutoTokenizer.from_pretrained(out)
    ids = read(text[:99], return_tensors="pt").input_ids
    assert read.decode(ids[0]) == text[:99]
    assert (out / "tokenizer_config.json").exists(), "else transformers would take it for one of the model's family"
    assert (read.eos_token, read.unk_token) == (END_OF_DOCUMENT, UNKNOWN)
    loss = transformers.AutoModelForCausalLM.from_pretrained(out)(input_ids=ids, labels=ids).loss
    assert loss.item() < 1.5
