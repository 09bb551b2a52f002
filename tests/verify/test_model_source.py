"""A user's own model: the example is equal in every layout, its wrong table is found, and mistakes are one sentence."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.verify.support import task, verify
from threefold.config import load_config
from threefold.errors import UserError
from threefold.models.source import FileSource
from threefold.parallel.layout_check import check_source
from threefold.verify.verifier import DEPARTS, EQUAL, UNSPLIT

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model"
MISTAKES = tomllib.loads((Path(__file__).parent / "data" / "model_file.toml").read_text(encoding="utf-8"))["mistakes"]
LAYOUTS = ("dp2", "tp2", "pp2 zbv", "cp2", "dp2·tp2·pp2 interleaved sp", "dp2·tp2 zero3 full")


def example(plan: str, *layouts: str):
    source = FileSource.parse(f"{EXAMPLE / 'model.py'}:{plan}")
    return task(*layouts, given=load_config(EXAMPLE / "own.yaml"), source=source)


@pytest.mark.slow
def test_example_is_equal_in_every_layout(pool, tmp_path: Path) -> None:
    for result in verify(pool, example("plan", *LAYOUTS), tmp_path, *LAYOUTS):
        assert result.verdict == EQUAL, (str(result.spec), result.worst, result.message)


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


def changed(folder: Path, *changes: tuple[str, str]) -> FileSource:
    """The example with a few words of it replaced."""
    text = (EXAMPLE / "model.py").read_text()
    for before, after in changes:
        assert before in text
        text = text.replace(before, after)
    (folder / "model.py").write_text(text)
    return FileSource.parse(str(folder / "model.py"))


@pytest.mark.parametrize("mistake", MISTAKES, ids=[each["sentence"] for each in MISTAKES])
def test_mistake_in_the_file_is_one_sentence(pool, tmp_path: Path, mistake: dict[str, Any]) -> None:
    source = changed(tmp_path, tuple(mistake["change"]))
    with pytest.raises(UserError) as told:
        verify(pool, task("dp2", given=load_config(EXAMPLE / "own.yaml"), source=source), tmp_path, "dp2")
    assert mistake["sentence"] in str(told.value)
    assert str(told.value).endswith(".")
    assert "\n" not in str(told.value)


FIRST_LINE = '            "embed.tokens": Vocab(),\n'


@pytest.mark.slow
def test_blocks_given_whole_are_still_cut_inside(pool, tmp_path: Path) -> None:
    """Equal, and with half of the model on each rank: it once was equal because nothing was cut."""
    source = changed(tmp_path, (FIRST_LINE, '            "blocks.*": Replicated(),\n' + FIRST_LINE))
    todo = task("tp2", given=load_config(EXAMPLE / "own.yaml"), source=source)
    [result] = verify(pool, todo, tmp_path, "tp2")
    [expected] = verify(pool, example("plan", "tp2"), tmp_path, "tp2")
    assert result.verdict == expected.verdict == EQUAL
    assert 0 < result.parameters == expected.parameters < 0.55 * MODEL


MODEL = 2_944
"""Parameters of the example, shrunk for two ranks."""


@pytest.mark.slow
def test_a_layout_that_splits_nothing_is_no_proof(pool, tmp_path: Path) -> None:
    """Every rank of the tensor axis holds everything and computes the same."""
    body = (EXAMPLE / "model.py").read_text().split("        split={\n")[1].split("        },\n")[0]
    source = changed(tmp_path, (body, '            "**": Replicated(),\n'))
    layouts = ("dp2", "tp2", "tp2·pp2", "dp2·tp2 zero1")
    todo = task(*layouts, given=load_config(EXAMPLE / "own.yaml"), source=source)
    alone, *others = verify(pool, todo, tmp_path, *layouts)
    assert (alone.verdict, alone.parameters) == (EQUAL, MODEL)
    for result in others:
        assert (result.verdict, result.worst and result.worst.relative <= todo.tolerance) == (UNSPLIT, True)
        assert result.message == "nothing is split over tp: every rank of it holds the same parameters"
    assert [result.parameters < MODEL for result in others] == [False, True, True]
    assert others[0].to_json()["parameters_per_rank"] == MODEL


def test_a_block_that_the_plan_leaves_out_is_named(pool, tmp_path: Path) -> None:
    source = changed(tmp_path, ("for number in range(config.num_layers)]", "for number in (0, 2)]"))
    todo = task("dp2", given=load_config(EXAMPLE / "own.yaml"), source=source)
    with pytest.raises(UserError) as told:
        verify(pool, todo, tmp_path, "dp2")
    assert str(told.value) == (
        "model.py:plan: layers lacks 'blocks.1' of the model, which has parameters; name it where the model runs "
        "through it."
    )


def test_file_without_that_plan(pool, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.py has no function plam; it needs plam"):
        verify(pool, example("plam", "dp2"), tmp_path, "dp2")


def with_attention_of_the_guide(folder: Path) -> FileSource:
    """The example with the variant of the guide."""
    guide = (EXAMPLE.parents[1] / "docs/guides/own_model.md").read_text()
    (variant,) = (block for block in guide.split("```") if "class CappedAttention(" in block)
    added = f"{variant.removeprefix('python')}\n\nclass Block("
    return changed(folder, ("class Block(", added), ("CausalAttention()", "CappedAttention(0.05)"))


@pytest.mark.slow
def test_custom_attention_is_equal_but_no_ring(pool, tmp_path: Path) -> None:
    source = with_attention_of_the_guide(tmp_path)
    layouts = ("tp2", "pp2", "cp2", "cp2 ring")
    todo = task(*layouts, given=load_config(EXAMPLE / "own.yaml"), source=source)
    *equal, ring = verify(pool, todo, tmp_path, *layouts)
    assert [each.verdict for each in equal] == [EQUAL] * 3, [(each.worst, each.message) for each in equal]
    assert "ring, which computes attention itself, without the forward of CappedAttention" in ring.message


HALVED = {
    "forward": """def halved():
    core = CausalAttention()
    core.forward = lambda *values: 0.5 * CausalAttention.forward(core, *values)
    return core""",
    "hooks": """def halved():
    core = CausalAttention()
    core.register_forward_hook(lambda module, given, out: 0.5 * out)
    return core""",
    "call": """class Halved(CausalAttention):
    def __call__(self, *values):
        return 0.5 * super().__call__(*values)

halved = Halved""",
}
"""Ways in which an attention computes something else with the `forward` of its class."""


@pytest.mark.slow
@pytest.mark.parametrize("way", HALVED)
def test_an_attention_that_is_changed_without_a_forward_is_equal_but_no_ring(pool, tmp_path: Path, way: str) -> None:
    source = changed(
        tmp_path,
        ("class Block(", f"{HALVED[way]}\n\n\nclass Block("),
        ("self.core = CausalAttention()", "self.core = halved()"),
    )
    layouts = ("cp2 ring",) if way != "hooks" else ("cp2", "cp2 ring")
    todo = task(*layouts, given=load_config(EXAMPLE / "own.yaml"), source=source)
    *equal, ring = verify(pool, todo, tmp_path, *layouts)
    assert [each.verdict for each in equal] == [EQUAL] * (len(layouts) - 1)
    assert f"attention itself, without the {'hooks' if way == 'hooks' else 'forward'} of" in ring.message


def test_a_ring_refuses_a_custom_attention_before_ranks_start(tmp_path: Path) -> None:
    source = with_attention_of_the_guide(tmp_path)
    for works in ({"parallel.cp": 2}, {"parallel.cp_method": "ring"}):  # a single rank makes no ring
        check_source(source, load_config(EXAMPLE / "own.yaml", works))
    with pytest.raises(UserError) as told:
        check_source(source, load_config(EXAMPLE / "own.yaml", {"parallel.cp": 2, "parallel.cp_method": "ring"}))
    assert str(told.value) == (
        "parallel.cp_method is ring, which computes attention itself, without the forward of CappedAttention; use "
        "all-gather."
    )
