"""Options that `threefold generate` and `threefold eval` share, and the reading of standard input."""

import sys
from typing import Annotated, Final, Literal

from typer import Option

from threefold.errors import UserError

LAYOUT: Final = "Layout and device"
"""Group of options in help texts."""
TensorRanks = Annotated[int, Option("--tp", min=1, help="Tensor-parallel size.", rich_help_panel=LAYOUT)]
PipelineRanks = Annotated[int, Option("--pp", min=1, help="Pipeline-parallel size.", rich_help_panel=LAYOUT)]
DtypeName = Annotated[
    Literal["fp32", "bf16", "fp16", "fp64"],
    Option("--dtype", help="Data type of the weights and the computation.", rich_help_panel=LAYOUT),
]
SpecialTokensName = Annotated[
    Literal["parse", "text"] | None,
    Option(
        "--special-tokens",
        help="Whether text that spells a special token becomes that token (parse) or stays text (text), as "
        "untrusted input should.",
        show_default="as the model was trained",
    ),
]
DeviceName = Annotated[
    Literal["auto", "cpu", "cuda"],
    Option("--device", help="Device; auto uses GPUs if there is one per rank.", rich_help_panel=LAYOUT),
]


def read_standard_input() -> str:
    """Read all of standard input as UTF-8, whatever the locale; raise a `UserError` if it is not UTF-8."""
    source = getattr(sys.stdin, "buffer", None)
    if source is None:
        return sys.stdin.read()
    content: bytes = source.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(
            f"Standard input is not UTF-8 text (byte {error.start} is 0x{content[error.start]:02x}); convert it first, "
            "for example with `iconv -f latin1 -t utf-8`."
        ) from None
