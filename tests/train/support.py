"""Small runs on the pool: token files of a few hundred lines of text, a model of a few thousand weights."""

import contextlib
import hashlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from tokenizers import Tokenizer

from tests.support import custom_state_models
from tests.support.custom_state_models import LENGTH, WORDS
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config, resolve
from threefold.data.corpus import (
    DOCUMENT_DTYPE,
    DOCUMENTS_FILE,
    META_FILE,
    TOKEN_DTYPES,
    TOKENIZER_FILE,
    TOKENS_FILE,
    dtype_for,
)
from threefold.data.dataset import open_dataset
from threefold.data.formats.threefold_folder import Meta, file_checksums
from threefold.data.tokenizer import END_OF_DOCUMENT, train_tokenizer
from threefold.models.gpt.model import GPT
from threefold.models.gpt.sharding import gpt_plan
from threefold.report import loss_curve
from threefold.report.document import RunReport
from threefold.report.metrics import read_metrics
from threefold.train import run as entry_point
from threefold.train.callbacks.records import StepRecord
from threefold.train.loop import evaluate
from threefold.train.run import open_loader, open_samples
from threefold.train.step import Engine
from threefold.train.stop import Stopped

TOLERANCE = {"fp32": 1e-5, "fp64": 1e-12}


def write_tokens(folder: Path, documents: list[str]) -> Path:
    """Token files of these documents, with a byte-level tokenizer of at most 300 tokens."""
    tokenizer = train_tokenizer(iter(documents), 300)
    encoded = [tokenizer.encode(document).ids for document in documents]
    return write_ids(folder, encoded, tokenizer, tokenizer.token_to_id(END_OF_DOCUMENT))


def write_ids(folder: Path, documents: Sequence[Sequence[int]], tokenizer: Tokenizer, eod: int) -> Path:
    """Token files of documents that are tokens already, without their ends."""
    folder.mkdir(parents=True)
    vocab_size = tokenizer.get_vocab_size()
    dtype = dtype_for(vocab_size)
    starts = np.cumsum([0, *(len(document) + 1 for document in documents)])
    np.concatenate([[*document, eod] for document in documents]).astype(TOKEN_DTYPES[dtype]).tofile(
        folder / TOKENS_FILE
    )
    starts.astype(DOCUMENT_DTYPE).tofile(folder / DOCUMENTS_FILE)
    text = tokenizer.to_str()
    (folder / TOKENIZER_FILE).write_text(text, encoding="utf-8")
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    Meta(dtype, vocab_size, eod, int(starts[-1]), len(documents), 1, sha256, (), file_checksums(folder)).write(
        folder / META_FILE
    )
    return folder


@dataclass(frozen=True)
class Run:
    """A small run; `sections` replaces whole sections, as a tuple of ("section", settings), and `set` overrides any
    setting, as one of ("section.key", value)."""

    data: Path
    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    steps: int = 4
    dtype: str = "fp32"
    dropout: float = 0.1
    sections: tuple[tuple[str, dict[str, Any]], ...] = ()
    set: tuple[tuple[str, Any], ...] = ()

    def but(self, **changes: Any) -> "Run":
        return replace(self, **changes)

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def config(self) -> Config:
        given: dict[str, dict[str, Any]] = {
            # 301 rows: not divisible by any tp, and more than the tokenizer has
            "model": {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 4, "vocab_size": 301},
            "data": {"path": str(self.data), "sequence_length": 16, "split": "80,20"},
            "parallel": {"dp": self.dp, "tp": self.tp, "pp": self.pp, "cp": self.cp},
            "train": {"max_steps": self.steps, "global_batch_size": 8, "eval_every": 0, "device": "cpu"},
            "precision": {"dtype": self.dtype},
            # with 1e-8 Adam's first steps follow the sign of gradients that are rounding noise
            "optimizer": {"lr": 1e-2, "eps": 1e-5, "warmup_steps": 2, "decay_steps": 20},
            "checkpoint": {"every": 0},
            "log": {"every": 2},
        }
        given["model"] |= {"hidden_dropout": self.dropout, "attention_dropout": self.dropout}
        given |= {name: dict(section) for name, section in self.sections}
        for key, value in self.set:
            section, name = key.split(".")
            given.setdefault(section, {})[name] = value
        config = Config.model_validate(given)
        return resolve(config, open_dataset(config).vocab_size)


def run_of(kind: str, **changes: Any) -> Run:
    """A small run of the own model with a part that keeps state or draws, on its own rows."""
    file = custom_state_models.__file__
    name = {"split statistics": "Cut", "own forward": "Whole"}.get(kind, "Model")
    model = {"architecture": "own", "file": f"{file}:{name}", "vocab_size": WORDS, "arguments": {"kind": kind}}
    data = {"path": f"{file}:Sums", "sequence_length": LENGTH, "split": "80,20"}
    return Run(Path("unused"), sections=(("model", model), ("data", data))).but(**changes)


def micro_batches(count: int) -> tuple[tuple[str, Any], ...]:
    return (("train.gradient_accumulation_steps", count),)


def train(config: Config, run_dir: Path, resume: Any = False, **options: Any) -> Stopped | None:
    """Train, without the picture of the loss and the report at the end: they take as long as a small run."""
    with mock.patch.object(loss_curve, "draw"), mock.patch.object(RunReport, "after_fit"):
        return entry_point.train(config, run_dir, resume, entry_point.RunOptions(**options))


def train_rank(run: Run, run_dir: Path, resume: bool = False, draws: bool = False) -> str:
    """Train as a rank of the pool, and return what it printed; draws the loss and writes the report where it shall."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        (entry_point.train if draws else train)(run.config, run_dir, resume)
    return printed.getvalue()


def steps_of(run_dir: Path) -> dict[int, dict[str, Any]]:
    """The step objects of a run's metrics file, by step; a step that appears twice is an error."""
    steps = [line for line in read_metrics(run_dir / "metrics.jsonl") if "loss" in line]
    assert len({line["step"] for line in steps}) == len(steps), "a step appears twice"
    return {line["step"]: line for line in steps}


def losses_of(run_dir: Path) -> list[float]:
    steps = steps_of(run_dir)
    assert list(steps) == list(range(1, len(steps) + 1)), f"steps are missing or out of order: {list(steps)}"
    return [line["loss"] for line in steps.values()]


def same(got: list[float], expected: list[float], dtype: str) -> bool:
    """Whether the losses agree to what rounding allows."""
    assert len(got) == len(expected) > 0
    return bool(np.allclose(got, expected, rtol=TOLERANCE[dtype], atol=0))


def manifest(checkpoint: Path) -> dict[str, Any]:
    return dict(json.loads((checkpoint / "checkpoint.json").read_text()))


def engine_of(config: Config) -> Engine:
    mesh = Mesh(Layout.from_config(config.parallel), in_tree=config.train.exact)
    return Engine(lambda: GPT(config.model), gpt_plan(config.model, config.data.sequence_length), mesh, config)


def evaluated(run: Run, batches: int) -> tuple[float, int]:
    config = run.config
    engine = engine_of(config)
    loader = open_loader(config, open_samples(config, open_dataset(config)), engine.mesh.dp)
    record = evaluate(engine, loader, batches, 0)
    loader.close()
    return record.loss, record.tokens


def record(step: int, **changes: Any) -> StepRecord:
    values: dict[str, Any] = {
        "step": step,
        "loss": 11.083364487,
        "grad_norm": 1.5,
        "lr": 1e-5 * 2 / 3600,
        "tokens": 8190,
        "tokens_read": 8192,
        "epoch": 0,
        "batch": step - 1,
        "reader_cost": 0.23392,
        "seconds": 2.05344,
    }
    return StepRecord(**(values | changes))
