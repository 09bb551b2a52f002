"""`threefold checkpoint convert` and `average`: checkpoints in other formats, and the mean of several."""

from pathlib import Path
from typing import Literal

from typer import Option

from threefold.files import first_of, format_bytes
from threefold.report.commands.checkpoint import RunOrCheckpoint
from threefold.terminal import Bars, Overwrite, RunFolder, byte_size, print_table, print_warnings


def convert(
    path: RunOrCheckpoint,
    out: Path = Option(..., metavar="DIR", help="Folder to create; with --format threefold, a run folder."),
    format_: Literal["threefold", "safetensors", "torch", "dcp"] = Option(
        "threefold",
        "--format",
        help="threefold: a run with this checkpoint, in the newest version of the format; safetensors or torch: "
        "whole tensors for other programs; dcp: torch.distributed.checkpoint.",
    ),
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = Option(
        None, help="Data type of the weights.", show_default="as stored"
    ),
    weights_only: bool = Option(False, "--weights-only", help="Leave out the optimizer's state."),
    shard_size: str = Option(
        "5GB", metavar="SIZE", help="Largest tensor file, such as 500MB; torch writes a single file."
    ),
    overwrite: Overwrite = False,
) -> None:
    """Rewrite a checkpoint, or a run's newest good one, in another format, dtype or file size, or only its weights.

    Works tensor by tensor, so a model larger than memory can be converted. RUN is not changed.
    For a folder that transformers reads, use `threefold checkpoint export`.

    Examples:
      threefold checkpoint convert runs/run --out weights --format safetensors
    """
    from threefold.report.checkpoints import locate

    size = byte_size(shard_size, "--shard-size", "5GB")
    locate(path)
    from threefold.convert.checkpoints import Conversion, convert_checkpoint

    with Bars() as bars:
        made = convert_checkpoint(Conversion(path, out, format_, dtype, weights_only, size, overwrite), bars)
    print_warnings(made.warnings)
    facts = {
        "from": str(made.checkpoint),
        "after": f"{made.step:,} steps",
        "format": format_,
        "parameters": f"{made.parameters:,}, {', '.join(made.dtypes)}",
        "tensors": f"{made.tensors:,}, {format_bytes(made.bytes)}",
        "files": first_of(made.files, 1) if made.files else "none",
        "other files": ", ".join(made.others) or "none",
    }
    print_table(("written", str(out)), [*facts.items()])


def average(
    run: RunFolder,
    latest: int = Option(..., min=2, help="Number of checkpoints to average, the newest ones."),
    out: Path = Option(..., metavar="DIR", help="Run folder to create, with one checkpoint."),
    overwrite: Overwrite = False,
) -> None:
    """Average the weights of a run's latest checkpoints into a new run without optimizer state.

    generate, eval, export and train.init_from open it. Set checkpoint.keep to the number of checkpoints, or more.

    Examples:
      threefold checkpoint average runs/run --latest 5 --out runs/averaged
    """
    from threefold.report.checkpoints import locate

    locate(run)
    from threefold.convert.averaging import average_checkpoints

    with Bars() as bars:
        steps, tensors = average_checkpoints(run, latest, out, overwrite, bars)
    sizes = f"{len(tensors):,}, {format_bytes(sum(tensor.bytes for tensor in tensors.values()))}"
    print_table(("written", str(out)), [("mean of the steps", ", ".join(map(str, steps))), ("tensors", sizes)])
