"""Parallel layers where the room is not there: a loop of the user's trains them as plain `DTensor`s."""

from unittest.mock import patch

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.parallel import leaf, parameter
from threefold.parallel.parameter import whole
from threefold.parallel.tensor import ColumnParallelLinear, RowParallelLinear


def trained(with_room: bool) -> list[Tensor]:
    """Whole weights after two steps of a pair of layers on two ranks."""
    kind = leaf.SPLIT_TENSOR if with_room else DTensor
    with patch.object(leaf, "SPLIT_TENSOR", kind), patch.object(parameter, "SPLIT_TENSOR", kind):
        axis = Mesh(Layout(tp=2)).tp
        up = ColumnParallelLinear(6, 8, axis, name="up", gather_output=False)
        down = RowParallelLinear(8, 5, axis, name="down", input_is_parallel=True)
        assert type(up.weight) is kind
        weights = [*up.parameters(), *down.parameters()]
        optimizer = torch.optim.SGD(weights, 0.1, foreach=False)
        for seed in (1, 2):
            x = torch.randn(7, 6, generator=torch.Generator().manual_seed(seed))
            optimizer.zero_grad()
            (down(F.gelu(up(x))) - 1).square().sum().backward()
            optimizer.step()
        return [whole(each.detach()) for each in weights]


def test_layers_train_without_the_room(pool) -> None:
    for ours, theirs in zip(pool.run(2, trained, True)[0], pool.run(2, trained, False)[0], strict=True):
        assert torch.equal(ours, theirs)
