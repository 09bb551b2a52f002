"""Any optimizer of torch's interface, from the user's file: the same weights in every layout, resumed, verified."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.command import Command
from tests.support.parity import Case, check
from tests.support.sweep import sweep
from tests.train.support import Run, losses_of, same, steps_of, train
from threefold.config import Config, resolve
from threefold.config.optimizer import OptimizerConfig
from threefold.errors import UserError
from threefold.train.optimizers import CustomOptimizer, check_optimizer, update_rule
from threefold.verify.worker_pool import WorkerPool

FILE = '''
import torch


class Lion(torch.optim.Optimizer):
    """As the package's own, but for where it keeps its state."""

    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            in_update, kept = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["exp_avg"] = torch.zeros_like(p)
                update = state["exp_avg"].lerp(p.grad, 1 - in_update).sign_()
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=group["lr"])
                state["exp_avg"].lerp_(p.grad, 1 - kept)


class Numbered(torch.optim.Optimizer):
    """RMSprop whose state begins at 1, whose steps shrink with a plain number of them, and a tensor without dims."""

    def __init__(self, params, lr, rho=0.9, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "rho": rho, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["count"], state["shrinks"] = 0, torch.ones((), dtype=p.dtype)
                    state["squares"], state["nothing"] = torch.ones_like(p), None
                state["count"] += 1
                state["shrinks"].mul_(0.97)
                state["squares"].mul_(group["rho"]).addcmul_(p.grad, p.grad)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                lr = group["lr"] * float(state["shrinks"]) / (1 + 0.1 * state["count"])
                p.addcdiv_(p.grad, state["squares"].sqrt() + 1e-4, value=-lr)


class ByNorm(torch.optim.Optimizer):
    """A step of fixed length for each weight (a LARS without momentum), with averages of rows and columns."""

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("average", torch.zeros_like(p)).lerp_(p.grad, 0.5)
                average = self.state[p]["average"]
                p.sub_(average / (average.norm() + 1e-8), alpha=group["lr"])


class ByWholeNorm(ByNorm):
    needs_whole_matrices = True


class Factored(torch.optim.Optimizer):
    """Adafactor's second moment: a row and a column in place of a matrix."""

    needs_whole_matrices = True

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state, squares = self.state[p], p.grad.square() + 1e-12
                if p.dim() < 2:
                    v = state.setdefault("v", torch.zeros_like(p)).lerp_(squares, 0.1)
                else:
                    rows = state.setdefault("rows", torch.zeros_like(p[:, :1])).lerp_(squares.mean(1, True), 0.1)
                    columns = state.setdefault("columns", torch.zeros_like(p[:1])).lerp_(squares.mean(0, True), 0.1)
                    v = rows * columns / rows.mean()
                update = p.grad / (v.sqrt() + 1e-3)
                p.sub_(update / update.norm().clamp(min=1.0), alpha=group["lr"])


class Keeper(torch.optim.SGD):
    def step(self, closure=None):
        super().step()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["history"] = [1, 2]


def frozen_sgd(params, lr, weight_decay=0.0, momentum=0.5):
    return torch.optim.SGD(params, lr=lr, weight_decay=weight_decay, momentum=momentum)


def no_optimizer(params, lr):
    return 3


class NoOptimizer:
    pass
'''
LLAMA: dict[str, Any] = {"positions": "rope", "head_dim": 4, "model": (("architecture", "llama"),)}


@pytest.fixture(scope="session")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("own") / "my_optim.py"
    path.write_text(FILE)
    return path


@pytest.mark.slow
def test_the_users_lion_is_the_built_in_one_to_the_bit(
    pool: WorkerPool, small_run: Run, tmp_path: Path, file: Path
) -> None:
    """On dp 2 · tp 2 with ZeRO 1 in bf16 with master weights, its betas given as arguments."""
    run = small_run.but(dp=2, tp=2, dtype="bf16", set=(("parallel.zero", 1), ("optimizer.lr", 1e-3)))
    given = run.but(set=(*run.set, ("optimizer.name", "lion"), ("optimizer.betas", [0.9, 0.98])))
    arguments = {"betas": [0.9, 0.98]}
    own = run.but(set=(*run.set, ("optimizer.name", f"{file}:Lion"), ("optimizer.arguments", arguments)))
    pool.run(4, _without_eps, given, tmp_path / "built-in")
    pool.run(4, _without_eps, own, tmp_path / "own")
    found, steps = steps_of(tmp_path / "own"), steps_of(tmp_path / "built-in")
    for number, step in steps.items():
        assert [found[number][key] for key in ("loss", "grad_norm")] == [step[key] for key in ("loss", "grad_norm")]


OPTIMIZERS = ["Numbered", "ByWholeNorm", "Factored", "Lion", "frozen_sgd"]
LAYOUTS: list[dict[str, Any]] = [
    {"dp": 2, "tp": 2, "settings": (("parallel.zero", 3),)},
    {"dp": 3, "settings": (("parallel.zero", 1),)},
    {"tp": 3},
    {"pp": 3},
    {"dp": 2, "tp": 2, "pp": 2},
]


@sweep("changes", LAYOUTS, quick=(0,), slow=(4,), ids=str)
@sweep("name", OPTIMIZERS, quick=(0,))
def test_the_same_weights_in_every_layout(pool, expected, file: Path, name: str, changes: dict[str, Any]) -> None:
    """In fp64 over several steps: element-wise over shards, and with whole matrices where the class says so."""
    check(pool, expected, own(file, name, **changes))


def own(file: Path, name: str, **changes: Any) -> Case:
    update = (("optimizer.name", f"{file}:{name}"), ("optimizer.lr", 1e-3))
    return Case(**{"dtype": "fp64", "steps": 4, "update": update, "optimizer": "lion", **LLAMA, **changes})


@sweep(("name", "lr"), [("Numbered", 1e-2), ("Factored", 1e-2), ("ByWholeNorm", 1e-1)], slow=(1, 2))
def test_resumes_in_another_layout(
    pool: WorkerPool, small_run: Run, tmp_path: Path, file: Path, name: str, lr: float
) -> None:
    """State of every kind goes through a checkpoint: cut tensors, tensors without dims, numbers, rows and columns."""
    settings = {"optimizer.name": f"{file}:{name}", "optimizer.lr": lr, "model.architecture": "llama"}
    run = small_run.but(dtype="fp64", set=tuple(settings.items()))
    pool.run(1, _without_eps, run.but(steps=6), tmp_path / "uninterrupted")
    before = run.but(dp=2, tp=2, steps=3)
    after = run.but(dp=2, pp=2, steps=6, set=(*run.set, ("parallel.zero", 1)))
    pool.run(4, _without_eps, before, tmp_path / "resumed")
    pool.run(4, _without_eps, after, tmp_path / "resumed", True)
    assert same(losses_of(tmp_path / "resumed"), losses_of(tmp_path / "uninterrupted"), "fp64")


@pytest.mark.slow
def test_verify_knows_it_and_finds_one_that_needs_whole_matrices(
    threefold: Command, tmp_path: Path, file: Path
) -> None:
    config = tmp_path / "run.yaml"
    sections = {
        "data": {"path": "unused", "sequence_length": 12},
        "model": {"num_layers": 2, "hidden_size": 16, "num_attention_heads": 4, "vocab_size": 67},
        "optimizer": {"name": f"{file}:ByWholeNorm"},
    }
    config.write_text(yaml.safe_dump(sections))
    good = threefold("verify", config, "--layouts", "tp2", "--dtype", "fp64")
    assert good.status == 0, good.output + good.error
    sections["optimizer"]["name"] = f"{file}:ByNorm"
    config.write_text(yaml.safe_dump(sections))
    bad = threefold("verify", config, "--layouts", "tp2", "--dtype", "fp64")
    assert bad.status == 1, bad.output


@pytest.mark.parametrize(
    ("name", "arguments", "sentence"),
    [
        ("Lino", {}, r"optimizer\.name is .*my_optim\.py:Lino but .* has no Lino; the nearest is Lion\."),
        ("NoOptimizer", {}, r"NoOptimizer'> but must be a subclass of torch\.optim\.Optimizer, or a function"),
        ("no_optimizer", {}, r"makes a int but must make a torch\.optim\.Optimizer; return one\."),
        ("Lion", {"beta": 1}, r"arguments has beta but .*Lion takes one of betas; the nearest is betas\."),
        ("Lion", {"lr": 1}, r"arguments has lr, a setting of its own; set optimizer\.lr instead\."),
        ("Lion", {"betas": 0.9}, r"which with lr=0\.0006, betas=0\.9 cannot step: TypeError: .*\."),
        ("Keeper", {}, r"keeps a list as its state history, which no checkpoint can have; keep tensors and numbers\."),
        ("ByNorm", {"lr": 1}, r"has lr, a setting"),
    ],
)
def test_wrong_optimizers(file: Path, name: str, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        check_optimizer(OptimizerConfig(name=f"{file}:{name}", arguments=arguments))
    assert str(caught.value).startswith("optimizer.")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (
            "no_such_package.optim:Lion",
            r"but Python finds no module no_such_package; name an importable one, or a file",
        ),
        ("no_such_file.py:Lion", r"but no_such_file\.py is not a file; name a Python file, as in my_file\.py:Lion\."),
        ("torch.optim:LBFGS", r"cannot step: .*closure"),
        ("torch.optim:SparseAdam", r"cannot step: RuntimeError"),
    ],
)
def test_wrong_places(name: str, sentence: str) -> None:
    with pytest.raises(UserError, match=f"^optimizer.name is {name}.*{sentence}"):
        check_optimizer(OptimizerConfig(name=name))


def test_an_undeclared_factored_one_is_told_before_the_run() -> None:
    with pytest.raises(UserError, match=r"keeps a state row_var of the shape \[4, 1\] .*needs_whole_matrices = True"):
        check_optimizer(OptimizerConfig(name="torch.optim:Adafactor"))


def test_torch_s_own_by_their_paths() -> None:
    """Those that no row of the table has; how many tensors they keep is counted for the estimate of memory."""
    counted = {"NAdam": 2, "RAdam": 2, "Adagrad": 1, "Adamax": 2, "RMSprop": 1}
    for name, states in counted.items():
        config = OptimizerConfig(name=f"torch.optim:{name}")
        check_optimizer(config)
        assert update_rule(config) is CustomOptimizer
        assert CustomOptimizer.states_per_element(config, True) == states


def test_settings_that_it_does_not_read() -> None:
    given: dict[str, Any] = {"data": {"path": "unused"}, "model": {"vocab_size": 64}}
    given["optimizer"] = {"name": "torch.optim:RMSprop", "momentum": 0.9}
    with pytest.raises(UserError, match=r"momentum is 0\.9 but .*its arguments in optimizer\.arguments"):
        resolve(Config.model_validate(given), 1)
    given["optimizer"] = {"name": "adamw", "arguments": {"amsgrad": True}}
    with pytest.raises(UserError, match=r"optimizer\.name is adamw, whose settings are those of this section"):
        resolve(Config.model_validate(given), 1)


def _without_eps(run: Run, folder: Path, resume: bool = False) -> None:
    """As `train_rank`; the settings of AdamW that every small run has are not for an own optimizer."""
    train(config_of(run), folder, resume)


def config_of(run: Run) -> Config:
    kept = tuple(each for each in run.set if not each[0].startswith("optimizer."))
    sections = run.but(set=kept).config.sections()
    sections["optimizer"] = {"lr": 1e-2, "warmup_steps": 2, "decay_steps": 20}
    sections["optimizer"] |= {key.split(".")[1]: value for key, value in run.set if key.startswith("optimizer.")}
    return resolve(Config.model_validate(sections), 1)
