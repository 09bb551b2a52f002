"""Pickling of what ranks exchange.

Torch pickles each tensor as a file of its own, with a header and records, which takes about a millisecond. `dumps`
pickles its bytes, dtype and shape, which takes some ten microseconds.
"""

import io
import pickle
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from threefold.errors import UserError


def dumps(value: Any) -> bytes:
    """Pickle a value with tensors into bytes that `pickle.loads` reads.

    Tensors are pickled by value, even if they share memory; a replicated `DTensor` becomes a plain tensor.

    Raises:
        UserError: a `DTensor` is sharded or partial; it could outlive the mesh of its ranks.
    """
    file = io.BytesIO()
    _Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, DTensor):
            return _itself, (_whole(value),)
        if type(value) is not Tensor or not _is_plain(value):
            return NotImplemented
        flat = value.detach().contiguous().view(-1).view(torch.uint8)
        return _tensor, (bytearray(flat.numpy()), value.dtype, tuple(value.shape))


def _itself(value: Any) -> Any:
    return value


def _whole(tensor: DTensor) -> Tensor:
    if not all(placement.is_replicate() for placement in tensor.placements):
        sizes = " × ".join(map(str, tensor.shape))
        raise UserError(
            f"A DTensor of {sizes} was returned, of which a rank has a part ({tensor.placements}); return "
            "tensor.full_tensor(), which all ranks of its mesh call."
        )
    return tensor.to_local().detach()


def _is_plain(tensor: Tensor) -> bool:
    dense = tensor.layout == torch.strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())
    return tensor.device.type == "cpu" and dense and not tensor.requires_grad


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    return torch.frombuffer(data, dtype=dtype).view(shape) if data else torch.empty(shape, dtype=dtype)
