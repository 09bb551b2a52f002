"""What comes back from `dumps` is what went in."""

import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from threefold.comm.axis import dumps


def back(value: Any) -> Any:
    return pickle.loads(dumps(value))


TENSORS = {
    "fp64": torch.randn(3, 5, dtype=torch.float64),
    "bf16": torch.randn(7).bfloat16(),
    "nan and inf": torch.tensor([torch.nan, torch.inf, -0.0]),
    "bool": torch.tensor([True, False, True]),
    "int64": torch.tensor(-(2**40)),
    "complex": torch.randn(2, 2, dtype=torch.complex64).conj(),
    "empty": torch.empty(3, 0, 2, dtype=torch.int32),
    "transposed": torch.arange(12).view(3, 4).t(),
    "every other": torch.arange(12)[1::2],
    "expanded": torch.ones(1, 4).expand(3, 4),
    "without memory": torch.empty(2, 3, device="meta"),
    "sparse": torch.eye(3).to_sparse(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_tensor_comes_back(name: str) -> None:
    tensor = TENSORS[name]
    found = back([{"here": tensor}])[0]["here"]
    assert type(found) is Tensor
    assert (found.dtype, found.shape, found.device, found.layout) == (
        tensor.dtype,
        tensor.shape,
        tensor.device,
        tensor.layout,
    )
    if tensor.device.type == "cpu":
        assert torch.equal(
            found.to_dense().resolve_conj().nan_to_num(7.0), tensor.to_dense().resolve_conj().nan_to_num(7.0)
        )


def test_memory_is_its_own_and_may_be_written() -> None:
    whole = torch.arange(6.0)
    first, second, again = back((whole[:3], whole[2:], whole[:3]))
    first.add_(1)
    assert second.tolist() == [2, 3, 4, 5]
    assert again.tolist() == [0, 1, 2]
    assert whole.tolist() == [0, 1, 2, 3, 4, 5]


def test_only_what_is_seen_of_a_large_tensor_goes() -> None:
    assert len(dumps(torch.zeros(1_000_000)[:10])) < 1000


def test_parameters_and_leaves_stay_what_they_are() -> None:
    parameter = back(nn.Parameter(torch.ones(2)))
    assert type(parameter) is nn.Parameter
    leaf = back(torch.ones(2, requires_grad=True))
    assert leaf.requires_grad
    assert leaf.is_leaf
