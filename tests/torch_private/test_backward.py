"""A canary for the question whether autograd runs."""

import torch

from threefold.torch_private.runtime import in_backward_pass


def test_a_backward_pass_is_noticed() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(in_backward_pass()))
    seen.append(in_backward_pass())
    y.sum().backward()
    seen.append(in_backward_pass())
    assert seen == [False, True, False], "torch._C._current_graph_task_id no longer tells of a backward pass"
