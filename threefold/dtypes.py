"""Floating-point dtypes by their names in the config (`precision.dtype`, `parallel.gradient_compression`)."""

from typing import Final

import torch

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
