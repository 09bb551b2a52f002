"""Writing on: every layout, batch and window against the model by hand."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.inference.support import Oracle
from tests.support.sweep import sweep
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.inference import generate as generation
from threefold.inference.generate import (
    GenerationRequest,
    Sampling,
    complete,
    generate,
    generate_text,
    generate_tokens,
    uniform,
)
from threefold.inference.inputs import read_prompts
from threefold.inference.model import Model, Trained
from threefold.verify.worker_pool import WorkerPool

PROMPTS = [
    torch.randint(1, 300, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (1, 9, 4, 13, 2, 20)
]
"""Of odd lengths, one longer than the context."""
GREEDY = GenerationRequest(25, Sampling(temperature=0), batch_size=4)
"""More tokens than the context has, and fewer rows than there are prompts."""
SHORT = GenerationRequest(6, Sampling(temperature=0), batch_size=2)
SAMPLED = GenerationRequest(10, Sampling(1.0, top_k=50, top_p=0.9), seed=3, batch_size=3)


@pytest.fixture(scope="module")
def learned(runs: Callable[[str], Path]) -> Trained:
    return Trained.find(runs("learned"))


@pytest.fixture(scope="module")
def model(learned: Trained) -> Model:
    return learned.load(dtype="fp64")


def test_greedy_is_the_likeliest_again_and_again(trained: Trained) -> None:
    """Also past the context, where the older half is let go."""
    oracle, model = Oracle(trained), trained.load(dtype="fp64")
    expected = [oracle.greedy(prompt, 25, model.tokens, model.ends) for prompt in PROMPTS]
    assert complete(model, PROMPTS, GREEDY) == expected


def test_each_prompt_as_if_alone(model: Model) -> None:
    alone = [complete(model, [prompt], SAMPLED)[0] for prompt in PROMPTS]
    assert complete(model, PROMPTS, SAMPLED) == alone
    assert len({tuple(tokens) for tokens in alone}) == len(PROMPTS)


def test_a_seed_repeats_and_another_does_not(model: Model) -> None:
    again, other = GenerationRequest(10, SAMPLED.sampling, 3), GenerationRequest(10, SAMPLED.sampling, 4)
    assert complete(model, PROMPTS, again) == complete(model, PROMPTS, SAMPLED) != complete(model, PROMPTS, other)


def test_a_prompt_given_twice_gets_two_answers(model: Model) -> None:
    first, second = complete(model, [PROMPTS[1]] * 2, SAMPLED)
    assert first == complete(model, PROMPTS, SAMPLED)[1] != second


def in_layout(run: Path, layout: Layout) -> tuple[list[list[int]], list[list[int]], int, set[str]]:
    """Greedy and sampled tokens, the parameters that this rank holds, and on which axes it sent anything."""
    mesh = Mesh(layout)
    model = Trained.find(run).load(mesh, "fp64")
    held = sum(parameter.numel() for parameter in map(_local, model.stage.parameters()))
    with mesh.recorder.recording() as events:
        greedy = complete(model, PROMPTS[1:4], SHORT)
    return greedy, complete(model, PROMPTS[1:4], SAMPLED), held, {event.axis for event in events}


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return getattr(parameter, "_local_tensor", parameter)


@sweep(
    ("kind", "tp", "pp"),
    [("learned", 2, 2), ("llama", 1, 2), ("llama", 4, 1), ("experts", 2, 1), ("blocks", 4, 1), ("latent", 2, 2)],
    quick=(0, 2),
)
def test_same_tokens_in_every_layout(
    pool: WorkerPool, runs: Callable[[str], Path], kind: str, tp: int, pp: int
) -> None:
    alone = Trained.find(runs(kind)).load(dtype="fp64")
    whole = sum(parameter.numel() for parameter in alone.stage.parameters())
    results = pool.run(tp * pp, in_layout, runs(kind), Layout(tp=tp, pp=pp))
    for greedy, sampled, held, axes in results:
        assert greedy == complete(alone, PROMPTS[1:4], SHORT)
        assert sampled == complete(alone, PROMPTS[1:4], SAMPLED)
        assert held < 0.75 * whole
        assert ("tp" in axes) is (tp > 1)  # at tp 1 nothing is sent along an axis of one rank


def test_rows_that_are_no_token_are_not_chosen(model: Model) -> None:
    """The embedding may have more rows than the tokenizer has tokens."""
    hidden = model.hidden(torch.tensor([PROMPTS[1]]))
    assert hidden is not None
    narrow = replace(model, dtype=model.dtype)  # the number of tokens is kept
    vars(narrow)["tokens"] = 250
    whole = model.whole_logits(hidden[:, -1])
    assert torch.equal(narrow.whole_logits(hidden[:, -1]), whole[:, :250])


def test_no_number_is_drawn_twice(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also past the context, where the window of a sequence begins anew."""
    drawn: list[tuple[str, int]] = []

    def noting(seed: int, sequence: str, position: int) -> float:
        drawn.append((sequence, position))
        return uniform(seed, sequence, position)

    monkeypatch.setattr(generation, "uniform", noting)
    prompts = PROMPTS[1:3]
    complete(model, prompts, GenerationRequest(40, Sampling(1.0)))
    assert len({sequence for sequence, _ in drawn}) == 2
    assert sorted(drawn) == sorted(set(drawn))
    assert {place for _, place in drawn} >= {*range(len(prompts[0]), len(prompts[1]) + 40)}


def test_a_character_of_several_tokens_comes_whole(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "é — 😀 end ¿"
    tokens = model.tokenizer.encode(text).ids
    assert len(tokens) > len(text.split()) + 8, "give characters that are several tokens"

    def given(*_: object) -> Iterator[tuple[int, int | None]]:
        yield from ((0, token) for token in [*tokens, tokens[0]])
        yield 0, None

    monkeypatch.setattr(generation, "generate_tokens", given)
    *pieces, end, last = (piece for _, piece in generate_text(model, ["a"], SHORT))
    assert last is None
    assert "".join(filter(None, pieces)) == text
    assert not any("\ufffd" in piece for piece in pieces if piece)
    assert end == "\ufffd"  # what is cut off has no other text


def test_what_has_ended_costs_nothing(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    hidden = Model.hidden

    def counting(self: Model, tokens: torch.Tensor) -> torch.Tensor | None:
        if tokens.shape[1] == 1:
            rows.append(len(tokens))
        return hidden(self, tokens)

    request = GenerationRequest(8, Sampling(1.0))
    full = complete(model, PROMPTS[1:3], request)
    monkeypatch.setattr(Model, "hidden", counting)
    monkeypatch.setitem(vars(model), "ends", frozenset([full[0][2]]))  # the first prompt ends with its third token
    assert full[0][2] not in full[0][:2] + full[1], "choose other prompts"
    assert complete(model, PROMPTS[1:3], request) == [full[0][:2], full[1]]
    assert rows == [2] * 3 + [1] * 5


def test_events_end_each_prompt_once(model: Model) -> None:
    events = list(generate_tokens(model, PROMPTS, SAMPLED))
    assert sorted(prompt for prompt, token in events if token is None) == list(range(len(PROMPTS)))
    assert set(dict(events).values()) == {None}


def test_pieces_are_whole_characters_and_add_up(learned: Trained, model: Model) -> None:
    prompts, request = ["The statement is", "If é"], GenerationRequest(20, Sampling(1.0))
    texts = list(prompts)
    pieces = list(generate_text(model, prompts, request))
    for number, piece in pieces:
        texts[number] += piece or ""
    begun = [model.tokenizer.encode(prompt).ids for prompt in prompts]
    added = complete(model, begun, request)
    assert texts == [model.tokenizer.decode(a + b) for a, b in zip(begun, added, strict=True)]
    assert len(pieces) > 20
    assert texts == generate(learned.checkpoint.path.parents[1], prompts, request)


@pytest.mark.parametrize(
    ("tp", "sentence"), [(3, "--tp is 3 but must divide the model's num_attention_heads 4; use 2")]
)
def test_layouts_that_cannot_be(learned: Trained, tp: int, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        learned.check(Layout(tp=tp))
    with pytest.raises(UserError, match=r"--pp is 6 but the model has 5 layers, .* use 5 at most"):
        learned.check(Layout(pp=6))
    learned.check(Layout(tp=4, pp=5))


def test_mistakes_are_told(tmp_path: Path, model: Model, learned: Trained) -> None:
    with pytest.raises(UserError, match="no complete checkpoint"):
        Trained.find(tmp_path)
    for prompts in ([], ["a", ""]):
        with pytest.raises(UserError, match="--prompt is empty"):
            list(generate_text(model, prompts, GREEDY))
    with pytest.raises(UserError, match="A prompt is empty"):
        list(generate_tokens(model, [[1], []], GREEDY))
    for option in ("max_new_tokens", "batch_size"):
        with pytest.raises(UserError, match=f"--{option.replace('_', '-')} is 0"):
            GenerationRequest(**{option: 0})


def test_prompts_from_files(tmp_path: Path) -> None:
    text, lines, empty = tmp_path / "a.txt", tmp_path / "a.jsonl", tmp_path / "b.txt"
    text.write_text("One\n\n  Two \r\nThree", encoding="utf-8")
    lines.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in ("One\nmore", "Two")) + "\n\n")
    empty.write_text("\n \n")
    assert read_prompts(text) == ["One", "  Two ", "Three"]
    text.write_text("One\nTwo", encoding="utf-8-sig")
    assert read_prompts(text) == ["One", "Two"]
    assert read_prompts(lines) == ["One\nmore", "Two"]
    with pytest.raises(UserError, match=r"b.txt has no prompt; give one per line"):
        read_prompts(empty)
    with pytest.raises(UserError, match="nowhere, which is not a file"):
        read_prompts(tmp_path / "nowhere")
    lines.write_text('{"text": "One"}')
    with pytest.raises(UserError, match=r'a.jsonl:1 has no key "prompt"'):
        read_prompts(lines)
