"""Rendering of conversations by chat templates: Jinja in a sandbox whose steps are counted."""

import json
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import wraps
from typing import Any, Final, NamedTuple

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from threefold.data.conversations import ChatTemplate, Message
from threefold.errors import UserError

MOST_STEPS: Final = 2_000_000
"""Maximum steps per rendering; visiting all messages for each of a thousand messages takes a million."""


class _Answers(jinja2.ext.Extension):
    """Jinja tags `{% generation %}` … `{% endgeneration %}`, which enclose the text that the assistant generates."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        environment: Any = self.environment
        text, start = caller(), len("".join(environment.blocks))
        environment.spans.append((start, start + len(text)))
        return text


class _Dict:
    """`dict` for templates, without access from a class into the interpreter."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """Jinja namespace without names that begin with an underscore, which give access to the interpreter."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # so that `namespace(self=...)` works
        self, *given = args
        names = dict(*given, **kwargs)
        for name in names:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: Any) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja sandbox for chat templates that limits each rendering to `MOST_STEPS` steps.

    It counts steps instead of seconds, so that a template is rejected on every machine or on none. Steps are loop
    iterations, calls of macros and functions, items that filters visit, sizes given to them, and items that `*`
    creates.
    """

    intercepted_binops = frozenset(("*", "**"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, jinja2.ext.loopcontrols])
        self.begin()
        sized = ("batch", "slice", "center", "indent")  # filters whose output size is given by a number
        self.filters = {name: self._counted(function, name in sized) for name, function in self.filters.items()}
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]  # makes text of any length
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: datetime.now().strftime(format),
            "dict": _Dict(),
            "namespace": _Namespace,
        }

    def begin(self) -> None:
        """Begin a rendering, which gives `blocks` of text, and `spans` of it that the assistant generates."""
        self._steps = 0
        self.blocks: list[str] = []
        self.spans: list[tuple[int, int]] = []

    @property
    def step(self) -> bool:
        """True; counts a step when read. Compiled templates read it in loops, because calls are slow in the sandbox."""
        self.take()
        return True

    def take(self, steps: int = 1) -> None:
        """Count steps. Raises TemplateRuntimeError if the limit is exceeded."""
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise jinja2.exceptions.TemplateRuntimeError(
                f"it takes more than {MOST_STEPS:,} steps, as loops in loops do; write it with fewer"
            )

    def call(self, context: Any, function: Any, *args: Any, **kwargs: Any) -> Any:
        self.take(5)  # a call takes about as long as five steps
        found = super().call(context, function, *args, **kwargs)
        if isinstance(found, range):
            self.take(len(found))
        return found

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int) and right > 0:
            self.take(left.bit_length() * right)
        elif operator == "*":
            if isinstance(left, int) and isinstance(right, int):
                self.take((left.bit_length() + right.bit_length()) >> 10)
            for items, number in ((left, right), (right, left)):
                if isinstance(items, str | list | tuple) and isinstance(number, int):
                    self.take(len(items) * max(0, number))
        return super().call_binop(context, operator, left, right)

    def _generate(self, source: jinja2.nodes.Template, *args: Any, **kwargs: Any) -> str:
        found: Iterator[jinja2.nodes.For | jinja2.nodes.Macro] = source.find_all((jinja2.nodes.For, jinja2.nodes.Macro))
        for node in list(found):
            step = jinja2.nodes.EnvironmentAttribute("step").set_lineno(node.lineno)
            if isinstance(node, jinja2.nodes.For) and node.test is not None:  # evaluated also for filtered-out items
                node.test = jinja2.nodes.And(step, node.test).set_lineno(node.lineno)
            else:
                node.body.insert(0, jinja2.nodes.ExprStmt(step).set_lineno(node.lineno))
        source.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def _counted(self, function: Callable[..., Any], is_sized: bool) -> Callable[..., Any]:
        """Wrap a filter so that it counts the items it visits, and the sizes it is given if `is_sized`."""

        @wraps(function)  # keeps the attributes by which Jinja passes the environment or the context
        def counted(*args: Any, **kwargs: Any) -> Any:
            for each in (*args, *kwargs.values()):
                if isinstance(each, int):
                    self.take(abs(each) if is_sized else 0)
                elif isinstance(each, list | tuple | dict):
                    self.take(len(each))
                elif isinstance(each, str):
                    self.take(len(each) >> 10)
            return function(*args, **kwargs)

        return counted


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # unlike Jinja's own filter, without HTML escapes
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Rendered(NamedTuple):
    """A conversation as text, and the spans (start, end) that the template marks as generated by the assistant."""

    text: str
    generated: list[tuple[int, int]]


class ChatRenderer:
    """Compiled chat template. Raises UserError if its syntax is wrong."""

    def __init__(self, template: ChatTemplate) -> None:
        self.template = template
        try:
            self._environment = TemplateEnvironment()
            self._compiled = self._environment.from_string(template.template)
        except jinja2.TemplateError as error:
            raise UserError(f"{template.origin} is not a chat template that can be used ({_reason(error)}).") from None

    def render(
        self, messages: Sequence[Message], where: str, tools: Sequence[Any] | None = None, prompted: bool = False
    ) -> Rendered:
        """Render a conversation as text, with the prompt for the assistant's next turn if `prompted`."""
        values = {
            **dict(self.template.special_tokens),
            "messages": [_aliased(message) for message in messages],
            "tools": list(tools) if tools is not None else None,
            "documents": None,
            "add_generation_prompt": prompted,
        }
        try:
            self._environment.begin()
            for block in self._compiled.generate(values):
                self._environment.blocks.append(block)
        except Exception as error:  # a template is a program: it may fail in any way
            raise UserError(f"{where} is refused by {self.template.origin} ({_reason(error)}).") from None
        return Rendered("".join(self._environment.blocks), self._environment.spans)


def _aliased(message: Message) -> dict[str, Any]:
    """Return a message without empty keys, its reasoning under every name that templates read."""
    message = {key: value for key, value in message.items() if value is not None}
    names = ("reasoning_content", "thinking", "reasoning")
    reasoning = next((message[key] for key in names if key in message), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _reason(error: Exception) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
