"""Training runs from Python (`Trainer`), like `threefold train` but with Python objects."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from threefold.api.own_parts import AnyConfig, changed, own_run
from threefold.checkpoint.resume import Resume
from threefold.errors import UserError
from threefold.files import shown
from threefold.launch.environment import find_launched_rank
from threefold.launch.launcher import joined_rank
from threefold.launch.process import StopSignals
from threefold.launch.training_run import explain_stop, prepare_training
from threefold.models.loss_terms import LossFunction
from threefold.train.callbacks.base import Callback, say
from threefold.train.callbacks.registry import require_packages
from threefold.verify.self_check import self_check

if TYPE_CHECKING:
    import torch

    from threefold.train.attempt import Stopped


class Trainer:
    """Training run described by a config, in this process.

    Under torchrun or srun, and in a function started by `threefold.spawn` or `threefold.run`, each process is one rank
    of the config's layout. A script started alone is the only rank.

    Args:
        config: a `Config` from `load_config`, the path of a YAML file, or a mapping of sections.
        run_dir: folder for logs, metrics and checkpoints.
        callbacks: called in this order, after the built-in callbacks and those of `train.callbacks`; each runs on the
            ranks that its `ranks` selects.
        model: model in place of the config's: a class or function that makes it, a list of layers, `PipelineLayers`, or
            `"FILE.py:NAME"`.
        plan: layers of the model and how each weight is sharded; None if the class or file has an attribute `plan`.
        loss: `loss(output, batch)` of the last layer's output returns the mean over the samples of a micro-batch, or
            terms by name (`CountedLoss`), each of which is logged. None if the class or file has an attribute `loss`,
            or the last layer returns the summed loss of tokens and labels.
        arguments: keyword arguments of the model's class or function, like `model.arguments`. Its other parameters
            without a default receive the setting of the same name, such as `vocab_size`.
        optimizer: a class or function that makes an optimizer, in place of `optimizer.name`. It may be any
            `torch.optim.Optimizer`, is called with parameters, `lr` and `weight_decay`, and takes further arguments
            through `functools.partial`. It must be defined in a module or at the top of the script, where a resumed run
            looks it up.
        dataset: data set in place of `data.path`: a map-style `torch.utils.data.Dataset`, or a function or class that
            makes one without arguments, bound to a name in a module or the script, as in `data = MyData()`. Samples are
            tokens; with a loss of your own they may be any nesting of tensors and numbers, such as a tuple of inputs
            and a label, or a mapping.

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
            _check_callback(callback)
        self.config, self.source = own_run(
            config, model=model, plan=plan, loss=loss, arguments=arguments, optimizer=optimizer, dataset=dataset
        )

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
            run = replace(prepare_training(config, self.run_dir, resume=resume), check=self_check)
            stopped = None if run.finished else run.start_here(self.callbacks, self.source, signals)
        rank = joined_rank() or find_launched_rank()
        if stopped is not None and not stopped.reason and (rank is None or rank.rank == 0):
            by = stopped.limit or stopped.signal
            say(explain_stop(self.run_dir, by, stopped.step, "trainer.fit()", "trainer.fit(resume=True)"))
        return stopped


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
