"""`threefold chat`: a conversation with a trained model, in a terminal or line by line from standard input."""

import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import typer
from typer import Option

from threefold import terminal
from threefold.data.conversations import utf8
from threefold.errors import UserError
from threefold.inference.commands import options
from threefold.output import SILENT

if TYPE_CHECKING:
    from threefold.inference.conversation import Conversation
    from threefold.inference.generate import GenerationRequest
    from threefold.inference.model import Model

_RESET: Final = "/reset"
_SAMPLING: Final = "Sampling"


def command(
    run: terminal.RunFolder,
    system: str | None = Option(None, help="System message, with which the conversation begins."),
    chat_template: Path | None = Option(
        None, help="Chat template, .jinja or tokenizer_config.json.", show_default="the one of the model"
    ),
    max_new_tokens: int = Option(500, min=1, help="Largest number of tokens of an answer.", rich_help_panel=_SAMPLING),
    temperature: float = Option(0.8, min=0, help="Sampling temperature; 0 = greedy.", rich_help_panel=_SAMPLING),
    top_k: int = Option(0, min=0, help="Sample from the k most likely tokens; 0 = all.", rich_help_panel=_SAMPLING),
    top_p: float = Option(
        0.95, min=0, max=1, help="Nucleus (top-p) threshold; 1 = all tokens.", rich_help_panel=_SAMPLING
    ),
    seed: int = Option(0, min=0, help="Sampling seed.", rich_help_panel=_SAMPLING),
    special_tokens: options.SpecialTokensName = None,
    step: terminal.Step = None,
    average: terminal.Average = False,
    custom_model: terminal.ModelFile = None,
    trust_code: terminal.TrustCode = False,
    dtype: options.DtypeName = "fp32",
    device: options.DeviceName = "auto",
) -> None:
    """Talk to the newest checkpoint of RUN, or to a model exported in Hugging Face's format, in this process.

    On a terminal, /reset forgets the conversation, Ctrl-C ends an answer, and Ctrl-D the program. Without a terminal,
    each line of standard input is a message, and each answer is printed.

    Examples:
      threefold chat runs/tuned --system "Answer in one sentence."
      threefold chat exported --temperature 0
    """
    from threefold.comm.layout import Layout
    from threefold.inference.inputs import check_run
    from threefold.inference.run import InferenceRun

    layout, file = Layout(), terminal.model_file(custom_model)
    with _as_run(run) as folder:
        check_run(folder, layout)
        from threefold.inference.generate import GenerationRequest, Sampling  # imports torch

        sampling = Sampling(temperature, top_k, top_p)
        request = GenerationRequest(max_new_tokens, sampling, seed, special_tokens=special_tokens)
        inference = InferenceRun.prepare(folder, layout, dtype, device, file, trust_code, average, step)
        trained = replace(inference.trained, chat_template=chat_template)
        if trained.template is None:
            raise UserError(
                f"{run} has no chat template, which says how a conversation is written; give one with --chat-template "
                "(.jinja or tokenizer_config.json), or continue plain text with threefold generate."
            )
        replace(inference, trained=trained).start(talk, request, system)


@contextmanager
def _as_run(folder: Path) -> Iterator[Path]:
    """Yield a run folder: `folder` itself or, if it is a model of Hugging Face, a run that is made of it for the time.

    The copy takes the disk space of the model, in the folder of temporary files.
    """
    if not (folder / "config.json").is_file():
        yield folder
        return
    from threefold.huggingface.import_hf import Import, import_model
    from threefold.huggingface.source import check_import

    with TemporaryDirectory(prefix="threefold-chat-") as made:
        out = Path(made) / folder.resolve().name
        source = check_import(str(folder), out, False)
        with terminal.Bars() if sys.stdin.isatty() else nullcontext(SILENT) as progress:
            import_model(Import(source, out), progress)
        yield out


def talk(model: "Model", request: "GenerationRequest", system: str | None) -> None:
    """Answer each message until the input ends."""
    from threefold.inference.conversation import Conversation

    terminal.print_warnings(model.trained.warnings)
    conversation = Conversation(model, request, system)
    if not sys.stdin.isatty():
        for line in _lines():
            _say(conversation, line)
        return
    with suppress(ImportError):
        import readline  # noqa: F401  (edits the line that `input` reads)
    step = model.trained.checkpoint.step
    typer.echo(f"Step {step:,}. {_RESET} forgets the conversation, Ctrl-C ends an answer, and Ctrl-D the program.")
    while True:
        try:
            message = utf8(input("> "))
        except EOFError:
            typer.echo()
            return
        except KeyboardInterrupt:
            typer.echo("\nCtrl-D ends the program.")
            continue
        try:
            _say(conversation, message)
        except KeyboardInterrupt:
            typer.echo()
        except UserError as error:
            typer.echo(str(error), err=True)


def _say(conversation: "Conversation", message: str) -> None:
    """Print the answer to a message as it is generated."""
    if message.strip() == _RESET:
        conversation.reset()
    elif message.strip():
        with closing(conversation.answer(message)) as pieces:
            for piece in pieces:
                typer.echo(piece, nl=False)
        if conversation.forgotten:
            typer.echo(
                f"\n({conversation.forgotten} earlier messages no longer fit into the context.)", err=True, nl=False
            )
        typer.echo()


def _lines() -> Iterator[str]:
    """Yield the lines of standard input, which is UTF-8 whatever the locale."""
    for number, line in enumerate(getattr(sys.stdin, "buffer", sys.stdin), start=1):
        try:
            yield (line.decode("utf-8-sig") if isinstance(line, bytes) else line).rstrip("\r\n")
        except UnicodeDecodeError:
            raise UserError(
                f"Line {number} of standard input is not UTF-8 text; convert it first, for example with "
                "`iconv -f latin1 -t utf-8`."
            ) from None
