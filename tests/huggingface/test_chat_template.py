"""Chat templates from elsewhere: they end, fail in one sentence, and reach nothing of the interpreter."""

import ast
import tomllib
from pathlib import Path

import pytest

import threefold
from threefold.data.conversations import Chat, ChatTemplate
from threefold.data.encoding import DocumentEncoder
from threefold.data.tokenizer import TextEncoder, TextRule, opened
from threefold.errors import UserError
from threefold.huggingface.chat_renderer import ChatRenderer, Prefix
from threefold.huggingface.limited import Limits

MESSAGES = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yo"}]
TIGHT = Limits(seconds=0.1)
SMALL = Limits(memory=100_000_000)
_GIVEN = tomllib.loads((Path(__file__).parent / "data" / "templates.toml").read_text(encoding="utf-8"))
ENDLESS = {
    name: (template, limits, reason)
    for kind, limits, reason in (
        ("time", TIGHT, "it takes more than 0.1 seconds of processor time"),
        ("memory", SMALL, "it takes more than 100.0 MB of memory"),
    )
    for name, template in _GIVEN[kind].items()
}
FAILING = _GIVEN["failing"] | {
    "nested blocks": ("{% if a %}" * 3000 + "{% endif %}" * 3000, "maximum recursion depth exceeded"),
    "nested loops": ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
    "brackets": ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "maximum recursion depth exceeded"),
    "unary signs": ("{{ " + "-" * 20000 + "1 }}", ""),
}


def rendered(template: str) -> str:
    return ChatRenderer(ChatTemplate(template, (), "a.jinja")).render(MESSAGES, "a chat").text


@pytest.mark.parametrize(("template", "limits", "reason"), ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_would_not_end_or_takes_all_memory_is_refused(
    template: str, limits: Limits, reason: str
) -> None:
    with pytest.raises(UserError) as refused:
        ChatRenderer(ChatTemplate(template, (), "a.jinja"), limits).render(MESSAGES, "x.jsonl:1")
    assert str(refused.value) == f"x.jsonl:1 is refused by a.jinja ({reason})."


@pytest.mark.parametrize(("template", "reason"), FAILING.values(), ids=FAILING)
def test_whatever_fails_in_a_template_is_one_sentence(template: str, reason: str) -> None:
    with pytest.raises(UserError, match=r"a\.jinja") as refused:
        ChatRenderer(ChatTemplate(template, (), "a.jinja")).render(MESSAGES, "x.jsonl:1")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 400


def test_a_renderer_goes_on_after_a_conversation_that_it_refused() -> None:
    template = "{% for m in messages if m.content == 'loop' %}{% for a in range(99999) %}{% for b in range(99999) %}"
    template += "{% endfor %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    renderer = ChatRenderer(ChatTemplate(template, (), "a.jinja"), TIGHT)
    for content in ("a", "b"):
        assert renderer.render([{"role": "user", "content": content}], "a chat").text == content
        with pytest.raises(UserError, match="processor time"):
            renderer.render([{"role": "user", "content": "loop"}], "a chat")


def test_a_conversation_of_a_thousand_messages_is_rendered() -> None:
    """Also by a loop over all messages for each of them."""
    loops = "{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}."
    assert ChatRenderer(ChatTemplate(loops, (), "a.jinja")).render(MESSAGES * 500, "a chat").text == "."


def test_prefixes_of_a_conversation_are_compared_with_its_text() -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
    prefixes = [Prefix(1, (False,)), Prefix(1, (True,)), Prefix(1, (False, True)), Prefix(0, (False,))]
    found = ChatRenderer(ChatTemplate(template)).render(MESSAGES, "a chat", prefixes=prefixes)
    assert found.lengths == [4, -1, 4, 0]


def test_many_marked_answers_are_located_in_time_that_grows_with_the_text() -> None:
    """A template may mark each of a hundred thousand letters; looking through all tokens for each took an hour."""
    stored = '{"version": "1.0", "truncation": null, "padding": null, "added_tokens": [], "normalizer": null, '
    stored += (
        '"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"}, "behavior": "Isolated", "invert": false}, '
    )
    stored += '"post_processor": null, "decoder": null, "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, '
    stored += '"unk_token": "b"}}'
    template = "{% for i in range(50000) %}a{% generation %}{{ '' }}a{% endgeneration %}{% endfor %}"
    encoder = DocumentEncoder(TextEncoder(opened(stored), TextRule()), None, ChatTemplate(template))
    ids, counted = encoder.encode(Chat("x:1", tuple(MESSAGES)))
    assert (len(ids), counted) == (100_000, [False, True] * 50_000)


def test_templates_are_rendered_in_one_place() -> None:
    """Jinja is imported by the module of the child process alone."""
    package = Path(threefold.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        and any(
            name.partition(".")[0] == "jinja2"
            for name in (getattr(node, "module", None) or "", *(each.name for each in node.names))
        )
    }
    assert found == {"huggingface/template_sandbox.py"}


@pytest.mark.parametrize(("template", "text"), _GIVEN["rendered"].items())
def test_templates_render_as_in_jinja(template: str, text: str) -> None:
    assert rendered(template) == text


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "messages.append.__self__.__class__",
        "cycler.__init__.__globals__.os",
        "''|attr('__class__')|string",
        "'{0.__class__.__mro__}'.format(1)",
        "messages|map(attribute='__class__')|list",
        "strftime_now.__globals__.datetime",
        "raise_exception.__globals__.json",
        "dict.__call__.__globals__.json",
        "namespace.__init__.__globals__.json",
        "range.__class__.__base__.__subclasses__()",
        "lipsum.__globals__.os",
    ],
)
def test_a_template_reaches_nothing_of_the_interpreter(expression: str) -> None:
    try:
        text = rendered("{{ " + expression + " }}")
    except UserError:
        return
    assert text in ("", "['', '']", "[Undefined, Undefined]")
