"""The calls of Horovod's example of this name, in its order, with a small model."""

import timeit

import horovod.torch as hvd  # the test swaps this line
import torch
import torch.nn.functional as F
import torch.optim as optim
from torch import nn


def main(args, seen):
    hvd.init()
    torch.manual_seed(args.seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(49, 10), nn.ReLU(), nn.Linear(10, 7))
    lr_scaler = hvd.size() if not args.use_adasum else 1
    optimizer = optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
    compression = hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=compression,
        op=hvd.Adasum if args.use_adasum else hvd.Average,
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    data, target = (torch.stack(each) for each in zip(*args.datasets[0], strict=True))
    data, target = data[hvd.rank() :: hvd.size()], target[hvd.rank() :: hvd.size()]

    def benchmark_step():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(data), target)
        loss.backward()
        seen(model)
        optimizer.step()

    timeit.timeit(benchmark_step, number=1)
    for _ in range(2):
        timeit.timeit(benchmark_step, number=2)
    return model, None
