"""Reference of the commands, from the command line itself; `docs/generate.py` writes it into the site."""

from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from threefold.cli.main import make_app

SIZE = {"terminal_width": 100, "max_content_width": 100}
"""Columns of the help texts."""


def described(command: Any, name: str, parent: Any = None) -> Iterator[tuple[str, str]]:
    """Yield the words that start a command and its help, then those of its subcommands."""
    context = command.context_class(command, info_name=name, parent=parent, **{**command.context_settings, **SIZE})
    yield context.command_path, command.get_help(context)
    for each in command.list_commands(context) if hasattr(command, "list_commands") else ():
        child = command.get_command(context, each)
        if not child.hidden:
            yield from described(child, each, context)


def page() -> str:
    """Each command with its help."""
    lines = []
    for words, text in described(get_command(make_app()), "threefold"):
        depth = min(len(words.split()), 3)
        lines += [f"{'#' * (depth + 1)} `{words}`", "", "```text", text.strip(), "```", ""]
    return "\n".join(lines)
