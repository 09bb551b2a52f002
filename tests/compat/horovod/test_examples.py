"""Scripts with the calls of Horovod's PyTorch examples run with their import swapped alone, equal to one process."""

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset
from torch.utils.data.distributed import DistributedSampler

from tests.support.sweep import sweep
from threefold.verify.worker_pool import WorkerError

SCRIPTS = Path(__file__).parent / "scripts"
IMPORT, SWAPPED = "import horovod.torch as hvd", "import threefold.compat.horovod as hvd"
ROWS = 26  # 13 of a rank: batches of 4 leave one


class Images(Dataset[tuple[Tensor, Tensor]]):
    def __init__(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.images = torch.randn(ROWS, 1, 7, 7, generator=generator, dtype=torch.float64)
        self.labels = torch.randint(7, (ROWS,), generator=generator)

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]


def options(folder: Path, **changed: Any) -> SimpleNamespace:
    usual: dict[str, Any] = dict(  # noqa: C408
        seed=42,
        vary=True,
        batch_size=4,
        test_batch_size=5,
        epochs=2,
        lr=0.05,
        momentum=0.5,
        use_adasum=False,
        fp16_allreduce=False,
        use_mixed_precision=False,
        base_lr=0.02,
        wd=1e-3,
        batches_per_allreduce=3,
        warmup_epochs=1,
        gradient_predivide_factor=1.0,
        checkpoint_format=str(folder / "checkpoint-{epoch}.pt"),
        datasets=(Images(1), Images(2)),
    )
    return SimpleNamespace(**{**usual, **changed})


Seen = list[dict[str, Tensor]]


def run_script(name: str, folder: Path, changed: dict[str, Any]) -> tuple[Seen, dict[str, Tensor], Any]:
    """Run an example; returns gradients before each update, the weights at the end, and what it measured."""
    text = (SCRIPTS / f"{name}.py").read_text()
    assert text.count(IMPORT) == 1
    swapped = folder / f"{name}_{torch.distributed.get_rank()}.py"
    swapped.write_text(text.replace(IMPORT, SWAPPED))
    seen: Seen = []
    torch.set_default_dtype(torch.float64)
    try:
        model, measured = runpy.run_path(str(swapped))["main"](
            options(folder, **changed),
            lambda model: seen.append({n: p.grad.detach().clone() for n, p in model.named_parameters()}),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    return seen, {name: each.detach() for name, each in model.state_dict().items()}, measured


def batches(epoch: int, ranks: int, size: int) -> list[list[list[int]]]:
    """The samples of each rank in each step of an epoch, as torch's sampler divides them."""
    orders = []
    for rank in range(ranks):
        sampler = DistributedSampler(Images(1), num_replicas=ranks, rank=rank)
        sampler.set_epoch(epoch)
        orders.append(list(sampler))
    steps = range(0, len(orders[0]), size)
    return [[order[start : start + size] for order in orders] for start in steps]


def reference(name: str, ranks: int, folder: Path) -> tuple[Seen, dict[str, Tensor]]:
    """Plain PyTorch in one process: the mean over the ranks of the mean loss of each one's rows."""
    data, args = Images(1), options(folder)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(args.seed)
        if name == "pytorch_mnist":
            (folder / "net.py").write_text((SCRIPTS / f"{name}.py").read_text().replace(IMPORT, "hvd = None"))
            model, loss_fn = runpy.run_path(str(folder / "net.py"))["Net"](), F.nll_loss
            optimizer = torch.optim.SGD(model.parameters(), lr=args.lr * ranks, momentum=args.momentum)
            steps = [step for epoch in (1, 2) for step in batches(epoch, ranks, 4)]
        elif name == "pytorch_imagenet_resnet50":
            layers = nn.Linear(49, 13), nn.LayerNorm(13), nn.GELU(), nn.Linear(13, 7)
            model, loss_fn = nn.Sequential(nn.Flatten(), *layers), F.cross_entropy
            optimizer = torch.optim.SGD(model.parameters(), momentum=args.momentum, weight_decay=args.wd)
            steps = [step for epoch in range(2) for step in batches(epoch, ranks, 12)]
        else:
            model, loss_fn = (
                nn.Sequential(nn.Flatten(), nn.Linear(49, 10), nn.ReLU(), nn.Linear(10, 7)),
                F.cross_entropy,
            )
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * ranks)
            steps = [[list(range(rank, ROWS, ranks)) for rank in range(ranks)]] * 5
        seen: Seen = []
        for number, step in enumerate(steps):
            optimizer.zero_grad()
            if name == "pytorch_imagenet_resnet50":
                epoch, batch = divmod(number, 2)
                warming = (epoch + (batch + 1) / 2) * (ranks - 1) + 1
                rate = warming / ranks if epoch < args.warmup_epochs else 1.0
                optimizer.param_groups[0]["lr"] = args.base_lr * ranks * args.batches_per_allreduce * rate
            for rows in step:
                parts = [rows[start : start + 4] for start in range(0, len(rows), 4)]
                parts = parts if name == "pytorch_imagenet_resnet50" else [rows]
                for part in parts:
                    loss = loss_fn(model(data.images[part]), data.labels[part])
                    (loss / len(parts) / ranks).backward()
            seen.append({n: p.grad.clone() for n, p in model.named_parameters()})
            optimizer.step()
        return seen, {name: each.detach() for name, each in model.state_dict().items()}
    finally:
        torch.set_default_dtype(torch.float32)


@sweep(
    ("name", "changed"),
    [
        ("pytorch_mnist", {}),
        ("pytorch_mnist", {"use_mixed_precision": True, "gradient_predivide_factor": 3.0}),
        ("pytorch_imagenet_resnet50", {}),
        ("pytorch_synthetic_benchmark", {}),
    ],
    quick=[1, 2],
)
def test_an_example_runs_with_its_import_swapped(pool, name: str, changed: dict[str, Any], tmp_path: Path) -> None:
    gradients, weights = pool.run(1, reference, name, 2, tmp_path)[0]
    for seen, ended, measured in pool.run(2, run_script, name, tmp_path, changed):
        assert len(seen) == len(gradients)
        for ours, theirs in [*zip(seen, gradients, strict=True), (ended, weights)]:
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                assert float((ours[key] - value).abs().max()) <= 1e-12 * max(1.0, float(value.abs().max())), key
        assert name == "pytorch_synthetic_benchmark" or all(0 <= each < 10 for each in measured)
    if name == "pytorch_imagenet_resnet50":  # resumed after its last epoch, from rank 0's checkpoint
        again = pool.run(2, run_script, name, tmp_path, {**changed, "seed": 3})
        for _, ended, measured in again:
            assert measured is None
            assert all(
                torch.equal(ended[key], value) or torch.allclose(ended[key], value) for key, value in weights.items()
            )


def test_a_run_refuses_adasum(pool, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"op is Adasum, which has no counterpart; use hvd\.Average"):
        pool.run(2, run_script, "pytorch_synthetic_benchmark", tmp_path, {"use_adasum": True})
