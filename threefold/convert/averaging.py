"""The mean of a run's latest checkpoints' weights, one tensor at a time."""

from dataclasses import replace
from pathlib import Path

from torch import Tensor

from threefold.checkpoint.errors import MODEL
from threefold.checkpoint.folder import complete, require_outside_checkpoints
from threefold.checkpoint.index import INDEX, StoredTensor, read_index
from threefold.checkpoint.manifest import WRITER, Checkpoint
from threefold.checkpoint.tensors import ReadableChunk, ReadableTensor
from threefold.convert.checkpoints import Conversion, TensorSource, write_run
from threefold.errors import UserError
from threefold.files import first_of, shown
from threefold.host import return_freed_memory
from threefold.output import Progress, check_replaceable, staged_directory


class AveragedTensors(TensorSource):
    """Reader of the means of the weights of several checkpoints, summed in fp64; whole numbers are the newest's."""

    def __init__(self, folders: list[Path], tensors: dict[str, StoredTensor], progress: Progress) -> None:
        super().__init__(folders[-1], tensors, None, progress)
        self.changes_weights = True
        self._others = [TensorSource(folder, read_index(folder), None, progress) for folder in folders[:-1]]

    def read(self, name: str) -> Tensor:
        newest = super().read(name)
        if not newest.dtype.is_floating_point:
            return newest
        total = newest.double()
        for each in self._others:
            total += each.read(name).double()
        return total.div_(1 + len(self._others)).to(newest.dtype)

    def streamed(self, name: str) -> ReadableTensor:
        planned = self.planned[name]
        whole = ReadableChunk((0,) * len(planned.shape), planned.shape, lambda: self.read(name))
        return ReadableTensor(planned.shape, planned.dtype, [whole])


def average_checkpoints(
    run: Path, latest: int, out: Path, overwrite: bool, progress: Progress
) -> tuple[list[int], dict[str, StoredTensor]]:
    """Write a run whose only checkpoint has the mean of the weights of a run's `latest` checkpoints.

    Returns:
        the steps of these checkpoints, and the tensors written.

    Raises:
        DamagedCheckpoint: one of them is damaged.
        UserError: there are fewer, their weights differ in shape, or `out` cannot be written; nothing is left.
    """
    return_freed_memory()
    require_outside_checkpoints(out)
    check_replaceable(out, [run], overwrite)
    chosen = _latest(run, latest)
    newest, folders = chosen[-1], [checkpoint.path for checkpoint in chosen]
    weights = {name: tensor for name, tensor in read_index(newest.path).items() if name.startswith(MODEL)}
    _require_alike(folders, weights)
    progress.phase("Averaging", latest * sum(tensor.bytes for tensor in weights.values()))
    source = AveragedTensors(folders, weights, progress)
    data = {chunk.file for each in read_index(newest.path).values() for chunk in each.chunks}
    texts = sorted(newest.files.keys() - data - {INDEX, WRITER})
    newest = replace(newest, facts=replace(newest.facts, measured=None))
    with staged_directory(out, inputs=[run], overwrite=overwrite) as staged:
        write_run(Conversion(run, out, weights_only=True), newest, source, texts, staged)
    return [checkpoint.step for checkpoint in chosen], weights


def _latest(run: Path, count: int) -> list[Checkpoint]:
    found = sorted(complete(run), key=lambda checkpoint: checkpoint.step)
    if len(found) < count:
        has = f"checkpoints of the steps {first_of([each.step for each in found], 5)}" if found else "no checkpoint"
        rule = f"--latest is {count} but {shown(run)} has {has}"
        use = f"use at most {len(found)}, or train" if len(found) > 1 else "train"
        raise UserError(f"{rule}; {use} with a checkpoint.keep of {count}.")
    return found[-count:]


def _require_alike(folders: list[Path], weights: dict[str, StoredTensor]) -> None:
    shapes = {name: tensor.shape for name, tensor in weights.items()}
    for folder in folders[:-1]:
        others = {name: each.shape for name, each in read_index(folder).items() if name.startswith(MODEL)}
        if wrong := next((name for name in {**shapes, **others} if shapes.get(name) != others.get(name)), None):
            raise UserError(
                f"{shown(folder)} and {shown(folders[-1])} differ in {shown(wrong.removeprefix(MODEL))}, which only "
                "one has in this shape; average checkpoints of one model."
            )
