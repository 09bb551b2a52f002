"""Training runs from Python with Python objects (`Trainer`)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.api.pipeline import PipelineLayers
from threefold.checkpoint.resume import Resume
from threefold.config import Config, load_config
from threefold.config.loading import config_of
from threefold.config.model import CUSTOM
from threefold.config.schema import section_types
from threefold.doors import hook
from threefold.errors import UserError
from threefold.files import shown
from threefold.launch.environment import find_launched_rank
from threefold.launch.launcher import joined_rank
from threefold.launch.process import StopSignals
from threefold.launch.run_folder import explain_stop
from threefold.launch.training_run import prepare_training
from threefold.models.loss_terms import LossFunction
from threefold.models.source import ConfigSource, ModelSource, as_source
from threefold.plugins import import_path_of
from threefold.train.callbacks.base import Callback, say
from threefold.train.callbacks.registry import require_packages

if TYPE_CHECKING:
    import torch

    from threefold.train.stop import Stopped

AnyConfig = Config | Path | str | Mapping[str, Mapping[str, Any]]
"""A `Config` from `load_config`, the path of a YAML file, or a mapping of sections."""


class Trainer:
    """Training run described by a config, in this process.

    Under torchrun or srun, and in a function started by `threefold.spawn` or `threefold.run`, each process is one rank
    of the config's layout. A script started alone is the only rank.

    Args:
        config: a `Config` from `load_config`, the path of a YAML file, or a mapping of sections.
        run_dir: folder for logs, metrics and checkpoints.
        callbacks: called in this order, after the built-in callbacks and those of `train.callbacks`; each runs on the
            ranks that its `ranks` selects.
        model: model to train instead of the config's: a class or function that makes it, a list of layers,
            `PipelineLayers`, or `"FILE.py:NAME"`.
        plan: layers of the model and how each weight is sharded; None if the class or file has an attribute `plan`.
        loss: `loss(output, batch)`, called with the last layer's output, returns the mean over the samples of a
            micro-batch, or terms by name (`CountedLoss`), each of which is logged. None if the class or file has an
            attribute `loss`, or the last layer returns the summed loss of tokens and labels.
        arguments: keyword arguments of the model's class or function, like `model.arguments`. Its other parameters
            without a default receive the setting of the same name, such as `vocab_size`.
        optimizer: a class or function that makes an optimizer, used instead of `optimizer.name`. It may be any
            `torch.optim.Optimizer`, is called with parameters, `lr` and `weight_decay`, and takes further arguments
            through `functools.partial`. It must be defined in a module or at the top of the script, where a resumed run
            looks it up.
        dataset: data set to use instead of `data.path`: a map-style `torch.utils.data.Dataset`, or a function or class
            that makes one without arguments, bound to a name in a module or the script, as in `data = MyData()`.
            Samples are tokens; with a custom loss they may be any nesting of tensors and numbers, such as a tuple of
            inputs and a label, or a mapping.

    Raises:
        UserError: an argument is of another kind, or a callback's package is not installed.

    Example:
        >>> stopping = threefold.callbacks.EarlyStopping("valid_loss", patience=3)
        >>> trainer = threefold.Trainer("my.yaml", run_dir="runs/mine", callbacks=[stopping])
        >>> trainer.fit(epochs=3, test_interval=1)

        >>> config = {"parallel": {"dp": 2, "tp": 2}, "train": {"global_batch_size": 16}}
        >>> trainer = threefold.Trainer(config, model=MyModel, plan=plan, loss=loss, dataset=MyData)
    """

    def __init__(
        self,
        config: AnyConfig,
        *,
        run_dir: Path | str = "runs/trainer",
        callbacks: Sequence[Callback] = (),
        model: Any = None,
        plan: Any = None,
        loss: LossFunction | None = None,
        arguments: Mapping[str, Any] | None = None,
        optimizer: "Callable[..., torch.optim.Optimizer] | None" = None,
        dataset: Any = None,
    ) -> None:
        self.run_dir, self.callbacks = Path(run_dir), list(callbacks)
        for callback in self.callbacks:
            if isinstance(callback, type) and issubclass(callback, Callback):
                name = callback.__name__
                raise UserError(f"callbacks has the class {name} but needs an object; write {name}().")
            if not isinstance(callback, Callback):
                raise UserError(
                    f"callbacks has {shown(repr(callback))}, a {type(callback).__name__}, but each must be a "
                    "threefold.Callback; make it a subclass."
                )
            require_packages(callback, f"callbacks has {type(callback).__name__}")
        self.config, self.source = custom_run(config, model, plan, loss, arguments, optimizer, dataset)

    def fit(
        self,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        test_interval: int | None = None,
        resume: Resume = False,
    ) -> "Stopped | None":
        """Train to the last step, or until a callback stops the run.

        Ctrl-C (SIGINT), SIGTERM and SIGUSR1 end the run after the current step, with a checkpoint. A second signal ends
        it at once: one of several ranks exits, a single process raises `KeyboardInterrupt`.

        Collective over the ranks of the layout.

        Args:
            epochs: passes over the training samples, overriding `train.epochs` and `train.max_steps`.
            max_steps: optimizer steps, overriding the same settings.
            test_interval: epochs between evaluations on the validation split, overriding `train.eval_every` and
                `train.eval_every_epochs`.
            resume: whether to resume from the newest checkpoint in the run's folder, in any layout; "auto" resumes if
                there is one.

        Returns:
            None after the last step; otherwise the step after which a callback, a signal or `train.max_seconds` stopped
            the run, and the callback's reason, the signal or the limit.

        Raises:
            UserError: settings cannot be combined, the layout does not match the number of ranks, the folder already
                has a run, or a callback raised; the message says what to write instead.
            KeyboardInterrupt: a signal came before the first step, or for the second time.
        """
        if epochs is not None and max_steps is not None:
            raise UserError(f"fit has epochs {epochs} and max_steps {max_steps}; leave one of the two out.")
        config = self.config
        if epochs is not None or max_steps is not None:
            config = changed(config, "train", {"epochs": epochs, "max_steps": max_steps})
        if test_interval is not None:
            config = changed(config, "train", {"eval_every_epochs": test_interval, "eval_every": None})
        with StopSignals(process_ends=False) as signals:
            run = replace(prepare_training(config, self.run_dir, resume=resume), verify=hook("verify_run"))
            stopped = None if run.finished else run.start_here(self.callbacks, self.source, signals)
        rank = joined_rank() or find_launched_rank()
        if stopped is not None and not stopped.reason and (rank is None or rank.rank == 0):
            by = stopped.limit or stopped.signal
            say(explain_stop(self.run_dir, by, stopped.step, "trainer.fit()", "trainer.fit(resume=True)"))
        return stopped


def custom_run(
    config: Any, model: Any, plan: Any, loss: Any, arguments: Any, optimizer: Any, dataset: Any
) -> tuple[Config, ModelSource]:
    """Return the unresolved config of a run, and the source of its model; arguments as in `Trainer`."""
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
        source = as_source(PipelineLayers(model) if isinstance(model, list | tuple) else model, plan, loss)
        found = source.configured(found)
    if arguments is None:
        return found, source
    if found.model.architecture != CUSTOM:
        raise UserError("arguments is given without model, whose constructor takes them; give the model too.")
    return changed(found, "model", {"arguments": dict(arguments)}), source


def read_config(config: Any, changes: Mapping[str, Any]) -> Config:
    """Read an `AnyConfig` and apply changes by `section.key` (None: the default); raise UserError if one is wrong."""
    if isinstance(config, str | Path):
        return load_config(config, changes)
    if isinstance(config, Config):
        for key, value in changes.items():
            section, name = key.split(".")
            config = changed(config, section, {name: value})
        return config
    if not isinstance(config, Mapping):
        raise UserError(
            f"config is a {type(config).__name__} but must be a result of load_config, the path of a YAML file, or a "
            "mapping of sections such as {'data': {'path': 'tokens'}}."
        )
    for name, section in config.items():
        if not isinstance(section, Mapping):
            owners = [key for key, kind in section_types().items() if name in kind.model_fields]
            instead = f"{{{owners[0]!r}: {{{name!r}: {shown(repr(section))}}}}}" if owners else "{}"
            raise UserError(
                f"config has {shown(repr(section))} for {name} but must have a mapping of settings; use {instead}."
            )
    return config_of({str(name): dict(section) for name, section in config.items()}, changes)


def changed(config: Config, section: str, changes: Mapping[str, Any]) -> Config:
    """Return the config with changed settings in one section, removing those that are None."""
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
        made, arguments = made.func, {**made.keywords, **arguments}
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
