"""Stand-ins that let Megatron-Core run on CPUs: what it asks of torch.cuda, and the device that it makes tensors on."""

from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_CPU = torch.device("cpu")


class OnCpu(TorchFunctionMode):
    """Makes a tensor on the CPU where code asks for CUDA, and names its type as that of CUDA."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.")  # the optimizers look at it
        return func(*args, **kwargs)


class _Generators:
    def __getitem__(self, _: Any) -> torch.Generator:
        return torch.default_generator


def begin() -> None:
    """Put the stand-ins in place, before Megatron-Core is imported."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: _CPU
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    cuda.manual_seed = torch.manual_seed
    cuda._lazy_call = lambda call, **_: call()
    cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.current_stream = lambda *_, **__: None
    cuda.default_generators = _Generators()
    OnCpu().__enter__()
