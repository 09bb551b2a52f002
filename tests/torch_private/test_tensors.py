"""Private functions of torch that concern tensors: those whose results are compared with a documented one's."""

import torch
from torch import nn

from threefold.torch_private.distributed import persistent_buffers
from threefold.torch_private.tensors import fused_adam_, has_gradient_hooks, has_module_hooks, version_of


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


def test_hooks_are_seen() -> None:
    for register in (nn.Parameter.register_hook, nn.Parameter.register_post_accumulate_grad_hook):
        for device in ("cpu", "meta"):
            parameter = nn.Parameter(torch.ones(2, device=device))
            assert not has_gradient_hooks(parameter)
            register(parameter, lambda gradient: None)
            assert has_gradient_hooks(parameter), f"torch keeps the hooks of {register.__name__} elsewhere"
    for kind in ("forward", "forward_pre", "full_backward", "full_backward_pre"):
        module = nn.Identity()
        assert not has_module_hooks(module)
        getattr(module, f"register_{kind}_hook")(lambda *arguments: None)
        assert has_module_hooks(module), f"torch keeps {kind} hooks elsewhere"


def test_persistent_buffers_are_those_of_the_state_dict() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(2))
    module.register_buffer("derived", torch.ones(2), persistent=False)
    assert [name for name, _ in persistent_buffers(module)] == list(module.state_dict()) == ["kept"]


def test_a_write_in_place_changes_the_version() -> None:
    tensor = torch.ones(2)
    before = version_of(tensor)
    tensor.mul_(1)
    assert version_of(tensor) > before, "torch counts what is written to a tensor elsewhere"
    assert version_of(tensor) == version_of(tensor)
