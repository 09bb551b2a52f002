"""Configs that are damaged, or made to hurt: each loads, or is refused at once in one sentence."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from tests.config.damaged_configs import damaged_config
from threefold.config import load_config
from threefold.config.loading import LARGEST_DOCUMENT
from threefold.config.resolve import check_settings
from threefold.config.section import divisors, nearest_divisor
from threefold.errors import UserError

CPU_LIMIT = 20
"""Seconds of CPU that nothing here comes near; what works without bound would take minutes, or all memory."""


@pytest.fixture(autouse=True)
def _bounded() -> Iterator[None]:
    """End what works without bound."""

    def end(*_: object) -> None:
        pytest.fail(f"more than {CPU_LIMIT} s of CPU")

    before = signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, CPU_LIMIT)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)
    signal.signal(signal.SIGPROF, before)


def outcome(path: Path | str, *overrides: str) -> str:
    """The sentence that refuses a config, or nothing; whatever else is raised is a failure."""
    try:
        check_settings(load_config(path, overrides))
    except UserError as error:
        sentence = str(error)
        assert sentence.count("\n") == 0
        assert sentence.isprintable()
        assert len(sentence) < 1000
        return sentence
    return ""


def _laughs(merge: bool) -> str:
    levels = [f"b{n}: &b{n} {{<<: [{', '.join([f'*b{n - 1}'] * 9)}]}}" for n in range(1, 12)]
    if not merge:
        levels = [f"b{n}: &b{n} [{', '.join([f'*b{n - 1}'] * 9)}]" for n in range(1, 12)]
    return "\n".join(["b0: &b0 {x: 1}", *levels])


DATA = "data: {path: x}\n"
YAML = {
    "NUL": ("data: {path: a\0b}", "line 1: not valid YAML, the character U+0000 is not allowed"),
    "ESC": (DATA + "train: {init_from: a\x1bb}", "line 2: not valid YAML, the character U+001B is not allowed"),
    "DEL": ("data: {path: \x7f}", "the character U+007F is not allowed"),
    "escaped NUL": (r'data: {path: "a\0b"}', "data.path is 'a\\x00b' but must be a path"),
    "surrogate": (r'"\ud800": {path: x}', "is not a setting"),
    "ESC in a key": (r'"a\e[31m": 3', "is not a setting"),
    "list in itself": ("&a [*a]", "contains itself"),
    "mapping in itself": ("a: &a {b: *a}", "contains itself"),
    "section in itself": ("data: &a {path: *a}", "contains itself"),
    "billion laughs": (_laughs(merge=False), "more than 20,000 values"),
    "billion merges": (_laughs(merge=True), "more than 20,000 values"),
    "long chain": (
        "a0: &a0 [1]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}]\n" for n in range(1, 3000)),
        "more than 20,000 values",
    ),
    "many values": ("[" + "1," * 100_000 + "]", "more than 20,000 values"),
    "deep list": ("[" * 100_000, "nested too deeply"),
    "deep mapping": ("{a: " * 50_000, "nested too deeply"),
    "deep blocks": ("- " * 50_000, "nested too deeply"),
    "deep keys": ("? " * 50_000, "nested too deeply"),
    "deep JSON": ('{"a":' * 50_000, "nested too deeply"),
    "deep setting": (DATA + "model: {num_layers: " + "[" * 900 + "]" * 900 + "}", "nested too deeply"),
    "type": ("!!python/object/apply:os.system ['id']", "the tag !!python/object/apply:os.system is not allowed"),
    "own tag": (DATA + "model: !mine {num_layers: 2}", "line 2: the tag !mine is not allowed"),
    "no number": (DATA + "model: {num_layers: !!int abc}", "the tag !!int is not allowed"),
    "no date": ("data: {path: !!timestamp x}", "the tag !!timestamp is not allowed"),
    "text": ("data: {path: !!str 5}", None),
    "merged": (DATA + "model: {<<: {num_layers: 2}}", None),
    "merged scalar": ("data: {<<: 3}", "not valid YAML"),
    "equals sign": ("data: {path: =}", None),
    "twice": (DATA + "data: {path: y}", "line 2: data is set twice, first on line 1"),
    "twice below": ("data: {mixture: {a: 1, a: 2}}", "data.mixture.a is set twice"),
    "number as section": (DATA + "1: {a: 2}", "1 is not a setting"),
    "null as section": (DATA + "null: {a: 2}", "null is not a setting"),
    "number as key": ("data: {1: 2, path: x}", "data.1 is not a setting"),
    "true as key": (DATA + "model: {true: 1}", "model.true is not a setting"),
    "list as key": ("? [a]\n: b", "unhashable key"),
    "tab": ("data:\n\tpath: x", "line 2: not valid YAML"),
    "documents": (DATA + "---\nmodel: {}", "found another document"),
    "empty": ("", "data.path is missing"),
    "scalar": ("hello", "a config is a mapping of sections"),
    "list": ("[1, 2]", "a config is a mapping of sections"),
    "section of a scalar": (DATA + "model: 3", "model is 3 but must be a section"),
    "byte order mark": ("\ufeff" + DATA, None),
    "long key": (DATA + "? " + "x" * 50_000 + "\n: 3", "is not a setting"),
    "long value": (DATA + "model: {preset: " + "x" * 50_000 + "}", "; use gpt2-124m"),
    "long path": (f"data: {{path: {'x' * 5000}}}", "must be a path: at most 4095 bytes, at most 255 in each name"),
    "deep path": (DATA + f"train: {{init_from: {'a/' * 3000}}}", "must be a path: at most 4095 bytes"),
    "long name in a mixture": (f"data: {{mixture: {{{'x' * 300}: 1}}}}", "data.mixture is"),
}


@pytest.mark.parametrize("case", YAML)
def test_hostile_yaml(tmp_path: Path, case: str) -> None:
    text, expected = YAML[case]
    path = tmp_path / "run.yaml"
    path.write_bytes(text.encode(errors="surrogatepass"))
    sentence = outcome(path)
    assert expected in sentence if expected is not None else sentence == ""


def test_what_is_no_yaml_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "utf16").write_bytes("data: {path: x}".encode("utf-16"))
    (tmp_path / "binary").write_bytes(bytes(range(128, 256)) * 10)
    with open(tmp_path / "large", "wb") as large:
        large.truncate(100 << 20)
    for name, expected in {
        "fifo": "no regular file",
        "/dev/zero": "no regular file",
        "": "a folder",
        "x" * 5000: "File name too long",
        "a\0b": "NUL",
        "utf16": "is not UTF-8 text",
        "binary": "is not UTF-8 text",
        "large": f"104,857,600 bytes and {LARGEST_DOCUMENT:,} are allowed",
    }.items():
        assert expected in outcome(tmp_path / name)


HUGE = {
    "model.num_layers=99999999999999999999": "must be at most 1024",
    f"model.num_layers={'9' * 5000}": "too long for a number",
    "model.num_layers=1000000": "must be at most 1024",
    "model.num_layers=nan": "must be a whole number",
    "model.num_layers=1e400": "must be a whole number",
    "model.hidden_size=1e9": "must be a whole number",
    "model.hidden_size=1000000000": "must be at most 1048576",
    "model.hidden_size=1048575": "must divide model.hidden_size 1048575; use 5",
    "model.vocab_size=1000000000000": "must be at most 2147483647",
    "model.num_experts=1000000": "must be at most 16384",
    "model.rope_theta=1e400": "must be a finite number",
    "model.rope_theta=1e308": "must be 0 or between 1.1755e-38 and 3.40282e+38 in size, as in fp32; use 3.40282e+38",
    "model.norm_eps=1e308": "must be at most 1.",
    "model.norm_eps=1e-320": "in size, as in fp32; use 1.1755e-38",
    "optimizer.clip_grad_norm=1e-320": "must be 0 or between 1.1755e-38 and 3.40282e+38 in size, as in fp32; use 1.17",
    "optimizer.clip_grad_norm=1.1755e-38": None,
    "optimizer.clip_grad_norm=3.40282e+38": None,
    "optimizer.clip_grad_norm=0": None,
    "optimizer.lr=5e-324": "as in fp32; use 1.1755e-38",
    f"model.rope_theta={'9' * 399}": "must be a number",
    "model.preset=llama3": "the nearest is llama-3",
    "model.architecture=GPT": "the nearest is gpt",
    "data.sequence_length=1000000000": "must be at most 100000000",
    "parallel.dp=1000000000": "must be at most 1000000",
    "parallel.pp=1000000": "model.num_layers is 8; use at most 8",
    "parallel.tp=1000000": "must divide model.num_attention_heads 8; use 8",
    "parallel.cp=1000000": "use data.sequence_length 2000000 instead of 256",
    "parallel.dp=999983 train.global_batch_size=999999937": "use 999983000",
    "parallel.dp=1000000 parallel.zero=1 parallel.zero_shards=999999 train.global_batch_size=1000000": "use 1000000",
    "train.global_batch_size=1000000000000000": "must be at most 1000000000",
    "train.global_batch_size=999999937": None,
    "train.global_batch_size=999999937 train.micro_batch_size=2": "use 1.",
    "train.micro_batch_size=1000000000 train.gradient_accumulation_steps=1000000000": "must be at most 1000000000",
    "parallel.pp=8 parallel.schedule=interleaved model.num_layers=14 train.micro_batch_size=1 "
    "train.global_batch_size=999999937": "equal rounds of at least parallel.pp 8; use 1.",
    "precision.loss_scale=1.7e308": "must be at most 1.8446744073709552e+19",
    "optimizer.betas=[.nan,.inf]": "must be a list of two numbers",
    "parallel.partition=3": "must be cost, uniform, uniform-chunks, class: and the name of a class, or a list of layers",
    "model.num_layers=!!python/object:x": "the tag !!python/object:x is not allowed",
    f"model.num_layers={'[' * 100_000}": "nested too deeply",
    f"model.preset={'x' * 300_000}": "characters and 262,144 are allowed",
    "model.num_layers=\0": "the character U+0000 is not allowed",
    "data.path=&a\xa0[*a]": "--set",
    "a": "write it as section.key=value",
    "=": "write it as section.key=value",
    "model=3": "model is a section; name a setting of it, such as model.preset",
}


@pytest.mark.parametrize("overrides", HUGE, ids=lambda text: text[:60].encode("unicode_escape").decode())
def test_hostile_overrides(tmp_path: Path, overrides: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(DATA)
    sentence, expected = outcome(str(path), *overrides.split(" ")), HUGE[overrides]
    assert expected in sentence if expected is not None else sentence == ""


def test_divisors() -> None:
    for number in (*range(1, 400), 999_999, 3 * 5 * 7 * 11 * 13 * 17):
        assert divisors(number) == [divisor for divisor in range(1, number + 1) if number % divisor == 0]
    assert nearest_divisor(7, 10**12 + 39) == 1  # a prime
    assert nearest_divisor(5, 24) == 4


def test_damaged_configs_load_or_are_refused_in_a_sentence(tmp_path: Path) -> None:
    source, refused, path = Random(20), 0, tmp_path / "run.yaml"
    for number in range(400):
        path.write_bytes(damaged_config(source))
        try:
            refused += bool(outcome(path))
        except Exception as error:
            error.add_note(f"damaged config {number}:\n{path.read_bytes()[:2000]!r}")
            raise
    assert 200 < refused < 400  # damaged, but not beyond all use
