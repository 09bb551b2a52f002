"""The float dtypes of the config by name, as `precision.dtype` and `parallel.gradient_compression` have them."""

from typing import Final

import torch

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
