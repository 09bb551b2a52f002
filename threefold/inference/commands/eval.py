"""`threefold eval`: perplexity or last-word accuracy of a trained model on texts."""

import json
import os
import secrets
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from typer import Option

from threefold import terminal
from threefold.errors import UserError
from threefold.files import first_bytes, shown
from threefold.inference.commands import options
from threefold.report.progress import Steps

if TYPE_CHECKING:
    from threefold.config import Config
    from threefold.inference.eval_tasks import EncodedTexts, EvalTask
    from threefold.inference.model import Model


def command(
    run: terminal.RunFolder,
    data: Path | None = Option(
        None,
        metavar="FILE",
        help="Texts to evaluate: JSON lines (.jsonl, also .gz or .zst) or plain text (.txt).",
        show_default="data.validation, as trained",
    ),
    task: Literal["perplexity", "lambada"] = Option(
        "perplexity", help="Metric; lambada is the accuracy on the last word of each text."
    ),
    key: str | None = Option(
        None,
        help="Key of the text, or of the messages, in a JSON line.",
        show_default="text; of data.validation, its own",
    ),
    stride: int | None = Option(None, help="Tokens between the starts of windows.", show_default="half the context"),
    context: int | None = Option(None, min=1, help="Context length, in tokens.", show_default="as trained"),
    batch_size: int = Option(8, min=1, help="Windows per batch of a replica.", rich_help_panel=options.LAYOUT),
    special_tokens: options.SpecialTokensName = None,
    loss_tokens: Literal["answers", "all"] | None = Option(
        None,
        help="Tokens whose loss counts in conversations, and in prompts with completions.",
        show_default="as the model was trained",
    ),
    dp: int = Option(
        1, min=1, help="Data-parallel replicas; each evaluates part of the windows.", rich_help_panel=options.LAYOUT
    ),
    step: terminal.Step = None,
    average: terminal.Average = False,
    custom_model: terminal.ModelFile = None,
    trust_code: terminal.TrustCode = False,
    tp: options.TensorRanks = 1,
    pp: options.PipelineRanks = 1,
    dtype: options.DtypeName = "fp32",
    device: options.DeviceName = "auto",
    json_file: Path | None = Option(None, "--json", metavar="FILE", help="Also write the metrics to FILE, as JSON."),
) -> None:
    """Evaluate the newest checkpoint of RUN on the texts of a file, on dp · tp · pp local processes or torchrun ranks.

    The metrics are the same in every layout.

    Examples:
      threefold eval runs/run --data held-out.jsonl
      threefold eval runs/run  # of a run with data.validation
      threefold eval runs/run --data lambada.jsonl --task lambada --dp 4
    """
    from threefold.comm.layout import Layout
    from threefold.inference.inputs import check_run, check_stride, read_texts, require_texts
    from threefold.inference.run import InferenceRun

    layout, file = Layout(dp, tp, pp), terminal.model_file(custom_model)
    config = check_run(run, layout)
    _check_context(context, config)
    if task == "lambada" and stride is not None:
        raise UserError(f"--stride is {stride} but --task lambada has one window per text; leave --stride out.")
    if stride is not None and config is not None:
        check_stride(stride, config.data.sequence_length if context is None else context)
    if data is None:
        data, key = _validation(run, config), key or (None if config is None else config.data.key)
    if json_file is not None:
        named, folder = f"--json {shown(json_file)}", json_file.parent
        if not folder.is_dir():
            raise UserError(f"{named} cannot be written: {shown(folder)} is not a folder; name one that is.")
        if json_file.is_dir():
            raise UserError(f"{named} is a folder; name a file, such as {shown(json_file / 'metrics.json')}.")
        if json_file.exists() and data.exists() and json_file.samefile(data):
            raise UserError(f"{named} is the file of --data; name another.")
        if json_file.is_file() and not _is_earlier_output(json_file):
            raise UserError(f"{named} exists already and is not an output of this command; name another file.")
    require_texts(data)
    inference = InferenceRun.prepare(run, layout, dtype, device, file, trust_code, average, step)  # imports torch
    from threefold.inference.eval_tasks import LastWord, Perplexity

    trained = inference.trained.config
    _check_context(context, trained)  # of the newest checkpoint that is good
    counted = loss_tokens or trained.data.loss_tokens
    length = trained.data.sequence_length if context is None else context
    between = (length + 1) // 2 if stride is None else stride
    chosen: EvalTask = LastWord(length) if task == "lambada" else Perplexity(length, between, counted)
    texts = read_texts(data, key or "text")
    with Steps("reading", len(texts)) as steps:
        work = chosen.prepare(inference.trained.documents(special_tokens), texts, steps.advance)
    about = {
        "run": str(run),
        **({"average": True} if average else {}),
        "step": inference.trained.checkpoint.step,  # unless loading finds it damaged
        "data": str(data),
        "task": task,
        "dtype": dtype,
        "layout": {"dp": dp, "tp": tp, "pp": pp},
        **vars(chosen),
    }
    inference.start(measure, chosen, work, batch_size, about, json_file)


def _validation(run: Path, config: "Config | None") -> Path:
    """Return the text of a run's `data.validation`, which the command evaluates unless it is given others."""
    from threefold.data.sources import is_json_lines

    name = None if config is None else config.data.validation
    if name is None:
        raise UserError(
            f"--data is missing, and {shown(run)} was trained without data.validation; give a file of texts."
        )
    if not is_json_lines(Path(name)):
        what = f"--data is missing, and data.validation is {shown(name)}, which is no file of texts here"
        raise UserError(f"{what}; give one.")
    return Path(name)


def _check_context(context: int | None, config: "Config | None") -> None:
    if context is None or config is None or config.model.position_embedding != "learned":
        return
    if context > (longest := config.model.max_position_embeddings):
        raise UserError(f"--context is {context} but the model has {longest} positions; use {longest} at most.")


def measure(
    model: "Model", task: "EvalTask", work: "EncodedTexts", batch_size: int, about: dict[str, Any], file: Path | None
) -> None:
    """Evaluate on all ranks and print on one."""
    from rich.console import Console

    from threefold.inference.eval_tasks import score

    if model.prints:
        terminal.print_warnings(model.trained.warnings)
    about["step"] = model.trained.checkpoint.step
    started = time.perf_counter()
    with Steps("measuring", len(work.windows), shown=model.prints) as steps:
        scores = score(model, work.texts, work.windows, batch_size, steps.advance, work.masks)
    seconds = time.perf_counter() - started
    if model.prints:
        metrics = task.metrics(work, scores)
        rows = []
        for metric in metrics:
            digits = "," if isinstance(metric.value, int) else ",.4f" if metric.value < 1e6 else ".4g"
            rows.append((metric.title, f"{metric.value:{digits}}", metric.unit))
        count = next(metric.value for metric in metrics if metric.name == "tokens")
        rows += [("time", f"{seconds:,.1f}", "s"), ("speed", f"{count / seconds:,.0f}", "evaluated tokens/s")]
        settings = ", ".join(f"{name} {about[name]}" for name in ("context", "stride") if name in about)
        title = f"{about['run']}, step {about['step']:,}, on {about['data']}: {about['task']}, {settings}"
        style: dict[str, Any] = {"box": None, "show_header": False, "pad_edge": False, "title_style": ""}
        made = terminal.table(("",) * 3, rows, "lrl", range(3), title=title, title_justify="left", **style)
        Console(highlight=False, soft_wrap=True).print(made)
        if file is not None:
            _write(file, about | {metric.name: metric.value for metric in metrics} | {"seconds": seconds})


def _is_earlier_output(path: Path) -> bool:
    """Return whether a file is empty or begins as those that `_write` writes."""
    begins = first_bytes(path, 20)
    return not begins or begins.startswith(b'{\n  "run": ')


def _write(path: Path, document: dict[str, Any]) -> None:
    """Write JSON; a complete file replaces an existing one atomically, unless that is a pipe or a device."""
    text = json.dumps(document, indent=2) + "\n"
    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        target = path.resolve()  # keeps a symbolic link
        partial = target.with_name(f".threefold-{secrets.token_hex(8)}")
        try:
            with partial.open("x", encoding="utf-8") as file:
                file.write(text)
            os.replace(partial, target)
        except BaseException:
            partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise UserError(f"--json {path} cannot be written ({error.strerror}); choose another file.") from None
