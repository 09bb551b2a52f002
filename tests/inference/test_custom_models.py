"""A user's own model generates and evaluates in any layout, its layers called as in training, or is refused."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.api import custom_plain_model
from tests.inference import custom_text_models
from tests.support import custom_state_models, custom_token_model
from tests.support.sweep import sweep
from tests.train.support import Run, train_rank
from tests.verify import custom_cut_model
from threefold.checkpoint.tensors import load_tensors
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.errors import UserError
from threefold.inference.custom_logits import check_custom_model
from threefold.inference.eval_tasks import Perplexity, score
from threefold.inference.generate import GenerationRequest, Sampling, complete
from threefold.inference.model import Trained
from threefold.models.layers.decoder import NOTHING
from threefold.models.source import ConfigSource, FileSource, construct

ROOT = Path(__file__).parents[2]
STATES = f"{custom_state_models.__file__}:Model"
CUSTOM = {
    "loss in the last layer": (f"{custom_token_model.__file__}:Tiny", {"blocks": 2}),
    "fused heads": (f"{custom_cut_model.__file__}:Fused", {"blocks": 2}),
    "samples": (STATES, {"kind": "tracked", "vocab_size": 301}),
    "tuples": (f"{custom_text_models.__file__}:Placed", {}),
}
"""Model of a file and its arguments, by what its layers do."""
PROMPTS = [[5, 7, 200], [9], [4, 4, 8, 15, 16, 23, 42], [3] * 20]
GREEDY = GenerationRequest(5, Sampling(temperature=0), batch_size=3)
TEXTS = ["The statement returns a value when the name is bound to an object.", "If not"]


def custom_run(run: Run, file: str, arguments: dict[str, Any]) -> Run:
    own = (("model.architecture", "own"), ("model.file", file), ("model.arguments", arguments))
    return run.but(dropout=0.0, steps=2, set=own)


def guide_model(folder: Path) -> str:
    """The model of docs/guides/own_model.md, copied."""
    text = (ROOT / "docs/guides/own_model.md").read_text()
    (folder / "my_model.py").write_text(re.findall(r"```python\n(# my_model\.py\n.*?)```", text, re.DOTALL)[0])
    return f"{folder / 'my_model.py'}:MyModel"


def plain_model(folder: Path) -> str:
    (folder / "plain.py").write_text(Path(custom_plain_model.__file__).read_text() + custom_plain_model.PLAN)
    return f"{folder / 'plain.py'}:Plain"


def used(run: Path, file: str, layout: Layout | None = None) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens of the prompts, and the losses of the texts' windows."""
    trained = Trained.find(run, model=file)
    trained.check(layout or Layout())
    model = trained.load(None if layout is None else Mesh(layout), "fp64")
    work = Perplexity(16, 5).prepare(trained.documents(), TEXTS, lambda: None)
    return complete(model, PROMPTS, GREEDY), score(model, work.texts, work.windows, 3).losses.tolist()


def by_hand(run: Path, file: str) -> tuple[list[list[int]], list[float]]:
    """The same by plain torch: the whole model on one sequence at a time, layer by layer."""
    trained = Trained.find(run, model=file)
    make, plan = FileSource.parse(file).load(trained.config)
    model = construct(make, trained.config.train.seed).double().eval()
    stored = dict(model.named_parameters()) | {name: each for name, each in model.named_buffers() if "part." in name}
    stored.pop("blocks.0.part.scratch", None), stored.pop("blocks.1.part.scratch", None)
    load_tensors({f"model.{name}": each for name, each in stored.items()}, trained.checkpoint.path, alone=True)
    known, ends = trained.load().tokens, trained.ends()

    @torch.no_grad()
    def logits(tokens: list[int]) -> torch.Tensor:
        x: Any = (torch.tensor([tokens]),)
        for name in plan.layers:
            layer = model.get_submodule(name)
            takes_samples = "samples" in type(layer).forward.__code__.co_varnames
            x = layer(*x, samples=NOTHING) if takes_samples else layer(*x)
            x = x if isinstance(x, tuple) else (x,)
        return x[0][0]

    added = []
    for prompt in PROMPTS:
        tokens, new = prompt[-16:], []
        while len(new) < GREEDY.max_new_tokens:
            tokens = tokens[-8:] if len(tokens) > 16 else tokens
            token = int(logits(tokens)[-1, :known].argmax())
            if token in ends:
                break
            new.append(token)
            tokens.append(token)
        added.append(new)
    work = Perplexity(16, 5).prepare(trained.documents(), TEXTS, lambda: None)
    losses = []
    for window in work.windows:
        text = work.texts[window.text].tolist()
        chances = logits(text[window.begin : window.end]).log_softmax(-1)
        losses.append(-sum(float(chances[n - 1 - window.begin, text[n]]) for n in range(window.first, window.end + 1)))
    return added, losses


def agree(got: tuple[list[list[int]], list[float]], expected: tuple[list[list[int]], list[float]]) -> None:
    assert got[0] == expected[0]
    assert got[1] == pytest.approx(expected[1], rel=1e-12)


@sweep("kind", [*CUSTOM, "guide", "plain"], slow=slice(None))
def test_a_custom_model_that_trains_generates_and_evaluates(pool, small_run: Run, tmp_path: Path, kind: str) -> None:
    made = {"guide": guide_model, "plain": plain_model}
    file, arguments = CUSTOM[kind] if kind in CUSTOM else (made[kind](tmp_path), {})
    arguments = {"vocab_size": 301} if kind == "plain" else arguments
    pool.run(1, train_rank, custom_run(small_run, file, arguments), tmp_path / "run")
    expected = by_hand(tmp_path / "run", file)
    agree(used(tmp_path / "run", file), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", CUSTOM)
def test_a_custom_model_generates_and_evaluates_in_any_layout(pool, small_run: Run, tmp_path: Path, kind: str) -> None:
    file, arguments = CUSTOM[kind]
    pool.run(1, train_rank, custom_run(small_run, file, arguments), tmp_path / "run")
    expected = by_hand(tmp_path / "run", file)
    for layout in (Layout(tp=2, pp=2), Layout(pp=4)):
        for got in pool.run(4, used, tmp_path / "run", file, layout):
            agree(got, expected)


@pytest.mark.parametrize("kind", sorted({*custom_state_models.KINDS} - {"kept tensor"}))
def test_each_kind_of_state_passes_the_trial_before_ranks_start(small_run: Run, kind: str) -> None:
    config = custom_run(small_run, STATES, {"kind": kind, "vocab_size": 301}).config
    check_custom_model(config, ConfigSource().load(config)[1])


MASKED = """
from tests.support.custom_models import MaskedModel as Masked, StreamModel as Streams, masked_loss as loss, plan_of

plan = plan_of(3)
"""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Masked", "'start' raises TypeError: MaskedStart.forward() missing 1 required positional argument: 'keep'"),
        (
            "Streams",
            "'start' raises TypeError: StreamStart.forward() missing 1 required positional argument: 'features'",
        ),
    ],
)
def test_a_model_that_needs_more_than_tokens_is_refused_before_ranks_start(
    small_run: Run, tmp_path: Path, name: str, reason: str
) -> None:
    (tmp_path / "mine.py").write_text(MASKED)
    config = custom_run(small_run, f"{tmp_path / 'mine.py'}:{name}", {}).config
    with pytest.raises(UserError) as told:
        check_custom_model(config, ConfigSource().load(config)[1])
    assert str(told.value) == (
        f"mine.py:{name} cannot generate or evaluate text, for which its layers must turn token ids alone, int64 "
        f"[samples, positions], into logits [samples, positions, vocabulary]; {reason}, for token ids of the shape "
        "[1, 8]."
    )


def test_a_model_of_other_outputs_is_refused_in_one_sentence(pool, small_run: Run, tmp_path: Path) -> None:
    file = f"{custom_text_models.__file__}:Pooled"
    pool.run(1, train_rank, custom_run(small_run, file, {}), tmp_path / "run")
    with pytest.raises(UserError) as told:
        used(tmp_path / "run", file)
    assert str(told.value) == (
        "custom_text_models.py:Pooled cannot generate or evaluate text, for which its layers must turn token ids "
        "alone, int64 [samples, positions], into logits [samples, positions, vocabulary]; its last layer 'end' returns "
        "a Tensor of the shape [1, 1] for token ids of the shape [1, 8]."
    )
