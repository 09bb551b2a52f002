"""Preparing this process, which may have used torch, to be forked."""

from threefold.errors import UserError
from threefold.torch_private.threads import end_openmp_threads


def prepare_fork() -> bool:
    """Make this process one whose forks can run torch's operations.

    Returns whether they may run them in parallel: False where threads of this process could not be ended, and forks
    compute with one thread each.

    Raises:
        UserError: a process group or CUDA is initialised, which forks cannot use.
    """
    import torch
    import torch.distributed as dist

    if dist.is_initialized():
        raise UserError(
            "torch.distributed is initialised in this process, so it cannot start ranks of its own; call init_mesh in "
            "the function that runs on each rank."
        )
    if torch.cuda.is_initialized():
        raise UserError(
            "CUDA is initialised in this process, so its forks could not use it; start the ranks before anything uses "
            "a GPU (in a notebook, restart the kernel), or with start_method='spawn'."
        )
    return end_openmp_threads()
