"""Help texts: usage, description, examples, then options and commands in groups, in two columns."""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup
from typer.main import get_command, get_group

from threefold.doors import imported
from threefold.files import on_one_line, require_local

_KINDS: Final = {
    **dict.fromkeys(("int", "int range"), "N"),
    **dict.fromkeys(("float", "float range"), "X"),
    **dict.fromkeys(("str", "list[str]"), "TEXT"),
    "path": "PATH",
}
"""What stands for a value of an option without a metavar, by the type that Typer shows."""
_STATUS: Final = "\nExit status: "
_BRACES: Final = re.compile(r"^\{(.*)\}|^\[(\[.*\]\.\.\.)\]\.\.\.$")
"""Names of arguments in a usage, with the braces or the second brackets that Typer puts around them."""
_EXTRA: Final = re.compile(r"  \[([^\[]*)\]$")
_WORDS: Final = (
    (re.compile(r"([\d.]+)<=x<=([\d.]+)"), r"from \1 to \2"),
    (re.compile(r"x[<>]=[\d.]+"), ""),  # what nobody would type
    (re.compile(r"default: \((.*)\)"), r"default: \1"),
)
"""Patterns in what Typer adds to a help text, and their words."""


class HelpedCommand(TyperCommand):
    """Command whose options are in groups, those of their `rich_help_panel`, and whose paths are of this machine."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _describe(self, ctx, formatter)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [_BRACES.sub(r"\1\2", piece) for piece in super().collect_usage_pieces(ctx)]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        rest = super().parse_args(ctx, args)
        for param in self.params:  # each path of a command is one of this machine
            given = ctx.params.get(param.name)
            for value in given if isinstance(given, list | tuple) else (given,):
                if isinstance(value, Path):
                    named = param.display_name_raw if isinstance(param, TyperArgument) else max(param.opts, key=len)
                    require_local(value, str(named))
        return rest


class HelpedGroup(TyperGroup):
    """Group of commands, listed in groups, those of their `rich_help_panel`; its errors are fit for a terminal."""

    def make_context(self, *args: Any, **options: Any) -> Any:
        with _fit_for_terminal():
            return super().make_context(*args, **options)

    def invoke(self, ctx: Any) -> Any:
        with _fit_for_terminal():
            return super().invoke(ctx)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        _describe(self, ctx, formatter)
        panels: dict[str, list[tuple[str, str]]] = {}
        for name, panel, text in self.listed():
            panels.setdefault(panel, []).append((name, " ".join(text.split("\n\n")[0].split())))
        _write(formatter, panels)

    def listed(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, panel and help text of each command."""
        for name, command in self.commands.items():
            if not command.hidden:
                panel = getattr(command, "rich_help_panel", None)
                yield name, panel if isinstance(panel, str) else "Commands", command.help or ""


class CommandTable(Mapping[str, Any]):
    """Commands by name, each imported and built when it is used first.

    Args:
        table: command → its panel of the help, and the import path of its function or of the Typer app of its
            subcommands. A command of two words joins the subcommands of the first. A class `Parser` beside a function
            replaces Typer's parser of its arguments.
    """

    def __init__(self, table: Mapping[str, tuple[str, str]]) -> None:
        self._table, self._built = table, dict[str, Any]()

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = self._build(name)
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._table if " " not in name)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def listed(self) -> Iterator[tuple[str, str, str]]:
        """Yield name, panel and help text of each command; none is built."""
        for name in self:
            panel, path = self._table[name]
            found = imported(path)
            yield name, panel, (found.info.help if isinstance(found, typer.Typer) else found.__doc__) or ""

    def _build(self, name: str) -> Any:
        found = imported(self._table[name][1])
        if not isinstance(found, typer.Typer):
            app = CommandLine(add_completion=False)
            _add(app, name, found)
            return get_command(app)
        app = CommandLine(help=found.info.help)
        app.registered_commands = [*found.registered_commands]
        for words, (_, path) in self._table.items():
            if words.startswith(f"{name} "):
                _add(app, words.removeprefix(f"{name} "), imported(path))
        group = get_group(app)
        group.name = name
        return group


def _add(app: "CommandLine", name: str, function: Callable[..., Any]) -> None:
    app.command(name, cls=getattr(sys.modules[function.__module__], "Parser", None))(function)


def group_of(table: CommandTable) -> type[HelpedGroup]:
    """Return the class of a group with the commands of a table."""

    class TableGroup(HelpedGroup):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.commands: Any = table

        def listed(self) -> Iterator[tuple[str, str, str]]:
            return table.listed()

        def list_commands(self, ctx: Any) -> list[str]:
            return list(table)

    return TableGroup


@contextmanager
def _fit_for_terminal() -> Iterator[None]:
    """Shorten and escape what an error of parsing quotes of the command line; some errors show the help instead."""
    usage_error: Any = typer.BadParameter.__base__
    try:
        yield
    except usage_error as error:
        if type(error).show is usage_error.show:
            error.message = on_one_line(error.message)
        raise


class CommandLine(typer.Typer):
    """Command line, or subcommands of one command, with these help texts; takes the arguments of `typer.Typer`."""

    def __init__(self, *, cls: type[HelpedGroup] = HelpedGroup, **options: Any) -> None:
        settings = {"help_option_names": ["-h", "--help"], "max_content_width": 120}
        super().__init__(cls=cls, no_args_is_help=True, rich_markup_mode=None, context_settings=settings, **options)

    def command(self, name: str | None = None, *, cls: Any = None, **options: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=cls or HelpedCommand, **options)


def _describe(command: TyperCommand | TyperGroup, ctx: Any, formatter: Any) -> None:
    """Write usage, description, examples, arguments and options."""
    formatter.write_usage(ctx.command_path, " ".join(command.collect_usage_pieces(ctx)))
    examples = ""
    for paragraph in (command.help or "").strip().replace(_STATUS, f"\n{_STATUS}").split("\n\n"):
        if paragraph.startswith(("Example:", "Examples:")):
            examples = paragraph
        elif paragraph:
            formatter.write_paragraph()
            formatter.write_text(" ".join(paragraph.split()))
    if examples:
        heading, *lines = examples.splitlines()
        formatter.write_paragraph()
        formatter.write("\n".join([heading, *(f"  {line.strip()}" for line in lines)]) + "\n")
    panels: dict[str, list[tuple[str, str]]] = {}
    for param in command.get_params(ctx):
        if (record := param.get_help_record(ctx)) is None:
            continue
        argument = isinstance(param, TyperArgument)
        panel = getattr(param, "rich_help_panel", None) or ("Arguments" if argument else "Options")
        panels.setdefault(panel, []).append((_name(param, ctx), _readable(record[1], argument)))
    order = dict.fromkeys(["Arguments", "Options", *panels])
    _write(formatter, {panel: panels[panel] for panel in order if panel in panels})


def _name(param: Any, ctx: Any) -> str:
    """Return an option with the placeholder of its value, or the name of an argument."""
    if isinstance(param, TyperArgument):
        return str(param.display_name_raw)
    value = ""
    if not param.is_flag:
        shown = (param.metavar or param.display_type(ctx) or "").removeprefix("<").removesuffix(">")
        value = _KINDS.get(shown, shown)
    names = " / ".join(", ".join(sorted(each, key=len)) for each in (param.opts, param.secondary_opts) if each)
    return f"{names} {value}".rstrip()


def _readable(text: str, argument: bool) -> str:
    """Return a help text with Typer's additions in words; the usage shows which arguments are required."""
    if (found := _EXTRA.search(text)) is None:
        return text
    extra = found[1]
    for pattern, words in _WORDS:
        extra = pattern.sub(words, extra)
    told = "; ".join(part for part in extra.split("; ") if part and not (argument and part == "required"))
    return text[: found.start()] + (f" ({told})" if told else "")


def _write(formatter: Any, panels: dict[str, list[tuple[str, str]]]) -> None:
    """Write groups of rows, with one width of the first column."""
    longest = 30  # columns of the longest name that has its text beside it
    widths = [len(name) for rows in panels.values() for name, _ in rows]
    widest = max((width for width in widths if width <= longest - 2), default=0)
    for panel, rows in panels.items():
        with formatter.section(panel):
            formatter.write_dl([(name.ljust(widest), text) for name, text in rows], col_max=longest)
