"""How layouts are written, chosen and made small."""

from itertools import pairwise

import pytest

from tests.verify.support import config
from threefold.comm.layout import Layout, parse
from threefold.config.optimizer import LR_SCHEDULES
from threefold.errors import UserError
from threefold.train.optim import learning_rate
from threefold.verify.layouts import (
    asked_for,
    compose,
    covering,
    every,
    parse_layouts,
    possible,
    prepare,
    products,
    shrink,
    stages,
    with_further_features,
)


@pytest.mark.parametrize(
    "text",
    ["dp2·tp2·pp2", "dp2tp2pp2", "dp2 tp2 pp2", "dp2, tp=2, pp2", "pp2×tp2×dp2", "DP2xTP2xPP2", "dp=2+tp=2+pp=2+cp1"],
)
def test_one_layout_in_many_spellings(text: str) -> None:
    assert parse(text).layout == Layout(dp=2, tp=2, pp=2)
    assert str(parse(text)) == "dp2·tp2·pp2"


@pytest.mark.parametrize(
    ("text", "settings", "shown"),
    [
        ("tp4,pp2:interleaved", {"parallel.schedule": "interleaved"}, "tp4·pp2 interleaved"),
        ("dp2 zero=3 sp tp2", {"parallel.zero": 3, "parallel.sequence_parallel": True}, "dp2·tp2 zero3 sp"),
        (
            "pp2 schedule=zbv chunks2 recompute=full",
            {"parallel.schedule": "zbv", "parallel.stage_chunks": 2, "train.recompute": "full"},
            "pp2 zbv chunks2 full",
        ),
        ("cp2 ring", {"parallel.cp_method": "ring"}, "cp2 ring"),
        ("dp4 zero1 shards2", {"parallel.zero": 1, "parallel.zero_shards": 2}, "dp4 zero1 shards2"),
        ("dp1 accumulation=4", {"train.gradient_accumulation_steps": 4}, "dp1 accumulation4"),
    ],
)
def test_options(text: str, settings: dict, shown: str) -> None:
    spec = parse(text)
    assert dict(spec.settings) == settings
    assert str(spec) == shown
    assert parse(shown) == spec


def test_several_layouts_once_each() -> None:
    assert list(map(str, parse_layouts(["dp2; tp2;", "dp2", "cp2"]))) == ["dp2", "tp2", "cp2"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("dp2 zvb", ["'zvb'", "the nearest is zbv"]),
        ("ddp2", ["'ddp2'", "the nearest is dp2"]),
        ("dp2 dp4", ["sets dp twice"]),
        ("zbv gpipe pp2", ["parallel.schedule twice"]),
        ("sp", ["names no axis"]),
        ("tp0", ["parallel.tp is 0"]),
    ],
)
def test_mistakes_are_one_sentence(text: str, words: list[str]) -> None:
    with pytest.raises(UserError) as told:
        parse(text)
    assert all(word in str(told.value) for word in words)
    assert "\n" not in str(told.value)


def test_products_of_eight() -> None:
    found = products(8)
    assert len(found) == len(set(found)) == 20  # 8 = 2³: the ways to share three twos among four axes
    assert all(layout.world_size == 8 for layout in found)


def test_shrunk_config_suits_every_layout_of_eight_ranks() -> None:
    base = shrink(prepare(config(), "fp64", 50257), possible(8))
    model = base.model
    assert (model.num_attention_heads, model.hidden_size, model.ffn_hidden_size) == (8, 32, 128)  # 1 : 4, as before
    assert model.vocab_size % 2 == 1
    assert model.num_layers == 12
    assert base.data.sequence_length % 16 == 0
    assert base.train.global_batch_size == 16
    for layout in ("dp8", "tp8", "pp8", "dp2·tp2·pp2", "dp4·pp2"):
        compose(base, parse(layout))


@pytest.mark.parametrize(("given", "kept"), [(900, 1), (1, 1), (0, 0)])
def test_steps_are_taken_at_the_full_rate(given: int, kept: int) -> None:
    """In a warm-up of hundreds of steps, the first three would hardly move a weight."""
    base = prepare(config(optimizer={"warmup_steps": given}), "fp64", 50257)
    assert shrink(base, [parse("dp2")]).optimizer.warmup_steps == kept


@pytest.mark.parametrize("decay", sorted(LR_SCHEDULES.built_in))
@pytest.mark.parametrize("given", [{}, {"warmup_steps": 1000, "decay_steps": 100_000}, {"lr": 1e-3, "min_lr": 1e-3}])
def test_the_second_run_has_another_rate_at_each_step_around_its_checkpoint(decay: str, given: dict) -> None:
    base = prepare(config(optimizer={"decay": decay, **given}, train={"max_steps": 3}), "fp64", 50257)
    second = with_further_features(shrink(base, [parse("dp2")]), attention_dropout=True, documents=True)
    rates = [learning_rate(update, second.optimizer) for update in range(1, 6)]
    assert all(abs(one - other) > 0.01 * one for one, other in pairwise(rates[2:] if decay == "wsd" else rates))


def test_nothing_grows() -> None:
    tiny = config(model={"num_layers": 2, "hidden_size": 12, "num_attention_heads": 2, "vocab_size": 30})
    base = shrink(prepare(tiny, "fp64", 30), possible(8))
    assert (base.model.num_layers, base.model.hidden_size, base.model.vocab_size) == (2, 8, 30)


def test_logits_in_chunks_stay_in_as_many() -> None:
    chunked = config(model={"vocab_size": 64_000}, train={"global_batch_size": 16, "loss_chunk_size": 8000})
    assert shrink(prepare(chunked, "fp64", 64_000), possible(8)).train.loss_chunk_size == 8
    at_once = config(train={"global_batch_size": 16, "loss_chunk_size": 0})
    assert shrink(prepare(at_once, "fp64", 64_000), possible(8)).train.loss_chunk_size == 0


def test_covering_selection_has_every_product_and_feature_that_composes() -> None:
    base = shrink(prepare(config(model={"num_layers": 16}), "fp64", 50257), possible(8))
    taken = covering(base, 8).specs
    everything = every(base, 8).specs
    assert {spec.layout for spec in taken} == {spec.layout for spec in everything}
    facts = {fact for spec in taken for fact in spec.settings}
    assert {fact for spec in everything for fact in spec.settings} <= facts
    assert len(taken) <= 30


def test_every_candidate_is_taken_or_refused_with_a_reason() -> None:
    base = shrink(prepare(config(), "fp64", 50257), possible(8))
    selection = every(base, 8)
    assert len(selection.specs) + len(selection.unsupported) == len(possible(8))
    assert all(unsupported.reason.endswith(".") for unsupported in selection.unsupported)


def test_layout_that_does_not_compose_is_refused_by_name() -> None:
    base = prepare(config(), "fp64", 50257)
    with pytest.raises(UserError, match=r"^Unsupported layout tp3: parallel.tp is 3 but must divide .*; use 2\.$"):
        asked_for(base, [parse("tp3")])


@pytest.mark.parametrize(
    ("text", "count"), [("dp8", 1), ("pp4", 4), ("pp2 interleaved", 4), ("pp2 zbv", 4), ("pp2 looped-bfs chunks3", 6)]
)
def test_stages(text: str, count: int) -> None:
    assert stages(parse(text)) == count


MIXTRAL = {
    "architecture": "llama",
    "num_key_value_heads": 8,
    "num_experts": 8,
    "sliding_window": 100,
    "rope_scaling": "yarn",
    "rope_factor": 4.0,
    "rope_original_positions": 128,
}


@pytest.mark.slow
def test_experts_are_shared_in_every_way() -> None:
    base = shrink(prepare(config(model=MIXTRAL), "fp64", 50257), possible(8, experts=8))
    assert {spec.layout.ep for spec in every(base, 8).specs} == {1, 2, 4, 8}
    assert str(parse("dp4·tp2·ep2 sp")) == "dp4·tp2·ep2 sp"
    assert {spec.layout.ep for spec in covering(base, 8).specs} == {1, 2, 4, 8}


def test_few_key_value_heads_keep_enough_heads_for_every_rank_that_shares_them() -> None:
    few = {"architecture": "llama", "num_attention_heads": 32, "num_key_value_heads": 2}
    model = shrink(prepare(config(model=few), "fp64", 50257), [parse("tp8"), parse("dp2·tp4")]).model
    assert (model.num_attention_heads, model.num_key_value_heads) == (8, 2)


def test_a_family_keeps_its_ways_when_it_shrinks() -> None:
    """Heads still share keys, the window and the stretched positions still bite."""
    model = shrink(prepare(config(model=MIXTRAL), "fp64", 50257), possible(8, experts=8)).model
    assert (model.num_attention_heads, model.num_key_value_heads, model.num_experts) == (16, 8, 8)
    assert 0 < model.sliding_window < model.rope_original_positions * 4
    assert model.rope_original_positions < model.max_position_embeddings


def test_a_window_keeps_two_positions() -> None:
    """In a window of one, no query or key has a gradient but rounding, which no tolerance bounds."""
    given = {"preset": "gemma-3-270m"}
    for length, kept in ((1_024, 6), (4_096, 2), (32_768, 2)):
        base = prepare(config(model=given, data={"sequence_length": length}), "fp64", 262_144)
        assert shrink(base, [parse("dp2")]).model.sliding_window == kept
    given["sliding_window"] = 1
    assert shrink(prepare(config(model=given), "fp64", 262_144), [parse("dp2")]).model.sliding_window == 1
