"""Samples that are filled up to their length: what is read, what is trained on, and what is neither."""

import json
import re
from contextlib import closing
from pathlib import Path

import numpy as np

from tests.train.support import Run, steps_of, train_rank
from threefold.constants import IGNORE_INDEX
from threefold.data.dataset import open_dataset
from threefold.data.loader import BatchSlice, Loader
from threefold.data.tokenizer import END_OF_DOCUMENT
from threefold.verify.worker_pool import WorkerPool


def test_what_padding_is(small_run: Run, tmp_path: Path) -> None:
    """What is beyond a line and its end, also where the line ends with that token; none of a line that is cut."""
    data, tokenizer = tmp_path / "lines.jsonl", small_run.data / "tokenizer.json"
    spelled = ["a", "a" + 2 * END_OF_DOCUMENT, "list of values " * 40]
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in spelled))
    settings = (("data.tokenizer", str(tokenizer)), ("data.sequence_length", 48), ("data.split", "1"))
    samples = open_dataset(small_run.but(data=data, set=settings).config).samples("train")
    assert samples.padding(np.arange(3)).tolist() == [46, 44, 0]
    with closing(Loader(samples, None, BatchSlice(3), 1)) as loader:
        found = loader.batch(0)
    assert found.padding is not None
    assert sorted(found.padding.tolist()) == [0, 44, 46]


def test_padding_is_neither_read_nor_trained_on(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """JSON lines of a few words: each row has as many tokens as its line and its end, which another replica counts."""
    lines = ["the value of x", "a list", "the function returns the list of all values that are not in it"] * 20
    data = tmp_path / "lines.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    settings = (("data.tokenizer", str(small_run.data / "tokenizer.json")), ("data.sequence_length", 48))
    run = small_run.but(data=data, dp=2, steps=3, set=settings)
    printed = pool.run(2, train_rank, run, tmp_path / "run")[0]
    with closing(
        Loader(open_dataset(run.config).samples("train"), None, BatchSlice(8), run.config.train.seed)
    ) as loader:
        rows = [loader.batch(step) for step in range(3)]
    counted = [int((each.labels != IGNORE_INDEX).sum()) for each in rows]
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
    for line, count in zip(steps_of(tmp_path / "run").values(), read, strict=True):
        assert abs(line["tokens_per_second"] * line["seconds"] / count - 1) < 0.01
