"""Text from checkpoints of any layout: the choices one by one, and the whole against the model by hand."""

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from tests.train.support import Run, train_rank
from threefold.checkpoint.folder import path_of
from threefold.errors import UserError
from threefold.launch.pool import WorkerPool
from threefold.train.generate import Sampling, Writer, generate

PROMPT = "The statement is"


@pytest.fixture(scope="module")
def run(pool: WorkerPool, small_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on tp 2 · pp 2 with an uneven, tied vocabulary."""
    folder = tmp_path_factory.mktemp("generate") / "run"
    pool.run(4, train_rank, small_run.but(tp=2, pp=2, steps=8), folder)
    return folder


def greedy(run: Path, prompt: str, new_tokens: int) -> str:
    """By hand: the likeliest token, again and again, from all logits of the whole model."""
    writer = Writer.load(run)
    tokenizer = Tokenizer.from_file(str(path_of(run, 8) / "tokenizer.json"))
    tokens = tokenizer.encode(prompt).ids
    for _ in range(new_tokens):
        with torch.no_grad():
            logits = writer.model(torch.tensor([tokens[-16:]]))[0, -1]
        tokens.append(int(logits[:300].argmax()))
    return str(tokenizer.decode(tokens))


def test_greedy_is_the_likeliest_of_the_trained_model(run: Path) -> None:
    """Beyond 16 new tokens the context is cut, too."""
    (text,) = generate(run, [PROMPT], 25, temperature=0)
    assert text == greedy(run, PROMPT, 25)
    assert text.startswith(PROMPT)


def test_one_process_wrote_the_same(pool: WorkerPool, small_run: Run, run: Path, tmp_path: Path) -> None:
    pool.run(1, train_rank, small_run.but(steps=8), tmp_path)
    assert list(generate(tmp_path, [PROMPT], 12, temperature=0)) == list(generate(run, [PROMPT], 12, temperature=0))


def test_a_seed_repeats_and_another_does_not(run: Path) -> None:
    texts = [list(generate(run, [PROMPT, "If"], 20, 1.0, seed=seed)) for seed in (0, 0, 1)]
    assert texts[0] == texts[1] != texts[2]
    assert len(texts[0]) == 2


def test_the_data_need_not_be_there(pool: WorkerPool, small_run: Run, run: Path, tmp_path: Path) -> None:
    """The tokenizer is part of the checkpoint, and so is the config."""
    names = {path.name for path in path_of(run, 8).iterdir()}
    assert {"tokenizer.json", "config.yaml", "checkpoint.json"} <= names
    data = tmp_path / "tokens"
    data.symlink_to(small_run.data)
    pool.run(1, train_rank, small_run.but(data=data, steps=1), tmp_path / "run")
    data.unlink()
    assert list(generate(tmp_path / "run", [PROMPT], 2))


def test_pieces_add_up(run: Path) -> None:
    writer = Writer.load(run)
    pieces = list(writer.stream(PROMPT, 20, Sampling(temperature=0), 0))
    assert len(pieces) > 5
    assert PROMPT + "".join(pieces) == greedy(run, PROMPT, 20)


def test_it_ends_with_the_document(run: Path) -> None:
    writer = Writer.load(run)
    with torch.no_grad():  # a head that always sees the end coming
        writer.model.head.norm.weight.zero_()
        writer.model.head.norm.bias.fill_(1)
        writer.model.head.output.weight[writer.eod] = 10
    assert list(writer.stream(PROMPT, 20, Sampling(temperature=0), 0)) == []


def counts(sampling: Sampling, logits: list[float], draws: int = 400) -> dict[int, int]:
    generator = torch.Generator().manual_seed(0)
    chosen = [sampling.choose(torch.tensor(logits), generator) for _ in range(draws)]
    return {token: chosen.count(token) for token in sorted(set(chosen))}


LOGITS = [0.1, 0.4, 0.3, 0.2]  # probabilities, whose logarithms are the logits


@pytest.mark.parametrize(
    ("sampling", "possible"),
    [
        (Sampling(0.0), {1}),
        (Sampling(1.0), {0, 1, 2, 3}),
        (Sampling(1.0, top_k=0, top_p=1.0), {0, 1, 2, 3}),
        (Sampling(1.0, top_k=1), {1}),
        (Sampling(1.0, top_k=2), {1, 2}),
        (Sampling(1.0, top_k=99), {0, 1, 2, 3}),
        (Sampling(1.0, top_p=0.39), {1}),
        (Sampling(1.0, top_p=0.41), {1, 2}),
        (Sampling(1.0, top_p=0.71), {1, 2, 3}),
        (Sampling(1.0, top_k=2, top_p=0.99), {1, 2}),
        (Sampling(0.02), {1}),
    ],
)
def test_what_may_be_chosen(sampling: Sampling, possible: set[int]) -> None:
    assert set(counts(sampling, torch.tensor(LOGITS).log().tolist())) == possible


def test_how_often_each_is_chosen() -> None:
    found = counts(Sampling(1.0), torch.tensor(LOGITS).log().tolist(), 4000)
    assert [found[token] / 4000 for token in range(4)] == pytest.approx(LOGITS, abs=0.03)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"prompts": [""]}, "--prompt is empty"),
        ({"prompts": ["a", ""]}, "--prompt is empty"),
        ({"temperature": -1.0}, "--temperature is -1"),
        ({"top_k": -1}, "--top-k is -1"),
        ({"top_p": 1.5}, "--top-p is 1.5"),
        ({"max_new_tokens": 0}, "--max-new-tokens is 0"),
    ],
)
def test_mistakes_are_told(run: Path, arguments: dict, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        list(generate(run, **({"prompts": [PROMPT]} | arguments)))


def test_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no complete checkpoint"):
        list(generate(tmp_path, [PROMPT]))
