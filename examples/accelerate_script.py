"""Use Threefold's mesh, optimizer and loader in a script that `accelerate` starts, logs and saves for.

    accelerate launch --cpu --num_processes 2 examples/accelerate_script.py
    python examples/accelerate_script.py             # the same losses, on one process

`accelerate` initialises the ranks; the global batches and updates are then those of one process.
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import threefold as t3


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--save", help="file for the weights")
    given = parser.parse_args()
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    mesh = t3.init_mesh()  # over the ranks that accelerate started

    torch.manual_seed(0)
    x = torch.randn(150, 8)
    y = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)

    model, optimizer, loader = t3.prepare(model, optimizer, loader, mesh=mesh, zero=1)
    for epoch in range(given.epochs):
        correct = 0
        for rows, labels in loader:
            logits = model(rows)
            t3.backward(F.cross_entropy(logits, labels))
            optimizer.step()
            optimizer.zero_grad()
            predicted, truth = t3.gather_for_metrics((logits.argmax(-1), labels), loader)
            correct += int((predicted == truth).sum())
        accelerator.print(f"epoch {epoch + 1}: loss {optimizer.loss:.5f}, {correct} of {len(x)} right")
    if given.save:
        accelerator.save(model.state_dict(), given.save)  # whole tensors; collective, so call it on every rank
    accelerator.end_training()


if __name__ == "__main__":
    main()
