"""What chat templates are compiled in and may call: Jinja's sandbox, with the functions and tags of transformers."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class _Answers(jinja2.ext.Extension):
    """`{% generation %}` … `{% endgeneration %}`: around what the assistant generates."""

    tags = {"generation"}  # noqa: RUF012

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        environment.extend(track_answers=self._track)
        self._blocks: list[str] | None = None
        self._spans: list[tuple[int, int]] = []

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        text = caller()
        if self._blocks is not None:
            start = len("".join(self._blocks))
            self._spans.append((start, start + len(text)))
        return text

    @contextmanager
    def _track(self, blocks: list[str], spans: list[tuple[int, int]]) -> Iterator[None]:
        self._blocks, self._spans = blocks, spans
        try:
            yield
        finally:
            self._blocks, self._spans = None, []


class _Dict:
    """`dict` for templates, without the ways from a class into the interpreter."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


class _Namespace(jinja2.utils.Namespace):
    """A namespace without names that begin with an underscore, which lead into the interpreter."""

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


def template_environment() -> jinja2.Environment:
    """A new one."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Answers, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
