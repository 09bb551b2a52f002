"""Perplexity and last words against the slow way, token by token."""

import json
from collections.abc import Callable
from math import exp
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.inference.support import Oracle
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.inference.eval_tasks import EvalTask, LastWord, Perplexity, Window, score
from threefold.inference.inputs import read_texts
from threefold.inference.model import Trained
from threefold.verify.worker_pool import WorkerPool

TEXTS = [
    "The statement returns a value when the name is bound to an object in the current scope.",
    "If not",
    "a",  # one token, so that nothing is predicted
    "Exceptions are raised by the raise statement, and handled by a handler that names their class.",
]


@pytest.fixture(scope="module")
def learned(runs: Callable[[str], Path]) -> Trained:
    return Trained.find(runs("learned"))


def figures(trained: Trained, task: EvalTask, mesh: Mesh | None = None, texts: list[str] = TEXTS) -> dict[str, float]:
    work = task.prepare(trained.documents(), texts, lambda: None)
    scores = score(trained.load(mesh, "fp64"), work.texts, work.windows, 3)
    return {figure.name: figure.value for figure in task.metrics(work, scores)}


def slow_losses(trained: Trained, tokens: list[int], stride: int) -> dict[int, float]:
    """The loss of each token but the first: of the earliest window that predicts it, by the definition."""
    oracle, losses = Oracle(trained), {}
    for begin in range(0, len(tokens), stride):
        window = tokens[begin : begin + oracle.context]
        probabilities = oracle.logits(window).log_softmax(-1)
        for place in range(len(window)):
            label = begin + place + 1
            if label < len(tokens) and label not in losses:
                losses[label] = -float(probabilities[place, tokens[label]])
    assert sorted(losses) == list(range(1, len(tokens)))
    return losses


@pytest.mark.parametrize("stride", [1, 5, 16])
def test_perplexity_by_the_slow_way(learned: Trained, stride: int) -> None:
    encoded = [learned.tokenizer().encode(text).ids for text in TEXTS]
    assert [len(tokens) > 16 for tokens in encoded] == [True, False, False, True]
    losses = [loss for tokens in encoded for loss in slow_losses(learned, tokens, stride).values()]
    found = figures(learned, Perplexity(16, stride))
    assert found["tokens"] == len(losses) == sum(len(tokens) - 1 for tokens in encoded)
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    assert found["perplexity"] == pytest.approx(exp(found["loss"]), rel=1e-12)


@pytest.mark.parametrize("context", [1, 4, 7])
def test_windows_count_each_token_once_and_see_enough(context: int) -> None:
    for stride in range(1, context + 1):
        for tokens in range(30):
            windows = Perplexity(context, stride).windows(0, tokens)
            counted = [label for window in windows for label in range(window.first, window.end + 1)]
            assert counted == list(range(1, tokens))
            for window in windows:
                assert 0 < window.end - window.begin <= context
                assert window.first - window.begin >= min(window.first, context - stride + 1)


WORDS = [text for text in TEXTS if " " in text]


def test_last_words_by_the_slow_way(learned: Trained) -> None:
    oracle, tokenizer = Oracle(learned), learned.tokenizer()
    losses, known = [], 0
    for text in WORDS:
        before, _, word = text.rpartition(" ")
        given, last = tokenizer.encode(before).ids, tokenizer.encode(f" {word}").ids
        probabilities = oracle.logits([*given, *last][:-1][-16:]).log_softmax(-1)[-len(last) :]
        losses.append(-float(probabilities[range(len(last)), last].sum()))
        known += probabilities.argmax(-1).tolist() == last
    found = figures(learned, LastWord(16), texts=WORDS)
    assert found["texts"] == len(WORDS)
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-12)
    assert found["accuracy"] == known / len(WORDS)


def test_a_word_is_known_when_all_its_tokens_are(learned: Trained) -> None:
    """What the model writes greedily is known, and no longer when one token is another."""
    oracle, tokenizer = Oracle(learned), learned.tokenizer()
    model = learned.load(dtype="fp64")
    tokens = oracle.greedy(tokenizer.encode("If not").ids, 6, model.tokens, model.ends)
    given = tokenizer.encode("If not").ids
    texts = [[*given, *tokens], [*given, *tokens[:3], 7, *tokens[4:]]]
    task = LastWord(16)
    work = task.prepare(learned.documents(), ["any text", "any other"], lambda: None)
    for number, window in enumerate(work.windows):
        work.texts[number] = torch.tensor(texts[number]).numpy()
        work.windows[number] = type(window)(number, 0, len(texts[number]) - 1, len(given))
    found = score(model, work.texts, work.windows, 2)
    assert found.hits.tolist()[0] == len(tokens) > found.hits.tolist()[1]
    assert {figure.name: figure.value for figure in task.metrics(work, found)}["accuracy"] == 0.5


def in_layout(run: Path, layout: Layout) -> list[dict[str, float]]:
    trained, mesh = Trained.find(run), Mesh(layout)
    return [figures(trained, Perplexity(16, 5), mesh), figures(trained, LastWord(16), mesh, WORDS)]


@pytest.mark.parametrize(
    ("kind", "layout"), [("learned", Layout(tp=2, pp=2)), pytest.param("llama", Layout(dp=2), marks=pytest.mark.slow)]
)
def test_same_figures_in_every_layout(pool: WorkerPool, runs: Callable[[str], Path], kind: str, layout: Layout) -> None:
    trained = Trained.find(runs(kind))
    expected = [figures(trained, Perplexity(16, 5)), figures(trained, LastWord(16), texts=WORDS)]
    for found in pool.run(layout.world_size, in_layout, runs(kind), layout):
        for task, one in zip(found, expected, strict=True):
            assert task == pytest.approx(one, rel=1e-12)


def known_in_layout(run: Path, texts: list[list[int]], given: int) -> list[int]:
    """How many tokens after the first `given` of each text are the likeliest, with the vocabulary on two ranks."""
    model = Trained.find(run).load(Mesh(Layout(tp=2)), "fp64")
    windows = [Window(number, 0, len(text) - 1, given) for number, text in enumerate(texts)]
    return [int(hits) for hits in score(model, [np.array(text) for text in texts], windows, 2).hits]


def test_likeliest_tokens_of_every_shard_are_known(
    pool: WorkerPool, runs: Callable[[str], Path], learned: Trained
) -> None:
    model, oracle, texts = learned.load(dtype="fp64"), Oracle(learned), []
    for begun in range(8):
        texts.append([begun, begun + 9, *oracle.greedy([begun, begun + 9], 6, model.tokens, frozenset())])
    shard = -(-learned.config.model.vocab_size // 2)
    assert {token >= shard for text in texts for token in text[2:]} == {False, True}
    assert pool.run(2, known_in_layout, runs("learned"), texts, 2) == [[6] * 8] * 2


def test_texts_from_files(tmp_path: Path) -> None:
    lines, empty = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    lines.write_text("\n\n".join(json.dumps({"text": text}) for text in ("One", "", " ", "Two")))
    assert read_texts(lines, "text") == ["One", "Two"]
    empty.write_text("\n")
    for path, key, sentence in (
        (empty, "text", "has no text"),
        (lines, "body", 'has no key "body"'),
        (tmp_path / "nowhere.jsonl", "text", "which is not a file"),
    ):
        with pytest.raises(UserError, match=sentence):
            read_texts(path, key)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Perplexity(16, 17), "--stride is 17 but must be between 1 and the context, 16, .* use 16"),
        (lambda: Perplexity(16, 0), "--stride is 0 .* use 1"),
    ],
)
def test_strides_that_cannot_be(make: Callable[[], EvalTask], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        make()


@pytest.mark.parametrize(
    ("task", "texts", "sentence"),
    [
        (Perplexity(16, 8), ["a"], "No text of --data has more than one token"),
        (LastWord(16), ["two words", "one"], "Text 2 of --data is one word"),
        (LastWord(2), ["a nonexistentword"], "The last word of text 1 of --data is .* tokens"),
    ],
)
def test_texts_without_anything_to_predict(learned: Trained, task: EvalTask, texts: list[str], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        task.prepare(learned.documents(), texts, lambda: None)
