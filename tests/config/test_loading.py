"""Reading configs: valid ones round-trip, and errors are one sentence with the line."""

from pathlib import Path

import pytest

from threefold.config import load_config, resolve
from threefold.config.adapter import AdapterConfig
from threefold.config.loading import config_of, known_keys, parse_value
from threefold.config.model import FOR_SCALED_ROPE, ModelConfig
from threefold.config.optimizer import HYPER_PARAMETERS, hyper_parameters
from threefold.config.preference import PreferenceConfig
from threefold.errors import UserError
from threefold.models.deepseek import DeepseekConfig
from threefold.models.llama import LlamaConfig

SEVEN_LINES = """\
data:
  path: tokens
parallel: {dp: 2, tp: 2, pp: 2}
train:
  max_steps: 300
optimizer:
  lr: 1e-3
"""
# These may have no value in a resolved config either.
_OPTIONAL = (
    *("model.preset", "model.file", "model.arguments", "parallel.fallbacks", "optimizer.arguments", "optimizer.groups"),
    "optimizer.frozen",
    *("train.init_step", "train.init_average"),
    *("train.epochs", "train.max_seconds", "train.spike_factor", "train.rollback_steps", "train.eval_every_epochs"),
    *("log.layers", "train.callbacks", *(f"train.grain_{key}" for key in ("samples", "tensor", "context", "leaf"))),
    *(f"optimizer.ema_{key}" for key in ("decay", "start", "every", "warmup")),
    *(f"checkpoint.{key}" for key in ("every_seconds", "keep_every", "keep_best", "async_save", "remote")),
    *(
        f"data.{key}"
        for key in [
            "mixture",
            "validation",
            "tokenizer",
            "eod",
            "special_tokens",
            "chat_template",
            "cache",
            "skip_steps",
        ]
    ),
)


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def message(folder: Path, text: str, *overrides: str) -> str:
    """The sentence about a wrong config, without the folder's name."""
    with pytest.raises(UserError) as caught:
        resolve(load_config(write(folder, text), overrides), vocab_size=1000)
    return str(caught.value).replace(f"{folder}/", "")


def test_seven_lines_make_a_run(tmp_path: Path) -> None:
    config = resolve(load_config(write(tmp_path, SEVEN_LINES)), vocab_size=1000)
    assert (config.parallel.dp, config.train.max_steps, config.optimizer.lr) == (2, 300, 1e-3)
    assert (config.model.num_layers, config.model.hidden_size, config.model.num_attention_heads) == (8, 256, 8)
    assert config.model.vocab_size == 1000


def test_resolved_config_loads_back_equal(tmp_path: Path) -> None:
    config = resolve(load_config(write(tmp_path, SEVEN_LINES), ["optimizer.eps=3e-9"]), vocab_size=1001)
    again = load_config(write(tmp_path, config.to_yaml()))
    assert again == config
    assert resolve(again, vocab_size=1001) == config
    assert again.to_yaml() == config.to_yaml()
    other = load_config(write(tmp_path, config.to_yaml()), ["train.seed=5"])
    assert other != config


def test_resolved_config_has_every_setting(tmp_path: Path) -> None:
    config = resolve(load_config(write(tmp_path, SEVEN_LINES)), vocab_size=1000)
    filled = [f"{section}.{key}" for section, values in config.sections().items() for key in values]
    others = LlamaConfig.model_fields.keys() | DeepseekConfig.model_fields.keys()
    idle = {f"model.{key}" for key in (*others - ModelConfig.model_fields.keys(), *FOR_SCALED_ROPE)}
    idle |= {f"optimizer.{key}" for key in HYPER_PARAMETERS if key not in hyper_parameters("adamw")}
    idle |= {f"adapter.{key}" for key in AdapterConfig.model_fields}
    idle |= {f"preference.{key}" for key in PreferenceConfig.model_fields}
    assert filled == [key for key in known_keys() if key not in {*_OPTIONAL, *idle}]


def test_overrides_in_order_and_null_for_the_default(tmp_path: Path) -> None:
    overrides = [
        "parallel.dp=4",
        "parallel.dp=8",
        "optimizer.betas=[0.8, 0.9]",
        "train.max_steps=null",
        "data.split=8,2",
    ]
    config = load_config(write(tmp_path, SEVEN_LINES), overrides)
    assert config.parallel.dp == 8
    assert config.optimizer.betas == (0.8, 0.9)
    assert config.train.max_steps == 1000
    assert config.data.split == "8,2"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 1e-3), ("6E4", 6e4), (".5", 0.5), ("-3", -3), ("1:30", "1:30"), ("true", True), ("gpipe", "gpipe")],
)
def test_values_of_overrides(text: str, value: object) -> None:
    parsed = parse_value(text, "--set")
    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("data: {path: x}\ntrain:\n  max_step: 5\n", "run.yaml, line 3: train.max_step is not a setting; the nearest is train.max_steps."),
        ("data: {path: x}\ntrain: {dp: 2}\n", "run.yaml, line 2: train.dp is not a setting; the nearest is parallel.dp."),
        ("data: {path: x}\ntrain: {batch_size: 2}\n", "run.yaml, line 2: train.batch_size is not a setting; the nearest is train.global_batch_size."),
        ("data: {path: x}\nmodel: {n_head: 2}\n", "run.yaml, line 2: model.n_head is not a setting; the nearest is model.num_attention_heads."),
        ("data: {path: x}\ntrain: {learning_rate: 2}\n", "run.yaml, line 2: train.learning_rate is not a setting; the nearest is optimizer.lr."),
        ("data: {path: x}\nmodl:\n  num_layers: 5\n", "run.yaml, line 2: modl is not a setting; the nearest is model."),
        ("dta: {path: x}\n", "run.yaml, line 1: dta is not a setting; the nearest is data."),
        ("data: {path: x}\ntrain:\n\n  max_steps: soon\n", "run.yaml, line 4: train.max_steps is 'soon' but must be a whole number."),
        ("data: {path: x}\ntrain: {max_steps: 1e3}\n", "run.yaml, line 2: train.max_steps is 1000.0 but must be a whole number; use 1000."),
        ("data: {path: x}\nparallel: {dp: true}\n", "run.yaml, line 2: parallel.dp is true but must be a whole number."),
        ("data: {path: x}\nparallel: {dp: 0}\n", "run.yaml, line 2: parallel.dp is 0 but must be at least 1."),
        ("data: {path: x}\noptimizer: {lr: .inf}\n", "run.yaml, line 2: optimizer.lr is inf but must be a finite number."),
        ("data: {path: x}\noptimizer: {betas: [1]}\n", "run.yaml, line 2: optimizer.betas is [1] but must be a list of two numbers."),
        ("data: {path: x}\nparallel: {fallbacks: dp2}\n", 'run.yaml, line 2: parallel.fallbacks is \'dp2\' but must be a list of layouts, such as ["dp2,tp2", dp2].'),
        ("data: {path: x, key: ''}\n", "run.yaml, line 1: data.key is '' but must be the name of a key, such as text."),
        ("data: {path: x}\nprecision: {dtype: bf6}\n", "run.yaml, line 2: precision.dtype is 'bf6' but must be one of fp32, bf16, fp16, fp64; the nearest is bf16."),
        ("data: {path: x}\nmodel: {tie_embeddings: 1}\n", "run.yaml, line 2: model.tie_embeddings is 1 but must be true or false."),
        ("data: tokens\n", "run.yaml, line 1: data is 'tokens' but must be a section with settings below it."),
        ("data: {path: x}\ntrain: {seed: 1}\ntrain: {seed: 2}\n", "run.yaml, line 3: train is set twice, first on line 2."),
        ("train: {seed: 1}\n", "run.yaml: data.path is missing; name the folder that `threefold data prepare` wrote."),
        ("", "run.yaml: data.path is missing; name the folder that `threefold data prepare` wrote."),
        ("- a\n", "run.yaml: a config is a mapping of sections such as data: and model:."),
        ("data: {path: x\n", "run.yaml, line 2: not valid YAML, expected ',' or '}', but got '<stream end>'."),
    ],
)  # fmt: skip
def test_wrong_file(tmp_path: Path, text: str, expected: str) -> None:
    assert message(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.max_step=3", "--set train.max_step=3: train.max_step is not a setting; the nearest is train.max_steps."),
        ("dp=2", "--set dp=2: dp is not a setting; the nearest is parallel.dp."),
        ("modl.num_layer=2", "--set modl.num_layer=2: modl.num_layer is not a setting; the nearest is model.num_layers."),
        ("dp", "--set dp: write it as section.key=value."),
        ("parallel.dp=two", "--set parallel.dp=two: parallel.dp is 'two' but must be a whole number."),
        ("optimizer.betas=[", "--set optimizer.betas=[, line 1: not valid YAML, expected the node content, but found '<stream end>'."),
        ("parallel.tp=3", "--set parallel.tp=3: parallel.tp is 3 but must divide model.num_attention_heads 8; use 2."),
    ],
)  # fmt: skip
def test_wrong_override(tmp_path: Path, override: str, expected: str) -> None:
    assert message(tmp_path, SEVEN_LINES, override) == expected


def test_overrides_as_a_mapping(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("data: {path: tokens}\nparallel: {tp: 4}\n")
    config = load_config(file, {"parallel.tp": 2, "data.path": "C: other", "optimizer.betas": (0.9, 0.99)})
    assert (config.parallel.tp, config.data.path, config.optimizer.betas) == (2, "C: other", (0.9, 0.99))
    for overrides, sentence in (
        ({"parallel.dq": 2}, "overrides has parallel.dq: parallel.dq is not a setting; the nearest is parallel.dp."),
        ({"parallel": {}}, "overrides has parallel: parallel is a section; name a setting of it, such as parallel.dp."),
        ({"parallel.tp": "two"}, "parallel.tp is 'two' but must be a whole number."),
        ("parallel.tp=2", "overrides is 'parallel.tp=2' but must be a list or a mapping; use ['parallel.tp=2']."),
    ):
        with pytest.raises(UserError) as told:
            load_config(file, overrides)  # type: ignore[arg-type]
        assert str(told.value) == sentence


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="it is a folder"):
        load_config(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"data: {path: \xe9}")
    with pytest.raises(UserError, match=r"not UTF-8 text \(byte 13\)"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.split=1", "1"),
        ("data.split=0.9", "0.9"),
        ("data.split=[949, 50, 1]", "949,50,1"),
        ("data.split=[0.9, 0.1]", "0.9,0.1"),
        ("data.path=2024", "2024"),
        ("data.key=1", "1"),
        ("data.tokenizer=7", "7"),
        ("train.init_from=7", "7"),
    ],
)
def test_text_may_look_like_a_number(override: str, expected: str) -> None:
    """YAML makes numbers and lists of values whose natural spelling is that of one."""
    config = config_of({"data": {"path": "x"}}, [override])
    key = override.partition("=")[0]
    assert config.sections()[key.split(".")[0]][key.split(".")[1]] == expected
    assert config_of(config.sections()).sections() == config.sections()


def test_the_corpora_of_a_mixture_may_look_like_numbers() -> None:
    assert config_of({}, ["data.mixture={2023: 1, b: 2}"]).data.corpora == {"2023": 1.0, "b": 2.0}


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.path=1.50", "data.path is 1.5 but must be text; write it in quotes, since YAML reads it as something else"),
        ("data.path=on", "data.path is true but must be text; write it in quotes"),
        ("data.split=true", "data.split is true but must be weights of the training, validation and test parts, such as"),
        ("data.split=[a, 1]", "data.split is ['a', 1] but must be weights of the training"),
        ("model.attention_pattern=5", 'model.attention_pattern is 5 but must be a list of full and sliding, or a period such as "5 sliding : 1 full".'),
        ("model.attention_pattern=[1, full]", "model.attention_pattern is [1, 'full'] but must be a list of full and sliding, or a period such as"),
        ("train.max_steps=1e3", "train.max_steps is 1000.0 but must be a whole number; use 1000."),
        ("train.max_steps=1.5", "train.max_steps is 1.5 but must be a whole number."),
        *(
            (f"{key}=s3://bucket/x", f"{key} is 's3://bucket/x' but must be a path on this machine (only checkpoint.remote")
            for key in ("data.path", "data.tokenizer", "data.chat_template", "data.cache", "train.init_from", "model.file")
        ),
        ("parallel.schedule=s3://bucket/x.csv", "parallel.schedule is 's3://bucket/x.csv' but must be a path on this"),
        ("data.mixture={s3://b/x: 1}", "data.mixture has 's3://b/x' but each of its paths must be a path on this machine"),
        ("checkpoint.remote=runs", "checkpoint.remote is 'runs' but must be an address with its protocol, such as s3://"),
        ("data.path=file:///mnt/x", "data.path is 'file:///mnt/x' but must be a path without its protocol; use /mnt/x."),
    ],
)  # fmt: skip
def test_values_that_are_no_text_and_addresses_that_are_no_path(override: str, told: str) -> None:
    with pytest.raises(UserError) as error:
        config_of({"data": {} if "mixture" in override else {"path": "x"}}, [override])
    assert told in str(error.value)
