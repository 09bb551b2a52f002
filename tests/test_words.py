"""The words of the code and the documentation: the field's usual terms lead to the files that do what they name."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parent.parent
PACKAGE = REPOSITORY / "threefold"

OLD_SENTENCES = (
    "before it is mended",
    "a replica alone shares nothing",
    "no replica is there to share with",
    "heads that share keys, normalised queries",
    "Bring models in",
    "take them there",
    "a folder that stands at --out",
    "1 safer, above 1 wilder",
    "the likeliest",
    "likeliest tokens",
    "of which a token passes",
    "those that a token passes",
    "The layout {} cannot be",
    "counts; look at data.path",
    "Going on from",
    "there are no words for its tokens",
    "first layer of each stage but the first",
    "as one rank lives it",
    "may be told of a run",
    "while it goes on",
)
"""Sentences of an older wording; `{}` is anything on the same line. White space and case do not matter."""

RIGHT_FILES = {
    "KV cache": ["inference/kv_cache.py"],
    "activation checkpointing": ["parallel/recompute.py"],
    "attention mask": ["models/layers/attention.py"],
    "GQA": ["models/layers/attention.py", "ops/kernels.py"],
    "QK-norm": ["models/llama/model.py"],
    "reduce-scatter": ["parallel/zero.py", "comm/axis.py", "comm/collectives.py"],
    "all-to-all": ["parallel/experts.py", "comm/axis.py"],
    "resume": ["checkpoint/resume.py", "launch/training_run.py"],
    "callback": ["train/callbacks/registry.py", "train/callbacks/base.py"],
    "sampler": ["data/loader.py", "data/map_dataset.py", "random/permutation.py"],
    "tied embeddings": ["parallel/pipeline/stage.py", "models/layers/decoder.py"],
    "load balancing loss": ["models/layers/experts.py"],
    "gradient accumulation": ["parallel/pipeline/runner.py", "train/step.py"],
    "loss scaling": ["train/step.py"],
    "learning rate": ["train/lr_schedules.py", "train/lr_schedules/*.py"],
    "optimizer state": ["train/optimizers/base.py", "checkpoint/*.py"],
    "micro-batch": ["parallel/pipeline/runner.py", "config/schedules.py"],
}
"""Term → the files of the package, as patterns, that do what it names."""


def documents() -> Iterator[tuple[str, str]]:
    """Path and content of every text that a user or a developer reads, but the tests."""
    yield "README.md", (REPOSITORY / "README.md").read_text()
    for folder in (PACKAGE, REPOSITORY / "docs", REPOSITORY / "examples", REPOSITORY / "benchmarks"):
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".md", ".yaml", ".sh", ".csv"):
                yield str(path.relative_to(REPOSITORY)), path.read_text()


def expression(sentence: str) -> re.Pattern[str]:
    words = [re.escape(word).replace(r"\{\}", r"[^.\n]{1,60}") for word in sentence.split()]
    return re.compile(r"\s+".join(words), re.IGNORECASE)


def search(term: str) -> list[str]:
    """Files of the package that have a term in any case, the most occurrences first, then by path."""
    found: dict[str, int] = {}
    for path in PACKAGE.rglob("*.py"):
        if number := path.read_text().lower().count(term.lower()):
            found[path.relative_to(PACKAGE).as_posix()] = number
    return sorted(found, key=lambda name: (-found[name], name))


@pytest.mark.parametrize("sentence", OLD_SENTENCES)
def test_old_sentence_is_gone(sentence: str) -> None:
    assert [path for path, text in documents() if expression(sentence).search(text)] == []


def test_no_codes_of_requirements() -> None:
    code = re.compile(r"\bS\d{2}\b(?=[,:;)–]|\s*$)", re.MULTILINE)
    tests = [(str(path), path.read_text()) for path in sorted((REPOSITORY / "tests").rglob("*.py"))]
    assert [path for path, text in (*documents(), *tests) if code.search(text)] == []


@pytest.mark.parametrize("term", RIGHT_FILES)
def test_search_for_a_term_finds_its_file(term: str) -> None:
    first_two = search(term)[:2]
    assert any(Path(name).match(pattern) for name in first_two for pattern in RIGHT_FILES[term]), first_two
