"""Fine-tuning an imported model on conversations: its tokens, labels and losses are those of transformers."""

import json
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from tests.support.chats import conversations, transformers_tokenizer
from tests.support.command import Silent
from tests.support.damage import flip
from tests.train.support import losses_of, same, train
from threefold.checkpoint.resume import find_resumption
from threefold.config import Config, load_config
from threefold.data.dataset import open_dataset
from threefold.data.formats.threefold_folder import TokenFiles
from threefold.data.loader import BatchSlice, Loader
from threefold.data.preparation import prepare
from threefold.errors import UserError
from threefold.huggingface.import_hf import Import, import_model
from threefold.inference.eval_tasks import Perplexity, score
from threefold.inference.inputs import read_texts
from threefold.inference.model import Trained
from threefold.launch.checks import resolve_run
from threefold.verify.worker_pool import WorkerError, WorkerPool

STYLES = {
    "llama3": "llama",
    "chatml": "qwen2",
    "phi": "gpt2",
    "mistral": "mistral",
    "zephyr": "mistral",
    "gemma": "llama",
}
LENGTHS = {"llama3": 160, "chatml": 160, "phi": 96, "mistral": 48, "zephyr": 176, "gemma": 80}
"""Tokens of a sample, so that all conversations are two."""


class Tuned(NamedTuple):
    """What fine-tuning starts from: the model of transformers and here, and its data in both forms."""

    theirs: Any
    tokenizer: Any
    base: Path
    lines: Path
    tokens: Path
    chats: list[list[dict[str, Any]]]
    length: int


@pytest.fixture(
    scope="module",
    params=[pytest.param(style, marks=() if style == "llama3" else pytest.mark.slow) for style in STYLES],
)
def tuned(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    import transformers

    style, folder = request.param, tmp_path_factory.mktemp(request.param)
    tokenizer = transformers_tokenizer(style)
    classes = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
        "gpt2": (transformers.GPT2Config, transformers.GPT2LMHeadModel),
    }
    config, model = classes[STYLES[style]]
    torch.manual_seed(5)
    theirs = model(
        config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=256,
            initializer_range=0.2,
            **(
                {"n_inner": 48, "resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
                if STYLES[style] == "gpt2"
                else {"intermediate_size": 48, "num_key_value_heads": 2}
            ),
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=tokenizer.bos_token_id,
        )
    ).eval()
    theirs.save_pretrained(folder / "hf")
    tokenizer.save_pretrained(folder / "hf")
    import_model(Import(folder / "hf", folder / "base"), Silent())
    chats = conversations(style)
    lines = folder / "chats.jsonl"
    lines.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    prepare((lines,), folder / "tokens", tokenizer=folder / "base" / "tokenizer.json")
    return Tuned(theirs, tokenizer, folder / "base", lines, folder / "tokens", chats, LENGTHS[style])


def config_of(tuned: Tuned, path: Path, steps: int = 3, **layout: int) -> Config:
    """All conversations in each batch, so that a step's loss is that of the file."""
    given = load_config(tuned.base / "config.yaml").sections()
    given["data"] = {"path": str(path), "sequence_length": tuned.length, "split": "1"}
    if path == tuned.lines:
        given["data"]["tokenizer"] = str(tuned.base / "tokenizer.json")
    given["train"] |= {"max_steps": steps, "eval_every": 0, "device": "cpu", "global_batch_size": 2}
    given |= {
        "parallel": layout,
        "optimizer": {"lr": 1e-3, "warmup_steps": 0, "decay": "constant"},
        "log": {"every": 1},
    }
    given["precision"] = {"dtype": "fp64"}
    return resolve_run(Config.model_validate(given))


def expected(tuned: Tuned) -> tuple[float, int, list[list[int]]]:
    """The mean loss of transformers' model over the tokens that its own masks have, their number, and all tokens."""
    total, count, ids = 0.0, 0, []
    for chat in tuned.chats:
        rendered = tuned.tokenizer.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, return_tensors="pt"
        )
        labels = rendered["input_ids"].masked_fill(torch.as_tensor(rendered["assistant_masks"]) == 0, -100)
        counted = int((labels[:, 1:] != -100).sum())
        with torch.no_grad():
            loss = tuned.theirs.double()(rendered["input_ids"], labels=labels).loss
        total, count = total + counted * float(loss), count + counted
        ids.append(rendered["input_ids"][0].tolist())
    return total / count, count, ids


def test_both_forms_give_the_same_samples(tuned: Tuned) -> None:
    found = []
    for path in (tuned.lines, tuned.tokens):
        config = config_of(tuned, path)
        assert config.data.separate_documents
        samples = open_dataset(config).samples("train")
        every = np.arange(len(samples))
        found.append((*samples.labelled(every), samples.documents(every)))
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_first_loss_is_theirs_in_every_layout(tuned: Tuned, pool: WorkerPool, tmp_path: Path) -> None:
    config = config_of(tuned, tuned.tokens)
    loss, count, _ = expected(tuned)
    samples = open_dataset(config).samples("train")
    assert len(samples) == 2, "the batch is all conversations"
    batch = Loader(samples, None, BatchSlice(2), 1, True).batch(0)
    assert int((batch.labels != -100).sum()) == count
    pool.run(1, train, config, tmp_path / "one", False)
    one = losses_of(tmp_path / "one")
    assert math.isclose(one[0], loss, rel_tol=1e-6), (one[0], loss)
    layouts = ({"dp": 2, "tp": 2},) if tuned.tokenizer.bos_token else ({"dp": 2}, {"tp": 2}, {"pp": 2}, {"cp": 2})
    for layout in layouts:
        name = "-".join(layout)
        ranks = math.prod(layout.values())
        pool.run(ranks, train, config_of(tuned, tuned.lines, **layout), tmp_path / name, False)
        assert same(losses_of(tmp_path / name), one, "fp64"), layout


def test_eval_on_the_training_file_is_the_training_loss(tuned: Tuned, pool: WorkerPool, tmp_path: Path) -> None:
    """Of the same weights: those after the first step, which the second one trains on."""
    pool.run(1, train, config_of(tuned, tuned.lines, steps=1), tmp_path / "run", False)
    pool.run(1, train, config_of(tuned, tuned.lines, steps=2), tmp_path / "longer", False)
    trained = Trained.find(tmp_path / "run")
    task = Perplexity(trained.config.data.sequence_length, min(64, tuned.length))
    work = task.prepare(trained.documents(), read_texts(tuned.lines, "text"), lambda: None)
    scores = score(trained.load(dtype="fp64"), work.texts, work.windows, 3, masks=work.masks)
    found = {figure.name: figure.value for figure in task.metrics(work, scores)}
    assert math.isclose(found["loss"], losses_of(tmp_path / "longer")[1], rel_tol=1e-9)
    assert found["tokens"] == expected(tuned)[1]


def test_a_run_keeps_its_rule_and_template(tuned: Tuned, pool: WorkerPool, tmp_path: Path) -> None:
    config = config_of(tuned, tuned.lines, steps=1)
    pool.run(1, train, config, tmp_path / "run", False)
    trained = Trained.find(tmp_path / "run")
    (chat, *_) = tuned.chats
    expected_ids = tuned.tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True)["input_ids"]
    assert trained.documents().chats.prompt(chat[:1], "--prompt") == expected_ids
    rendered = tuned.tokenizer.apply_chat_template(chat, tokenize=False)
    bos = [tuned.tokenizer.bos_token_id] if tuned.tokenizer.bos_token else []
    ids = expected(tuned)[2][0]
    assert trained.documents().text.encode(rendered) == (ids if ids[: len(bos)] == bos else [*bos, *ids])
    assert list(trained.documents().text.rule.beginning) == bos
    longer = config.model_copy(update={"train": config.train.model_copy(update={"max_steps": 2})})
    assert find_resumption(tmp_path / "run", longer).warnings == ()
    other = longer.model_copy(update={"data": longer.data.model_copy(update={"special_tokens": "text"})})
    with pytest.raises(UserError, match=r"data.special_tokens is text but .* was trained with parse"):
        find_resumption(tmp_path / "run", other)


def with_data(config: Config, **changes: Any) -> Config:
    """The same run on other data, one step longer."""
    train = config.train.model_copy(update={"max_steps": config.train.max_steps + 1})
    return config.model_copy(update={"data": config.data.model_copy(update=changes), "train": train})


def test_other_answers_are_not_resumed(tuned: Tuned, pool: WorkerPool, tmp_path: Path) -> None:
    """A template that writes the same text and marks less of it as answers leaves the tokens as they are."""
    config = config_of(tuned, tuned.lines, steps=1)
    pool.run(1, train, config, tmp_path / "run", False)
    assert find_resumption(tmp_path / "run", with_data(config)).warnings == ()
    prepared = with_data(config, path=str(tuned.tokens), tokenizer=None)
    assert find_resumption(tmp_path / "run", prepared).warnings == (), "the same in another form"
    (changed,) = find_resumption(tmp_path / "run", with_data(config, loss_tokens="all")).warnings
    assert changed.startswith("data.loss_tokens is 'all' from here on")
    template, end = str(tuned.tokenizer.chat_template), "{% endgeneration %}"
    ends = (*(f"'{token}'" for token in ("<|im_end|>", "<|eot_id|>", "<|end|>", "<end_of_turn>")), "eos_token")
    before = next(text for text in (f" + {token} }}}}" for token in ends) if text + end in template)
    fewer = tmp_path / "fewer.jinja"
    fewer.write_text(template.replace(before + end, " }}" + end + "{{" + before[2:]))
    other = with_data(config, chat_template=str(fewer))
    assert open_dataset(other).sizes() == open_dataset(config).sizes()
    with pytest.raises(UserError, match=r"where other tokens count for the loss than .*step_00000001 was trained on"):
        find_resumption(tmp_path / "run", other)


def test_a_flipped_bit_of_mask_or_cache_is_seen(tuned: Tuned, pool: WorkerPool, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tuned.tokens, tmp_path / "tokens"))
    flip(folder / "loss_mask.bin", 8 * 40)
    with pytest.raises(UserError, match=r"loss_mask.bin is damaged \(its checksum"):
        TokenFiles.open(folder)
    config = with_data(config_of(tuned, tuned.lines, steps=1), cache=str(tmp_path / "cache"))
    open_dataset(config).samples("train")
    (mask,) = (tmp_path / "cache").glob("*/loss_mask.bin")
    whole = mask.read_bytes()
    flip(mask, 8 * 40)
    open_dataset(config).samples("train")
    assert mask.read_bytes() == whole, "it is made again"
    (cached,) = (tmp_path / "cache").glob("*/tokens.bin")
    flip(cached, 8 * 20)
    with pytest.raises(WorkerError, match=r"tokens.bin (is damaged|holds token)"):
        pool.run(1, train, config, tmp_path / "run", False)
