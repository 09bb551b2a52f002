"""Fingerprints of samples and batches of any form, for comparison."""

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor


def fingerprint_of(value: Any) -> int:
    """Return a 63-bit content hash (BLAKE2b) of a nesting of tensors, arrays, numbers and texts."""
    digest = hashlib.blake2b(digest_size=8)
    _add(value, digest)
    return int.from_bytes(digest.digest(), "little") >> 1


def _add(value: Any, digest: Any) -> None:
    digest.update(type(value).__name__.encode())
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{[*value.shape]}".encode())
        if value.layout == torch.strided and not value.is_nested:
            flat = value.detach().cpu().contiguous().flatten()
            digest.update(flat.view(torch.uint8).numpy().data)
    elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
        digest.update(f"{value.dtype}{[*value.shape]}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        for key, each in value.items():
            digest.update(repr(key).encode())
            _add(each, digest)
    elif isinstance(value, list | tuple):
        for each in value:
            _add(each, digest)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            _add(getattr(value, field.name), digest)
    elif isinstance(value, str | bytes | int | float | complex | np.generic | None):
        digest.update(repr(value).encode())
