"""`threefold checkpoint`: import and export Hugging Face models."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from threefold.byte_sizes import format_bytes, parse_bytes
from threefold.cli.options import ModelFile, model_file, print_warnings

app = typer.Typer(help="Import and export Hugging Face models.", no_args_is_help=True)

Overwrite = Annotated[bool, typer.Option("--overwrite", help="Overwrite --out.")]


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
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Largest file size, such as 500MB.")] = "5GB",
    overwrite: Overwrite = False,
) -> None:
    """Export the newest checkpoint of RUN in the format that transformers' from_pretrained reads.

    Of a model of your own: its weights under its own names, beside its file.
    """
    from threefold.cli.data_view import Bars, print_table
    from threefold.huggingface.export_hf import Export, export_model

    with Bars() as bars:
        made = export_model(Export(run, out, _bytes(shard_size), dtype, overwrite, model_file(model)), bars)
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
