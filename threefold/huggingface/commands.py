"""`threefold checkpoint import` and `threefold checkpoint export`: models of Hugging Face."""

from pathlib import Path
from typing import Literal

import typer
from typer import Argument, Option

from threefold.doors import call_hook, needed
from threefold.errors import UserError
from threefold.files import first_of, format_bytes
from threefold.terminal import (
    Average,
    Bars,
    ModelFile,
    Overwrite,
    Step,
    TrustCode,
    byte_size,
    model_file,
    print_table,
    print_warnings,
)


def import_(
    source: str = Argument(
        ...,
        metavar="HF_DIR|ID",
        help="Folder with config.json and safetensors files; or, with the package huggingface_hub, a model's id on "
        "the Hugging Face hub, such as meta-llama/Llama-3.2-1B; or a folder of checkpoints of Megatron-LM.",
    ),
    out: Path = Option(..., metavar="RUN", help="Run folder to create."),
    ignore: list[str] | None = Option(
        None,
        metavar="KEY",
        help="Key of config.json to ignore, as it changes neither logits nor loss; may be repeated.",
    ),
    adapter: Path | None = Option(
        None, metavar="DIR", help="Folder of a LoRA adapter of the model, in the format of PEFT, to import with it."
    ),
    overwrite: Overwrite = False,
    allow_not_finite: bool = Option(
        False, "--allow-not-finite", help="Import weights although some are NaN or infinite."
    ),
) -> None:
    """Import a Hugging Face model as a run: GPT-2, Llama, Mistral, Mixtral, Qwen2, Qwen3, their mixtures, or DeepSeek.

    A checkpoint of Megatron-LM (torch_dist or mp_rank_*; GPT or Llama) becomes a run that goes on with its Adam.

    Examples:
      threefold checkpoint import models/gpt2 --out runs/gpt2
      threefold checkpoint import meta-llama/Llama-3.2-1B --out runs/llama
      threefold checkpoint import models/llama --adapter lora --out runs/lora
    """
    if call_hook("is_megatron", source):
        if adapter is not None or ignore:
            raise UserError(f"{source} is of Megatron-LM, so leave out --adapter and --ignore.")
        call_hook("import_megatron", source, out, overwrite, allow_not_finite)
        return
    from threefold.huggingface.source import check_import

    folder = check_import(source, out, overwrite)
    from threefold.huggingface.import_hf import Import, import_model  # imports torch

    with Bars() as bars:
        name = None if folder == Path(source) else source
        found = import_model(Import(folder, out, tuple(ignore or ()), overwrite, allow_not_finite, adapter, name), bars)
    model = found.config.model
    experts = f", {model.num_experts} experts, {model.experts_per_token} active per token" if model.num_experts else ""
    facts = {
        "family": found.family,
        "parameters": f"{found.parameters:,}",
        "layers": f"{model.num_layers} of width {model.hidden_size:,}{experts}",
        "vocabulary": f"{model.vocab_size:,} rows",
        "positions": f"{model.max_position_embeddings:,}",
        "weights": f"{', '.join(found.dtypes)}, {format_bytes(found.bytes)}",
        "tokenizer": "tokenizer.json" if found.tokenizer else "none in the folder",
    }
    if found.config.adapter.rank:
        settings = found.config.adapter
        facts["adapter"] = f"rank {settings.rank} of {first_of(settings.targets or (), 7)}"
    print_table((str(out), ""), [*facts.items()])
    if found.tokenizer:
        typer.echo(f'Next: threefold generate {out} --prompt "..."')
        typer.echo(f"  or: threefold data prepare TEXT --tokenizer {out / 'tokenizer.json'} --out tokens")
        typer.echo(f"      threefold train {out / 'config.yaml'} --run-dir {out}-trained")


def export(
    run: Path = Argument(..., metavar="RUN", help="Run folder."),
    out: Path = Option(..., metavar="HF_DIR", help="Folder to create."),
    dtype: Literal["fp32", "bf16", "fp16", "fp64"] | None = Option(
        None, help="Data type of the weights.", show_default="the run's precision.dtype, or an imported model's own"
    ),
    step: Step = None,
    average: Average = False,
    model: ModelFile = None,
    trust_code: TrustCode = False,
    shard_size: str = Option("5GB", metavar="SIZE", help="Largest file size, such as 500MB."),
    format_: Literal["huggingface", "megatron"] = Option(
        "huggingface", "--format", help="megatron: Megatron-LM's torch_dist, for a gpt or a llama; weights alone."
    ),
    adapter: bool = Option(False, "--adapter", help="Export the adapters (LoRA) alone, in the format of PEFT."),
    base: str | None = Option(
        None,
        metavar="HF_DIR|ID",
        help="With --adapter: the model that PEFT adds them to.",
        show_default="what the model was imported from",
    ),
    overwrite: Overwrite = False,
) -> None:
    """Export the newest checkpoint of RUN in the format that transformers' from_pretrained reads.

    Adapters are merged into the weights. For a model of your own, the weights keep their names, beside a copy of its
    file.

    Examples:
      threefold checkpoint export runs/run --out hf --dtype bf16
      threefold checkpoint export runs/tuned --adapter --out adapter
    """
    from threefold.huggingface.source import check_export

    size, file = byte_size(shard_size, "--shard-size", "5GB"), model_file(model)
    check_export(run, out, overwrite)
    if format_ == "megatron":
        if adapter or base is not None or file is not None:
            raise UserError("--format megatron writes a gpt or a llama; leave out --adapter, --base and --model.")
        needed("export_megatron", "--format megatron", "convert")(run, out, dtype, overwrite, average, step)
        return
    if adapter:
        _export_adapter(run, out, dtype, overwrite, average, step, base)
        return
    if base is not None:
        raise UserError(f"--base is {base}, which a merged model does not name; give it with --adapter.")
    from threefold.huggingface.export_hf import Export, export_model  # imports torch

    with Bars() as bars:
        made = export_model(Export(run, out, size, dtype, overwrite, file, trust_code, average, step), bars)
    print_warnings(made.warnings)
    blocks, left_out = made.config.model.blocks, ", ".join(made.left_out)
    facts = {
        "family": made.family,
        "after": f"{made.step:,} steps",
        "parameters": f"{made.parameters:,}",
        "layers": "" if blocks is None else str(blocks),
        "weights": f"{made.dtype}, {format_bytes(made.bytes)}",
        "files": first_of(made.files, 1),
        "other files": ", ".join(made.texts),
        "left out": f"{left_out}: used in training only" if left_out else "",
    }
    shown_facts = [(name, fact) for name, fact in facts.items() if fact or name not in ("layers", "left out")]
    print_table((str(out), ""), shown_facts)


def _export_adapter(
    run: Path, out: Path, dtype: str | None, overwrite: bool, average: bool, step: str | None, base: str | None
) -> None:
    from threefold.huggingface.peft_format import export_adapter  # imports torch

    made = export_adapter(run, out, dtype, overwrite, average, step, base)
    print_warnings(made.warnings)
    facts = {
        "family": made.family,
        "after": f"{made.step:,} steps",
        "layers": f"{made.layers}: {first_of(made.targets, 7)}",
        "parameters": f"{made.parameters:,}",
    }
    print_table((str(out), ""), [*facts.items()])
