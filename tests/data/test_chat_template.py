"""Chat templates from elsewhere: they end, and reach nothing of the interpreter."""

import pytest

from threefold.data.chat_renderer import MOST_STEPS, ChatRenderer
from threefold.data.conversations import ChatTemplate
from threefold.errors import UserError

MESSAGES = [{"role": "user", "content": " hi "}, {"role": "assistant", "content": "yo"}]

ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops over a list": "{% set all = range(99999)|list %}{% for a in all %}"
    "{% for b in all %}{% endfor %}{% endfor %}",
    "filtered loops over a list": "{% set all = range(99999)|list %}{% for a in all %}"
    "{% for b in all if b < 0 %}{% endfor %}{% endfor %}",
    "loops that pass nothing": "{% for a in range(99999) if range(99999)|sum < 0 %}{% endfor %}",
    "filtered loops": "{% for a in range(99999) %}{% for b in range(99999) if false %}{% endfor %}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "calls": "{% set all = range(99999)|list %}{% for a in all %}{{ all|sum }}{% endfor %}",
    "slices": "{{ [1]|slice(10**12)|list|length }}",
    "powers": "{{ 10 ** (10 ** 9) }}",
    "products": "{{ 'a' * 10 ** 11 }}",
    "lists": "{{ 10 ** 11 * [1] }}",
}


def rendered(template: str) -> str:
    return ChatRenderer(ChatTemplate(template, (), "a.jinja")).render(MESSAGES, "a chat").text


@pytest.mark.parametrize("template", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_would_not_end_is_refused_after_so_many_steps(template: str) -> None:
    renderer = ChatRenderer(ChatTemplate(template, (), "a.jinja"))
    for _ in range(2):
        with pytest.raises(UserError, match=f"more than {MOST_STEPS:,} steps, as loops in loops do"):
            renderer.render(MESSAGES, "a chat")


def test_steps_are_those_of_one_rendering() -> None:
    """A loop over all messages for each of a thousand is far below the limit."""
    renderer = ChatRenderer(
        ChatTemplate("{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}.", (), "a.jinja")
    )
    for _ in range(3):
        assert renderer.render(MESSAGES * 500, "a chat").text == "."


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
def test_counting_changes_no_text(template: str, text: str) -> None:
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
