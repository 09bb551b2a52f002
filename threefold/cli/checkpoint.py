"""`threefold checkpoint`: list, show, verify and convert checkpoints; import and export Hugging Face models."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from threefold.byte_sizes import format_bytes, parse_bytes
from threefold.cli.options import ModelFile, TrustCode, model_file, print_warnings

app = typer.Typer(
    help="List, show, verify and convert checkpoints; import and export Hugging Face models.", no_args_is_help=True
)

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Overwrite --out.")]
Place = Annotated[
    Path, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's folder, or that of one of its checkpoints.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON document instead of a table.")]


@app.command("list")
def list_(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder.")],
    as_json: AsJson = False,
) -> None:
    """List the checkpoints of RUN: step, time, size, samples consumed, state, and the layout that wrote each.

    A state is told without reading tensors: complete, damaged, partial, or diverged (set aside, as the loss was not
    finite). Exit status: 0, also where some are damaged; 2 if RUN is no run's folder.
    """
    from threefold.checkpoint.tools.locate import locate

    named = locate(run)
    from threefold.checkpoint.tools.listing import list_checkpoints  # imports torch, which errors need not wait for
    from threefold.cli.checkpoint_view import print_list

    found = list_checkpoints(named.run)
    if as_json:
        typer.echo(json.dumps([one.document() for one in found], indent=2))
    else:
        print_list(named.run, found)


@app.command()
def show(
    path: Place,
    pattern: Annotated[
        str | None,
        typer.Argument(metavar="[PATTERN]", help="Tensors to list: part of a name, or a pattern such as '*.mlp.*'."),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List the tensors: name, shape, dtype, size.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show what is in a checkpoint, of a run its newest good one: its run, the model, weights and optimizer state."""
    from threefold.checkpoint.tools.locate import locate

    named = locate(path)
    from threefold.checkpoint.tools.summary import choose, summarize_checkpoint
    from threefold.cli.checkpoint_view import print_summary, print_tensors

    summary = summarize_checkpoint(*choose(named))
    print_warnings(summary.warnings)
    with_tensors = tensors or pattern is not None
    if as_json:
        typer.echo(json.dumps(summary.document(pattern, with_tensors), indent=2))
    elif with_tensors:
        print_tensors(summary, pattern)
    else:
        print_summary(summary)


@app.command()
def verify(path: Place) -> None:
    """Compare every byte of a checkpoint, or of all checkpoints of a run, with the checksums it was written with.

    Exit status: 0 if all are as they were written; 1 if one is damaged, with a sentence that names the file; 2 if there
    is nothing to verify.
    """
    from threefold.checkpoint.tools.locate import locate

    named = locate(path)
    from threefold.checkpoint.errors import DamagedCheckpoint
    from threefold.checkpoint.tools.verification import to_verify, verify_checkpoint
    from threefold.cli.checkpoint_view import print_verified
    from threefold.cli.data_view import Bars

    damaged = False
    for checkpoint in to_verify(named):
        try:
            with Bars() as bars:
                verified = verify_checkpoint(checkpoint, bars)
        except DamagedCheckpoint as damage:
            damaged = True
            typer.echo(f"Error: {damage}", err=True)
        else:
            print_verified(checkpoint, verified)
    if damaged:
        raise typer.Exit(1)


@app.command()
def convert(
    path: Place,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to create; a run, with --format threefold.")],
    format_: Annotated[
        Literal["threefold", "safetensors", "torch", "dcp"],
        typer.Option(
            "--format",
            help="threefold: a run with this checkpoint, in the newest version of the format; safetensors or torch: "
            "whole tensors for other programs; dcp: torch.distributed.checkpoint.",
        ),
    ] = "threefold",
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64"] | None,
        typer.Option(help="Data type of the weights.", show_default="as they are stored"),
    ] = None,
    weights_only: Annotated[bool, typer.Option("--weights-only", help="Leave out the optimizer's state.")] = False,
    shard_size: Annotated[
        str, typer.Option(metavar="SIZE", help="Largest file of tensors, such as 500MB; torch writes one.")
    ] = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Write a checkpoint anew, of a run its newest good one: another format, dtype or file size, or the weights alone.

    Tensor by tensor, so that a model larger than memory is converted too.

    RUN stays as it is. `threefold checkpoint export` writes a folder that transformers reads.
    """
    from threefold.checkpoint.tools.locate import locate

    size = _bytes(shard_size)
    locate(path)
    from threefold.checkpoint.tools.conversion import Conversion, convert_checkpoint
    from threefold.cli.checkpoint_view import print_conversion
    from threefold.cli.data_view import Bars

    with Bars() as bars:
        made = convert_checkpoint(Conversion(path, out, format_, dtype, weights_only, size, overwrite), bars)
    print_warnings(made.warnings)
    print_conversion(out, made, format_)


@app.command("import")
def import_(
    source: Annotated[Path, typer.Argument(metavar="HF_DIR", help="Folder with config.json and safetensors files.")],
    out: Annotated[Path, typer.Option(metavar="RUN", help="Run folder to create.")],
    ignore: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY", help="Key of config.json to ignore, as it changes neither logits nor loss; may be repeated."
        ),
    ] = None,
    overwrite: Overwrite = False,
    allow_not_finite: Annotated[
        bool, typer.Option("--allow-not-finite", help="Import weights although some are NaN or infinite.")
    ] = False,
) -> None:
    """Import the model in HF_DIR as a run: GPT-2, Llama, Mistral, Qwen2, Qwen3, Mixtral, Qwen2-MoE or Qwen3-MoE."""
    from threefold.cli.data_view import Bars, print_table
    from threefold.huggingface.import_hf import Import, import_model

    with Bars() as bars:
        found = import_model(Import(source, out, tuple(ignore or ()), overwrite, allow_not_finite), bars)
    model = found.config.model
    experts = f", {model.num_experts} experts, {model.experts_per_token} active per token" if model.num_experts else ""
    print_table(
        (str(out), ""),
        [
            ("family", found.family),
            ("parameters", f"{found.parameters:,}"),
            ("layers", f"{model.num_layers} of width {model.hidden_size:,}{experts}"),
            ("vocabulary", f"{model.vocab_size:,} rows"),
            ("positions", f"{model.max_position_embeddings:,}"),
            ("weights", f"{', '.join(found.dtypes)}, {format_bytes(found.bytes)}"),
            ("tokenizer", "tokenizer.json" if found.tokenizer else "none in the folder"),
        ],
    )
    if found.tokenizer:
        typer.echo(f'Next: threefold generate {out} --prompt "..."')
        typer.echo(f"  or: threefold data prepare TEXT --tokenizer {out / 'tokenizer.json'} --out tokens")
        typer.echo(f"      threefold train {out / 'config.yaml'} --run-dir {out}-trained")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Run folder; its newest checkpoint is exported.")],
    out: Annotated[Path, typer.Option(metavar="HF_DIR", help="Folder to create.")],
    dtype: Annotated[
        Literal["fp32", "bf16", "fp16", "fp64"] | None,
        typer.Option(
            help="Data type of the weights.", show_default="the run's precision.dtype; of an imported model, its own"
        ),
    ] = None,
    model: ModelFile = None,
    trust_code: TrustCode = False,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file size, such as 500MB.")] = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Export the newest checkpoint of RUN in the format that transformers' from_pretrained reads.

    Of a model of your own: its weights under its own names, beside its file.
    """
    from threefold.cli.data_view import Bars, print_table
    from threefold.huggingface.export_hf import Export, export_model

    with Bars() as bars:
        made = export_model(Export(run, out, _bytes(shard_size), dtype, overwrite, model_file(model), trust_code), bars)
    print_warnings(made.warnings)
    print_table(
        (str(out), ""),
        [
            ("family", made.family),
            ("after", f"{made.step:,} steps"),
            ("parameters", f"{made.parameters:,}"),
            *((("layers", f"{blocks}"),) if (blocks := made.config.model.blocks) is not None else ()),
            ("weights", f"{made.dtype}, {format_bytes(made.bytes)}"),
            ("files", f"{made.files[0]}" + (f" and {len(made.files) - 1} more" if len(made.files) > 1 else "")),
            ("other files", ", ".join(made.texts)),
            *((("left out", f"{', '.join(made.left_out)}: used in training only"),) if made.left_out else ()),
        ],
    )


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--shard-size") from None
