"""Train and verify a user's own model, loss, optimizer, data and callback on dp 2 · tp 2: `python two_tower.py RUN`."""

import sys

import torch
from torch import nn

import threefold as t3


class Tower(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(words, width), nn.Linear(width, 32), nn.Linear(32, width)

    def forward(self, left, right, encoded=None):  # the first tower encodes `left`, the second `right`
        new = self.down(nn.functional.gelu(self.up(self.embed(left if encoded is None else right).mean(1))))
        return (left, right, new) if encoded is None else (encoded * new).sum(-1)


class TwoTower(nn.Module):
    plan = t3.Plan(["towers.*"], {"**.embed": t3.Vocab(), "**.up": t3.Column(), "**.down": t3.Row()})

    def __init__(self, words=51, width=12):
        super().__init__()
        self.towers = nn.ModuleList(Tower(words, width) for _ in range(2))


class Loss:
    def __call__(self, scores, batch):
        match = nn.functional.binary_cross_entropy_with_logits(scores, batch["same"].to(scores.dtype), reduction="sum")
        return {"match": match, "size": t3.LossTerm(scores.square().sum(), weight=0.01)}

    def counts(self, batch):
        return dict.fromkeys(("match", "size"), len(batch["same"]))


class Soft(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for p, lr in ((p, group["lr"]) for group in self.param_groups for p in group["params"]):
            average = self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            p.sub_(average.tanh(), alpha=lr)


class Show(t3.Callback):
    def after_step(self, record):
        print(f"step {record.step}: match {record.terms['match']:.4f}, size {record.terms['size']:.4f}")


pairs = [{"left": torch.arange(n, n + 5) % 51, "right": torch.arange(5) * n % 51, "same": n % 3 > 0} for n in range(99)]
config = {"parallel": {"dp": 2, "tp": 2}, "train": {"epochs": 2, "global_batch_size": 12}, "optimizer": {"lr": 0.1}}
mine = {"model": TwoTower, "loss": (loss := Loss()), "optimizer": Soft, "dataset": pairs}
if __name__ == "__main__":
    t3.run(t3.Trainer(config, run_dir=sys.argv[1], callbacks=[Show()], **mine).fit, ranks=4)
    print(verified := t3.verify_model(config, ["dp2·tp2", "pp2·tp2"], **mine))
    sys.exit(not verified.all_equal)
