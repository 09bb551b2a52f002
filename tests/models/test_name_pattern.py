"""Patterns over names of modules: what they match, and which of several decides."""

import pytest

from threefold.errors import UserError
from threefold.models.sharding import Patterns, matches


@pytest.mark.parametrize(
    ("name", "pattern", "fits"),
    [
        ("blocks.3", "blocks.*", True),
        ("blocks.3.attn", "blocks.*", False),
        ("blocks", "blocks.*", False),
        ("blocks.3.attn.core", "blocks.*.attn.core", True),
        ("blocks.3", "blocks.**", True),
        ("blocks.3.attn.core", "blocks.**", True),
        ("blocks", "blocks.**", False),
        ("blocks.3.attn.core", "**.core", True),
        ("core", "**.core", False),
        ("a.b.c.d", "a.**.d", True),
        ("a.d", "a.**.d", False),
        ("a.b.c.d", "a.**.b.**.d", False),
        ("blocks.0.attn_norm", "blocks.*.*_norm", True),
        ("blocks.0.attn.x_norm", "blocks.*.*_norm", False),
        ("a[0].b", "a[0].b", True),  # nothing but the star stands for anything
        ("a0.b", "a[0].b", False),
        ("axb", "a?b", False),
        ("a.b", "a.b\n", False),
        ("A.b", "a.b", False),
    ],
)
def test_pattern_fits_a_whole_name(name: str, pattern: str, fits: bool) -> None:
    assert matches(name, pattern) is fits


@pytest.mark.parametrize("pattern", ["", "a..b", ".a", "a.", "a.b**", "***"])
def test_what_is_no_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(UserError, match=r"^The pattern .* write it as in 'blocks\.\*\.mlp\.up'"):
        Patterns([pattern])


@pytest.mark.parametrize(
    ("patterns", "name", "expected"),
    [
        (["blocks.*", "blocks.*.mlp.up"], "blocks.1.mlp.up", "blocks.*.mlp.up"),
        (["blocks.*", "blocks.*.mlp.up"], "blocks.1.mlp.down", "blocks.*"),  # and everything inside
        (["blocks.**", "blocks.*.mlp.up"], "blocks.1.mlp.up", "blocks.*.mlp.up"),
        (["blocks.*.mlp.*", "blocks.0.mlp"], "blocks.0.mlp.up", "blocks.0.mlp"),  # more of the name, though further out
        (["blocks.*.mlp.*", "blocks.0.mlp"], "blocks.1.mlp.up", "blocks.*.mlp.*"),
        (["blocks.*.mlp_*", "blocks.*.*"], "blocks.1.mlp_up", "blocks.*.mlp_*"),
        (["a.**.d", "a.*.c.*"], "a.b.c.d", "a.*.c.*"),
        (["a.**.d", "a.*.*.d"], "a.b.c.d", "a.*.*.d"),
        (["**", "*"], "a", "*"),
        (["a.*"], "a", None),
        (["a.b"], "a.bc", None),
        (["a"], "", None),
    ],
)
def test_the_most_specific_decides_in_any_order(patterns: list[str], name: str, expected: str | None) -> None:
    assert Patterns(patterns).deciding(name) == Patterns(patterns[::-1]).deciding(name) == expected


@pytest.mark.parametrize(
    ("one", "other", "name"),
    [
        ("blocks.*.mlp.*", "blocks.*.*.up", "blocks.0.mlp.up"),
        ("*.mlp.up", "blocks.*.up", "blocks.mlp.up"),
        ("a.**.b", "**.a.b", "a.a.b"),
        ("up_*", "*_0", "up_0"),
    ],
)
def test_two_that_are_equally_specific_are_refused_by_name(one: str, other: str, name: str) -> None:
    for patterns in ([one, other], [other, one]):
        with pytest.raises(UserError) as told:
            Patterns(patterns).deciding(name)
        first, second = sorted([one, other])
        assert str(told.value).startswith(f"split has {first!r} and {second!r}, which both match {name!r}")


def test_a_pattern_names_what_it_matches_and_decides_for_what_is_inside() -> None:
    patterns = Patterns(["blocks.*"])
    assert patterns.naming("blocks.0") == "blocks.*"
    assert patterns.naming("blocks.0.mlp") is None
    assert patterns.deciding("blocks.0.mlp") == "blocks.*"
