"""Preferences against TRL's `DPOTrainer`: the same tokens, losses and gradients, on a model that transformers wrote."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.support.chats import transformers_tokenizer
from tests.support.command import Silent
from tests.support.parity import whole_tensors
from threefold.checkpoint.folder import newest
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, load_config
from threefold.data.dataset import open_dataset
from threefold.huggingface import files as weights
from threefold.huggingface.import_hf import Import, import_model
from threefold.launch.checks import resolve_run
from threefold.models.source import ConfigSource
from threefold.preference.references import reference_logps
from threefold.train.callbacks.base import RunContext
from threefold.train.run import open_loader
from threefold.train.state import load_weights
from threefold.train.step import Engine

pytestmark = pytest.mark.slow
STEPS, BETA, RATE = 3, 0.4, 0.01
TEXTS = [
    {"prompt": f"What is {n} + 2? ", "chosen": f"It is {n + 2}." * (n % 3 + 1), "rejected": "Fine." * (n % 4 + 1)}
    for n in range(8)
]
CHATS = [
    {
        "prompt": [{"role": "user", "content": one["prompt"]}],
        **{kind: [{"role": "assistant", "content": one[kind]}] for kind in ("chosen", "rejected")},
    }
    for one in TEXTS
]


def step_of(theirs: nn.Module, trainer: Any, rows: list[int], optimizer: Any) -> tuple[float, dict[str, Tensor]]:
    """Make a step of plain SGD with the loss of TRL's trainer; return the loss and the gradients."""
    examples = [trainer.train_dataset[row] for row in rows]
    optimizer.zero_grad()
    loss = trainer.compute_loss(theirs, trainer.data_collator(examples))
    loss.backward()
    gradients = {name: each.grad.clone() for name, each in theirs.named_parameters()}
    optimizer.step()
    return loss.item(), gradients


def ours(config: Config, start: Path) -> list[tuple[float, dict[str, Tensor], list[int], dict[str, float]]]:
    """Return losses, gradients, rows and terms of some steps, in a layout."""
    mesh = Mesh(Layout.from_config(config.parallel))
    make, plan = ConfigSource().load(config)
    engine = Engine(make, plan, mesh, config)
    load_weights(engine, newest(start))
    part = open_dataset(config).samples("train")
    part = part.with_references(reference_logps(RunContext(config, start, mesh), engine, part))
    found = []
    loader = open_loader(config, (part, None), mesh.dp)
    for step in range(STEPS):
        batch = loader.batch(step)
        loss, tokens = engine.compute_gradients(batch, step)
        gradients = whole_tensors(engine, "gradient")
        result = engine.update(loss, tokens, step)
        found.append((result.loss, gradients, loader.sample_indices(step).tolist(), dict(result.terms)))
    loader.close()
    return found


@pytest.mark.parametrize("loss", ["sigmoid", "ipo"])
@pytest.mark.parametrize("lines", [TEXTS, CHATS], ids=["texts", "chats"])
def test_losses_and_gradients_of_trl(pool, tmp_path: Path, lines: list[dict[str, Any]], loss: str) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = transformers_tokenizer("llama3")
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id}
    settings = LlamaConfig(vocab_size=len(tokenizer), intermediate_size=48, initializer_range=0.2, **sizes, **special)
    LlamaForCausalLM(settings).save_pretrained(tmp_path / "hf")
    theirs = LlamaForCausalLM.from_pretrained(tmp_path / "hf").train()
    tokenizer.save_pretrained(tmp_path / "hf")
    import_model(Import(tmp_path / "hf", tmp_path / "base"), Silent())
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    given = load_config(tmp_path / "base" / "config.yaml").sections()
    given["data"] = {"path": str(tmp_path / "pairs.jsonl"), "sequence_length": 256, "split": "1"}
    given["data"] |= {"tokenizer": str(tmp_path / "base" / "tokenizer.json"), "eod": tokenizer.eos_token_id}
    given["train"] |= {"max_steps": STEPS, "eval_every": 0, "device": "cpu", "global_batch_size": 4}
    given |= {"precision": {"dtype": "fp32"}, "preference": {"beta": BETA, "loss": loss}, "parallel": {"tp": 2}}
    given["optimizer"] = {"name": "sgd", "lr": RATE, "warmup_steps": 0, "decay": "constant", "weight_decay": 0}
    given["optimizer"] |= {"momentum": 0.0, "clip_grad_norm": 0.0}
    config = resolve_run(Config.model_validate(given))

    arguments = trl.DPOConfig(
        output_dir=str(tmp_path / "trl"),
        beta=BETA,
        loss_type=loss,
        max_length=None,
        use_cpu=True,
        report_to="none",
        gradient_checkpointing=False,
        bf16=False,
        disable_dropout=True,
    )
    trainer = trl.DPOTrainer(
        model=theirs, args=arguments, train_dataset=datasets.Dataset.from_list(lines), processing_class=tokenizer
    )
    samples = open_dataset(config).samples("train")
    tokens, labels = samples.labelled(np.arange(len(lines)))
    documents = samples.documents(np.arange(len(lines)))
    for row, example in enumerate(trainer.train_dataset):
        for side, kind in enumerate(("chosen_ids", "rejected_ids")):
            here = documents[row] == side
            assert tokens[row][here].tolist()[: len(example["prompt_ids"])] == example["prompt_ids"]
            counted = labels[row][here]
            assert counted[counted != -100].tolist() == example[kind]

    kind, _ = weights.read_model(theirs.config.to_dict(), "config.json")
    optimizer = torch.optim.SGD(theirs.parameters(), RATE)
    shown = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
    for found, gradients, rows, terms in pool.run(2, ours, config, tmp_path / "base")[0]:
        expected, wanted = step_of(theirs, trainer, rows, optimizer)
        assert found == pytest.approx(expected, rel=1e-5)
        maps = kind.weights(config.model, {name: tuple(each.shape) for name, each in gradients.items()})
        of_theirs = {key: each for one in maps for key, each in weights.split(one, gradients[one.name]).items()}
        assert of_theirs.keys() == wanted.keys()
        for key, gradient in of_theirs.items():
            assert (gradient - wanted[key]).norm() <= 1e-5 * wanted[key].norm(), key
        reported = [trainer._metrics["train"][name][-1] for name in shown]
        assert list(terms.values())[1:] == pytest.approx(reported, rel=1e-4, abs=1e-5)
