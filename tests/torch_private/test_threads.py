"""A canary for the private part of torch's threads."""

import torch

from threefold.torch_private.runtime import end_openmp_threads


def test_end_openmp_threads() -> None:
    before = torch.ones(300, 300) @ torch.ones(300, 300)
    assert end_openmp_threads(), "torch brings no OpenMP library any more that ends its threads"
    assert torch.equal(torch.ones(300, 300) @ torch.ones(300, 300), before)
