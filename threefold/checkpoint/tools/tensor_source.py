"""The tensors of a checkpoint, read one by one for a conversion."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.format.index import StoredTensor, TensorChunk
from threefold.checkpoint.format.storage import read_chunk
from threefold.checkpoint.tensor_names import MODEL
from threefold.data.progress import Progress
from threefold.errors import UserError
from threefold.files import shown


class TensorSource:
    """Reads tensors of a checkpoint in the dtypes of the output; each part is compared with its checksum.

    Args:
        folder: of the checkpoint.
        tensors: to be read, by name.
        dtype: of the weights in the output; None for as they are stored. Optimizer states, and weights that are no
            floating-point numbers, stay as they are.
        progress: of the bytes that were read.

    Attributes:
        folder: as given.
        planned: the tensors by name, in the dtypes of the output; their chunks are those of the checkpoint.
    """

    def __init__(
        self, folder: Path, tensors: Mapping[str, StoredTensor], dtype: torch.dtype | None, progress: Progress
    ) -> None:
        self.folder, self._tensors, self._progress = folder, tensors, progress
        self.planned = {
            name: replace(tensor, dtype=dtype)
            if dtype is not None and name.startswith(MODEL) and tensor.dtype.is_floating_point
            else tensor
            for name, tensor in tensors.items()
        }

    def read(self, name: str) -> Tensor:
        """A whole tensor.

        Raises:
            DamagedCheckpoint: it is not as it was written.
            UserError: it has values that its new dtype does not.
        """
        planned = self.planned[name]
        whole = torch.empty(planned.shape, dtype=planned.dtype)
        for chunk in planned.chunks:
            box = tuple(slice(first, first + size) for first, size in zip(chunk.offsets, chunk.sizes, strict=True))
            whole[box] = self.read_chunk(name, chunk)
        return whole

    def read_chunk(self, name: str, chunk: TensorChunk) -> Tensor:
        """A chunk of a tensor; raises as `read`."""
        try:
            with (self.folder / chunk.file).open("rb", buffering=0) as file:
                stored = read_chunk(file, self.folder, self._tensors[name], chunk)
        except OSError as error:
            raise DamagedCheckpoint(self.folder, f"its {shown(chunk.file)} cannot be read ({error.strerror})") from None
        self._progress.advance(stored.nbytes)
        dtype = self.planned[name].dtype
        if stored.dtype == dtype:
            return stored
        converted = stored.to(dtype)
        if lost := int((stored.isfinite() & ~converted.isfinite()).sum()):
            raise UserError(
                f"{shown(name)} of {shown(self.folder)} has {lost:,} values beyond those of "
                f"{str(dtype).removeprefix('torch.')}, which would become infinite; use --dtype bf16."
            )
        return converted
