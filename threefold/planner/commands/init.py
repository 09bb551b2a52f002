"""`threefold init`: write a commented config that runs, from five answers."""

import re
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import typer
from typer import Argument, Option

from threefold.errors import UserError
from threefold.files import counted, shown
from threefold.report.options import whole_number
from threefold.terminal import Bars

if TYPE_CHECKING:
    from threefold.config import Config

QUESTIONS: Final = {
    "data": "Data: a folder of `threefold data prepare`, or token files",
    "model": "Model: a preset such as gpt2-124m (threefold config presets), or LAYERSxWIDTH",
    "ranks": "Ranks: processes, or GPUs",
    "steps": "Steps",
    "batch": "Sequences per step, over all ranks",
}
"""What is asked on a terminal, in order, by the names of the options."""
COMMENTS: Final = {
    "data.path": "also token files of other systems, or JSON Lines with `tokenizer`",
    "data.sequence_length": "tokens in a sample",
    "data.split": "documents for training, validation and test, by weight",
    "model.preset": "threefold config presets lists them; settings beside it override its sizes",
    "model.architecture": "gpt, or llama",
    "model.num_layers": "blocks",
    "model.hidden_size": "width",
    "model.num_attention_heads": "must divide hidden_size",
    "parallel.dp": "replicas, which share each batch",
    "parallel.tp": "ranks that share each weight matrix",
    "parallel.pp": "ranks that share the layers",
    "parallel.zero": "1 to 3 shard optimizer state, gradients and weights over the replicas",
    "train.max_steps": "",
    "train.global_batch_size": "sequences in a step, in every layout",
    "train.eval_every": "steps between evaluations on the validation part; 0 for none",
    "train.seed": "of the initial weights, the order of the data and dropout",
    "optimizer.lr": "peak, after warm-up; decays to a tenth",
    "precision.dtype": "bf16 on GPUs",
    "checkpoint.every": "steps; `threefold train --resume` continues from the newest",
}
"""Settings in a written config, as `section.key`, with their comments; of a preset only its name is written."""


def command(
    file: Path = Argument(..., metavar="FILE", help="YAML file to write, such as run.yaml."),
    data: str | None = Option(
        None, metavar="PATH", help="Folder written by threefold data prepare, or token files of another system."
    ),
    model: str | None = Option(
        None,
        metavar="NAME|LAYERSxWIDTH",
        help="A preset, such as gpt2-124m, or the sizes of a small GPT.",
        show_default="8x256",
    ),
    ranks: str | None = Option(None, metavar="N", help="Number of processes, or GPUs, to train on.", show_default="1"),
    steps: str | None = Option(None, metavar="N", help="Number of steps to train.", show_default="1000"),
    batch: str | None = Option(
        None, metavar="N", help="Sequences per step, over all ranks.", show_default="32, or more ranks"
    ),
) -> None:
    """Write a commented config that runs; on a terminal, ask for the options that are not given.

    The data must exist, and the config is checked against it as threefold train does. All ranks are
    data-parallel replicas (dp); threefold plan finds faster layouts for GPUs.

    Examples:
      threefold init run.yaml
      threefold init run.yaml --data tokens --model gpt2-124m --ranks 8
    """
    if file.is_dir():
        raise UserError(f"{shown(file)} is a folder; name a file in it, such as {shown(file / 'run.yaml')}.")
    if file.exists() or file.is_symlink():
        names = (file.with_name(f"{file.stem}-{number}{file.suffix}") for number in range(2, 10**6))
        free = next(name for name in names if not name.exists())
        raise UserError(f"{shown(file)} exists already; name another file, such as {shown(free)}.")
    if not file.parent.is_dir():
        raise UserError(f"{shown(file)} cannot be written: there is no folder {shown(file.parent)}; make it first.")
    given = {"data": data, "model": model, "ranks": ranks, "steps": steps, "batch": batch}
    if data is None and not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UserError(
            "--data is missing; give the tokens to train on, such as --data tokens, which threefold data prepare "
            "writes, or run threefold init on a terminal, which asks."
        )
    config = checked(answers(given)) if data is not None else asked(given)
    try:
        with file.open("x", encoding="utf-8") as written:
            written.write(text_of(config, file))
    except OSError as error:
        raise UserError(f"{shown(file)} cannot be written ({error.strerror}); choose another file.") from None
    train = config.train
    typer.echo(
        f"Wrote {file}: {config.model.title}, {counted(config.parallel.dp, 'rank')}, {train.max_steps:,} steps of "
        f"{train.global_batch_size:,} sequences of {config.data.sequence_length:,} tokens."
    )
    typer.echo(f"Next: threefold train {shlex.quote(str(file))}")


def answers(given: Mapping[str, str | None]) -> dict[str, dict[str, Any]]:
    """Return settings by section from the values of the options, with the defaults of those that are None."""
    from threefold.config.model import MOST_LAYERS, WIDEST
    from threefold.config.rules import DEFAULT_GLOBAL_BATCH_SIZE
    from threefold.config.section import MOST_RANKS, MOST_SEQUENCES, MOST_STEPS

    ranks = whole_number(given["ranks"] or "1", "--ranks", most=MOST_RANKS)
    default, name = -(-DEFAULT_GLOBAL_BATCH_SIZE // ranks) * ranks, (given["model"] or "").strip()
    model: dict[str, Any] = {"preset": name} if given["model"] else {}
    if sizes := re.fullmatch(r"(\d+) ?[x×] ?(\d+)", name):
        width = whole_number(sizes[2], "--model: the width", most=WIDEST)
        most_heads = max(1, width // 32)  # an attention head is 32 wide at least
        heads = next(heads for heads in range(most_heads, 0, -1) if width % heads == 0)
        layers = whole_number(sizes[1], "--model: the number of layers", most=MOST_LAYERS)
        model = {"num_layers": layers, "hidden_size": width, "num_attention_heads": heads}
    return {
        "data": {"path": given["data"]},
        "model": model,
        "parallel": {"dp": ranks},
        "train": {
            "max_steps": whole_number(given["steps"] or "1000", "--steps", most=MOST_STEPS),
            "global_batch_size": whole_number(given["batch"] or str(default), "--batch", most=MOST_SEQUENCES),
        },
    }


def checked(sections: dict[str, dict[str, Any]]) -> "Config":
    """Return the resolved config of some settings, checked as before training.

    Evaluation is off if there is too little data for it.
    """
    from threefold.config.loading import config_of
    from threefold.launch.checks import check_run

    with Bars() as bars:
        try:
            return check_run(config_of(sections), bars)
        except UserError as error:
            whole = {"data": {**sections["data"], "split": "1,0,0"}, "train": {**sections["train"], "eval_every": 0}}
            try:
                return check_run(config_of({**sections, **whole}), bars)
            except UserError:
                raise error from None


def asked(given: Mapping[str, str | None]) -> "Config":
    """Ask for the options that are None, each until its answer is valid, and return the checked config."""
    values: dict[str, str | None] = dict.fromkeys(QUESTIONS)
    for name, question in QUESTIONS.items():
        usual = answers({**values, name: None})
        defaults = {
            "data": "tokens" if Path("tokens").is_dir() else None,
            "model": "8x256",
            "ranks": str(usual["parallel"]["dp"]),
            "steps": str(usual["train"]["max_steps"]),
            "batch": str(usual["train"]["global_batch_size"]),
        }
        while True:
            answer = given[name]
            values[name] = str(typer.prompt(question, default=defaults[name])) if answer is None else answer
            try:
                checked(answers(values))
                break
            except UserError as error:
                if answer is not None:
                    raise
                typer.echo(error, err=True)
    return checked(answers(values))


def text_of(config: "Config", file: Path) -> str:
    """Return a resolved config as commented YAML, with the settings that users change first."""
    from threefold.config.schema import to_yaml

    lines = [
        "# Written by threefold init. Train:",
        f"#   threefold train {file}",
        "# docs/config.md explains all settings; threefold config show prints them with their values.",
    ]
    rows: dict[str, list[tuple[str, str]]] = {}
    for key, comment in COMMENTS.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not (section == "model" and config.model.preset and name != "preset"):
            rows.setdefault(section, []).append((to_yaml({name: value}).rstrip("\n"), comment))
    width = max(len(text) for found in rows.values() for text, _ in found)
    for section, found in rows.items():
        why = "  # a performance choice: every layout trains the same model" if section == "parallel" else ""
        lines += ["", f"{section}:{why}"]
        lines += [f"  {text:<{width}}  # {comment}" if comment else f"  {text}" for text, comment in found]
    return "\n".join(lines) + "\n"
