"""Measure training on one GPU: tokens per second, model FLOPs utilization, and peak memory.

    pip install -e '.[benchmark]'
    python benchmarks/gpu.py [--models gpt2-124m llama-3.2-1b] [--sequences 1024 8192] [--rounds 3] [--steps 5]
    python benchmarks/gpu.py --device cpu --tiny          # half a minute; shows that the script itself works

Compares Threefold with `transformers`, `litgpt` if installed (Llama shapes only) and a plain module in the style of
nanoGPT (GPT shapes only), each with and without `torch.compile`. They take turns; each turn is a new process, which has
the whole memory, and warms up before the timed steps. If a micro-batch does not fit, the contestant halves it, and the
table says so.

Utilization is model FLOPs (`threefold.models.family`: attention over the whole square, without recompute) per second
over the highest rate of matrix products in the same dtype, measured before the first turn and after the last. Memory is
the peak that torch allocated on the GPU (resident memory on a CPU), beside the predictions of `threefold estimate` and
`threefold dry-run` for that micro-batch. The rows are for RESULTS.md. `--profile` then shows the operations and kernels
in which a step of Threefold spends its time.
"""

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
from gpu_contestants import CONTESTANTS, Contestant, Step, Training
from hardware import hardware_line
from rich.console import Console

from threefold.dtypes import DTYPES
from threefold.planner.block import model_flops_per_token
from threefold.planner.dry_run import dry_run
from threefold.planner.performance import peak_memory
from threefold.planner.stage_memory import stage_memory

MODELS = ("gpt2-124m", "llama-3.2-1b", "gpt3-1.3b", "gpt3-2.7b")
SEQUENCES = (1024, 2048, 4096, 8192)
GIB = 1 << 30
HEADINGS = (
    "model",
    "sequence",
    "contestant",
    "micro-batch",
    "tokens/s",
    "share of the matrix rate",
    "times the best peer",
    "peak GiB",
    "estimate GiB",
    "dry-run GiB",
)


@dataclass
class Turns:
    """Results of the turns of one contestant.

    Attributes:
        training: training with the micro-batch that fitted.
        seconds: seconds per step, by turn.
        memory: peak bytes over all turns.
        loss: loss of the last step of the last turn.
        failure: reason for missing results; empty if there are results.
    """

    contestant: Contestant
    training: Training
    seconds: list[float] = field(default_factory=list)
    memory: int = 0
    loss: float = 0.0
    failure: str = ""

    @property
    def rate(self) -> float:
        """Median tokens per second; 0 if there was no turn."""
        return self.training.tokens / statistics.median(self.seconds) if self.seconds else 0.0


def main() -> None:
    options = _options()
    console = Console(width=200)
    # In a separate process, so that a contestant has all of its memory.
    measured = partial(_reported, partial(matrix_rate, options.device, options.dtype, options.tiny))
    rates = [_in_process(measured)]
    found: dict[tuple[str, int], dict[str, Turns]] = {}
    for preset in options.models:
        for sequence in options.sequences:
            found[preset, sequence] = _race(options, preset, sequence, console)
    rates.append(_in_process(measured))
    where = torch.cuda.get_device_name() if options.device == "cuda" else "no GPU"
    console.print(f"{where}; {hardware_line()}", highlight=False, soft_wrap=True)
    spread = " and ".join(f"{rate / 1e12:.3g}" for rate in rates)
    console.print(f"{options.dtype} matrix products: {spread} TFLOP/s, before and after", highlight=False)
    lines = [HEADINGS, ("---",) * len(HEADINGS)]
    lines += [row for (preset, sequence), turns in found.items() for row in _rows(preset, sequence, turns, max(rates))]
    for line in lines:
        console.print(f"| {' | '.join(line)} |", highlight=False, soft_wrap=True, markup=False)
    for turns in (each for of_model in found.values() for each in of_model.values()) if options.profile else ():
        if turns.contestant.name == "Threefold" and not turns.failure:
            text = _in_process(partial(_reported, partial(_profile, turns, options.warm_up)))
            way = "compiled" if turns.training.compiled else "eager"
            heading = f"\n{turns.training.preset}, {turns.training.sequence}, {way}: operations of two steps"
            console.print(f"{heading}\n{text}", highlight=False, soft_wrap=True, markup=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--models", nargs="+", default=MODELS, help=f"presets; default {' '.join(MODELS)}")
    parser.add_argument("--sequences", nargs="+", type=int, default=None, help=f"default {SEQUENCES}; tiny: 32")
    parser.add_argument("--tokens", type=int, default=None, help="of a step; default 65,536, tiny: 128")
    parser.add_argument("--micro-batch", type=int, default=0, help="largest that is tried; default: the whole step")
    parser.add_argument("--contestants", nargs="+", default=None, help=", ".join(each.name for each in CONTESTANTS))
    parser.add_argument("--ways", nargs="+", choices=("eager", "compiled"), default=("eager", "compiled"))
    parser.add_argument("--rounds", type=int, default=3, help="turns of each, of which the medians are printed")
    parser.add_argument("--steps", type=int, default=5, help="steps that are timed in a turn")
    parser.add_argument("--warm-up", type=int, default=3, help="steps before them")
    parser.add_argument("--profile", action="store_true", help="also show where a step of Threefold spends its time")
    parser.add_argument("--tiny", action="store_true", help="two layers of width 64, to try the script")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch finds no GPU on this machine; try the script with --device cpu --tiny")
    options.sequences = options.sequences or ((32,) if options.tiny else SEQUENCES)
    options.tokens = options.tokens or (128 if options.tiny else 65_536)
    return options


def _race(options: argparse.Namespace, preset: str, sequence: int, console: Console) -> dict[str, Turns]:
    """Return the turns of all contestants for one model and sequence length, by name."""
    samples = options.tokens // sequence
    entered: dict[str, Turns] = {}
    for contestant in CONTESTANTS:
        if not contestant.can_train(preset) or contestant.name not in (options.contestants or (contestant.name,)):
            continue
        for way in options.ways:
            training = Training(
                preset=preset,
                sequence=sequence,
                tokens=samples * sequence,
                micro_batch=min(options.micro_batch or samples, samples),
                dtype=options.dtype,
                device=options.device,
                compiled=way == "compiled",
                tiny=options.tiny,
            )
            entered[f"{contestant.name}, {way}"] = Turns(contestant, training)
    for number in range(options.rounds):
        names = list(entered)
        for name in names if number % 2 == 0 else names[::-1]:
            turns = entered[name]
            if not turns.failure:
                _take_turn(turns, options.warm_up, options.steps)
                last = turns.failure or f"{turns.rate:,.0f} tokens/s"
                console.print(f"{preset}, {sequence}, round {number + 1}: {name}: {last}", highlight=False)
    return entered


def _take_turn(turns: Turns, warm_up: int, steps: int) -> None:
    """Run one turn in a new process; halve a micro-batch that does not fit, for later turns too."""
    while True:
        answer = _in_process(partial(_reported, partial(_timed, turns.contestant, turns.training, warm_up, steps)))
        if isinstance(answer, tuple):
            seconds, memory, turns.loss = answer
            turns.seconds.append(seconds)
            turns.memory = max(turns.memory, memory)
            return
        if answer != "out of memory" or turns.training.micro_batch == 1:
            turns.failure = answer
            return
        turns.training = replace(turns.training, micro_batch=turns.training.micro_batch // 2)


def _in_process(work: Callable[[Connection], None]) -> Any:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(theirs,))
    process.start()
    theirs.close()
    try:
        answer = ours.recv()
    except EOFError:
        answer = "its process ended"
    process.join()
    return answer


def _reported(work: Callable[[], Any], answer: Connection) -> None:
    """Send the result of `work`, or one line about its error."""
    try:
        answer.send(work())
    except torch.OutOfMemoryError:
        answer.send("out of memory")
    except Exception as error:  # a contestant that fails does not end the run
        answer.send(f"{type(error).__name__}: {error}".splitlines()[0][:200])


def _set_up(contestant: Contestant, training: Training) -> Step:
    if contestant.name == "Threefold":
        import torch.distributed as dist

        from threefold.launch.worker import RankInfo, join

        join(RankInfo(0, 1, 0, 1, "cuda" if training.device == "cuda" else "cpu"), dist.HashStore())
    return contestant.make_step(training)


def _timed(contestant: Contestant, training: Training, warm_up: int, steps: int) -> tuple[float, int, float]:
    """Return the seconds per step, the peak bytes and the last loss."""
    step = _set_up(contestant, training)
    for number in range(warm_up):
        step(number)
    _wait(training.device)
    started = time.perf_counter()
    for number in range(warm_up, warm_up + steps):
        loss = step(number)
    _wait(training.device)
    seconds = (time.perf_counter() - started) / steps
    _leave()
    on_gpu = training.device == "cuda"
    return seconds, torch.cuda.max_memory_allocated() if on_gpu else peak_memory(), loss


def _profile(turns: Turns, warm_up: int) -> str:
    """Return the operations and kernels that take longest in two steps, from torch's profiler."""
    step = _set_up(turns.contestant, turns.training)
    for number in range(warm_up):
        step(number)
    with torch.profiler.profile() as profile:
        for number in range(warm_up, warm_up + 2):
            step(number)
        _wait(turns.training.device)
    _leave()
    by = "self_device_time_total" if turns.training.device == "cuda" else "self_cpu_time_total"
    return str(profile.key_averages().table(sort_by=by, row_limit=30, max_name_column_width=70))


def _leave() -> None:
    """Leave the process group, if this contestant joined one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def matrix_rate(device: str, dtype: str, tiny: bool) -> float:
    """Return the FLOP/s of the fastest of a few large matrix products."""
    best = 0.0
    for size in (256, 512) if tiny else (4096, 8192, 16384):
        left, right = (torch.randn(size, size, device=device).to(DTYPES[dtype]) for _ in range(2))
        for repeats in (3, 10):  # the first warms up
            _wait(device)
            started = time.perf_counter()
            for _ in range(repeats):
                left @ right
            _wait(device)
            seconds = (time.perf_counter() - started) / repeats
        best = max(best, 2 * size**3 / seconds)
    return best


def _rows(preset: str, sequence: int, found: dict[str, Turns], rate: float) -> list[tuple[str, ...]]:
    best_peer = max((turns.rate for name, turns in found.items() if not name.startswith("Threefold")), default=0.0)
    rows = []
    for name, turns in found.items():
        if turns.failure:
            rows.append((preset, f"{sequence:,}", name, turns.failure, *("" for _ in HEADINGS[4:])))
            continue
        flops = model_flops_per_token(turns.training.config.model, sequence)
        assert flops is not None
        own = name.startswith("Threefold")
        foreseen = _foreseen(turns.training) if own else ("", "")
        times = f"{turns.rate / best_peer:.2f}" if own and best_peer else ""
        micro, peak = f"{turns.training.micro_batch}", f"{turns.memory / GIB:.2f}"
        share = f"{100 * turns.rate * flops / rate:.1f} %"
        rows.append((preset, f"{sequence:,}", name, micro, f"{turns.rate:,.0f}", share, times, peak, *foreseen))
    return rows


def _foreseen(training: Training) -> tuple[str, str]:
    """Return the peak memory predicted by `threefold estimate` and `threefold dry-run`."""
    config = training.config
    estimate = max(stage.peak for stage in stage_memory(config, training.device))
    return f"{estimate / GIB:.2f}", f"{dry_run(config).peak_bytes / GIB:.2f}"


if __name__ == "__main__":
    main()
