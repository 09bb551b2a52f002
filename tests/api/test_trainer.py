"""`threefold.Trainer`: the command's run from Python, on ranks that are there and alone; and wrong calls."""

import contextlib
import io
import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import threefold as t3
from tests.support import ready
from tests.train.support import Run, losses_of, steps_of, train_rank
from threefold.comm.layout import parse
from threefold.data.dataset import open_dataset
from threefold.errors import UserError
from threefold.verify.api import VerifiedModel
from threefold.verify.verifier import DEPARTS, EQUAL, FAILED, UNSPLIT, LayoutResult, Verdict
from threefold.verify.worker_pool import WorkerError, WorkerPool


class Plain(torch.optim.Optimizer):
    """Gradient descent, as a user would write it."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0, factor: float = 1.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "factor": factor})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                update = p.grad + group["weight_decay"] * p
                p.sub_(update, alpha=group["lr"] * group["factor"])


def sections_of(run: Run, **train: Any) -> dict[str, dict[str, Any]]:
    sections = run.config.sections()
    sections["train"] = {"global_batch_size": 8, "eval_every": 0, "eval_batches": 1, "device": "cpu", **train}
    sections["optimizer"] = {"lr": 1e-2, "warmup_steps": 2, "decay_steps": 20}
    return sections


def fitted(sections: dict[str, Any], folder: Path, **arguments: Any) -> list[Any]:
    """What the metrics by epoch of this rank are after `fit`."""
    epochs = t3.callbacks.EpochMetrics()
    optimizer = partial(Plain, factor=0.5)
    trainer = t3.Trainer(sections, run_dir=folder, callbacks=[epochs], optimizer=optimizer)
    with contextlib.redirect_stdout(io.StringIO()):
        assert trainer.fit(**arguments) is None
    return [(epoch.epoch, epoch.last_step, epoch.valid_loss is not None) for epoch in epochs.epochs]


def test_on_the_ranks_that_there_are(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    """Two epochs of dp 2 · tp 2 with an own optimizer, the same as torch's SGD from the config."""
    few = small_run.but(dtype="fp64", set=(("data.split", "4,96"),))
    config = few.config
    samples = len(open_dataset(config).samples("train", config.data))
    ends = [-(-epoch * samples // 8) for epoch in (1, 2)]
    ranks = pool.run(4, _fitted, sections_of(few.but(dp=2, tp=2)), tmp_path / "own", {"epochs": 2, "test_interval": 1})
    assert ranks == [[(0, ends[0], True), (1, ends[1], True)], [], [], []]
    sgd = (("optimizer.name", "sgd"), ("optimizer.lr", 5e-3), ("optimizer.decay_steps", 20), ("optimizer.min_lr", 5e-4))
    pool.run(1, train_rank, few.but(steps=ends[1], set=(*few.set, *sgd)), tmp_path / "sgd")
    assert losses_of(tmp_path / "own") == pytest.approx(losses_of(tmp_path / "sgd"), rel=1e-12)
    stored = t3.load_config(tmp_path / "own/config.yaml").optimizer
    assert (stored.name, stored.arguments) == (f"{__name__}:Plain", {"factor": 0.5})


def _fitted(sections: dict[str, Any], folder: Path, arguments: dict[str, Any]) -> list[Any]:
    return fitted(sections, folder, **arguments)


SCRIPT = """
import os
import signal
import sys

import torch
import threefold as t3


class Mine(torch.optim.Adam):
    pass


class Note(t3.Callback):
    def after_stop(self, step, reason):
        print("noted", step, reason)


config, folder = t3.load_config(sys.argv[1]), sys.argv[2]
stopping = t3.callbacks.EarlyStopping("loss", patience=2, min_delta=9)
stopped = t3.Trainer(config, run_dir=folder, callbacks=[stopping, Note()], optimizer=Mine).fit(max_steps=9)
print("ended", stopped.step, stopping.waited, torch.distributed.is_initialized())
print("again", t3.Trainer(config, run_dir=folder, optimizer=Mine).fit(max_steps=6, resume=True))


class Press(t3.Callback):
    def after_step(self, record):
        if record.step == 1:
            os.kill(os.getpid(), signal.SIGINT)


pressed = t3.Trainer(config, run_dir=folder + "-pressed", callbacks=[Press()]).fit(max_steps=6)
print("pressed", pressed.signal, pressed.step, signal.getsignal(signal.SIGINT) is signal.default_int_handler)
try:
    t3.Trainer({**config.sections(), "parallel": {"dp": 2, "tp": 2}}, run_dir=folder + "-4").fit(max_steps=1)
except t3.UserError as error:
    print(error)
"""


@pytest.mark.slow
def test_alone_it_is_one_process(small_run: Run, tmp_path: Path) -> None:
    """A script of its own: its callbacks are the objects that it has, and it may run again."""
    import yaml

    (tmp_path / "run.yaml").write_text(yaml.safe_dump(sections_of(small_run)))
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "script.py", "run.yaml", str(tmp_path / "run")]
    ended = ready.run(command, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    told = ended.stdout.splitlines()
    assert [line for line in told if line.startswith(("noted", "ended", "again"))] == [
        f"noted 4 {next(line for line in told if 'stopped: ' in line).partition('stopped: ')[2]}",
        "ended 4 3 False",
        "again None",
    ]
    assert list(steps_of(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]
    assert "pressed 2 2 True" in told
    assert told[told.index("pressed 2 2 True") - 1] == "  trainer.fit(resume=True)"
    assert told[-1] == (
        "The layout has 4 ranks but this is one process; start the script with `torchrun --nproc-per-node 4`, or call "
        "it in threefold.run(fn, ranks=4)."
    )


def test_other_ranks_than_the_layout_has(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    with pytest.raises(WorkerError, match=r"must|ranks") as caught:
        pool.run(2, _fitted, sections_of(small_run.but(dp=4)), tmp_path, {"max_steps": 1})
    assert isinstance(caught.value.error, UserError)


def test_a_callback_that_raises(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    with pytest.raises(WorkerError) as caught:
        pool.run(2, _with_callbacks, sections_of(small_run.but(dp=2)), tmp_path, [Raising()])
    assert str(caught.value.error) == "The callback Raising on rank 1 failed in before_step with KeyError: 'no'."


class Raising(t3.Callback):
    ranks = "all"

    def setup(self, run: Any) -> None:
        self.rank = run.mesh.rank

    def before_step(self, step: int, batch: Any) -> None:
        if (self.rank, step) == (1, 2):
            raise KeyError("no")


def _with_callbacks(sections: dict[str, Any], folder: Path, callbacks: Sequence[Any]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        t3.Trainer(sections, run_dir=folder, callbacks=callbacks).fit(max_steps=3)


class Interrupting(t3.Callback):
    """Rank 1 alone gets SIGTERM after step 2."""

    ranks = "all"

    def setup(self, run: Any) -> None:
        self.rank = run.mesh.rank

    def after_step(self, record: Any) -> None:
        if (self.rank, record.step) == (1, 2):
            os.kill(os.getpid(), signal.SIGTERM)


def interrupted(sections: dict[str, Any], folder: Path) -> tuple[list[Any], str]:
    """How two runs of one folder end, the first of which gets a signal; whether its handler is gone, and the output."""
    before, printed = signal.getsignal(signal.SIGTERM), io.StringIO()
    with contextlib.redirect_stdout(printed):
        stopped = t3.Trainer(sections, run_dir=folder, callbacks=[Interrupting()]).fit(max_steps=6)
        untouched = signal.getsignal(signal.SIGTERM) is before
        again = t3.Trainer(sections, run_dir=folder).fit(max_steps=6, resume=True)
    return [stopped and (stopped.signal, stopped.step, stopped.reason), untouched, again], printed.getvalue()


def test_a_signal_to_one_rank_ends_all_with_a_checkpoint(pool: WorkerPool, small_run: Run, tmp_path: Path) -> None:
    run = small_run.but(dp=2, steps=6, dtype="fp64")
    (first, told), (second, silent) = pool.run(2, interrupted, sections_of(run), tmp_path / "run")
    assert first == second == [(signal.SIGTERM, 3, ""), True, None]
    saved = tmp_path / "run/checkpoints/step_00000003"
    assert (
        f"Stopped by SIGTERM after step 3, which is saved in {saved}; resume with:\n  trainer.fit(resume=True)" in told
    )
    assert "Stopped by" not in silent
    assert list(steps_of(tmp_path / "run")) == [1, 2, 3, 4, 5, 6]


def test_the_outer_partial_of_an_optimizer_decides() -> None:
    """As where it is called."""
    made = partial(partial(Plain, factor=0.5, weight_decay=0.1), factor=0.25)
    config = t3.Trainer(NO_DATA, optimizer=made).config
    assert config.optimizer.name == f"{__name__}:Plain"
    assert config.optimizer.arguments == {"factor": 0.25, "weight_decay": 0.1}


def test_settings_of_the_call_replace_those_of_the_config() -> None:
    config = t3.Trainer(NO_DATA, optimizer=Plain, dataset=f"{__name__}:pairs").config
    assert config.data.path == f"{__name__}:pairs"
    assert NO_DATA["data"]["path"] == "unused", "a mapping of the caller is left as it is"
    again = t3.Trainer(config, optimizer="sgd").config
    assert (again.optimizer.name, again.data.path, again.model.vocab_size) == ("sgd", config.data.path, 64)


def test_all_layouts_are_equal_if_each_is() -> None:
    def results(*verdicts: Verdict) -> VerifiedModel:
        return VerifiedModel(tuple(LayoutResult(parse("dp2"), verdict, 1.0) for verdict in verdicts))

    assert results(EQUAL, EQUAL).all_equal
    for other in (DEPARTS, FAILED, UNSPLIT):
        assert not results(EQUAL, other).all_equal
        assert not results(other, EQUAL).all_equal
        assert str(results(EQUAL, other)) == f"dp2: equal\ndp2: {other}"


class NeedsMore(t3.Callback):
    packages = ("no_such_package",)


NO_DATA: dict[str, dict[str, Any]] = {"data": {"path": "unused"}, "model": {"vocab_size": 64}}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            {"callbacks": [t3.callbacks.EarlyStopping]},
            r"has the class EarlyStopping but needs an object; write",
        ),
        ({"callbacks": [print]}, r"a builtin_function_or_method, but each must be a threefold\.Callback; make it a"),
        ({"callbacks": [NeedsMore()]}, r"NeedsMore, which needs the package no_such_package, which is not installed"),
        (
            {"optimizer": lambda params, lr: None},
            r"which has no name in a module, so that no resumed run would find it",
        ),
        ({"optimizer": partial(Plain, 3)}, r"give its arguments by their names\."),
        (
            {"optimizer": torch.optim.SGD([torch.zeros(1)], lr=1)},
            r"a SGD object but must be a class, or a function",
        ),
        ({"config": 3}, r"config is a int but must be a result of load_config, the path of a YAML file, or a mapping"),
        ({"config": "no_such.yaml"}, r"no_such\.yaml"),
        ({"config": {"data": {"path": "x"}, "trane": {}}}, r"trane is not a setting; the nearest is train\."),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        t3.Trainer(**{"config": NO_DATA, **arguments})


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"epochs": 1, "max_steps": 2}, r"^fit has epochs 1 and max_steps 2; leave one of the two out\.$"),
        ({"epochs": 0}, r"train\.epochs is 0 but must be at least 1\."),
        ({"max_steps": "many"}, r"train\.max_steps is 'many' but must be a whole number\."),
        ({"test_interval": -1}, r"train\.eval_every_epochs is -1 but must be at least 1\."),
        ({}, r"unused"),
    ],
)
def test_wrong_calls_of_fit(tmp_path: Path, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        t3.Trainer(NO_DATA, run_dir=tmp_path / "run").fit(**arguments)
    assert not (tmp_path / "run").exists()
