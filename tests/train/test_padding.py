"""Samples that are filled up to their length: what is read, what is trained on, and what is neither."""

import json
import re
from contextlib import closing
from pathlib import Path

import torch

from tests.train.support import Run, steps_of, train_rank
from threefold.data.dataset import open_dataset
from threefold.data.loader import Batch, Loader, Share
from threefold.labels import IGNORED
from threefold.launch.pool import WorkerPool

END = 0


def batch(tokens: list[list[int]], labels: list[list[int]]) -> Batch:
    return Batch(torch.tensor(tokens), torch.tensor(labels), torch.arange(len(tokens)))


def test_what_padding_is() -> None:
    none = IGNORED
    assert batch([[5, 6, END, END, END]], [[6, END, none, none, none]]).padding() == 2  # the first ends the text
    assert batch([[5, 6, 7, END]], [[6, 7, END, none]]).padding() == 0
    assert batch([[5, END, 6, END]], [[END, none, END, none]]).padding() == 0
    assert batch([[5, 6, 7, 8]], [[6, 7, 8, 9]]).padding() == 0
    assert batch([[4, 5, 6, 7]], [[none, none, none, none]]).padding() == 0  # a long question without its answer
    rows = batch([[5, END, END, END], [5, 6, 7, 8]], [[END, none, none, none], [6, 7, 8, 9]])
    assert rows.padding() == 2


def test_padding_is_neither_read_nor_trained_on(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """JSON lines of a few words: each row has as many tokens as its line and its end, which another replica counts."""
    lines = ["the value of x", "a list", "the function returns the list of all values that are not in it"] * 20
    data = tmp_path / "lines.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    settings = (("data.tokenizer", str(small_run.data / "tokenizer.json")), ("data.sequence_length", 48))
    run = small_run.but(data=data, dp=2, steps=3, set=settings)
    printed = pool.run(2, train_rank, run, tmp_path / "run")[0]
    with closing(Loader(open_dataset(run.config).samples("train"), None, Share(8), run.config.train.seed)) as loader:
        rows = [loader.batch(step) for step in range(3)]
    counted = [int((each.labels != IGNORED).sum()) for each in rows]
    # Every text here is shorter than a sample, so its tokens count but the end, which is read.
    read = [count + 8 for count in counted]
    assert [line["tokens"] for line in steps_of(tmp_path / "run").values()] == counted
    padding = 3 * 8 * 48 - sum(read)
    assert padding > 100
    assert re.search(rf"tokens trained on +{sum(counted):,} in 3 steps", printed)
    assert re.search(rf"tokens read +{sum(read):,}, and {padding:,} of padding", printed)
    rates = re.search(r"speed +([\d,]+) tokens/s read, ([\d,]+) with padding", printed)
    assert rates is not None
    without, padded = (int(rate.replace(",", "")) for rate in rates.groups())
    assert abs(padded / without - 3 * 8 * 48 / sum(read)) < 0.05
