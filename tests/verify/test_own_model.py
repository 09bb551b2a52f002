"""A user's own model: the example is equal in every layout, its wrong table is found, and mistakes are one sentence."""

from pathlib import Path

import pytest

from tests.verify.support import task, verify
from threefold.config import load_config
from threefold.errors import UserError
from threefold.verify.report import DEPARTS, EQUAL
from threefold.verify.source import FileSource

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model"
LAYOUTS = ("dp2", "tp2", "pp2 zbv", "cp2", "dp2·tp2·pp2 interleaved sp", "dp2·tp2 zero3 full")


def example(plan: str, *layouts: str):
    source = FileSource.parse(f"{EXAMPLE / 'model.py'}:{plan}")
    return task(*layouts, given=load_config(EXAMPLE / "own.yaml"), source=source)


def test_example_is_equal_in_every_layout(pool, tmp_path: Path) -> None:
    for result in verify(pool, example("plan", *LAYOUTS), tmp_path, *LAYOUTS):
        assert result.verdict == EQUAL, (str(result.variant), result.worst, result.message)


def test_forgotten_tie_is_found(pool, tmp_path: Path) -> None:
    alone, split, pipeline = verify(
        pool, example("plan_without_tie", "dp2", "tp2", "pp2"), tmp_path, "dp2", "tp2", "pp2"
    )
    assert alone.verdict == EQUAL  # one rank holds both uses: nothing is wrong yet
    for result in (split, pipeline):
        assert result.verdict == DEPARTS
        assert result.message == "the ranks hold head.output.weight, which the whole model does not have"
        assert result.first is not None
        assert str(result.first) == "gradient of embed.tokens.weight, step 1"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (("def make_model", "def build"), "model.py has no function make_model; it needs make_model(config), which"),
        (
            ("return Model(config)", "return config"),
            "make_model(config) returns a ModelConfig but must return a Module.",
        ),
        (
            ("import replace", "import reverse"),
            "model.py cannot be imported: ImportError: cannot import name 'reverse'",
        ),
        (
            ("class Block(", "class Block(:"),
            "model.py cannot be imported: SyntaxError: invalid syntax (model.py, line 37)",
        ),
        (('"embed", *blocks', '"embedding", *blocks'), "layers names 'embedding', which is no module of the model."),
        (("costs=(width, ", "costs=("), "costs has 4 numbers but layers has 5; give each layer one."),
        (
            ('            "head.norm": Replicated(),\n', ""),
            "split says nothing about the parameter 'head.norm.weight'; give 'head.norm' Replicated().",
        ),
        (
            ('"blocks.*.norm"', '"block.*.norm"'),
            "split says nothing about the parameter 'blocks.0.norm.attention.weight'",
        ),
        (
            ('ties={"head.output', 'ties={"head.out'),
            "ties names 'head.out.weight', which is no parameter of the model.",
        ),
        (
            ("width, inner = config.hidden_size, config.ffn", "width, inner = config.width, config.ffn"),
            "AttributeError",
        ),
    ],
)
def test_mistake_in_the_file_is_one_sentence(pool, tmp_path: Path, change: tuple[str, str], sentence: str) -> None:
    text = (EXAMPLE / "model.py").read_text()
    assert change[0] in text
    (tmp_path / "model.py").write_text(text.replace(*change))
    source = FileSource.parse(str(tmp_path / "model.py"))
    todo = task("dp2", given=load_config(EXAMPLE / "own.yaml"), source=source)
    with pytest.raises(UserError) as told:
        verify(pool, todo, tmp_path, "dp2")
    assert sentence in str(told.value)
    assert str(told.value).endswith(".")
    assert "\n" not in str(told.value)


def test_file_without_that_plan(pool, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.py has no function plam; it needs plam"):
        verify(pool, example("plam", "dp2"), tmp_path, "dp2")
