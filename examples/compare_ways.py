"""One task in every way: trains a text classifier alone and distributed, and compares time and quality.

    python examples/compare_ways.py                  # writes comments.csv, ways.json and ways.png to ./ways
    python examples/compare_ways.py --csv MINE.csv   # your own comments, with the columns comment_text and label

The script of a single process and that of every other way are the same function, `train`: what differs is how its ranks
are started and what `threefold.prepare` is told. A way whose packages are missing is left out.
"""

import argparse
import csv
import json
import os
import random
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path

WORDS, LENGTH = 512, 24
SEED = 7


@dataclass(frozen=True)
class Way:
    """How the ranks are started, and what is told to `prepare`."""

    name: str
    ranks: int
    start: str  # here, spawn, torchrun
    options: tuple[tuple[str, object], ...] = ()
    tp: int = 1
    uses_accelerate: bool = False


WAYS = (
    Way("one process", 1, "here"),
    Way("spawn", 2, "spawn"),
    Way("torchrun", 2, "torchrun"),
    Way("bf16", 2, "torchrun", (("precision", "bf16"),)),
    Way("compressed, fp16", 2, "torchrun", (("compress", "fp16"),)),
    Way("accumulation", 2, "torchrun", (("accumulate", 2),)),
    Way("ZeRO 1", 2, "torchrun", (("zero", 1),)),
    Way("tensor parallel", 2, "torchrun", tp=2),
    Way("accelerate", 2, "torchrun", uses_accelerate=True),
)


# ---- The data ---------------------------------------------------------------------------------------------------


def write_comments(path: Path, rows: int, seed: int = SEED) -> None:
    """A learnable two-column CSV: a comment is toxic where an insult is not denied by the word before it."""
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
    """Word numbers, padded with 0, and labels; the most frequent words have numbers of their own."""
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
    """Harmonic mean of precision and recall of the class 1; 0 where both are."""
    hits = sum(one and other for one, other in zip(labels, predicted, strict=True))
    total = sum(labels) + sum(predicted)
    return 2 * hits / total if total else 0.0


def area_under_curve(labels: list[int], scores: list[float]) -> float:
    """How often a row of class 1 has a higher score than one of class 0, ties counted half (Mann and Whitney, 1947)."""
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
    """Embeddings, one block of self-attention and a head: plain PyTorch."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Attention(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.head_dim = width // heads
            self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
            self.out = nn.Linear(width, width)

        def forward(self, x, mask):
            batch, length, _ = x.shape
            q, k, v = (
                each(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
                for each in (self.query, self.key, self.value)
            )
            attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
            return self.out(attended.transpose(1, 2).reshape(batch, length, -1))

    class Classifier(nn.Module):
        def __init__(self, width: int = 64, heads: int = 4) -> None:
            super().__init__()
            self.words, self.places = nn.Embedding(WORDS, width), nn.Embedding(LENGTH, width)
            self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.attention = Attention(width, heads)
            self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
            self.head = nn.Linear(width, 1)

        def forward(self, tokens):
            mask = tokens != 0
            x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
            x = x + self.attention(self.norm1(x), mask)
            x = x + self.down(F.gelu(self.up(self.norm2(x))))
            return self.head(x.masked_fill(~mask[..., None], -1e4).amax(1)).sum(-1)

    return Classifier()


def train(way: Way, path: Path, epochs: int) -> dict[str, float]:
    """Train in one way, on the ranks of this process group; the same on every rank."""
    import torch
    import torch.distributed as dist
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, TensorDataset

    import threefold as t3

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    texts, labels = read_comments(path)
    tokens, targets = torch.tensor(texts), torch.tensor(labels, dtype=torch.float32)
    held_out = len(texts) // 5
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    options = dict(way.options)
    size = 64 // int(options.get("accumulate", 1))  # of a batch, so that an update has 64 rows in each way
    loader = DataLoader(TensorDataset(tokens[held_out:], targets[held_out:]), size, shuffle=True)
    valid = DataLoader(TensorDataset(tokens[:held_out], targets[:held_out]), 256)
    if way.uses_accelerate:
        from accelerate import Accelerator
        from accelerate.utils import DataLoaderConfiguration

        accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))
        model, optimizer, loader, valid = accelerator.prepare(model, optimizer, loader, valid)
        backward, gather = accelerator.backward, accelerator.gather_for_metrics
    else:
        mesh = t3.init_mesh(tp=way.tp) if dist.is_initialized() else None
        if way.tp > 1:
            options["tensor_parallel"] = {
                "attention.query": t3.Column(),
                "attention.key": t3.Column(),
                "attention.value": t3.Column(),
                "attention.out": t3.Row(),
                "up": t3.Column(),
                "down": t3.Row(),
            }
        model, optimizer = t3.prepare(model, optimizer, mesh=mesh, **options)
        loader, valid, model = t3.prepare(loader, valid, model)
        backward = t3.backward

        def gather(values):
            return t3.gather_for_metrics(values, valid)

    started = time.perf_counter()
    for _ in range(epochs):
        model.train()
        for x, y in loader:
            backward(F.binary_cross_entropy_with_logits(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    seconds = time.perf_counter() - started
    scores: list[float] = []
    truth: list[int] = []
    model.eval()
    with torch.no_grad():
        for x, y in valid:
            logits, answers = gather((model(x), y))
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


def run_rank(rank: int, ranks: int, port: int, way: Way, path: Path, epochs: int, result: Path) -> None:
    """A rank that `spawn` started."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1")
    os.environ.update(MASTER_PORT=str(port))
    run_launched(way, path, epochs, result)


def run_launched(way: Way, path: Path, epochs: int, result: Path) -> None:
    """A rank that a launcher started."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    found = train(way, path, epochs)
    if dist.get_rank() == 0:
        result.write_text(json.dumps(found))
    dist.destroy_process_group()


def run_way(way: Way, path: Path, epochs: int, result: Path) -> None:
    """The process that starts the ranks of a way, or is one."""
    if way.start == "here":
        result.write_text(json.dumps(train(way, path, epochs)))
    elif way.start == "torchrun":
        run_launched(way, path, epochs, result)
    else:
        import socket

        import torch.multiprocessing as mp

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        mp.spawn(run_rank, (way.ranks, port, way, path, epochs, result), nprocs=way.ranks)


# ---- The comparison ---------------------------------------------------------------------------------------------


def compare(ways: list[Way], path: Path, epochs: int, folder: Path) -> list[dict[str, object]]:
    """Run every way as a command of its own."""
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
    """A table on the console."""
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
    Console().print(table)


def draw(found: list[dict[str, object]], path: Path) -> None:
    """A picture of time, speed-up and quality."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = [str(row["name"]) for row in found]
    seconds = [float(str(row["seconds"])) for row in found]
    places = range(len(names))
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(14, 0.45 * len(names) + 1.8), sharey=True)
    left.barh(places, seconds, color="#4c72b0")
    left.set_title("training time (s)")
    left.set_yticks(list(places), names)
    left.invert_yaxis()
    middle.barh(places, [seconds[0] / each for each in seconds], color="#55a868")
    middle.axvline(1, color="grey", linewidth=0.8)
    middle.set_title("speed-up over one process")
    for offset, (key, label, color) in enumerate(
        (("accuracy", "accuracy", "#c44e52"), ("f1", "F1", "#8172b2"), ("auc", "AUC", "#ccb974"))
    ):
        heights = [place + 0.25 * (offset - 1) for place in places]
        right.barh(heights, [float(str(row[key])) for row in found], 0.22, label=label, color=color)
    right.set_xlim(0.5, 1)
    right.set_title("quality on the held-out comments")
    right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    """The command."""
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
    for way in [way for way in ways if way.uses_accelerate and find_spec("accelerate") is None]:
        ways.remove(way)
        print(f"{way.name}: left out, as it needs `pip install accelerate`")
    found = compare(ways, path, given.epochs, given.folder)
    (given.folder / "ways.json").write_text(json.dumps(found, indent=1))
    draw(found, given.folder / "ways.png")
    print_table(found)


if __name__ == "__main__":
    main()
