"""What generation and evaluation read and check before torch is imported: the checkpoint, the layout and the texts."""

from collections.abc import Sequence
from pathlib import Path

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import Damaged, SelectedCheckpoint, newest, select_checkpoint, usable_config
from threefold.comm.layout import Layout
from threefold.config import Config
from threefold.config.model import CUSTOM
from threefold.data.conversations import MESSAGES, PROMPT, Chat, Document
from threefold.data.sources import SourceReader, find_inputs, holds_preferences
from threefold.errors import UserError
from threefold.huggingface.conversations import conversation_of
from threefold.models.family import model_plan
from threefold.models.sharding import ModelPlan, check_tensor_axis

Prompt = str | Chat  # text to continue, or a conversation to answer


def find_checkpoint(run: Path, damaged: Damaged | None = None, step: str | None = None) -> SelectedCheckpoint:
    """Return the newest good checkpoint of a run, or that of a `step`, as `select_checkpoint` does."""
    return select_checkpoint(run, str(run), "; give the run folder of `threefold train`", damaged, step)


def check_run(run: Path, layout: Layout) -> Config | None:
    """Return the config of a run's newest checkpoint, None if damaged; a built-in model must support the layout."""
    if (saved := newest(run)) is None:
        return find_checkpoint(run).config
    try:
        config = usable_config(saved.path)
    except DamagedCheckpoint:
        return None
    if config.model.architecture != CUSTOM:
        check_layout(model_plan(config.model, config.data.sequence_length), layout)
    return config


def check_layout(plan: ModelPlan, layout: Layout) -> None:
    """Raise a `UserError` unless a model of a plan can be cut as a layout says."""
    check_tensor_axis(plan, layout.tp, "--tp")
    for key, unit in plan.units("tp").items():
        if not unit.fits(layout.tp):
            multiple = " or be a multiple of it" if unit.repeated else ""
            fits = plan.nearest_size("tp", layout.tp)
            raise UserError(
                f"--tp is {layout.tp} but must divide the model's {key} {unit.count}{multiple}; use {fits}."
            )
    layers = len(plan.layers)
    if layout.pp > layers:
        raise UserError(
            f"--pp is {layout.pp} but the model has {layers} layers, its embedding and its head included; "
            f"use {layers} at most."
        )


def check_stride(stride: int, context: int) -> None:
    """Raise a `UserError` unless windows of `context` tokens that start every `stride` tokens skip none."""
    if not 1 <= stride <= context:
        raise UserError(
            f"--stride is {stride} but must be between 1 and the context, {context}, as tokens between windows would "
            f"be skipped; use {min(max(1, stride), context)}."
        )


def require_text(prompts: Sequence[Prompt]) -> None:
    """Require at least one prompt. Raises UserError if there is no prompt, or one is empty or not UTF-8."""
    if not prompts or not all(prompts):
        raise UserError("--prompt is empty; give at least one character to continue.")
    for prompt in (prompt for prompt in prompts if isinstance(prompt, str)):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            code = ord(prompt[error.start])
            # Python represents a byte of the command line that is not UTF-8 as a surrogate.
            what = f"the byte 0x{code - 0xDC00:02x}" if 0xDC80 <= code <= 0xDCFF else f"half a character (U+{code:04X})"
            raise UserError(
                f"--prompt is not UTF-8 text: its character {error.start + 1} is {what}; give it as UTF-8."
            ) from None


def read_prompts(path: Path) -> list[Prompt]:
    """Read prompts from a file: JSON lines with the key `prompt` (.jsonl or .json, also .gz or .zst), or one per line.

    A list of messages under `prompt` or `messages` is a conversation to answer. Blank lines are skipped.
    """
    if not path.is_file():
        raise UserError(f"--prompts-file is {path}, which is not a file; give one that exists.")
    prompts: list[Prompt] = []
    if ".json" in path.name:
        reader = SourceReader(path, PROMPT, lambda _: None)
        for value, number in reader.objects():
            name = PROMPT if PROMPT in value or MESSAGES not in value else MESSAGES
            if isinstance(value.get(name), list):
                prompts.append(conversation_of(value[name], f"{path}:{number}", name))
            elif (text := reader.text_of(value, number)).strip():
                prompts.append(text)
    else:
        try:
            lines = path.read_text(encoding="utf-8-sig").split("\n")
        except OSError as error:
            raise UserError(f"--prompts-file {path} cannot be read ({error.strerror}).") from None
        except UnicodeDecodeError as error:
            raise UserError(f"--prompts-file {path} is not UTF-8 text (byte {error.start}).") from None
        prompts += [line.rstrip("\r") for line in lines if line.strip()]
    if not prompts:
        raise UserError(f"--prompts-file {path} has no prompt; give one per line.")
    return prompts


def require_texts(path: Path) -> None:
    """Raise a `UserError` unless a path of texts to evaluate is a file."""
    if not path.is_file():
        raise UserError(f"--data is {path}, which is not a file; give one that exists.")


def read_texts(path: Path, key: str) -> list[Document]:
    """Read the non-blank texts to evaluate: documents of a .txt file, or JSON lines with texts under `key` or chats."""
    require_texts(path)
    (found,) = find_inputs([path])
    if holds_preferences(found, key):
        raise UserError(
            f"--data {path} holds chosen and rejected answers, whose loss a run evaluates (train.eval_every); give "
            "texts, conversations, or prompts with completions."
        )
    if not (texts := list(SourceReader(found, key, lambda _: None))):
        raise UserError(f"--data {path} has no text; give one JSON object per line, with the text under {key!r}.")
    return texts
