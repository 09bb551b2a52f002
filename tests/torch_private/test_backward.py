"""Canaries for the question whether autograd runs, and for what it calls at its end."""

import torch

from threefold.torch_private.runtime import at_end_of_backward_pass, backward_pass


def test_a_backward_pass_is_noticed() -> None:
    seen = []
    x = torch.ones(2, requires_grad=True)
    y = x * 2
    y.register_hook(lambda gradient: seen.append(backward_pass() != -1))
    seen.append(backward_pass() != -1)
    y.sum().backward()
    seen.append(backward_pass() != -1)
    assert seen == [False, True, False], "torch._C._current_graph_task_id no longer tells of a backward pass"


def test_a_callback_runs_when_all_gradients_of_a_pass_have_accumulated() -> None:
    seen, passes = [], set()
    leaves = [torch.ones(2, requires_grad=True) for _ in range(3)]

    def arrived(leaf: torch.Tensor) -> None:
        if not passes:
            at_end_of_backward_pass(lambda: seen.append([each.grad is not None for each in leaves]))
        passes.add(backward_pass())

    for leaf in leaves:
        leaf.register_post_accumulate_grad_hook(arrived)
    (leaves[0] * (leaves[1] * leaves[2]).exp()).sum().backward()
    assert seen == [[True] * 3], "queue_callback of the autograd engine no longer calls back at the end of a pass"
    assert len(passes) == 1, "torch._C._current_graph_task_id is no longer one number for a pass"
    leaves[0].sum().backward()
    assert len(passes) == 2, "torch._C._current_graph_task_id no longer differs between passes"
