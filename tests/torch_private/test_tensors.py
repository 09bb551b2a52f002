"""Private functions of torch that concern tensors: those whose results are compared with a documented one's."""

import torch

from threefold.torch_private.tensors import fused_adam_


def test_fused_adam() -> None:
    for decoupled, kind in ((True, torch.optim.AdamW), (False, torch.optim.Adam)):
        ours = [torch.arange(3.0), torch.ones(2, 2)]
        theirs = [each.clone() for each in ours]
        gradients = [each + 1 for each in ours]
        means, squares = ([torch.zeros_like(each) for each in ours] for _ in range(2))
        counts = torch.zeros(2)
        optimizer = kind(theirs, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, eps=1e-3, fused=True)
        for each, gradient in zip(theirs, gradients, strict=True):
            each.grad = gradient
        for _ in range(2):
            optimizer.step()
            counts.add_(1)
            constants = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.2, "eps": 1e-3}
            fused_adam_(ours, gradients, means, squares, counts.unbind(), decoupled, **constants)
        assert all(map(torch.equal, ours, theirs)), f"torch._fused_adam(w)_ is no longer what {kind.__name__} calls"
