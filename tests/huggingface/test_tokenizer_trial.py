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


def replace(text: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


TIME, ABORTED = "it takes more than 1 seconds of processor time", "ends with SIGABRT; it may take 300.0 MB of memory"
_GIVEN = json.loads((Path(__file__).parent / "data" / "tokenizers.json").read_text(encoding="utf-8"))
DOUBLED = [replace("a", "aa")] * 60
REFUSED: dict[str, tuple[dict[str, Any], str]] = _GIVEN["refused"] | {
    "a normalizer that doubles": ({"normalizer": {"type": "Sequence", "normalizers": DOUBLED}}, f"{ABORTED}|{TIME}"),
    "a decoder that doubles": ({"decoder": {"type": "Sequence", "decoders": DOUBLED}}, f"{ABORTED}|{TIME}"),
    "a normalizer of a rare letter": ({"normalizer": replace("ж", "q" * 10_000)}, "makes more than 13,400 characters"),
    "a normalizer that prepends": ({"normalizer": {"type": "Prepend", "prepend": "p" * 10**6}}, "its normalizer makes"),
    "a decoder that grows": ({"decoder": replace("<unk>", "q" * 10**5)}, "its decoder makes more than"),
}
NESTED = {"type": "Split", "pattern": {"Regex": "(" * 20_000 + "a" + ")" * 20_000}}
UNREADABLE: dict[str, tuple[dict[str, Any], str]] = _GIVEN["unreadable"] | {
    "brackets": ({"pre_tokenizer": NESTED | {"behavior": "Isolated", "invert": False}}, "parse depth limit over"),
}
HARMLESS: dict[str, dict[str, Any]] = _GIVEN["harmless"]


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
