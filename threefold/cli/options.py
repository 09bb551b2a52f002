"""Parameters that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; docs/config.md lists the settings.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set one setting; may be given many times."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a training run.")]
TensorRanks = Annotated[int, typer.Option("--tp", min=1, help="Ranks that each weight is split over.")]
PipelineRanks = Annotated[int, typer.Option("--pp", min=1, help="Pipeline stages that the layers are divided into.")]
DtypeName = Annotated[
    Literal["fp32", "bf16", "fp16", "fp64"], typer.Option("--dtype", help="What the weights are and are computed in.")
]
SpecialTokensName = Annotated[
    Literal["parse", "text"] | None,
    typer.Option(
        "--special-tokens",
        help="Text that spells a special token is that token (parse), or text like any other (text), as untrusted text "
        "should be.",
        show_default="as the model was trained",
    ),
]
DeviceName = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option("--device", help="auto: GPUs if there is one for each rank.")
]
