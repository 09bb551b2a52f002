"""Train one text classifier in every way, alone and distributed, and compare time and quality.

    python examples/compare_ways.py                  # writes comments.csv, ways.json and ways.png to ./ways
    python examples/compare_ways.py --csv MINE.csv   # your own comments, with the columns comment_text and label

A single process and every other way run the same function, `train`; they differ in how the ranks start and in the
options of `threefold.prepare`; the pipeline uses `threefold.parallelize`. Every way starts from the same weights and
reads the same batches. A way whose packages are missing is left out.
"""

import argparse
import csv
import gc
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

WORDS, LENGTH = 512, 24
SEED = 7


@dataclass(frozen=True)
class Way:
    """Way to train: how the ranks start, the library, and its options."""

    name: str
    ranks: int
    start: str  # here, spawn or torchrun
    options: tuple[tuple[str, Any], ...] = ()
    by: str = "prepare"  # or parallelize, accelerate


WAYS = (
    Way("one process", 1, "here"),
    Way("spawn", 2, "spawn"),
    Way("torchrun", 2, "torchrun"),
    Way("bf16", 2, "torchrun", (("precision", "bf16"),)),
    Way("compressed, fp16", 2, "torchrun", (("compress", "fp16"),)),
    Way("accumulation", 2, "torchrun", (("accumulate", 2),)),
    Way("ZeRO 1", 2, "torchrun", (("zero", 1),)),
    Way("tensor parallel", 2, "torchrun", (("tp", 2),)),
    Way("pipeline", 2, "torchrun", (("pp", 2),), by="parallelize"),
    Way("accelerate", 2, "torchrun", by="accelerate"),
)


# ---- The data ---------------------------------------------------------------------------------------------------


def write_comments(path: Path, rows: int, seed: int = SEED) -> None:
    """Write a learnable two-column CSV: a comment is toxic if the word before its insult does not deny it."""
    draw = random.Random(seed)
    plain = [f"word{n}" for n in range(300)]
    insults, denials = ["idiot", "awful", "stupid", "trash", "horrible"], ["not", "never", "hardly"]
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["comment_text", "label"])
        for _ in range(rows):
            words = [draw.choice(plain) for _ in range(draw.randint(6, 16))]
            place = draw.randrange(1, len(words))
            kind = draw.random()
            label = int(kind < 0.5)
            if kind < 0.5:
                words[place] = draw.choice(insults)
                if draw.random() < 0.5:  # a denial elsewhere denies nothing
                    words.append(draw.choice(denials))
            elif kind < 0.85:
                words[place - 1 : place + 1] = [draw.choice(denials), draw.choice(insults)]
            writer.writerow([" ".join(words), label if draw.random() > 0.02 else 1 - label])


def read_comments(path: Path) -> tuple[list[list[int]], list[int]]:
    """Return word numbers, padded with 0, and labels; the most frequent words have their own numbers."""
    with path.open(newline="", encoding="utf-8") as file:
        rows = [(row["comment_text"].lower().split(), int(row["label"])) for row in csv.DictReader(file)]
    counts: dict[str, int] = {}
    for words, _ in rows:
        for word in words:
            counts[word] = counts.get(word, 0) + 1
    known = sorted(counts, key=lambda word: (-counts[word], word))[: WORDS - 2]
    numbers = {word: number for number, word in enumerate(known, 2)}
    texts = [([numbers.get(word, 1) for word in words] + [0] * LENGTH)[:LENGTH] for words, _ in rows]
    return texts, [label for _, label in rows]


# ---- The metrics ------------------------------------------------------------------------------------------------


def f1_score(labels: list[int], predicted: list[int]) -> float:
    """Return the harmonic mean of precision and recall of class 1; 0 if both are 0."""
    hits = sum(one and other for one, other in zip(labels, predicted, strict=True))
    total = sum(labels) + sum(predicted)
    return 2 * hits / total if total else 0.0


def area_under_curve(labels: list[int], scores: list[float]) -> float:
    """Return how often a row of class 1 scores above one of class 0, ties counted half (Mann and Whitney, 1947)."""
    order = sorted(range(len(scores)), key=scores.__getitem__)
    ranks = [0.0] * len(scores)
    start = 0
    while start < len(order):
        end = start
        while end < len(order) and scores[order[end]] == scores[order[start]]:
            end += 1
        for place in order[start:end]:
            ranks[place] = (start + end + 1) / 2
        start = end
    positive = sum(labels)
    negative = len(labels) - positive
    summed = sum(rank for rank, label in zip(ranks, labels, strict=True) if label)
    return (summed - positive * (positive + 1) / 2) / (positive * negative)


# ---- The training -----------------------------------------------------------------------------------------------


def make_model():
    """Return embeddings, one block of self-attention and a head: plain PyTorch, in layers that pass the mask on."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Embed(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)

        def forward(self, tokens):
            return self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device)), tokens != 0

    class Attention(nn.Module):
        def __init__(self, width, heads):
            super().__init__()
            self.head_dim, self.norm = width // heads, nn.LayerNorm(width)
            self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

        def forward(self, x, mask):
            y = self.norm(x)
            q, k, v = (
                each(y).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                for each in (self.query, self.key, self.value)
            )
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
            return x + self.out(y.transpose(1, 2).flatten(2)), mask

    class FeedForward(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.norm = nn.LayerNorm(width)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

        def forward(self, x, mask):
            return x + self.down(F.gelu(self.up(self.norm(x)))), mask

    class Head(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.score = nn.Linear(width, 1)

        def forward(self, x, mask):
            return self.score(x.masked_fill(~mask[..., None], -1e4).amax(1)).sum(-1)

    class Classifier(nn.Module):
        def __init__(self, width=64, heads=4):
            super().__init__()
            self.embed, self.attention = Embed(width), Attention(width, heads)
            self.feed, self.head = FeedForward(width), Head(width)

        def forward(self, tokens):
            return self.head(*self.feed(*self.attention(*self.embed(tokens))))

    torch.manual_seed(SEED)
    return Classifier()


class Script(NamedTuple):
    """Parts of a training loop that every way provides."""

    loader: Any
    valid: Any
    update: Callable[[Any, Any], None]
    """Train on a batch and its labels."""
    predict: Callable[[Any, Any], tuple[Any, Any]]
    """Return logits and labels of all rows of a batch of `valid`, at least on rank 0."""
    train: Callable[[], object] = lambda: None
    evaluate: Callable[[], object] = lambda: None


def cut():
    """Return how the layers are sharded, for tensor parallelism and for a plan."""
    import threefold as t3

    columns = {f"attention.{name}": t3.Column(heads=4) for name in ("query", "key", "value")}
    return {**columns, "attention.out": t3.Row(heads=4), "feed.up": t3.Column(), "feed.down": t3.Row()}


def with_prepare(options, make_optimizer, loader, valid, loss_fn) -> Script:
    """Set up any module in one call."""
    import torch.distributed as dist

    import threefold as t3

    model, tp = make_model(), options.pop("tp", 1)
    optimizer = make_optimizer(model.parameters())
    mesh = t3.init_mesh(tp=tp) if dist.is_initialized() else None
    table = cut() if tp > 1 else None
    model, optimizer = t3.prepare(model, optimizer, mesh=mesh, tensor_parallel=table, **options)
    loader, valid, model = t3.prepare(loader, valid, model)

    def update(x, y):
        t3.backward(loss_fn(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    def predict(x, y):
        return t3.gather_for_metrics((model(x), y), valid)

    return Script(loader, valid, update, predict, model.train, model.eval)


def with_parallelize(options, make_optimizer, loader, valid, loss_fn) -> Script:
    """Set up the model with a plan, which says where a pipeline may cut it."""
    import torch

    import threefold as t3

    mesh = t3.init_mesh(**options)
    plan = t3.Plan(layers=["embed", "attention", "feed", "head"], shard={**cut(), "**": t3.Replicated()})
    model = t3.parallelize(make_model, plan, mesh, micro_batches=mesh.pp.size)
    optimizer = t3.distributed_optimizer(make_optimizer(model.parameters()), model)

    def update(x, y):
        model.train_batch((x, y), lambda logits, batch: loss_fn(logits, batch[1]))
        optimizer.step()

    def predict(x, y):
        logits = []  # from the last stage, by micro-batch

        def keep(output, batch):
            logits.append(output)
            return loss_fn(output, batch[1])

        model.eval_batch((x, y), keep)
        return t3.compat.horovod.broadcast_object(torch.cat(logits) if mesh.is_last_stage else None, mesh.pp.last), y

    return Script(loader, valid, update, predict)


def with_accelerate(options, make_optimizer, loader, valid, loss_fn) -> Script:
    """Set up the script of `with_prepare` with Accelerate."""
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    model = make_model()
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
    model, optimizer, loader, valid = accelerator.prepare(model, make_optimizer(model.parameters()), loader, valid)

    def update(x, y):
        accelerator.backward(loss_fn(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    def predict(x, y):
        return accelerator.gather_for_metrics((model(x), y))

    return Script(loader, valid, update, predict, model.train, model.eval)


MAKERS = {"prepare": with_prepare, "parallelize": with_parallelize, "accelerate": with_accelerate}


def train(way: Way, path: Path, epochs: int) -> dict[str, float]:
    """Train in one way on the ranks of this process group; return the same results on every rank."""
    from functools import partial

    import torch
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, RandomSampler, TensorDataset

    torch.set_num_threads(1)
    texts, labels = read_comments(path)
    tokens, targets = torch.tensor(texts), torch.tensor(labels, dtype=torch.float32)
    held_out = len(texts) // 5
    options = dict(way.options)
    size = 64 // options.get("accumulate", 1)  # rows of a batch, so that an update has 64 rows in each way
    rows = TensorDataset(tokens[held_out:], targets[held_out:])
    loader = DataLoader(rows, size, sampler=RandomSampler(rows, generator=torch.Generator().manual_seed(SEED)))
    valid = DataLoader(TensorDataset(tokens[:held_out], targets[:held_out]), 256)
    make_optimizer = partial(torch.optim.AdamW, lr=2e-3)
    script = MAKERS[way.by](options, make_optimizer, loader, valid, F.binary_cross_entropy_with_logits)
    started = time.perf_counter()
    script.train()
    for _ in range(epochs):
        for x, y in script.loader:
            script.update(x, y)
    seconds = time.perf_counter() - started
    scores: list[float] = []
    truth: list[int] = []
    script.evaluate()
    with torch.no_grad():
        for x, y in script.valid:
            logits, answers = script.predict(x, y)
            scores += logits.tolist()
            truth += answers.int().tolist()
    predicted = [int(score > 0) for score in scores]
    accuracy = sum(one == other for one, other in zip(truth, predicted, strict=True)) / len(truth)
    return {
        "seconds": seconds,
        "rows": len(truth),
        "accuracy": accuracy,
        "f1": f1_score(truth, predicted),
        "auc": area_under_curve(truth, scores),
    }


def run_rank(rank: int, ranks: int, way: Way, path: Path, epochs: int, result: Path) -> None:
    """Run a rank that `spawn` started: ranks meet through a file, as another process may take a port found free."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    meeting = result.with_suffix(".meeting").absolute().as_uri()
    run_launched(way, path, epochs, result, init_method=meeting, rank=rank, world_size=ranks)


def run_launched(way: Way, path: Path, epochs: int, result: Path, **meeting: Any) -> None:
    """Run a rank that a launcher started."""
    import torch.distributed as dist

    dist.init_process_group("gloo", **meeting)
    found = train(way, path, epochs)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    # Nothing may keep gloo's threads: one that releases a tensor while Python ends would abort the process.
    gc.collect()
    dist.destroy_process_group()


def run_way(way: Way, path: Path, epochs: int, result: Path) -> None:
    """Start the ranks of a way, or run as one of them."""
    if way.start == "here":
        result.write_text(json.dumps(train(way, path, epochs)))
    elif way.start == "torchrun":
        run_launched(way, path, epochs, result)
    else:
        import torch.multiprocessing as mp

        result.with_suffix(".meeting").unlink(missing_ok=True)
        mp.spawn(run_rank, (way.ranks, way, path, epochs, result), nprocs=way.ranks)


# ---- The comparison ---------------------------------------------------------------------------------------------


def compare(ways: list[Way], path: Path, epochs: int, folder: Path) -> list[dict[str, object]]:
    """Run every way as a separate command."""
    found: list[dict[str, object]] = []
    for way in ways:
        result = folder / "result.json"
        result.unlink(missing_ok=True)
        command = [sys.executable]
        if way.start == "torchrun":
            command += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(way.ranks)]
        command += [__file__, "--csv", str(path), "--epochs", str(epochs), "--way", way.name, "--result", str(result)]
        started = time.perf_counter()
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        measured = json.loads(result.read_text())
        result.unlink()
        found.append({**asdict(way), **measured, "whole_seconds": time.perf_counter() - started})
        print(f"{way.name}: accuracy {measured['accuracy']:.3f} in {measured['seconds']:.1f} s", flush=True)
    return found


def print_table(found: list[dict[str, object]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    table = Table(title="One task in every way", box=SIMPLE_HEAD)
    for column in ("way", "ranks", "train", "in all", "speed-up", "acc.", "F1", "AUC"):
        table.add_column(column, justify="left" if column == "way" else "right", no_wrap=True)
    first = float(str(found[0]["seconds"]))
    for row in found:
        seconds = float(str(row["seconds"]))
        numbers = [f"{row[key]:.3f}" for key in ("accuracy", "f1", "auc")]
        times = [f"{seconds:.1f} s", f"{row['whole_seconds']:.1f} s", f"{first / seconds:.2f}"]
        table.add_row(str(row["name"]), str(row["ranks"]), *times, *numbers)
    Console(width=max(Console().width, 88)).print(table)


def draw(found: list[dict[str, object]], path: Path) -> None:
    """Plot time, speed-up and quality."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    names = [str(row["name"]) for row in found]
    seconds = [float(str(row["seconds"])) for row in found]
    places = range(len(names))
    # As wide as a page, on which a small text is still readable.
    figure = Figure(figsize=(8.3, 0.34 * len(names) + 1.3), layout="constrained", dpi=200)
    FigureCanvasAgg(figure)
    figure.suptitle("One task in every way: the same model, weights and batches", fontsize=11, x=0.01, ha="left")
    panels = figure.subplots(1, 3, sharey=True)
    for axes, title in zip(panels, ("training time (s)", "speed-up", "quality, held out"), strict=True):
        axes.set_title(title, fontsize=9, loc="left")
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    left, middle, right = panels
    left.bar_label(left.barh(places, seconds, color="#3d6fb4"), fmt="%.1f", padding=2, fontsize=8)
    left.margins(x=0.25)
    left.set_yticks(list(places), names)
    left.invert_yaxis()
    speed_ups = middle.barh(places, [seconds[0] / each for each in seconds], color="#55a868")
    middle.bar_label(speed_ups, fmt="%.2f", padding=2, fontsize=8)
    middle.margins(x=0.25)
    middle.axvline(1, color="grey", linewidth=0.8)
    for offset, (key, label, color) in enumerate(
        (("accuracy", "accuracy", "#e8893c"), ("f1", "F1", "#8d6cb5"), ("auc", "AUC", "#f2c14e"))
    ):
        heights = [place + 0.25 * (offset - 1) for place in places]
        right.barh(heights, [float(str(row[key])) for row in found], 0.22, label=label, color=color)
    right.set_xlim(0, 1)
    figure.legend(*right.get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path, dpi=200)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, help="comments with the columns comment_text and label (0 or 1)")
    parser.add_argument("--rows", type=int, default=4000, help="comments to generate where there is no --csv")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--folder", type=Path, default=Path("ways"), help="of what is written")
    parser.add_argument("--ways", nargs="*", metavar="NAME", help=f"of: {', '.join(way.name for way in WAYS)}")
    parser.add_argument("--way", help=argparse.SUPPRESS)
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    by_name = {way.name: way for way in WAYS}
    if given.way:
        run_way(by_name[given.way], given.csv, given.epochs, given.result)
        return
    unknown = [name for name in given.ways or () if name not in by_name]
    if unknown:
        parser.error(f"--ways has {unknown[0]!r} but must be of {', '.join(by_name)}")
    given.folder.mkdir(parents=True, exist_ok=True)
    path = given.csv
    if path is None:
        path = given.folder / "comments.csv"
        write_comments(path, given.rows)
    ways = [by_name[name] for name in given.ways] if given.ways else list(WAYS)
    for way in [way for way in ways if way.by == "accelerate" and find_spec("accelerate") is None]:
        ways.remove(way)
        print(f"{way.name}: left out, as it needs `pip install accelerate`")
    found = compare(ways, path, given.epochs, given.folder)
    (given.folder / "ways.json").write_text(json.dumps(found, indent=1))
    draw(found, given.folder / "ways.png")
    print_table(found)


if __name__ == "__main__":
    main()
