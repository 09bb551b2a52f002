"""Tokenizers of strangers: each is tried in a child process, and refused in one sentence or of bounded cost."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.chats import TEMPLATES, make_tokenizer
from threefold.data.tokenizer import TextEncoder, TextRule, decoded, encoding_of, load_tokenizer, loaded, opened
from threefold.errors import UserError
from threefold.huggingface import tokenizer_check
from threefold.huggingface.limited import LimitedProcess, Limits, Refused

SMALL = Limits(seconds=1, memory=300_000_000)
PLAIN: dict[str, Any] = {
    "version": "1.0",
    "truncation": None,
    "padding": None,
    "added_tokens": [],
    "normalizer": None,
    "pre_tokenizer": None,
    "post_processor": None,
    "decoder": None,
    "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1, "<unk>": 2}, "unk_token": "<unk>"},
}
TOKEN = {"content": "X", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def replace(pattern: str, content: str, kind: str = "String") -> dict[str, Any]:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def padding(**changes: Any) -> dict[str, Any]:
    fixed = {"strategy": {"Fixed": 10**10}, "direction": "Right", "pad_to_multiple_of": None}
    return {"padding": {**fixed, "pad_id": 0, "pad_type_id": 0, "pad_token": "a", **changes}}


def template(ids: list[int], used: str = "a") -> dict[str, Any]:
    single = [{"SpecialToken": {"id": used, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    known = {"a": {"id": "a", "ids": ids, "tokens": ["a"] * len(ids)}}
    return {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": known}


def bpe(**changes: Any) -> dict[str, Any]:
    usual = {"dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    given = {"vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"], "fuse_unk": False, "byte_fallback": False}
    return {"model": {"type": "BPE", **usual, **given, **changes}}


TIME, ABORTED = "it takes more than 1 seconds of processor time", "ends with SIGABRT; it may take 300.0 MB of memory"
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a regular expression that divides a run in every way": (
        {"pre_tokenizer": split("(a+)+$")},
        "retry-limit-in-match",
    ),
    "one that divides words in every way": ({"pre_tokenizer": split(r"(\w+\s?)+$")}, "retry-limit-in-match"),
    "words that are looked up at all lengths": (
        {
            "model": {
                "type": "WordPiece",
                "unk_token": "a",
                "continuing_subword_prefix": "",
                "max_input_chars_per_word": 10**12,
                "vocab": {"a": 0},
            }
        },
        TIME,
    ),
    "a normalizer that doubles": (
        {"normalizer": {"type": "Sequence", "normalizers": [replace("a", "aa")] * 60}},
        f"{ABORTED}|{TIME}",
    ),
    "a normalizer of a rare letter": ({"normalizer": replace("ж", "q" * 10_000)}, "makes more than 13,400 characters"),
    "a normalizer that prepends": ({"normalizer": {"type": "Prepend", "prepend": "p" * 10**6}}, "its normalizer makes"),
    "a decoder that doubles": (
        {"decoder": {"type": "Sequence", "decoders": [replace("a", "aa")] * 60}},
        f"{ABORTED}|{TIME}",
    ),
    "a decoder that grows": ({"decoder": replace("<unk>", "q" * 10**5)}, "its decoder makes more than"),
    "a decoder that strips more than there is": (
        {"decoder": {"type": "Strip", "content": "a", "start": 10**12, "stop": 10**12}},
        "index out of bounds",
    ),
    "a post-processor's id out of range": (
        {"post_processor": template([3])},
        "puts token 3 before texts and its ids go",
    ),
    "a post-processor's id of 32 bits": ({"post_processor": template([4_000_000_000])}, "puts token 4,000,000,000"),
    "RoBERTa's ids out of range": (
        {
            "post_processor": {
                "type": "RobertaProcessing",
                "sep": ["x", 9],
                "cls": ["y", 3_000_000_000],
                "trim_offsets": True,
                "add_prefix_space": False,
            }
        },
        "puts token 3,000,000,000 before texts",
    ),
    "a post-processor's token that it lacks": ({"post_processor": template([0], used="z")}, "no entry found for key"),
    "an id beyond all token files": (
        {"model": {**PLAIN["model"], "vocab": {"<unk>": (1 << 32) - 1}}},
        "has a token with id 4,294,967,295 and ids go",
    ),
    "a prefix that cuts letters": (bpe(continuing_subword_prefix="é日"), "out of range"),
    "characters that are not": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "////"}}, "charsmap"),
    "pieces of no length": ({"pre_tokenizer": {"type": "FixedLength", "length": 0}}, "must be non-zero"),
}
UNREADABLE: dict[str, tuple[dict[str, Any], str]] = {
    "a negative id": ({"added_tokens": [{"id": -1, **TOKEN}]}, "integer `-1`, expected u32"),
    "an id that is too large": ({"added_tokens": [{"id": 1 << 64, **TOKEN}]}, "expected u32"),
    "brackets": ({"pre_tokenizer": split("(" * 20_000 + "a" + ")" * 20_000)}, "parse depth limit over"),
    "a wrong regular expression": ({"pre_tokenizer": split("(")}, "unmatched parenthesis"),
    "an unknown id of no token": ({"model": {"type": "Unigram", "unk_id": 99, "vocab": [["a", 0.0]]}}, "UnkIdNotInVoc"),
    "merges of no token": (bpe(merges=["a z"]), "out of vocabulary"),
}
HARMLESS: dict[str, dict[str, Any]] = {
    "a plain one": {},
    "padding of ten billion tokens": padding(),
    "padding to multiples of nothing": padding(strategy="BatchLongest", pad_to_multiple_of=0),
    "truncation to nothing": {
        "truncation": {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 10}
    },
    "an empty pattern": {"normalizer": replace("", "x")},
    "an empty regular expression": {"normalizer": replace("", "x", "Regex"), "pre_tokenizer": split("")},
    "an empty pattern to split at": {"pre_tokenizer": {**split(""), "pattern": {"String": ""}}},
    "an empty pattern to decode": {"decoder": replace("", "x")},
    "an added token with another's id": {"added_tokens": [{"id": (1 << 32) - 1, **TOKEN}]},
    "an added token without text": {"added_tokens": [{"id": 3, **TOKEN, "content": ""}]},
    "no token for what it does not know": {"model": {**PLAIN["model"], "unk_token": "none"}},
    "one letter": {"model": {"type": "Unigram", "unk_id": None, "vocab": [["a", 0.0]]}},
    "no vocabulary": {"model": {**PLAIN["model"], "vocab": {}}},
}


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A cache of nobody, so that each tokenizer is tried."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache/threefold/tokenizers"


def made(changes: dict[str, Any]) -> str:
    return json.dumps({**PLAIN, **changes})


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits that are reached soon."""
    monkeypatch.setattr(tokenizer_check, "LIMITS", SMALL)


@pytest.mark.parametrize(("changes", "reason"), REFUSED.values(), ids=REFUSED)
def test_a_tokenizer_that_fails_is_refused_in_one_sentence(
    changes: dict[str, Any], reason: str, cache: Path, small: None
) -> None:
    with pytest.raises(UserError) as refused:
        loaded(made(changes), "--tokenizer t.json")
    told = str(refused.value)
    assert told.startswith("--tokenizer t.json is not a tokenizer.json that can be used (")
    assert re.search(reason, told), told
    assert "\n" not in told
    assert not cache.exists()


@pytest.mark.parametrize(("changes", "reason"), UNREADABLE.values(), ids=UNREADABLE)
def test_what_is_no_tokenizer_is_refused_as_before(changes: dict[str, Any], reason: str, small: None) -> None:
    with pytest.raises(UserError, match=r"^t\.json is not a tokenizer\.json that can be read \(") as refused:
        loaded(made(changes), "t.json")
    assert reason in str(refused.value)


def test_json_that_is_nested_too_deeply_is_refused() -> None:
    deep = '{"type":"Sequence","normalizers":[' * 100_000 + "]}" * 100_000
    with pytest.raises(
        UserError, match=r"^t\.json is not a tokenizer\.json that can be read \(recursion limit exceeded"
    ):
        loaded(made({}).replace('"normalizer": null', f'"normalizer": {deep}'), "t.json")


def test_what_is_harmless_is_loaded_and_tried_once(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    for changes in HARMLESS.values():
        loaded(made(changes), "t.json")
    assert len(list(cache.iterdir())) == len(HARMLESS)
    monkeypatch.setattr(tokenizer_check, "LimitedProcess", None)  # no other trial
    for changes in HARMLESS.values():
        text = made(changes)
        assert loaded(text, "t.json").to_str() == opened(text).to_str()


@pytest.mark.parametrize("style", TEMPLATES)
def test_tokenizers_in_published_styles_pass(style: str) -> None:
    loaded(make_tokenizer(style).to_str(), "t.json")


def test_the_cache_may_be_absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Then every load tries again."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    asked: list[str] = []

    def ask(child: LimitedProcess, request: str) -> None:
        asked.append(request)

    monkeypatch.setattr(LimitedProcess, "ask", ask)
    for _ in range(2):
        loaded(made({}), "t.json")
    assert asked == [made({})] * 2


def test_a_file_that_is_no_text_or_too_large_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"t\.json is not UTF-8 text"):
        load_tokenizer(path)
    with path.open("wb") as file:
        file.truncate(1 << 30)
    with pytest.raises(UserError, match=r"t\.json: it holds 1,073,741,824 bytes and 268,435,456 are allowed"):
        load_tokenizer(path)


def test_a_failure_that_the_trial_has_not_found_is_one_sentence() -> None:
    """Such as the panic of the library at a text, which is no Exception."""
    told = r"^The tokenizer fails on a text \(.*\); fetch its tokenizer\.json again, or use another one\.$"
    panics = opened(made({"decoder": {"type": "Strip", "content": "a", "start": 9, "stop": 9}}))
    with pytest.raises(UserError, match=told):
        decoded(panics, [0])
    unknown = opened(made(HARMLESS["one letter"]))
    for encode in (TextEncoder(unknown, TextRule()).encode, lambda text: encoding_of(unknown, text)):
        with pytest.raises(UserError, match=told):
            encode("b")
    with pytest.raises(UserError, match=told):
        decoded(unknown, [1 << 40])


def test_an_interrupt_is_let_through(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def decode(self, tokens: list[int], **_: Any) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoded(Interrupted(), [0])  # type: ignore[arg-type]


def test_a_trial_needs_no_other_process_of_a_library() -> None:
    """Whose address space, reserved for a thread of each core, would count for the limit."""
    with LimitedProcess("threefold.huggingface.tokenizer_trial:Trial", limits=Limits(memory=200_000_000)) as child:
        child.ask(Tokenizer.from_str(made({})).to_str())
        with pytest.raises(Refused, match=r"takes more than 200\.0 MB of memory"):
            child.ask(" " * 150_000_000)
