"""Config of a run whose model, loss, optimizer or data set is a Python object."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from threefold.api.pipeline import PipelineLayers
from threefold.config import Config, load_config
from threefold.config.loading import config_of
from threefold.config.model import OWN
from threefold.errors import UserError
from threefold.files import shown
from threefold.models.source import ConfigSource, ModelSource, as_source
from threefold.plugins import import_path_of

AnyConfig = Config | Path | str | Mapping[str, Mapping[str, Any]]
"""A `Config` from `load_config`, the path of a YAML file, or a mapping of sections."""


def own_run(
    config: Any,
    *,
    model: Any = None,
    plan: Any = None,
    loss: Any = None,
    arguments: Mapping[str, Any] | None = None,
    optimizer: Any = None,
    dataset: Any = None,
) -> tuple[Config, ModelSource]:
    """Return the unresolved config of a run, and the source of its model; arguments as in `Trainer`.

    Raises:
        UserError: an argument is not of a supported kind.
    """
    changes: dict[str, Any] = {}
    if dataset is not None:
        changes |= {"data.path": _dataset_path(dataset), "data.mixture": None}
    if optimizer is not None:
        changes |= _optimizer_settings(optimizer)
    if arguments is not None and not isinstance(arguments, Mapping):
        raise UserError(
            f"arguments is {shown(repr(arguments))} but must be a mapping from the names of the model's arguments to "
            "their values; use {}."
        )
    for name, part in (("plan", plan), ("loss", loss)):
        if model is None and part is not None:
            raise UserError(f"{name} is given without model; give the model too, or leave {name} out.")
    found = read_config(config, changes)
    source: ModelSource = ConfigSource()
    if model is not None:
        layers = isinstance(model, list | tuple)
        source = as_source(PipelineLayers(model) if layers else model, plan, loss)
        found = source.configured(found)
    if arguments is None:
        return found, source
    if found.model.architecture != OWN:
        raise UserError("arguments is given without model, whose constructor takes them; give the model too.")
    return changed(found, "model", {"arguments": dict(arguments)}), source


def read_config(config: Any, changes: Mapping[str, Any]) -> Config:
    """Return an `AnyConfig` with changes by `section.key` (None: the default); raise UserError if one is wrong."""
    if isinstance(config, str | Path):
        return load_config(config, changes)
    if isinstance(config, Config):
        for key, value in changes.items():
            section, name = key.split(".")
            config = changed(config, section, {name: value})
        return config
    if not isinstance(config, Mapping):
        raise UserError(
            f"config is a {type(config).__name__} but must be what load_config returns, the path of a YAML file, or a "
            "mapping of sections such as {'data': {'path': 'tokens'}}."
        )
    for name, section in config.items():
        if not isinstance(section, Mapping):
            owners = [key for key, field in Config.model_fields.items() if name in _settings_of(field.annotation)]
            instead = f"{{{owners[0]!r}: {{{name!r}: {shown(repr(section))}}}}}" if owners else "{}"
            raise UserError(
                f"config has {shown(repr(section))} for {name} but must have a mapping of settings; use {instead}."
            )
    return config_of({str(name): dict(section) for name, section in config.items()}, changes)


def _settings_of(section: Any) -> Mapping[str, Any]:
    return getattr(section, "model_fields", {})


def changed(config: Config, section: str, changes: Mapping[str, Any]) -> Config:
    """Return the config with other settings in a section, removing those that are None.

    Raises:
        UserError: a value is of the wrong type.
    """
    given = config.given()
    given[section] = {key: value for key, value in {**given[section], **changes}.items() if value is not None}
    origins = {key: where for key, where in config.origins.items() if key.partition(".")[2] not in changes}
    return config_of(given, origins=origins)


def _dataset_path(dataset: Any) -> str:
    """Return the `data.path` of a data set, or of a function or class that makes one."""
    if hasattr(dataset, "batch_sampler"):
        raise UserError(
            f"dataset is a {type(dataset).__name__} but must be the data set that it reads, as the run makes its own "
            "batches; give that, with the size of a batch as train.global_batch_size."
        )
    path = dataset if isinstance(dataset, str) else import_path_of(dataset)
    if path is None:
        raise UserError(
            f"dataset is a {type(dataset).__name__} that has no name in a module, so that no resumed run would find "
            "it; bind it to a name at the top of the script, or give a function of a module that makes it."
        )
    return path


def _optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return `optimizer.name` and `optimizer.arguments` of a class, a function, or a `functools.partial` of one."""
    made: Any = optimizer
    arguments: dict[str, Any] = {}
    while isinstance(made, partial):
        if made.args:
            raise UserError(f"optimizer is {shown(repr(optimizer))}; give its arguments by their names.")
        arguments = {**made.keywords, **arguments}
        made = made.func
    if isinstance(made, str):
        return {"optimizer.name": made}
    if not callable(made):
        raise UserError(
            f"optimizer is a {type(made).__name__} object but must be a class, or a function that makes one, as each "
            "rank makes it of its own shards."
        )
    path = import_path_of(made)
    if path is None:
        raise UserError(
            f"optimizer is {shown(repr(made))}, which has no name in a module, so that no resumed run would find it; "
            "define it at the top of a module, its arguments given with functools.partial."
        )
    return {"optimizer.name": path, "optimizer.arguments": arguments or None}
