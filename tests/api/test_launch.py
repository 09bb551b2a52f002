"""`spawn`, `run` and `notebook_launcher`: real processes, their values, and what they raise."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate

import threefold
from tests.support.sentences import sentence
from tests.support.sweep import sweep
from threefold.errors import UserError

RANKS = 3
NOBODY = 65534


def of_rank(scale: float) -> torch.Tensor:
    total = torch.full((2,), scale * dist.get_rank())
    dist.all_reduce(total)
    return total + dist.get_rank()


@sweep("start", [threefold.spawn, threefold.run], quick=(1,))
def test_values_of_all_ranks_come_back(start: Any) -> None:
    """Of a function that no other process could import."""
    shift = 10

    def local(scale: float) -> torch.Tensor:
        return of_rank(scale) + shift

    found = start(local, ranks=RANKS, args=(0.5,))
    assert [each.tolist() for each in found] == [[11.5 + rank] * 2 for rank in range(RANKS)]


def parts_and_whole(give_part: bool) -> dict[str, object]:
    """Weights that are cut and one that is whole on every rank, as they are stored."""
    mesh = threefold.init_mesh(tp=2)
    layer = threefold.ColumnParallelLinear(3, 4, mesh.tp, name="cut", seed=1)
    bias = layer.weight.redistribute(placements=[Replicate()])
    return {"layers": [layer.weight if give_part else layer.weight.full_tensor()], "bias": (bias,)}


def test_a_sharded_tensor_comes_back_whole_or_not_at_all() -> None:
    for found in threefold.spawn(parts_and_whole, 2, (False,)):
        (bias,), (weight,) = found["bias"], found["layers"]
        assert type(bias) is type(weight) is torch.Tensor
        assert torch.equal(bias, weight)
        assert torch.cat([bias, weight]).shape == (8, 3)
    sentence = r"^A DTensor of 4 × 3 was returned, .*; return tensor.full_tensor\(\), which all ranks of its mesh call"
    with pytest.raises(UserError, match=sentence):
        threefold.spawn(parts_and_whole, 2, (True,))


def test_notebook_launcher_takes_the_arguments_of_accelerate() -> None:
    assert [each.tolist() for each in threefold.notebook_launcher(of_rank, (1.0,), num_processes=2)] == [
        [1.0, 1.0],
        [2.0, 2.0],
    ]


@pytest.mark.slow
def test_new_interpreters_take_functions_of_modules() -> None:
    found = threefold.spawn(of_rank, 2, (1.0,), start_method="spawn")
    assert [each.tolist() for each in found] == [[1.0, 1.0], [2.0, 2.0]]


def test_the_exception_of_a_rank_is_raised_here_with_its_type_rank_and_traceback() -> None:
    def fails() -> None:
        if dist.get_rank() == 1:
            raise ZeroDivisionError("the cat sat on the keyboard")
        dist.barrier()

    with pytest.raises(ZeroDivisionError) as caught:
        threefold.spawn(fails, RANKS)
    assert str(caught.value) == "the cat sat on the keyboard"
    assert caught.value.__notes__ == ["Raised on rank 1."]
    assert 'raise ZeroDivisionError("the cat sat on the keyboard")' in str(caught.value.__cause__)
    assert "in fails" in str(caught.value.__cause__)


class _OfTwoArguments(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


def test_an_exception_that_cannot_be_sent_is_named() -> None:
    def fails() -> None:
        raise _OfTwoArguments("one", "other")

    with pytest.raises(threefold.RankFailed) as caught:
        threefold.spawn(fails, 1)
    assert str(caught.value) == f"rank 0 failed: {__name__}._OfTwoArguments: one and other"
    assert "in fails" in str(caught.value.__cause__)


def ends(how: str, folder: Path) -> None:
    (folder / str(dist.get_rank())).write_text(str(os.getpid()))
    dist.barrier()
    if dist.get_rank() == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            sys.exit(3)
        os._exit(0)
    while True:
        dist.barrier()


def gone(pid: int) -> bool:
    state = Path(f"/proc/{pid}/stat")
    return not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z"


@sweep(
    ("how", "sentence"),
    [
        ("killed", "rank 1 failed: its process was killed by SIGKILL, as when memory runs out"),
        ("exit", "rank 1 failed: SystemExit: 3"),
    ],
    quick=(0,),
)
def test_a_rank_that_dies_is_one_sentence_and_no_rank_is_left(tmp_path: Path, how: str, sentence: str) -> None:
    with pytest.raises(threefold.RankFailed) as caught:
        threefold.spawn(ends, RANKS, (how, tmp_path))
    assert str(caught.value) == sentence
    assert all(gone(int((tmp_path / str(rank)).read_text())) for rank in range(RANKS))


def test_a_rank_that_ends_quietly_is_no_value() -> None:
    with pytest.raises(threefold.RankFailed, match="rank 0 failed: its process ended before the function returned"):
        threefold.spawn(lambda: os._exit(0), 1)


def test_a_value_that_cannot_be_sent_is_an_error() -> None:
    with pytest.raises(UserError, match=r"^Rank 0 returned a function, which cannot be sent .*return numbers, tensors"):
        threefold.spawn(lambda: lambda: None, 1)


def test_one_rank_runs_in_this_process() -> None:
    """What it does to the process ends with the call: the process group, the number of threads, where gloo listens."""
    before = torch.get_num_threads(), os.environ.get("GLOO_SOCKET_IFNAME")
    kept = object()

    def ranks() -> tuple[int, int, object]:
        torch.set_num_threads(before[0] + 1)
        return os.getpid(), dist.get_world_size(), kept

    def fails() -> None:
        raise ZeroDivisionError(dist.get_rank())

    assert threefold.run(ranks) == threefold.run(ranks, ranks=1) == [(os.getpid(), 1, kept)]
    with pytest.raises(ZeroDivisionError, match=r"^0$"):
        threefold.run(fails, ranks=1)
    threefold.run(dist.destroy_process_group, ranks=1)
    assert not dist.is_initialized()
    assert (torch.get_num_threads(), os.environ.get("GLOO_SOCKET_IFNAME")) == before
    with pytest.raises(UserError, match=r"^args is 0.5 but must be a tuple"):
        threefold.run(of_rank, 1, 0.5)  # type: ignore[arg-type]


def test_a_debugger_without_a_terminal_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)  # pytest has its own
    with pytest.raises(UserError) as caught:
        threefold.spawn(lambda: breakpoint(), 1)
    assert str(caught.value) == (
        "breakpoint() is called on rank 0, whose process has no terminal; call threefold.run with ranks=1, which "
        "starts none."
    )


def idle(*args: Any, **options: Any) -> None:
    """Hook of a notebook's kernel, which does nothing without a client."""


idle.__module__ = "debugpy._vendored.force_pydevd"


def test_the_debugger_of_a_notebook_is_refused_unless_it_is_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "breakpointhook", idle)
    debugger = SimpleNamespace(get_global_debugger=lambda: None)
    monkeypatch.setitem(sys.modules, "pydevd", debugger)
    with pytest.raises(UserError, match=r"^breakpoint\(\) is called on rank 0, whose process has no terminal"):
        threefold.spawn(lambda: breakpoint(), 1)
    debugger.get_global_debugger = lambda: "attached"
    threefold.spawn(lambda: breakpoint(), 1)


def initialised() -> str:
    return sentence(threefold.spawn, of_rank, 2, (1.0,))


def test_a_rank_starts_no_ranks(pool) -> None:
    assert pool.run(1, initialised)[0].startswith(
        "torch.distributed is initialised in this process, so it cannot start"
    )


WRONG: list[tuple[tuple[Any, ...], dict[str, Any], str]] = [
    ((3, 2), {}, "fn is 3 but must be a function"),
    ((of_rank, 0), {}, "ranks is 0 but must be a whole number of at least 1; use 1."),
    ((of_rank, 2.0), {}, "ranks is 2.0 but must be a whole number"),
    ((of_rank, 2, 0.5), {}, "args is 0.5 but must be a tuple of the arguments; use (0.5,)."),
    ((of_rank, 2), {"device": "tpu"}, "device is 'tpu' but must be auto, cpu or cuda; use auto."),
    ((of_rank, 2), {"start_method": "forkserver"}, "start_method is 'forkserver' but must be fork or spawn; use fork."),
    ((lambda: None, 2), {"start_method": "spawn"}, "start_method is spawn but <lambda> and its arguments cannot be "),
]


@pytest.mark.parametrize(("arguments", "options", "sentence"), WRONG, ids=[sentence for *_, sentence in WRONG])
def test_wrong_calls_are_one_sentence(arguments: tuple[Any, ...], options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        threefold.spawn(*arguments, **options)
    assert str(caught.value).startswith(sentence)


AFTER_THREADS = """
import gc, sys, torch, threefold
def work():
    x = torch.full((600, 600), 2.0, requires_grad=True)
    (x @ x).sqrt().sum().backward()
    return float(x.grad.sum())
torch.set_num_threads(2)
mine = work()
def in_rank():
    imported = "threefold.comm.mesh" in sys.modules
    torch.set_num_threads(2)
    return work(), imported
found = threefold.spawn(in_rank, 2)
same = all(abs(each / mine - 1) < 1e-4 for each, _ in found)
print(same, all(imported for _, imported in found), gc.get_freeze_count())
"""


@pytest.mark.slow
def test_ranks_compute_in_parallel_though_this_process_has() -> None:
    """In the main module of a program that is not a file. Modules that each would import are imported once, before."""
    done = subprocess.run([sys.executable, "-c", AFTER_THREADS], capture_output=True, text=True, timeout=300)
    assert (done.stdout, done.stderr) == ("True True 0\n", "")


TORCHRUN = """
import sys, torch.distributed as dist, threefold
found = threefold.run(lambda: dist.get_rank() ** 2{ranks})
sys.stdout.write(str(found) + "\\n")  # at once: under torchrun `print` writes each part by itself
"""


@sweep(("ranks", "output"), [("", "[0, 1]\n[0, 1]\n"), (", ranks=2", "[0, 1]\n[0, 1]\n")], slow=(1,))
def test_under_torchrun_this_process_is_a_rank(tmp_path: Path, ranks: str, output: str) -> None:
    assert torchrun(tmp_path, ranks).stdout == output


@pytest.mark.sweep
def test_torchrun_with_another_number_of_ranks(tmp_path: Path) -> None:
    assert "ranks is 3 but the launcher started 2; use 2." in torchrun(tmp_path, ", ranks=3").stderr


def torchrun(folder: Path, ranks: str) -> subprocess.CompletedProcess[str]:
    script = folder / "launched.py"
    script.write_text(TORCHRUN.format(ranks=ranks))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


def opened_by(user: int, processes: list[int]) -> dict[int, str]:
    """Try, as a user, to list the open files of processes and to open each; what came of it."""
    answer, to_answer = os.pipe()
    if (child := os.fork()) == 0:
        found = []
        try:
            os.setgroups([])
            os.setgid(user)
            os.setuid(user)
            for process in processes:
                try:
                    opened = [number for number in os.listdir(f"/proc/{process}/fd") if opens(process, number)]
                    found.append(f"{process} opened {opened}")
                except PermissionError:
                    found.append(f"{process} refused")
            os.write(to_answer, "\n".join(found).encode())
        finally:
            os._exit(0)
    os.close(to_answer)
    with os.fdopen(answer) as text:
        lines = text.read().splitlines()
    os.waitpid(child, 0)
    return {int(process): said for process, _, said in (line.partition(" ") for line in lines)}


def opens(process: int, number: str) -> bool:
    try:
        os.close(os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_NONBLOCK))
    except OSError:
        return False
    return True


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_another_user_opens_no_pipe_of_the_ranks() -> None:
    """Values and exceptions of ranks are unpickled from pipes that the ranks inherit, named in /proc alone."""
    starter = os.getpid()

    def tried() -> tuple[int, dict[int, str], dict[int, str]]:
        both = [starter, os.getpid()]
        return os.getpid(), opened_by(NOBODY, both), opened_by(os.getuid(), both)

    for rank, by_another, by_this_user in threefold.spawn(tried, ranks=2):
        assert by_another == {starter: "refused", rank: "refused"}
        assert all(found.startswith("opened ['") for found in by_this_user.values())  # so the try can succeed
