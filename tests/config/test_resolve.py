"""Filling and checking a config: derived settings, batch arithmetic, rules between settings."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from threefold.config import Config, load_config, resolve
from threefold.config.model import FAMILIES
from threefold.config.presets import PRESETS
from threefold.config.resolve import default_largest, with_micro_batch
from threefold.config.schema import ParallelConfig
from threefold.errors import UserError


def resolved(vocab_size: int = 1000, **sections: dict[str, Any]) -> Config:
    return resolve(Config.model_validate({"data": {"path": "x"}, **sections}), vocab_size)


def message(vocab_size: int = 1000, **sections: dict[str, Any]) -> str:
    with pytest.raises(UserError) as caught:
        resolved(vocab_size, **sections)
    return str(caught.value)


def test_derived_settings() -> None:
    config = resolved(model={"hidden_size": 512}, train={"max_steps": 50}, optimizer={"lr": 1e-3})
    assert config.model.ffn_hidden_size == 2048
    assert config.data.sequence_length == config.model.max_position_embeddings == 256
    assert (config.optimizer.decay_steps, config.optimizer.warmup_steps) == (50, 5)
    assert config.optimizer.min_lr == pytest.approx(1e-4)


def test_sequence_length_and_positions_follow_each_other() -> None:
    assert resolved(data={"path": "x", "sequence_length": 96}).model.max_position_embeddings == 96
    assert resolved(model={"max_position_embeddings": 96}).data.sequence_length == 96


def test_stable_steps_of_wsd() -> None:
    given = {"decay": "wsd", "decay_steps": 100, "warmup_steps": 10}
    assert resolved(optimizer=given).optimizer.stable_steps == 70
    assert resolved(optimizer={**given, "stable_steps": 20}).optimizer.stable_steps == 20
    assert resolved(optimizer={**given, "decay": "cosine"}).optimizer.stable_steps == 0


def test_resolving_twice_changes_nothing() -> None:
    config = resolved(parallel={"dp": 2, "pp": 4}, optimizer={"decay": "wsd"})
    assert resolve(config, 1000) == config


LAYOUTS = [
    {},
    {"dp": 4},
    {"dp": 2, "zero": 2},
    {"pp": 2, "schedule": "interleaved"},
    {"pp": 4, "schedule": "zbv", "dp": 2, "tp": 2, "cp": 2},
]


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_what_followed_from_a_layout_follows_anew_from_another(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    """The config that a run stores is one for every layout, also after it was resolved and stored again."""
    (tmp_path / "stored.yaml").write_text(resolved(parallel=before).to_yaml_as_given())
    stored = resolve(load_config(tmp_path / "stored.yaml"), 1000)
    assert stored == resolved(parallel=before)
    (tmp_path / "again.yaml").write_text(resolve(stored, 1000).to_yaml_as_given())
    changes = {"dp": 1, "zero": 0, "pp": 1, "tp": 1, "cp": 1, "schedule": "1f1b", **after}
    moved = load_config(tmp_path / "again.yaml", [f"parallel.{key}={value}" for key, value in changes.items()])
    assert resolve(moved, 1000) == resolved(parallel=after)


def test_what_was_given_stays_whatever_the_layout(tmp_path: Path) -> None:
    given = resolved(parallel={"dp": 2, "zero": 1, "zero_shards": 2}, train={"micro_batch_size": 2})
    text = given.to_yaml_as_given()
    assert "  # From other settings:\n  # gradient_accumulation_steps: 8\n  # loss_chunk_size: 0\n" in text
    (tmp_path / "stored.yaml").write_text(text)
    kept = resolve(load_config(tmp_path / "stored.yaml", ["parallel.dp=4"]), 1000)
    assert (kept.parallel.zero_shards, kept.train.micro_batch_size, kept.train.gradient_accumulation_steps) == (2, 2, 4)


def again(tmp_path: Path, config: Config, *overrides: str) -> Config:
    """What a stored config becomes with some settings changed."""
    (tmp_path / "stored.yaml").write_text(config.to_yaml_as_given())
    return resolve(load_config(tmp_path / "stored.yaml", overrides), 1000)


@pytest.mark.parametrize("decay", ["cosine", "wsd"])
def test_what_followed_from_the_steps_follows_from_more_of_them(tmp_path: Path, decay: str) -> None:
    short = resolved(train={"max_steps": 500}, optimizer={"decay": decay, "lr": 1e-3})
    long = again(tmp_path, again(tmp_path, short), "train.max_steps=5000", "optimizer.lr=2e-3")
    assert long == resolved(train={"max_steps": 5000}, optimizer={"decay": decay, "lr": 2e-3})
    assert (long.optimizer.decay_steps, long.optimizer.warmup_steps, long.optimizer.min_lr) == (5000, 100, 2e-4)
    assert again(tmp_path, short) == short


def test_what_was_given_stays_though_it_equals_what_would_follow(tmp_path: Path) -> None:
    given = resolved(train={"max_steps": 500}, optimizer={"decay_steps": 500, "warmup_steps": 50, "min_lr": 6e-5})
    kept = again(tmp_path, given, "train.max_steps=5000", "optimizer.lr=2e-3").optimizer
    assert (kept.decay_steps, kept.warmup_steps, kept.min_lr) == (500, 50, 6e-5)


def test_the_model_follows_from_its_width_and_the_data(tmp_path: Path) -> None:
    small = resolved(model={"hidden_size": 64, "num_attention_heads": 4})
    text = small.to_yaml_as_given()
    assert "  # ffn_hidden_size: 256\n" in text
    assert again(tmp_path, small, "model.hidden_size=128").model.ffn_hidden_size == 512
    (tmp_path / "full.yaml").write_text(small.to_yaml_as_given(resolved=("model", "data")))
    stored = resolve(load_config(tmp_path / "full.yaml"), 1)  # without the data, as a checkpoint's is read
    assert stored == small
    assert stored.model.vocab_size == 1000


def test_the_global_batch_stays_whatever_the_layout(tmp_path: Path) -> None:
    product = resolved(parallel={"dp": 2}, train={"micro_batch_size": 2, "gradient_accumulation_steps": 3})
    with pytest.raises(UserError, match="global_batch_size"):
        again(tmp_path, product, "parallel.dp=4")


SIZES = {"gpt3-1.3b": 1.3e9, "gpt3-2.7b": 2.7e9, "gpt3-6.7b": 6.7e9, "gpt3-13b": 13.0e9, "gpt3-175b": 174.6e9}


@pytest.mark.parametrize("preset", SIZES)
def test_gpt3_presets_have_the_published_size(preset: str) -> None:
    assert parameters_of(resolved(model={"preset": preset})) == pytest.approx(SIZES[preset], rel=0.02)
    if preset == "gpt3-175b":
        assert parameters_of(resolved(model={"preset": preset, "vocab_size": 50304})) == 174_604_836_864


def parameters_of(config: Config) -> int:
    """Parameters of a GPT-2 style decoder with tied embeddings: 12 h² + 13 h a block, and the final norm."""
    model, h = config.model, config.model.hidden_size
    blocks = model.num_layers * (4 * h * h + 2 * h * model.ffn_hidden_size + model.ffn_hidden_size + 9 * h)
    return blocks + (model.vocab_size + model.max_position_embeddings + 2) * h


@pytest.mark.parametrize("preset", PRESETS)
def test_explicit_settings_override_the_preset(preset: str) -> None:
    config = resolved(model={"preset": preset, "num_layers": 4, "vocab_size": 2000})
    assert config.model.num_layers == 4
    assert config.model.vocab_size == 2000
    assert config.model.hidden_size == PRESETS[preset]["hidden_size"]
    assert config.data.sequence_length == PRESETS[preset]["max_position_embeddings"]


@pytest.mark.parametrize("preset", PRESETS)
def test_a_familys_default_overrides_the_preset_too(preset: str) -> None:
    values = PRESETS[preset]
    fields = FAMILIES.load(values.get("architecture", "gpt")).config.model_fields
    for name in values.keys() - {"architecture"}:
        default = fields[name].default
        if default not in (None, values[name]):
            with suppress(UserError):  # about another setting, which goes with the preset's value
                assert getattr(resolved(model={"preset": preset, name: default}).model, name) == default


Sizes = tuple[int | None, int | None, int | None]


def batch(sizes: Sizes, dp: int = 1, pp: int = 1) -> Sizes:
    names = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps")
    train = resolved(train=dict(zip(names, sizes, strict=True)), parallel={"dp": dp, "pp": pp}).train
    return train.global_batch_size, train.micro_batch_size, train.gradient_accumulation_steps


@given(micro=st.integers(1, 50), steps=st.integers(1, 50), dp=st.integers(1, 16))
def test_every_pair_derives_the_third(micro: int, steps: int, dp: int) -> None:
    total = micro * steps * dp
    for given_sizes in ((total, micro, steps), (None, micro, steps), (total, None, steps), (total, micro, None)):
        assert batch(given_sizes, dp) == (total, micro, steps)


@given(total=st.integers(1, 400), dp=st.integers(1, 8), pp=st.integers(1, 8))
def test_global_batch_alone(total: int, dp: int, pp: int) -> None:
    if total % dp:
        with pytest.raises(UserError, match=r"must be a multiple of parallel\.dp"):
            batch((total, None, None), dp, pp)
        return
    found, micro, steps = batch((total, None, None), dp, pp)
    assert found == total == (micro or 0) * (steps or 0) * dp
    assert 1 <= (micro or 0) <= 32  # of 256 tokens
    assert micro == 1 or pp == 1 or (steps or 0) >= 2 * pp


@pytest.mark.parametrize(
    ("given", "layout", "expected"),
    [
        ((None, None, None), {}, (32, 32, 1)),
        ((None, None, None), {"dp": 2, "pp": 2}, (32, 4, 4)),
        ((None, None, None), {"dp": 4, "pp": 4}, (32, 1, 8)),
        ((None, 8, None), {"dp": 2}, (32, 8, 2)),
        ((None, None, 4), {"dp": 2}, (32, 4, 4)),
        ((12, None, None), {}, (12, 12, 1)),  # 12 sequences once ran as 3 × 4, in 1.4 times the time of 1 × 12
        ((12, None, None), {"dp": 2}, (12, 6, 1)),
    ],
)
def test_the_default_batch(given: Sizes, layout: dict[str, int], expected: Sizes) -> None:
    """A global batch that is not given is the same in every layout."""
    assert batch(given, **layout) == expected


@pytest.mark.parametrize(
    ("largest", "parallel", "expected"),
    [
        (None, {}, (32, 2)),  # of 256 tokens, 8,192 in all
        (64, {}, (64, 1)),
        (63, {}, (32, 2)),
        (7, {}, (4, 16)),
        (1, {}, (1, 64)),
        (None, {"dp": 4}, (16, 1)),
        (None, {"pp": 2}, (16, 4)),  # a pipeline has two for each of its stages
        (None, {"pp": 4}, (8, 8)),
        (5, {"pp": 4}, (4, 16)),
        (None, {"pp": 3, "schedule": "dualpipev"}, (8, 8)),
        (None, {"pp": 4, "dp": 16}, (1, 4)),  # too few for that
        (None, {"cp": 2}, (64, 1)),  # each rank has half of the tokens
    ],
)
def test_the_largest_default_micro_batch(
    largest: int | None, parallel: dict[str, Any], expected: tuple[int, int]
) -> None:
    given = Config.model_validate({"data": {"path": "x"}, "parallel": parallel, "train": {"global_batch_size": 64}})
    train = resolve(given, 1000, largest).train
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == expected
    given = Config.model_validate({"data": {"path": "x"}, "train": {"global_batch_size": 64, "micro_batch_size": 8}})
    assert resolve(given, 1000, largest).train.micro_batch_size == 8


@pytest.mark.parametrize(
    ("vocab_size", "train", "expected"),
    [
        (4096, {}, (32, 0)),
        (8192, {}, (16, 0)),  # 32 × 256 × 8192 logits would have to be computed in chunks, and twice
        (32_000, {}, (4, 0)),
        (32_769, {}, (32, 4096)),  # fewer than 1,024 tokens at once
        (8192, {"loss_chunk_size": 0}, (32, 0)),
        (8192, {"loss_chunk_size": 100}, (32, 100)),
    ],
)
def test_logits_stay_in_one_piece_where_they_can(
    vocab_size: int, train: dict[str, int], expected: tuple[int, int]
) -> None:
    found = resolved(vocab_size, train=train).train
    assert (found.micro_batch_size, found.loss_chunk_size) == expected


def test_long_sequences_go_one_by_one() -> None:
    train = resolved(data={"path": "x", "sequence_length": 10_000}).train
    assert (train.micro_batch_size, train.gradient_accumulation_steps) == (1, 32)


def test_another_machine_has_another_default_and_the_rest_follows() -> None:
    given = {"data": {"path": "x"}, "train": {"global_batch_size": 64}, "model": {"vocab_size": 50_000}}
    config = resolve(Config.model_validate(given), 1, 64)
    assert (config.train.micro_batch_size, config.train.loss_chunk_size) == (64, 2048)
    changed = with_micro_batch(config, 2)
    assert changed == resolve(Config.model_validate(given), 1, 2)
    assert (changed.train.gradient_accumulation_steps, changed.train.loss_chunk_size) == (32, 0)
    assert changed.to_yaml_as_given() == resolve(Config.model_validate(given), 1, 2).to_yaml_as_given()
    kept = resolve(Config.model_validate({**given, "train": {"global_batch_size": 64, "loss_chunk_size": 77}}), 1, 64)
    assert with_micro_batch(kept, 2).train.loss_chunk_size == 77


@pytest.mark.parametrize(
    ("sizes", "dp", "expected"),
    [
        ((33, 4, 4), 2, "train.global_batch_size is 33 but must be micro_batch_size 4 · gradient_accumulation_steps 4 · dp 2 = 32; set it to 32 or leave one of the three out."),
        ((30, None, None), 4, "train.global_batch_size is 30 but must be a multiple of parallel.dp 4; use 32."),
        ((None, None, None), 3, "train.global_batch_size is 32 but must be a multiple of parallel.dp 3; use 33."),
        ((32, 5, None), 2, "train.micro_batch_size is 5 but must divide global_batch_size 32 / dp 2 = 16; use 4."),
        ((32, None, 7), 2, "train.gradient_accumulation_steps is 7 but must divide global_batch_size 32 / dp 2 = 16; use 8."),
    ],
)  # fmt: skip
def test_batch_sizes_that_disagree(sizes: Sizes, dp: int, expected: str) -> None:
    names = ("global_batch_size", "micro_batch_size", "gradient_accumulation_steps")
    assert message(train=dict(zip(names, sizes, strict=True)), parallel={"dp": dp}) == expected


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": {"num_attention_heads": 7}}, "model.num_attention_heads is 7 but must divide model.hidden_size 256; use 8."),
        ({"parallel": {"tp": 3}}, "parallel.tp is 3 but must divide model.num_attention_heads 8; use 2."),
        ({"parallel": {"cp": 3}}, "parallel.cp is 3 but the ranks share each sequence in 6 equal parts; use data.sequence_length 258 instead of 256."),
        ({"parallel": {"cp": 2}, "data": {"path": "x", "sequence_length": 66}}, "parallel.cp is 2 but the ranks share each sequence in 4 equal parts; use data.sequence_length 64 instead of 66."),
        ({"parallel": {"zero": 1}}, "parallel.zero is 1 but parallel.dp is 1 and ZeRO needs dp > 1; use 0 or dp 2."),
        ({"parallel": {"zero": 1, "dp": 8, "zero_shards": 3}}, "parallel.zero_shards is 3 but must divide parallel.dp 8; use 2."),
        ({"parallel": {"zero": 1, "dp": 6, "zero_shards": 3, "ep": 2}, "model": {"architecture": "llama", "num_experts": 4}, "train": {"global_batch_size": 12}}, "parallel.zero_shards is 3 but must be a multiple or a divisor of parallel.ep 2, whose replicas share a copy of the experts; use 2."),
        ({"parallel": {"zero": 2, "dp": 4, "zero_shards": 1}}, "parallel.zero_shards is 1 but zero_shards 1 disables sharding and parallel.zero is 2; use 4, or zero 0."),
        ({"parallel": {"zero": 3, "dp": 2, "tp": 64}, "model": {"num_attention_heads": 64}}, "parallel.zero is 3 but parallel.tp 64 leaves a rank without rows of the 1000 of model.vocab_size; use 0 or model.vocab_size 1009."),
        ({"parallel": {"zero": 1, "dp": 2, "pp": 2, "schedule": "zbv"}}, "parallel.zero is 1 but parallel.schedule zbv defers weight gradients until after their layer's backward pass, at whose end fully_shard reduce-scatters them; use 0 or schedule interleaved."),
        ({"model": {"position_embedding": "rope", "hidden_size": 40}}, "model.position_embedding is rope but the width of a head, model.hidden_size / model.num_attention_heads = 5, must be even for it; use model.hidden_size 48, or learned."),
        ({"parallel": {"tp": 8}, "model": {"ffn_hidden_size": 1001}}, "model.ffn_hidden_size is 1001 but must be a multiple of parallel.tp 8; use 1000."),
        ({"parallel": {"pp": 9}}, "parallel.pp is 9 but each stage needs a layer and model.num_layers is 8; use at most 8."),
        ({"model": {"vocab_size": 999}}, "model.vocab_size is 999 but the tokenizer of the data has 1000 tokens; use 1000."),
        ({"model": {"vocab_size": 1001, "max_position_embeddings": 64}, "data": {"path": "x", "sequence_length": 65}}, "data.sequence_length is 65 but model.max_position_embeddings is 64; use 64 or raise the latter."),
        ({"optimizer": {"betas": (0.9, 1.0)}}, "optimizer.betas is [0.9, 1.0] but each must be at least 0 and below 1; use [0.9, 0.95]."),
        ({"optimizer": {"warmup_steps": 20, "decay_steps": 10}}, "optimizer.warmup_steps is 20 but must be at most optimizer.decay_steps 10; use 10."),
        ({"optimizer": {"stable_steps": 20}}, "optimizer.stable_steps is 20 but optimizer.decay is cosine, which has no stable part; leave it out or use decay wsd."),
        ({"optimizer": {"decay": "wsd", "stable_steps": 95, "warmup_steps": 10, "decay_steps": 100}}, "optimizer.stable_steps is 95 but warm-up and decay_steps leave room for 90; use 90."),
        ({"precision": {"dtype": "fp64"}, "train": {"device": "cuda"}}, "precision.dtype is fp64 but works on the CPU only; use fp32 or bf16, or set train.device to cpu."),
    ],
)  # fmt: skip
def test_settings_that_cannot_go_together(sections: dict[str, dict[str, Any]], expected: str) -> None:
    assert message(**sections) == expected


def test_samples_that_fill_no_batch_are_a_step_of_an_epoch() -> None:
    epochs = Config.model_validate({"data": {"path": "x"}, "train": {"epochs": 2, "global_batch_size": 4}})
    assert [resolve(epochs, 100, samples=samples).train.max_steps for samples in (8, 9, 10)] == [4, 5, 5]


def test_a_rank_holds_its_columns_of_the_logits() -> None:
    """Four tensor ranks have room for four times the sequences in as much memory."""
    sizes = [default_largest(32768, 256, ParallelConfig(tp=tp), chunk_given=False) for tp in (1, 2, 4)]
    assert sizes == [4, 8, 16]


def test_what_was_given_is_not_derived(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("data: {path: x}\noptimizer: {warmup_steps: 7}\n")
    found = resolve(load_config(path), 100)
    assert "optimizer.warmup_steps" not in found.derived
    assert "optimizer.decay_steps" in found.derived
