"""Private parts of torch that calls of other packages need, each with the reason why, and what would replace it."""

from collections.abc import Callable

import torch


def backward_pass() -> int:
    """Return the number of the backward pass that autograd is running in this thread, or -1.

    Why: a hook is called once per tensor, and must tell the first call of a pass from the others, also after a pass
    that an error has ended. A public `torch.autograd` function would replace it.
    """
    return int(torch._C._current_graph_task_id())


def at_end_of_backward_pass(callback: Callable[[], None]) -> None:
    """Call a function when the running backward pass has accumulated all gradients, before it returns.

    Why: `.grad` of a leaf is complete only then, and no public hook is called after the last one. FSDP does the same.
    A public `torch.autograd` function would replace it.
    """
    torch.autograd.Variable._execution_engine.queue_callback(callback)
