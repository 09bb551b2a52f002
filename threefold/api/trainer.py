"""A training run from Python: what `threefold train` does, with objects of one's own."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.checkpoint.resume import Resume
from threefold.config import Config, load_config
from threefold.config.loading import config_of
from threefold.errors import UserError
from threefold.files import shown
from threefold.launch.training_run import prepare_training
from threefold.plugins import import_path_of
from threefold.train.callbacks.base import Callback
from threefold.train.callbacks.registry import require_packages

if TYPE_CHECKING:
    import torch

    from threefold.train.stop import Stopped


class Trainer:
    """Trains as a config says, in this process.

    Under torchrun or srun, and in a function that `threefold.spawn` or `threefold.run` started, each process is one
    rank of the config's layout; a script that was started alone is its only one.

    Args:
        config: of `load_config`; or the path of a YAML file, or a mapping of sections.
        run_dir: the run's folder, for logs, metrics and checkpoints.
        callbacks: called after those of every run and those of `train.callbacks`, in this order; each is used on the
            ranks that its `ranks` says.
        optimizer: a class, or a function that makes one, in place of `optimizer.name`: any `torch.optim.Optimizer`,
            called with parameters, `lr` and `weight_decay`; further arguments through `functools.partial`. It belongs
            to a module or to the script, as a run that is resumed looks it up there; a function's own has no name.
        dataset: in place of `data.path`: a map-style `torch.utils.data.Dataset` whose samples are tokens, or a function
            or class that makes one without arguments, as `data.path` takes it; of a module or of the script. An object
            needs a name there, as in `data = MyData()`.

    Raises:
        UserError: an argument is none of these, or a callback's package is not installed.

    Example:
        >>> stopping = threefold.callbacks.EarlyStopping("valid_loss", patience=3)
        >>> trainer = threefold.Trainer("my.yaml", run_dir="runs/mine", callbacks=[stopping])
        >>> trainer.fit(epochs=3, test_interval=1)
    """

    def __init__(
        self,
        config: Config | Path | str | Mapping[str, Mapping[str, Any]],
        *,
        run_dir: Path | str = "runs/trainer",
        callbacks: Sequence[Callback] = (),
        optimizer: "Callable[..., torch.optim.Optimizer] | None" = None,
        dataset: Any = None,
    ) -> None:
        self.run_dir, self.callbacks = Path(run_dir), list(callbacks)
        for callback in self.callbacks:
            _check_callback(callback)
        self.config = _read(config, None if dataset is None else _dataset_path(dataset))
        if optimizer is not None:
            self.config = _changed(self.config, "optimizer", _optimizer_settings(optimizer))

    def fit(
        self,
        *,
        epochs: int | None = None,
        max_steps: int | None = None,
        test_interval: int | None = None,
        resume: Resume = False,
    ) -> "Stopped | None":
        """Train to the end, or until a callback stops it.

        Collective over the ranks of the layout.

        Args:
            epochs: passes over the training samples, in place of `train.epochs` and `train.max_steps`.
            max_steps: optimizer steps, in place of the same.
            test_interval: epochs between evaluations on the validation part, in place of `train.eval_every` and
                `train.eval_every_epochs`.
            resume: whether to resume from the newest checkpoint of the run's folder; "auto" does if there is one.

        Returns:
            None after the last step; else the step after which a callback stopped the run, and its reason.

        Raises:
            UserError: settings that cannot be combined, a layout of other than the ranks that there are, a folder that
                has a run already, a callback that raised; the sentence says what to write instead.
        """
        if epochs is not None and max_steps is not None:
            raise UserError(f"fit has epochs {epochs} and max_steps {max_steps}; leave one of the two out.")
        config = self.config
        if epochs is not None or max_steps is not None:
            config = _changed(config, "train", {"epochs": epochs, "max_steps": max_steps})
        if test_interval is not None:
            config = _changed(config, "train", {"eval_every_epochs": test_interval, "eval_every": None})
        run = prepare_training(config, self.run_dir, resume=resume)
        return None if run.finished else run.start_here(self.callbacks)


def _check_callback(callback: Any) -> None:
    if isinstance(callback, type) and issubclass(callback, Callback):
        raise UserError(
            f"callbacks has the class {callback.__name__} but needs an object; write {callback.__name__}()."
        )
    if not isinstance(callback, Callback):
        raise UserError(
            f"callbacks has {shown(repr(callback))}, a {type(callback).__name__}, but each must be a "
            "threefold.Callback; make it a subclass."
        )
    require_packages(callback, f"callbacks has {type(callback).__name__}")


def _read(config: Any, data: str | None) -> Config:
    """The config, its data replaced where `data` is a path."""
    if isinstance(config, str | Path):
        config = load_config(config, () if data is None else ("data.mixture=null", f"data.path={data}"))
    if isinstance(config, Config):
        return config if data is None else _changed(config, "data", {"path": data, "mixture": None})
    if isinstance(config, Mapping):
        sections = {name: dict(section) for name, section in config.items()}
        if data is not None:
            sections["data"] = {**sections.get("data", {}), "path": data, "mixture": None}
        return config_of(sections)
    raise UserError(
        f"config is a {type(config).__name__} but must be what load_config returns, the path of a YAML file, or a "
        "mapping of sections such as {'data': {'path': 'tokens'}}."
    )


def _changed(config: Config, section: str, changes: Mapping[str, Any]) -> Config:
    """The config with other settings of a section; those that are None are taken out.

    Raises:
        UserError: a value is not of its type.
    """
    given = {
        name: {key: value for key, value in values.items() if config.is_given(f"{name}.{key}")}
        for name, values in config.sections().items()
    }
    given[section] = {key: value for key, value in {**given[section], **changes}.items() if value is not None}
    found = config_of(given)
    found._origins = {key: where for key, where in config._origins.items() if key.partition(".")[2] not in changes}
    return found


def _dataset_path(dataset: Any) -> str:
    """`data.path` of a data set, or of what makes one."""
    path = dataset if isinstance(dataset, str) else import_path_of(dataset)
    if path is None:
        raise UserError(
            f"dataset is a {type(dataset).__name__} that has no name in a module, so that no resumed run would find "
            "it; bind it to a name at the top of the script, or give a function of a module that makes it."
        )
    return path


def _optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """`optimizer.name` and `optimizer.arguments` of a class, a function, or a `functools.partial` of one."""
    made: Any = optimizer
    arguments: dict[str, Any] = {}
    while isinstance(made, partial):
        if made.args:
            raise UserError(f"optimizer is {shown(repr(optimizer))}; give its arguments by their names.")
        arguments = {**made.keywords, **arguments}
        made = made.func
    if isinstance(made, str):
        return {"name": made}
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
    return {"name": path, "arguments": arguments or None}
