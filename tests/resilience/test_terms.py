"""Whatever decides a run's numbers is a term of the run: settings, code and data that differ on one rank are named."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist

from tests.train.support import write_tokens
from threefold.comm.heartbeat import Heartbeat
from threefold.config import Config, resolve
from threefold.config.schema import section_settings
from threefold.data.dataset import open_dataset
from threefold.errors import UserError
from threefold.models.source import ConfigSource, FileSource
from threefold.resilience.terms import NOT_COMPARED, agree_on_terms, code, data_of, settings_of
from threefold.train.run import open_samples
from threefold.verify.worker_pool import WorkerPool

TEXTS = [f"Sentence {number} of a text that is long enough for a sample or two of it." for number in range(40)]
MODEL = {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 2}


def config(path: Path | str = "tokens", **sections: dict[str, Any]) -> Config:
    data = {"path": str(path), "sequence_length": 16, "split": "8,2"} | sections.pop("data", {})
    train = {"global_batch_size": 4, "max_steps": 3} | sections.pop("train", {})
    return resolve(Config.model_validate({"model": MODEL, "data": data, "train": train, **sections}), 64)


def test_every_setting_that_a_resolved_config_has_is_compared_or_named_as_an_exception() -> None:
    known = {f"{section}.{key}" for section, settings in section_settings().items() for key in settings}
    assert NOT_COMPARED.keys() <= known
    resolved = config(train={"micro_batch_size": 2})
    values = {f"{section}.{key}" for section, values in resolved.sections().items() for key in values}
    assert settings_of(resolved).keys() == values - NOT_COMPARED.keys()


def test_what_a_rank_derives_from_its_memory_is_not_compared() -> None:
    agreed = {"train.micro_batch_size", "train.gradient_accumulation_steps", "train.loss_chunk_size"}
    assert not agreed & settings_of(config()).keys()
    assert settings_of(config(train={"micro_batch_size": 2}))["train.micro_batch_size"] == "2"


def test_code_is_known_by_its_content_and_not_by_its_place(tmp_path: Path) -> None:
    found = []
    for number, text in enumerate(["import helper\n", "import helper\n", "import helper\n", "import helper  # x\n"]):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "model.py").write_text(text)
        (folder / "helper.py").write_text("RATE = 2\n" if number == 2 else "RATE = 1\n")
        resolved = config(optimizer={"name": f"{folder}/model.py:Lion"})
        found.append(code(resolved, FileSource(folder / "model.py", "Model")))
        assert "optimizer.name" not in settings_of(resolved)
    assert found[0].keys() == {"the code of optimizer.name", "the code of the model"}
    assert found[0] == found[1]
    assert all(found[0][name] != found[other][name] for name in found[0] for other in (2, 3))


def test_each_entry_of_a_list_of_code_is_compared(tmp_path: Path) -> None:
    """Also the entries that name no code, and their arguments."""

    def terms(folder: str, first: str = "A = 1\n", every: int = 1) -> dict[str, str]:
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "one.py").write_text(first)
        (tmp_path / folder / "two.py").write_text("B = 1\n")
        entries = [f"{tmp_path}/{folder}/{name}.py:Call" for name in ("one", "two")]
        named = config(train={"callbacks": [*entries, {"name": "early_stopping", "patience": every}]})
        return settings_of(named) | code(named, ConfigSource())

    right = terms("right")
    assert terms("elsewhere") == right
    for changed in (terms("first", first="A = 2\n"), terms("argument", every=2)):
        assert changed != right


def facts(path: Path) -> dict[str, str]:
    resolved = config(path)
    dataset = open_dataset(resolved)
    return data_of(dataset, open_samples(resolved, dataset))


def test_data_is_known_by_its_content(tmp_path: Path) -> None:
    write_tokens(tmp_path / "one", TEXTS)
    shutil.copytree(tmp_path / "one", tmp_path / "elsewhere")
    assert facts(tmp_path / "one") == facts(tmp_path / "elsewhere")
    tokens = tmp_path / "elsewhere" / "tokens.bin"
    changed = bytearray(tokens.read_bytes())
    changed[10] ^= 1
    tokens.write_bytes(changed)
    assert facts(tmp_path / "one") != facts(tmp_path / "elsewhere")


def agreed(configs: list[Config]) -> str:
    mine = configs[dist.get_rank()]
    dataset = open_dataset(mine)
    try:
        lines = agree_on_terms(mine, dataset, open_samples(mine, dataset), ConfigSource(), Heartbeat())
    except UserError as error:
        return str(error)
    return json.dumps(lines)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"optimizer": {"lr": 0.5}}, "optimizer.lr is 0.0006 on rank 0"),
        ({"train": {"seed": 4}}, "train.seed is 1234 on rank 0"),
        ({"train": {"exact": True}}, "train.exact is false on rank 0"),
        ({"parallel": {"dp": 2, "zero": 1}}, "parallel.zero is 0 on rank 0"),
        ({"data": {"split": "7,3"}}, "data.split is 8,2 on rank 0"),
        ({"checkpoint": {"every": 7}}, "checkpoint.every is 500 on rank 0"),
    ],
)
def test_ranks_that_were_given_different_settings_end_before_the_first_step(
    pool: WorkerPool, tmp_path: Path, change: dict[str, Any], named: str
) -> None:
    write_tokens(tmp_path / "tokens", TEXTS)
    path = tmp_path / "tokens"
    assert pool.run(2, agreed, [config(path), config(path)]) == ["[]", "[]"]
    parallel = {"dp": 2} if "parallel" in change else {}
    first, second = pool.run(2, agreed, [config(path, parallel=parallel), config(path, **change)])
    assert first == second
    assert first.startswith(named)
    assert first.endswith("start every rank with the same config, data, code and environment.")


def test_other_tokens_on_one_host_are_found(pool: WorkerPool, tmp_path: Path) -> None:
    write_tokens(tmp_path / "one", TEXTS)
    shutil.copytree(tmp_path / "one", tmp_path / "half")
    tokens = tmp_path / "half" / "tokens.bin"
    content = np.frombuffer(tokens.read_bytes(), np.uint8).copy()
    content[len(content) // 2 :] = 0
    tokens.write_bytes(content.tobytes())
    first, second = pool.run(2, agreed, [config(tmp_path / "one"), config(tmp_path / "half")])
    assert first == second
    assert first.startswith("the data at data.path is ")
