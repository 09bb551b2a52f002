"""Chat templates from elsewhere: they end, fail in one sentence, and reach nothing of the interpreter."""

import ast
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

TIME, MEMORY = "it takes more than 0.1 seconds of processor time", "it takes more than 100.0 MB of memory"
_DOUBLED = "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
_SQUARED = "{% set ns = namespace(x=3) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
_NESTED = "{% set ns = namespace(x=[]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
_ALL = "{% set all = range(99999)|list %}"
ENDLESS = {
    "loops in loops": ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", TIME),
    "loops over a list": (_ALL + "{% for a in all %}{% for b in all %}{% endfor %}{% endfor %}", TIME),
    "loops that pass nothing": ("{% for a in range(99999) if range(99999)|sum < 0 %}{% endfor %}", TIME),
    "macros": ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}", TIME),
    "calls": (_ALL + "{% for a in all %}{{ all|sum }}{% endfor %}", TIME),
    "counting": (_ALL + "{% for a in all %}{{ all.count(-1) }}{% endfor %}", TIME),
    "counting letters": ("{% set t = 'a' * 10**7 %}{% for a in range(99999) %}{{ t.count('b') }}{% endfor %}", TIME),
    "powers": ("{{ 10 ** (messages|length * 10**9) }}", TIME),
    "squares": (_SQUARED + "{{ ns.x > 1 }}", TIME),
    "lists in lists that are compared": (_NESTED + "{% set a = ns.x %}" + _NESTED + "{{ a == ns.x }}", TIME),
    "lists in lists that are printed": (_NESTED + "{{ ns.x }}", TIME),
    "lists in lists as JSON": (_NESTED + "{{ ns.x|tojson }}", TIME),
    "lists in lists that are visited": (
        "{% macro f(x) %}{% for a in x %}{{ f(a) }}{% endfor %}{% endmacro %}" + _NESTED + "{{ f(ns.x) }}",
        TIME,
    ),
    "slices": ("{{ messages|slice(10**12)|list|length }}", TIME),
    "doubled lists": (_DOUBLED, MEMORY),
    "doubled lists that are printed": (_DOUBLED + "{{ ns.x }}", MEMORY),
    "products": ("{{ 'a' * 10 ** 11 * messages|length }}", MEMORY),
    "lists": ("{{ 10 ** 11 * [1] }}", MEMORY),
    "padding": ("{{ messages[0].content|center(10**11) }}", MEMORY),
    "formats": ("{{ '%0100000000000d' % messages|length }}", MEMORY),
    "replaced text": (
        "{% set ns = namespace(x='aa') %}{% for i in range(99) %}{% set ns.x = ns.x.replace('a', 'aa') %}{% endfor %}",
        MEMORY,
    ),
}
FAILING = {
    "recursion": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "maximum recursion depth exceeded"),
    "nested blocks": ("{% if a %}" * 3000 + "{% endif %}" * 3000, "maximum recursion depth exceeded"),
    "nested loops": ("{% for a in [1] %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
    "brackets": ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "maximum recursion depth exceeded"),
    "unary signs": ("{{ " + "-" * 20000 + "1 }}", ""),
    "types": ("{{ 1 + 'a' }}", "unsupported operand type"),
    "undefined": ("{{ a.b.c }}", "'a' is undefined"),
    "zero": ("{{ 1 // 0 }}", ""),
    "a key": ("{{ {}.popitem() }}", ""),
    "an index": ("{{ messages[9].content }}", "has no element 9"),
    "a value": ("{{ 'a'|int(base=99) }}{{ 'x'.index('y') }}", "substring not found"),
    "a conversion": ("{{ (10 ** 9999)|string }}", "Exceeds the limit"),
    "an overflow": ("{{ 2.0 ** 99999 }}", ""),
    "another template": ("{% include 'a' %}", "no loader"),
    "a filter": ("{{ 1|nothing }}", "No filter named 'nothing'"),
    "its own refusal": ("{{ raise_exception('\n not\n so ') }}", "(not so)"),
    "a refusal without words": ("{{ raise_exception('') }}", "(TemplateError)"),
    "too much text": ("{% for a in range(70) %}{{ 'a' * 10**6 }}{% endfor %}", "it renders more than 67,108,864 char"),
}


def rendered(template: str) -> str:
    return ChatRenderer(ChatTemplate(template, (), "a.jinja")).render(MESSAGES, "a chat").text


@pytest.mark.parametrize(("template", "reason"), ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_would_not_end_or_takes_all_memory_is_refused(template: str, reason: str) -> None:
    limits = SMALL if reason == MEMORY else TIGHT
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


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{% if not loop.last %},{% endif %}{% endfor %}",
            "1/2,2/2",
        ),
        (
            "{% for m in messages if m.role == 'user' %}{{ loop.length }}{{ m.content|trim }}{% else %}no{% endfor %}",
            "1hi",
        ),
        ("{% for m in messages if m.role == 'tool' %}{{ m }}{% else %}no{% endfor %}", "no"),
        (
            "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
            "yo",
        ),
        (
            "{{ messages|map(attribute='role')|join('-') }}{{ 'ab' * 2 }}{{ 2 ** 3 }}{{ 3 * 4 }}",
            "user-assistantabab812",
        ),
        ("{% macro f(n) %}{{ n }}{% if n %}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(3) }}", "3210"),
        ("{{ 1700000000|string }}{{ none|default(1700000000) }}{{ 'a'|center(3) }}.", "1700000000None a ."),
        ("{% set ns = namespace(x=1) %}{% for i in range(4) %}{% set ns.x = ns.x * 2 %}{% endfor %}{{ ns.x }}", "16"),
        ("{% for a in [1, [2, [3]]] recursive %}{{ a if a is number else loop(a) }}{% endfor %}", "123"),
    ],
)
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
