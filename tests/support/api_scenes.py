"""Code around each example of the API page: the names that the example uses, and its number of ranks."""

from typing import NamedTuple

NAMES = """
import os
import sys

import torch
from torch import nn
from torch.nn import functional as F

import threefold as t3
"""

MODEL = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, input):
        return input + self.down(F.gelu(self.up(input)))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.output = nn.Linear(16, 50, bias=False)

    def forward(self, input):
        return self.output(input)


class MyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.blocks, self.head = nn.Embedding(50, 16), nn.ModuleList([Block(), Block()]), Head()


plan = t3.Plan(
    ["embed", "blocks.*", "head"],
    {"embed": t3.Vocab(), "blocks.*.up": t3.Column(), "blocks.*.down": t3.Row(), "head.output": t3.Vocab()},
)
dataset = [{"input": (ids := torch.arange(n, n + 5) % 50), "labels": ids.roll(-1)} for n in range(128)]


def loss_fn(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())
"""

REPLICAS = f"""
{MODEL}
mesh = t3.init_mesh(dp=2)
model = t3.parallelize(MyModel, plan, mesh)
loader = t3.DistributedDataLoader(dataset, global_batch_size=64, mesh=mesh, seed=0)
"""

TRAINED = f"""
{REPLICAS}
optimizer, step = t3.distributed_optimizer(torch.optim.AdamW(model.parameters(), lr=0.1), model), 7
batch = next(iter(loader))
model.train_batch(batch, loss_fn)
optimizer.step()
"""

CLASSIFIER = """
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
rows = torch.utils.data.TensorDataset(torch.randn(32, 6), torch.arange(32) % 3)
loader = torch.utils.data.DataLoader(rows, batch_size=8)
"""

PREPARED = f"""
{CLASSIFIER}
model, optimizer, loader = t3.prepare(model, optimizer, loader)
x, y = next(iter(loader))
"""

TWO_TOWERS = """
sys.path.insert(0, EXAMPLES)
from two_tower import TwoTower as MyModel, config, loss

plan, MyData = MyModel.plan, f'{EXAMPLES}/two_tower.py:pairs'
"""

TRAIN = """
def train(lr=0.5):
    mesh = t3.init_mesh(tp=2)
    return mesh.rank * lr
"""

MATRICES = "mesh = t3.init_mesh(tp=2)\n"
CUT = f"{MATRICES}parameters = dict(t3.parallelize(MyModel, plan, mesh).named_parameters())\n"
RAN = "assert all(bool(p.isfinite().all()) for p in model.parameters())\n"


class Scene(NamedTuple):
    """Code before and after an example, which runs as the ranks of one process group.

    Attributes:
        ranks: size of the group; 0 for an example that starts its ranks itself.
        before, after: Python source; NAMES come before.
    """

    ranks: int
    before: str = ""
    after: str = ""


SCENES = {
    "The Python library": Scene(1),
    "threefold.Trainer": Scene(
        4,
        TWO_TOWERS,
        "trainer.fit(max_steps=1)\nassert os.path.isdir('runs/mine')\n",
    ),
    "threefold.verify_model": Scene(0, TWO_TOWERS),
    "threefold.load_config": Scene(1),
    "threefold.run": Scene(0, TRAIN, "assert losses == [rank * 0.5 for rank in range(8)]"),
    "threefold.spawn": Scene(0),
    "threefold.notebook_launcher": Scene(0, TRAIN),
    "threefold.init_mesh": Scene(8),
    "threefold.Plan": Scene(
        2,
        MODEL,
        f"{MATRICES}loader = t3.DistributedDataLoader(dataset, 16, mesh=mesh)\n"
        "model = t3.parallelize(MyModel, plan, mesh)\nassert model.train_batch(next(iter(loader)), loss_fn) > 0",
    ),
    "threefold.Column": Scene(
        2,
        f"""
{MODEL}
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.out = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, input):
        return self.out(self.query(input))
""",
        f"{CUT}assert parameters['blocks.0.query.weight'].shape == (8, 16)",
    ),
    "threefold.Sharded": Scene(
        2,
        f"""
{MODEL}
class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(8))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    def forward(self, input):
        return input * self.attn.temperature.mean()
""",
        f"{CUT}assert parameters['blocks.0.attn.temperature'].shape == (4,)",
    ),
    "threefold.inspect": Scene(1),
    "threefold.PipelineLayers": Scene(
        2,
        f"{MODEL}\nmesh = t3.init_mesh(pp=2)",
        "assert model.train_batch(dict.fromkeys(('input', 'labels'), torch.arange(8).view(8, 1)), loss_fn)",
    ),
    "threefold.parallelize": Scene(
        8,
        f"{MODEL}\nmesh = t3.init_mesh(dp=2, tp=2, pp=2)\nloader = t3.DistributedDataLoader(dataset, 64, mesh=mesh)",
        RAN,
    ),
    "threefold.CountedLoss": Scene(2, REPLICAS, "assert model.train_batch(next(iter(loader)), loss) > 0"),
    "threefold.distributed_optimizer": Scene(
        2, REPLICAS, f"model.train_batch(next(iter(loader)), loss_fn)\noptimizer.step()\n{RAN}"
    ),
    "threefold.DistributedDataLoader": Scene(2, f"{MODEL}\nmesh = t3.init_mesh(dp=2)", "assert loader.epoch == 3"),
    "threefold.save": Scene(2, TRAINED, "assert os.path.isdir('ckpt/checkpoints/step_00000007')"),
    "threefold.load": Scene(
        2, f"{TRAINED}\nt3.save('ckpt', step, model=model, optimizer=optimizer, loader=loader)", "assert step == 7"
    ),
    "threefold.prepare": Scene(2, CLASSIFIER, RAN),
    "threefold.backward": Scene(
        2,
        "tokens = torch.arange(12).view(4, 3)\nlabels = tokens.roll(-1, 1)\n"
        "model, = t3.prepare(nn.Embedding(12, 12)),\n",
        "assert model.weight.grad.abs().sum() > 0",
    ),
    "threefold.clip_grad_norm_": Scene(2, PREPARED, RAN),
    "threefold.gather_for_metrics": Scene(
        2, f"{PREPARED}\nvalid_loader, correct = loader, 0", "assert 0 <= correct <= 32"
    ),
    "threefold.compat.horovod.DistributedOptimizer": Scene(2, CLASSIFIER, RAN),
    "threefold.compat.horovod.broadcast_parameters": Scene(2, CLASSIFIER),
    "threefold.compat.horovod.broadcast_optimizer_state": Scene(2, CLASSIFIER),
    "threefold.compat.horovod.broadcast_object": Scene(2, "first_epoch = 3", "assert first_epoch == 3"),
    "threefold.compat.horovod.allreduce": Scene(2, "correct, rows = 3, 4", "assert mean == 0.75"),
    "threefold.ColumnParallelLinear": Scene(2, f"{MATRICES}x = torch.randn(3, 512)", "assert y.shape == (3, 512)"),
    "threefold.RowParallelLinear": Scene(2, MATRICES, "assert not down.weight.any()"),
    "threefold.VocabParallelEmbedding": Scene(2, MATRICES),
    "threefold.ParallelCrossEntropy": Scene(
        2, f"{MATRICES}x, labels = torch.randn(3, 512), torch.tensor([1, 2, 3])", "assert loss > 0"
    ),
    "threefold.compat.paddle.split": Scene(2, f"{MATRICES}x = torch.randn(3, 512)", "assert y.shape == (3, 512)"),
    "threefold.compat.paddle.Splitter": Scene(2, f"{MATRICES}x = torch.randn(3, 512)", "assert x.shape == (3, 1024)"),
    "threefold.Dropout": Scene(1, "x = torch.ones(4, 5)", "assert x.shape == (4, 5)"),
    "threefold.sample_keys": Scene(1, "", "assert len(keys) == 4"),
    "threefold.pipeline.partition_uniform_chunks": Scene(1),
    "threefold.pipeline.layers_by_rank": Scene(1),
    "threefold.Callback": Scene(
        4, "", "t3.Trainer('my.yaml', run_dir='runs/mine', callbacks=[StopAtLoss()]).fit(max_steps=1)"
    ),
    "threefold.callbacks.EarlyStopping": Scene(
        4,
        "EarlyStopping = t3.callbacks.EarlyStopping",
        "t3.Trainer('my.yaml', run_dir='runs/mine', callbacks=[stopping]).fit(max_steps=1)",
    ),
}
"""Scenes by the heading of the example."""
