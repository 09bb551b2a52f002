"""Parameters that several commands share."""

from pathlib import Path
from typing import Annotated, Literal

import typer

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; docs/config.md lists the settings.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override one setting; may be repeated."),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")]
TensorRanks = Annotated[int, typer.Option("--tp", min=1, help="Tensor-parallel size.")]
PipelineRanks = Annotated[int, typer.Option("--pp", min=1, help="Pipeline-parallel size.")]
DtypeName = Annotated[
    Literal["fp32", "bf16", "fp16", "fp64"],
    typer.Option("--dtype", help="Data type of the weights and the computation."),
]
SpecialTokensName = Annotated[
    Literal["parse", "text"] | None,
    typer.Option(
        "--special-tokens",
        help="Text that spells a special token becomes that token (parse), or stays text (text), as for untrusted "
        "input.",
        show_default="as the model was trained",
    ),
]
DeviceName = Annotated[
    Literal["auto", "cpu", "cuda"], typer.Option("--device", help="auto: GPUs if there is one per rank.")
]
