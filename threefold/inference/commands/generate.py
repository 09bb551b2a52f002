"""`threefold generate`: generate text from a trained model."""

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from typer import Option

from threefold import terminal
from threefold.errors import OutputLost, UserError
from threefold.files import shown as shown_path
from threefold.foreign import open_nofollow
from threefold.inference.commands import options

if TYPE_CHECKING:
    from threefold.inference.generate import GenerationRequest
    from threefold.inference.inputs import Prompt
    from threefold.inference.model import Model


def command(
    run: terminal.RunFolder,
    prompts: list[str] | None = Option(
        None, "--prompt", help="Text to continue; may be repeated.", show_default="standard input"
    ),
    chat: bool = Option(False, "--chat", help="Treat each prompt as a user message, and print the assistant's answer."),
    system: str | None = Option(None, help="With --chat: the system message."),
    prompts_file: Path | None = Option(
        None, metavar="FILE", help="File with one prompt per line; in .jsonl, the line's key `prompt` or `messages`."
    ),
    max_new_tokens: int = Option(
        100, min=1, help="Largest number of tokens to generate per prompt.", rich_help_panel="Sampling"
    ),
    temperature: float = Option(0.8, min=0, help="Sampling temperature; 0 = greedy.", rich_help_panel="Sampling"),
    top_k: int = Option(0, min=0, help="Sample from the k most likely tokens; 0 = all.", rich_help_panel="Sampling"),
    top_p: float = Option(
        0.95, min=0, max=1, help="Nucleus (top-p) threshold; 1 = all tokens.", rich_help_panel="Sampling"
    ),
    seed: int = Option(0, min=0, help="Sampling seed.", rich_help_panel="Sampling"),
    batch_size: int = Option(16, min=1, help="Prompts per batch.", rich_help_panel=options.LAYOUT),
    special_tokens: options.SpecialTokensName = None,
    show_special: bool = Option(False, "--show-special", help="Also print special tokens."),
    keep: bool = Option(
        False, "--keep", help="Also append the texts to RUN/samples.jsonl, which threefold report shows."
    ),
    step: terminal.Step = None,
    average: terminal.Average = False,
    custom_model: terminal.ModelFile = None,
    trust_code: terminal.TrustCode = False,
    tp: options.TensorRanks = 1,
    pp: options.PipelineRanks = 1,
    dtype: options.DtypeName = "fp32",
    device: options.DeviceName = "auto",
) -> None:
    """Continue each prompt with the newest checkpoint of RUN, on tp · pp local processes or torchrun ranks.

    The layout changes only the speed: the same prompt, seed and options give the same text in every layout.

    Examples:
      threefold generate runs/run --prompt "In Python, a list"
      threefold generate runs/run --prompts-file prompts.txt --tp 2
    """
    from threefold.comm.layout import Layout
    from threefold.data.conversations import Chat
    from threefold.inference.inputs import check_run, read_prompts, require_text
    from threefold.inference.run import InferenceRun
    from threefold.report.record import SAMPLES_FILE

    if system is not None and not chat:
        raise UserError("--system goes only with --chat; give both, or leave --system out.")
    layout, file = Layout(tp=tp, pp=pp), terminal.model_file(custom_model)
    given = [*(prompts or ()), *(read_prompts(prompts_file) if prompts_file else ())]
    if given:
        require_text(given)
    check_run(run, layout)
    from threefold.inference.generate import GenerationRequest, Sampling, encode_prompts  # imports torch

    request = GenerationRequest(
        max_new_tokens, Sampling(temperature, top_k, top_p), seed, batch_size, special_tokens, show_special
    )
    inference = InferenceRun.prepare(run, layout, dtype, device, file, trust_code, average, step)
    given = given or [options.read_standard_input().rstrip("\n")]
    require_text(given)
    before = () if system is None else ({"role": "system", "content": system},)
    chosen = [
        Chat("--prompt", (*before, {"role": "user", "content": prompt})) if chat and isinstance(prompt, str) else prompt
        for prompt in given
    ]
    encode_prompts(inference.trained, chosen, request)  # raises encoding errors before any rank starts
    inference.start(write, chosen, request, run / SAMPLES_FILE if keep else None)


def write(model: "Model", prompts: "list[Prompt]", request: "GenerationRequest", kept_in: Path | None = None) -> None:
    """Print prompts and continuations as they are generated, in order, holding back the text of later prompts.

    For a conversation only the answer is printed. At the end a line for each prompt is appended to `kept_in`.
    """
    from threefold.inference.generate import generate_text

    shown, pending = 0, {n: prompt if isinstance(prompt, str) else "" for n, prompt in enumerate(prompts)}
    ended: set[int] = set()
    texts = dict.fromkeys(range(len(prompts)), "")
    lost: OutputLost | None = None

    def echo(text: str) -> None:
        nonlocal lost
        try:
            typer.echo(text, nl=False)
        except OutputLost as error:
            if model.mesh.is_alone:
                raise
            lost = error  # the other ranks need this one to the end

    if model.prints:
        terminal.print_warnings(model.trained.warnings)
        echo(pending.pop(0))
    for number, text in generate_text(model, prompts, request):
        if not model.prints:
            continue
        texts[number] += text or ""
        if text is None:
            ended.add(number)
        elif number == shown:
            echo(text)
        else:
            pending[number] += text
        while shown in ended:
            shown += 1
            echo("\n" + pending.pop(shown, ""))
    if kept_in is not None and model.prints:
        named = (prompt if isinstance(prompt, str) else prompt.messages[-1]["content"] for prompt in prompts)
        step = model.trained.checkpoint.step
        lines = [{"step": step, "prompt": prompt, "text": texts[number]} for number, prompt in enumerate(named)]
        try:
            with open(open_nofollow(kept_in, os.O_APPEND), "a", encoding="utf-8") as file:
                file.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        except OSError as error:
            raise UserError(
                f"{shown_path(kept_in)} cannot be written ({error.strerror}); generate without --keep."
            ) from None
    if lost is not None:
        raise lost
