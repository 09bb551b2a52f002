"""Lets torchtitan 0.3 run on CPUs: it takes a machine without an accelerator for one with CUDA.

Import it before anything of torchtitan but this module's own imports. `triton` must be installed, which torchtitan
imports.
"""

import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torchtitan.tools.utils as tools
from torch import nn
from torch.distributed.fsdp import FSDPModule

for variable, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("MASTER_ADDR", "127.0.0.1")):
    os.environ.setdefault(variable, value)
os.environ.setdefault("MASTER_PORT", "29587")

if not hasattr(dist, "set_timeout"):  # of a later PyTorch
    dist.set_timeout = lambda *_: None

device = SimpleNamespace(**{name: getattr(torch.cpu, name) for name in dir(torch.cpu) if not name.startswith("_")})
device.set_device = device.reset_peak_memory_stats = device.empty_cache = lambda *_: None
device.current_device, device.get_device_name = lambda: 0, lambda *_: "cpu"
device.get_device_properties = lambda *_: SimpleNamespace(total_memory=1 << 34)
device.memory_stats = lambda *_: {}
tools.device_type, tools.device_module = "cpu", device
tools.get_local_device = lambda: torch.device("cpu")


def reduce_by_sums(model: nn.Module, divisor: float = 1.0) -> None:
    """Have FSDP sum gradients and divide them itself, since gloo has no sum that scales; torchtitan divides by 1."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)
            module.set_gradient_divide_factor(divisor)
