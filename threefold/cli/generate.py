"""`threefold generate`: text from a trained model."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from threefold.cli.options import DeviceName, DtypeName, PipelineRanks, RunFolder, SpecialTokensName, TensorRanks
from threefold.cli.streams import read_standard_input
from threefold.errors import OutputLost

if TYPE_CHECKING:
    from threefold.data.chat.messages import Conversation
    from threefold.inference.generate import GenerationRequest, Prompt
    from threefold.inference.model import Model


def generate(
    run: RunFolder,
    prompts: Annotated[
        list[str] | None,
        typer.Option("--prompt", help="Text to go on from; may be given many times.", show_default="standard input"),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Take each prompt as a user's message, and print the assistant's answer.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system's message before each.")] = None,
    prompts_file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="A prompt a line; of .jsonl, each line's key `prompt`, or its `messages`."),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to add to each prompt.")] = 100,
    temperature: Annotated[float, typer.Option(min=0, help="Below 1 safer, above 1 wilder; 0: the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among this many likeliest tokens; 0 for all.")] = 0,
    top_p: Annotated[float, typer.Option(min=0, max=1, help="Choose among the likeliest tokens of this mass.")] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="Seed of the choices.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts that are worked on at once.")] = 16,
    special_tokens: SpecialTokensName = None,
    show_special: Annotated[bool, typer.Option("--show-special", help="Print special tokens too.")] = False,
    tp: TensorRanks = 1,
    pp: PipelineRanks = 1,
    dtype: DtypeName = "fp32",
    device: DeviceName = "auto",
) -> None:
    """Write on from each prompt with the newest checkpoint of RUN, on tp · pp processes here or as ranks of torchrun.

    The layout changes nothing but the speed: a prompt, a seed and the options give the same text in each.
    """
    from threefold.comm.layout import Layout
    from threefold.inference.generate import GenerationRequest, encode_prompts, require_text
    from threefold.inference.prompt_files import read_prompts
    from threefold.inference.sampling import Sampling
    from threefold.launch.inference_run import InferenceRun

    if system is not None and not chat:
        raise typer.BadParameter("needs --chat", param_hint="--system")
    given = [*(prompts or ()), *(read_prompts(prompts_file) if prompts_file else ())]
    request = GenerationRequest(
        max_new_tokens, Sampling(temperature, top_k, top_p), seed, batch_size, special_tokens, show_special
    )
    inference = InferenceRun.prepare(run, Layout(tp=tp, pp=pp), dtype, device)
    given = given or [read_standard_input().rstrip("\n")]
    require_text(given)
    chosen = [_message(prompt, system) if chat and isinstance(prompt, str) else prompt for prompt in given]
    encode_prompts(inference.trained, chosen, request)  # so that what cannot be encoded is told before a rank starts
    inference.start(write, chosen, request)


def _message(prompt: str, system: str | None) -> "Conversation":
    from threefold.data.chat.messages import Conversation

    before = () if system is None else ({"role": "system", "content": system},)
    return Conversation("--prompt", (*before, {"role": "user", "content": prompt}))


def write(model: "Model", prompts: "list[Prompt]", request: "GenerationRequest") -> None:
    """Print the prompts and what follows them as it comes, in order: what comes for a later one waits.

    Of a conversation the answer alone is printed.
    """
    from threefold.inference.generate import generate_text

    shown, told = 0, {n: prompt if isinstance(prompt, str) else "" for n, prompt in enumerate(prompts)}
    ended: set[int] = set()
    lost: OutputLost | None = None

    def echo(text: str) -> None:
        nonlocal lost
        try:
            typer.echo(text, nl=False)
        except OutputLost as error:
            if model.mesh.is_alone:
                raise
            lost = error  # the other ranks count on this one to the end

    if model.speaks:
        for warning in model.trained.warnings:
            typer.echo(f"Warning: {warning}", err=True)
        echo(told.pop(0))
    for number, text in generate_text(model, prompts, request):
        if not model.speaks:
            continue
        if text is None:
            ended.add(number)
        elif number == shown:
            echo(text)
        else:
            told[number] += text
        while shown in ended:
            shown += 1
            echo("\n" + told.pop(shown, ""))
    if lost is not None:
        raise lost
