"""Rendering of chat templates in a sandbox of Jinja; runs in the child process of `chat_renderer`."""

import json
import os.path
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from threefold.constants import LONGEST_DOCUMENT


class _Answers(jinja2.ext.Extension):
    """Jinja tags `{% generation %}` … `{% endgeneration %}`, which enclose the text that the assistant generates."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        environment: Any = self.environment
        text, start = caller(), environment.characters
        if text:
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


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja environment of transformers' chat templates."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, jinja2.ext.loopcontrols])
        self.characters = 0  # rendered so far
        self.spans: list[tuple[int, int]] = []  # of them, those that the assistant generates
        self.filters["tojson"] = _to_json
        del self.globals["lipsum"]  # makes random text
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: datetime.now().strftime(format),
            "dict": _Dict(),
            "namespace": _Namespace,
        }


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


class Sandbox:
    """Compiled chat template. `setup` has the `template` and its `special_tokens` by name.

    Called with a request (`messages`, `tools`, whether the text is `prompted`, and `prefixes`), it returns the rendered
    `text`, the spans of it that the assistant `generated`, and a length for each prefix. A prefix names the number of
    the first messages, and whether they are rendered with the prompt: its length is that of the text that all of these
    renderings have in common with each other and, at its beginning, with the whole `text`; -1 if they have less.
    """

    def __init__(self, setup: dict[str, Any]) -> None:
        self._environment = _Environment()
        self._special_tokens = setup["special_tokens"]
        self._template = self._environment.from_string(setup["template"])

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        messages, tools = request["messages"], request["tools"]
        text = self._render(messages, tools, request["prompted"])
        generated, lengths = self._environment.spans, []
        for count, prompts in request["prefixes"]:
            texts = [self._render(messages[:count], tools, prompted) for prompted in prompts]
            common = os.path.commonprefix(texts)  # noqa: RUF071 (of characters)
            lengths.append(len(common) if text.startswith(common) else -1)
        return {"text": text, "generated": generated, "lengths": lengths}

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None, prompted: bool) -> str:
        environment, blocks = self._environment, list[str]()
        environment.characters, environment.spans = 0, []
        values = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": prompted}
        for block in self._template.generate({**self._special_tokens, **values}):
            blocks.append(block)
            environment.characters += len(block)
            if environment.characters > LONGEST_DOCUMENT:
                raise jinja2.TemplateError(f"it renders more than {LONGEST_DOCUMENT:,} characters")
        return "".join(blocks)
