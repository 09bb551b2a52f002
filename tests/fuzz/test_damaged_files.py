"""Every kind of file that is opened, damaged: refused in a sentence or harmless; no traceback, no hang, no guess."""

import json
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from tests.fuzz import readers
from tests.fuzz.damage import damaged_file, flipped_file
from tests.fuzz.judge import Judge, Reader, Verdict, examine
from tests.huggingface.hand_made import write_llama
from tests.support.chats import CONVERSATIONS, write_tokenizer
from tests.support.command import Silent
from tests.support.other_systems import write_fleet, write_fleet_npz, write_megatron
from tests.support.words import words
from threefold.convert.json_lines import JsonLines
from threefold.convert.tokens import to_threefold
from threefold.data.preparation import prepare
from threefold.huggingface.import_hf import Import, import_model
from threefold.output import SILENT

pytestmark = pytest.mark.slow

EXAMPLE = Path(__file__).parents[2] / "examples" / "demo.yaml"


@pytest.fixture(scope="module")
def judge() -> Iterator[Judge]:
    one = Judge()
    yield one
    one.close()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tokenizers and a file of JSON lines, which stay whole."""
    folder = tmp_path_factory.mktemp("inputs")
    words(readers.VOCABULARY, "<|endoftext|>").save(str(folder / "tokenizer.json"))
    write_lines(folder / "lines.jsonl")
    write_tokenizer(folder / "chat", "llama3")
    return folder


def write_lines(path: Path) -> None:
    path.write_text("".join(json.dumps({"text": f"w{n} w{n + 1} w{n % 7}"}) + "\n" for n in range(2, 60)))


def documents(seed: int = 5) -> list[list[list[int]]]:
    draw = np.random.default_rng(seed)
    return [[[*draw.integers(1, readers.VOCABULARY, draw.integers(5, 60)).tolist(), 0]] for _ in range(30)]


def new_checkpoint(folder: Path, inputs: Path) -> Reader:
    source = write_llama(folder.parent / "llama")
    shutil.copy(inputs / "tokenizer.json", source)
    import_model(Import(source, folder, (), overwrite=False), Silent())
    return readers.checkpoint


def token_folder(folder: Path, inputs: Path) -> Reader:
    source = write_megatron(folder.parent / "source" / "m", documents())
    to_threefold(source, folder, inputs / "tokenizer.json", None, False, SILENT)
    return readers.tokens


def chat_folder(folder: Path, inputs: Path) -> Reader:
    lines = folder.parent / "chats.jsonl"
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CONVERSATIONS))
    prepare((lines,), folder, tokenizer=inputs / "chat" / "tokenizer.json")
    return readers.tokens


def cache_folder(folder: Path, inputs: Path) -> Reader:
    lines, tokenizer = inputs / "lines.jsonl", inputs / "tokenizer.json"
    JsonLines(lines, tokenizer, cache=folder).encoded(readers.LENGTH, SILENT)
    return partial(readers.cache, lines=lines, tokenizer=tokenizer)


def megatron_folder(folder: Path, inputs: Path) -> Reader:
    write_megatron(folder / "text", documents(6))
    return readers.megatron


def fleet_folder(folder: Path, inputs: Path) -> Reader:
    write_fleet(folder / "text", documents(7))
    return readers.fleet


def old_fleet_folder(folder: Path, inputs: Path) -> Reader:
    write_fleet_npz(folder / "text", documents(8), packed=True)
    return readers.fleet


def huggingface_folder(folder: Path, inputs: Path) -> Reader:
    write_llama(folder)
    shutil.copy(inputs / "tokenizer.json", folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [0, 2], "top_p": 0.9}')
    return readers.huggingface


def config_folder(folder: Path, inputs: Path) -> Reader:
    folder.mkdir()
    shutil.copy(EXAMPLE, folder / "run.yaml")
    return readers.config


def text_folder(folder: Path, inputs: Path) -> Reader:
    folder.mkdir()
    write_lines(folder / "lines.jsonl")
    return partial(readers.text_lines, tokenizer=inputs / "tokenizer.json")


def conversation_folder(folder: Path, inputs: Path) -> Reader:
    folder.mkdir()
    lines = "".join(json.dumps({"messages": chat}) + "\n" for chat in CONVERSATIONS)
    (folder / "lines.jsonl").write_text(lines)
    return partial(readers.chat_lines, tokenizer=inputs / "chat" / "tokenizer.json")


def never(damage: str) -> bool:
    return False


def always(damage: str) -> bool:
    """Files without checksums: what fits together is what they hold; the readers compare it with a plain reading."""
    return True


KINDS: list[tuple[Callable[[Path, Path], Reader], int, int, Callable[[str], bool]]] = [
    (new_checkpoint, 170, 80, never),
    (token_folder, 70, 40, never),
    (chat_folder, 40, 20, never),
    (cache_folder, 60, 20, never),
    (megatron_folder, 60, 20, always),
    (fleet_folder, 50, 20, always),
    (old_fleet_folder, 40, 20, always),
    (huggingface_folder, 60, 20, always),
    (config_folder, 40, 20, always),
    (text_folder, 40, 20, always),
    (conversation_folder, 40, 20, always),
]
DAMAGES, FLIPS = (sum(kind[place] for kind in KINDS) for place in (1, 2))


def test_the_bench_is_as_large_as_promised() -> None:
    assert DAMAGES >= 670
    assert FLIPS >= 300


@pytest.mark.parametrize("times", [1, pytest.param(10, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(("make", "damages", "flips", "may_differ"), KINDS, ids=[kind[0].__name__ for kind in KINDS])
def test_damaged_files_are_refused_or_harmless(
    judge: Judge,
    inputs: Path,
    tmp_path: Path,
    make: Callable[[Path, Path], Reader],
    damages: int,
    flips: int,
    may_differ: Callable[[str], bool],
    times: int,
) -> None:
    damages, flips = damages * times, flips * times
    whole = tmp_path / "whole" / "files"
    whole.parent.mkdir()
    read = make(whole, inputs)
    (scratch := tmp_path / "scratch").mkdir()
    cases = [
        *(partial(damaged_file, number=number, seed=make.__name__) for number in range(damages)),
        *(partial(flipped_file, number=number, seed=make.__name__) for number in range(flips)),
    ]
    found, counts = examine(judge, read, whole, scratch, cases, may_differ)
    print(f"{make.__name__}: {dict(counts)}")
    assert not found, "\n".join(map(str, found))
    assert counts.total() == damages + flips
    assert counts["refused"] > damages // 10  # of a cache, what is damaged is made anew as a rule


def test_a_reader_that_guesses_is_found(judge: Judge, inputs: Path, tmp_path: Path) -> None:
    """The bench itself: a reader that shows tracebacks, hangs, crashes or guesses does not pass it."""
    whole = tmp_path / "files"
    whole.mkdir()
    (whole / "data.json").write_text('{"a": [1, 2, 3]}')
    (scratch := tmp_path / "scratch").mkdir()
    cases = [partial(flipped_file, number=number, seed="bench") for number in range(20)]
    found, counts = examine(judge, careless, whole, scratch, cases, never)
    kinds: Counter[str] = Counter(finding.verdict.kind for finding in found)
    assert kinds["traceback"]
    assert kinds["read"]
    assert counts.total() == 20
    found, _ = examine(judge, crashing, whole, scratch, [overwritten], never)
    assert [finding.verdict.kind for finding in found] == ["crashed"]


def test_the_first_reading_that_hangs_is_found_as_soon_as_any() -> None:
    """However long the process takes to start."""
    impatient = Judge(patience=1.0)
    assert impatient.ask(hanging, Path()) == Verdict("hung", "has not answered within 1 s")


def careless(folder: Path) -> str:
    return str(json.loads((folder / "data.json").read_bytes().decode("latin-1")))


def hanging(folder: Path) -> str:
    while True:
        signal.pause()


def crashing(folder: Path) -> str:
    import os

    if "a" not in (folder / "data.json").read_text():
        os.abort()
    return ""


def overwritten(folder: Path) -> str:
    (folder / "data.json").write_text("{}")
    return "another content of data.json"
