"""Selection of the newest valid checkpoint, and checks that its tensors match the model of its config."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar, cast

import torch
import yaml

from threefold.checkpoint.errors import MODEL, DamagedCheckpoint
from threefold.checkpoint.folder import CONFIG, LOOP, Checkpoint, folders, stored_config
from threefold.checkpoint.manifest import Manifest, read_manifest
from threefold.checkpoint.tensors import stored_tensors
from threefold.config import Config, ModelConfig
from threefold.config.model import OWN
from threefold.errors import UserError
from threefold.files import shown
from threefold.models.family import make_model
from threefold.models.sharding import ModelPlan
from threefold.torch_private.tensors import persistent_buffers

if TYPE_CHECKING:
    from threefold.comm.mesh import Axis


_BLOCKS: Final = "blocks."
_SIZES: Final[Mapping[str, tuple[str | None, ...]]] = {
    "embed.tokens.weight": ("vocab_size", "hidden_size"),
    "embed.positions.weight": ("max_position_embeddings", None),
    "blocks.0.mlp.down.weight": (None, "ffn_hidden_size"),
}
"""Settings that determine the dims of a weight."""

Shapes = Mapping[str, tuple[int, ...]]


def model_mismatch(model: ModelConfig, stored: Shapes) -> str | None:
    """Return why the stored weights do not match a resolved model config, as a clause; None if they match.

    Single tensors are compared first, so that a config of a billion layers is refused at once.
    """
    weights = {name.removeprefix(MODEL): shape for name, shape in stored.items() if name.startswith(MODEL)}
    return next(_misfits(model, weights), None)


def require_match(model: ModelConfig, plan: ModelPlan, checkpoint: Path) -> None:
    """Check that a checkpoint's weights match a custom model as its file defines it now.

    Raises:
        UserError: a weight is missing, unknown or of another shape.
    """
    weights = {
        name.removeprefix(MODEL): shape
        for name, (shape, _) in stored_tensors(checkpoint).items()
        if name.startswith(MODEL)
    }
    with torch.device("meta"):
        made = make_model(model)
    expected = {plan.whole_name(name): tuple(weight.shape) for name, weight in made.named_parameters()}
    for prefix, module in made.named_modules():
        for name, buffer in persistent_buffers(module):
            whole = plan.whole_name(f"{prefix}.{name}" if prefix else name)
            if whole in weights:  # checkpoints of older versions have none
                expected[whole] = tuple(buffer.shape)
    if reason := next(_differences(expected, weights), None):
        raise UserError(
            f"The model of {shown(model.file)} is not the one that {checkpoint} was made with: {reason}; restore the "
            "file, or start a new run in another folder."
        )


def _differences(expected: Shapes, weights: Shapes) -> Iterator[str]:
    for name in [*expected, *sorted(weights.keys() - expected.keys())]:
        if name not in weights:
            yield f"it has {name}, which the checkpoint lacks"
        elif name not in expected:
            yield f"the checkpoint has {name}, which it lacks"
        elif weights[name] != expected[name]:
            yield f"its {name} is {_shown(expected[name])} and the checkpoint's is {_shown(weights[name])}"


def _misfits(model: ModelConfig, weights: Shapes) -> Iterator[str]:
    layers = {name.split(".")[1] for name in weights if name.startswith(_BLOCKS)}
    if len(layers) != model.num_layers:
        yield f"its config has model.num_layers {model.num_layers} and its tensors are those of {len(layers)} layers"
    for name, keys in _SIZES.items():
        for key, size in zip(keys, weights.get(name, ()), strict=False):
            if key is not None and getattr(model, key) != size:
                yield f"its config has model.{key} {getattr(model, key)} and its tensor {name} has {size}"
    with torch.device("meta"):
        expected = {name: tuple(weight.shape) for name, weight in make_model(model).named_parameters()}
    for missing in sorted(expected.keys() - weights.keys()):
        yield f"its config describes a model with {missing}, which is not among its tensors"
    for unknown in sorted(weights.keys() - expected.keys()):
        yield f"its tensors hold {unknown}, which the model that its config describes does not have"
    for name, shape in expected.items():
        if weights[name] != shape:
            found = _shown(weights[name])
            yield f"its config describes a model whose {name} is {_shown(shape)} and its tensor of that name is {found}"


def _shown(shape: tuple[int, ...]) -> str:
    return " × ".join(map(str, shape)) or "a number"


Damaged = Mapping[Path, str]
"""Reasons why checkpoints could not be loaded, by folder."""

T = TypeVar("T")


@dataclass(frozen=True)
class SelectedCheckpoint:
    """A selected checkpoint, its config, and warnings about the damaged ones that were skipped (`passed`)."""

    checkpoint: Checkpoint
    config: Config
    warnings: tuple[str, ...] = field(default=())
    passed: tuple[Path, ...] = ()


def select_checkpoint(
    run_dir: Path, missing: Callable[[str], str], damaged: Damaged | None = None
) -> SelectedCheckpoint:
    """Return the newest valid checkpoint of a run, as far as can be seen without reading its tensors.

    Args:
        missing: makes the message if there is none, from a phrase such as "no complete checkpoint".
        damaged: checkpoints that loading found damaged.

    Raises:
        UserError: there is none, or a later version of Threefold wrote the newest.
    """
    passed: list[DamagedCheckpoint] = []
    for path in reversed(folders(run_dir)):
        try:
            if damaged and path in damaged:
                raise DamagedCheckpoint(path, damaged[path])
            checkpoint, config = inspect_checkpoint(path)
        except DamagedCheckpoint as damage:
            passed.append(damage)
            continue
        warning = passed_over(passed, checkpoint.path)
        return SelectedCheckpoint(
            checkpoint, config, (warning,) if passed else (), tuple(damage.path for damage in passed)
        )
    raise UserError(
        missing(f"no complete checkpoint ({listed_damage(passed)} passed over)" if passed else "no complete checkpoint")
    )


def check_whole(checkpoint: Checkpoint) -> None:
    """Compare all files with their checksums, as slow as reading them; raise DamagedCheckpoint if one was changed."""
    manifest = read_manifest(checkpoint.path)
    for name in sorted(manifest.files):
        manifest.check_content(name)


def from_first(world: "Axis", find: Callable[[], T]) -> T:
    """Run `find` on the first rank and broadcast its result or its UserError, so that all ranks agree. Collective."""
    found: T | UserError | None = None
    if world.is_first:
        try:
            found = find()
        except UserError as error:
            found = error
    found = world.gather_objects(found)[0]
    if isinstance(found, UserError):
        raise found
    return cast(T, found)


def inspect_checkpoint(path: Path) -> tuple[Checkpoint, Config]:
    """Return a checkpoint and its config after checking everything but the bytes of its tensors.

    Raises:
        DamagedCheckpoint: the checkpoint is not valid.
        UserError: a later version of Threefold wrote it.
    """
    manifest = read_manifest(path)
    manifest.check_sizes()
    # Imports torch, which a run without checkpoints should not wait for.
    from threefold.checkpoint.storage import stored_index

    index = stored_index(path)
    data = {chunk.file for tensor in index.values() for chunk in tensor.chunks}
    if unknown := data - manifest.files.keys():
        raise DamagedCheckpoint(path, f"its tensors are in {min(unknown)}, which its manifest does not name")
    shapes = {name: tensor.shape for name, tensor in index.items()}
    _check_small(manifest, data, shapes)
    config = usable_config(path)
    if config.model.architecture != OWN and (reason := model_mismatch(config.model, shapes)):
        raise DamagedCheckpoint(path, reason)  # the file of a custom model may have changed: see `require_match`
    return Checkpoint(path, manifest.facts), config


def _check_small(manifest: Manifest, data: set[str], shapes: "Shapes") -> None:
    """Compare all files but tensor files with their checksums; for a changed config, the error names the mismatch."""
    for name in sorted(manifest.files.keys() - data - {CONFIG}):
        manifest.check_content(name)
    if LOOP in manifest.files:
        raise DamagedCheckpoint(
            manifest.folder, f"saved by threefold.save, without a {CONFIG}: threefold.load opens it"
        )
    if CONFIG not in manifest.files:
        raise DamagedCheckpoint(manifest.folder, f"its manifest does not name {CONFIG}")
    try:
        manifest.check_content(CONFIG)
    except DamagedCheckpoint as damage:
        raise _more_exactly(damage, shapes) from None


def _more_exactly(damage: DamagedCheckpoint, shapes: "Shapes") -> DamagedCheckpoint:

    try:
        model = usable_config(damage.path).model
        reason = None if model.architecture == OWN else model_mismatch(model, shapes)
    except DamagedCheckpoint as unusable:
        reason = unusable.reason
    return DamagedCheckpoint(damage.path, f"{damage.reason}, and {reason}") if reason else damage


def usable_config(path: Path, *, with_code: bool = False) -> Config:
    """Return the config of a checkpoint (`stored_config`); raise DamagedCheckpoint if it cannot be used."""
    try:
        return stored_config(path, with_code=with_code)
    except UserError as error:
        raise DamagedCheckpoint(path, f"its {CONFIG} cannot be used ({str(error).removesuffix('.')})") from None
    except (ValueError, ArithmeticError, RecursionError, yaml.YAMLError) as error:  # values that no run writes
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DamagedCheckpoint(path, f"its {CONFIG} cannot be used ({reason})") from None


def passed_over(passed: Sequence[DamagedCheckpoint], used: Path) -> str:
    """Return the warning that damaged checkpoints were skipped and another one is used."""
    return f"{listed_damage(passed)} passed over; {used} is used, the newest that is good."


def listed_damage(passed: Sequence[DamagedCheckpoint]) -> str:
    """Return the skipped checkpoints with their reasons, followed by "was" or "were"."""
    listed = [f"{damage.path} ({damage.reason})" for damage in passed]
    more = f" and {len(listed) - 3} more" if len(listed) > 3 else ""
    return f"{' and '.join(listed[:3])}{more} {'was' if len(listed) == 1 else 'were'}"
