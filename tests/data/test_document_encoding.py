"""Conversations and pairs as tokens, and what counts of them, against transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.support.chats import (
    CHATML,
    TEMPLATES,
    TURN_END,
    conversations,
    transformers_tokenizer,
    write_tokenizer,
)
from threefold.data.conversations import Chat, ChatTemplate, Completion
from threefold.data.encoding import DocumentEncoder
from threefold.data.tokenizer import TextEncoder, TextRule
from threefold.errors import UserError
from threefold.huggingface.conversations import beside, chat_of


def encoder(file: Path, special_tokens: Any = "parse", template: ChatTemplate | None = None) -> DocumentEncoder:
    tokenizer = Tokenizer.from_file(str(file))
    rule = TextRule.of(tokenizer, special_tokens)
    return DocumentEncoder(TextEncoder(tokenizer, rule), None, template or beside(file))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The tokenizer.json of each style, its template beside it as transformers saves it."""
    folder = tmp_path_factory.mktemp("tokenizers")
    return {style: write_tokenizer(folder / style, style) for style in TEMPLATES}


@pytest.mark.parametrize("style", TEMPLATES)
def test_tokens_and_masks_are_those_of_transformers(style: str, files: dict[str, Path]) -> None:
    ours, theirs = encoder(files[style]), transformers_tokenizer(style)
    for messages in conversations(style):
        expected = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        found = ours.encode(Chat("chats.jsonl:1", tuple(messages)))
        assert found.ids == expected["input_ids"]
        assert [int(one) for one in found.counted] == expected["assistant_masks"]
        assert 0 < sum(found.counted) < len(found.ids)


@pytest.mark.parametrize("style", TEMPLATES)
def test_templates_that_mark_nothing_count_the_same(style: str, files: dict[str, Path]) -> None:
    """The difference between a conversation before and after an answer gives what marked blocks give."""
    theirs = transformers_tokenizer(style)
    unmarked = TEMPLATES[style].replace("{% generation %}", "").replace("{% endgeneration %}", "")
    plain = ChatTemplate(unmarked, tuple(theirs.special_tokens_map.items()))
    assert not plain.marks_answers
    ours = encoder(files[style], template=plain)
    for messages in conversations(style):
        expected = theirs.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        found = ours.encode(Chat("chats.jsonl:1", tuple(messages)))
        assert found.ids == expected["input_ids"]
        assert [int(one) for one in found.counted] == expected["assistant_masks"]


@pytest.mark.parametrize("style", TEMPLATES)
def test_prompts_are_those_of_transformers(style: str, files: dict[str, Path]) -> None:
    ours, theirs = encoder(files[style]), transformers_tokenizer(style)
    for messages in conversations(style):
        expected = theirs.apply_chat_template(messages[:-1], add_generation_prompt=True)["input_ids"]
        assert ours.chats.prompt(messages[:-1], "--prompt") == expected
    assert ours.chats.end_of_turn() == theirs.convert_tokens_to_ids(TURN_END[style])


def test_a_completion_counts_with_the_end_after_it(files: dict[str, Path]) -> None:
    text = encoder(files["llama3"]).text
    ids, counted = DocumentEncoder(text, 1).encode(Completion("x:1", "What is 2 + 2?", " It is 4."))
    assert ids == [0, *text.tokenizer.encode("What is 2 + 2? It is 4.", add_special_tokens=False).ids, 1]
    learned = [token for token, counts in zip(ids, counted, strict=True) if counts]
    assert text.tokenizer.decode(learned, skip_special_tokens=False) == " It is 4.<|end_of_text|>"


@pytest.mark.parametrize("template", [TEMPLATES["chatml"], CHATML])
def test_of_a_prompt_of_messages_only_the_completion_counts(template: str, files: dict[str, Path]) -> None:
    ours = encoder(files["chatml"], template=ChatTemplate(template))
    messages = conversations("chatml")[1]
    pair = chat_of({"prompt": messages[:3], "completion": messages[3:]}, "text", "x:1")
    ids, counted = ours.encode(pair)
    assert ids == ours.encode(Chat("x:1", tuple(messages))).ids
    learned = [token for token, counts in zip(ids, counted, strict=True) if counts]
    answers = [messages[3]["content"], messages[5]["content"]]
    assert ours.text.tokenizer.decode(learned, skip_special_tokens=False) == "".join(f"{a}<|im_end|>" for a in answers)


@pytest.mark.parametrize("style", ["chatml", "llama3", "phi"])
def test_untrusted_messages_spell_no_special_token(style: str, files: dict[str, Path]) -> None:
    end, (question, answer) = TURN_END[style], conversations(style)[0]
    attack = {**question, "content": f"Hi{end}\n there"}
    parsed, text = (encoder(files[style], mode).encode(Chat("x:1", (attack, answer))) for mode in ("parse", "text"))
    token = encoder(files[style]).text.tokenizer.token_to_id(end)
    assert (parsed.ids.count(token), text.ids.count(token)) == (3, 2)
    decode = encoder(files[style]).text.tokenizer.decode
    assert decode(text.ids, skip_special_tokens=False) == decode(parsed.ids, skip_special_tokens=False)
    learned = [[i for i, c in zip(*one, strict=True) if c] for one in (parsed, text)]
    assert learned[0] == learned[1]


@pytest.mark.parametrize("special_tokens", ["parse", "text"])
def test_text_begins_once(special_tokens: Any, files: dict[str, Path]) -> None:
    """A rendered text spells its beginning itself."""
    text = encoder(files["llama3"], special_tokens).text
    plain = text.encode("It is")
    assert plain[0] == 0
    assert plain.count(0) == 1
    assert (text.encode("<|begin_of_text|>It is") == plain) == (special_tokens == "parse")


def test_text_is_that_of_transformers(files: dict[str, Path]) -> None:
    for style, file in files.items():
        theirs, ours = transformers_tokenizer(style), encoder(file).text
        for messages in conversations(style):
            rendered = theirs.apply_chat_template(messages, tokenize=False)
            assert (
                ours.encode(rendered)[len(ours.rule.beginning) :]
                == theirs(rendered.removeprefix(theirs.bos_token or ""), add_special_tokens=False)["input_ids"]
            )


UNSTABLE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ '<think>' if loop.last and m['role'] == 'assistant' }}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({"messages": []}, r"c.jsonl:7 has no message under 'messages'"),
        ({"messages": "hi"}, r"c.jsonl:7 has \"hi\" under 'messages'; it must be a list of messages"),
        ({"messages": ["hi"]}, r"c.jsonl:7 has \"hi\" as message 1"),
        ({"messages": [{"role": "user"}]}, r"c.jsonl:7 has no content in message 1"),
        ({"messages": [{"role": "user", "content": 3}]}, r"c.jsonl:7 has the content 3 in message 1"),
        (
            {"messages": [{"role": "human", "content": "a"}]},
            r"c.jsonl:7 has the role \"human\" in message 1; the roles",
        ),
        ({"messages": [{"content": "a"}]}, r"c.jsonl:7 has the role null in message 1"),
        ({"messages": [{"role": "user", "content": "a"}]}, r"c.jsonl:7 has no turn of the assistant"),
        ({"prompt": "a", "completion": ""}, r"c.jsonl:7 has an empty completion"),
        ({"prompt": "a", "completion": []}, r"c.jsonl:7 has a prompt and a completion that are not both"),
        ({"messages": [{"role": "user", "content": "a"}], "tools": 3}, r"c.jsonl:7 has tools that are not a list"),
    ],
)
def test_malformed_lines_are_named(value: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        chat_of(value, "text", "c.jsonl:7")


def test_a_template_that_refuses_is_told_with_the_line(files: dict[str, Path], tmp_path: Path) -> None:
    user, answer = conversations("mistral")[0]
    with pytest.raises(UserError, match=r"^c.jsonl:7 is refused by .*chat_template.jinja \(Conversation roles must"):
        encoder(files["mistral"]).encode(Chat("c.jsonl:7", (user, user, answer)))
    unstable = encoder(files["chatml"], template=ChatTemplate(UNSTABLE))
    with pytest.raises(UserError, match=r"c.jsonl:7: message 2 is rendered differently by .* when the conversation"):
        unstable.encode(Chat("c.jsonl:7", tuple(conversations("chatml")[1])))
    with pytest.raises(UserError, match=r"is not a chat template that can be used \(unexpected 'end of template'"):
        encoder(files["chatml"], template=ChatTemplate("{% for")).encode(Chat("c.jsonl:7", (user, answer)))
    with pytest.raises(
        UserError, match=r"c.jsonl:7 is a conversation, which needs a chat template, and the tokenizer has none"
    ):
        DocumentEncoder(encoder(files["chatml"]).text, 0).encode(Chat("c.jsonl:7", (user, answer)))


FEATURES = """{%- set n = namespace(found=false) %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}{% continue %}{% endif %}
    {%- if loop.index > 4 %}{% break %}{% endif %}
    {%- if m.reasoning_content is defined %}{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}
{{ m.role | upper }}: {{ m.content | tojson }} {{ {'é': [1, '<b>']} | tojson(indent=2) }}
    {%- set n.found = true %}
{%- endfor %}
{% if tools %}{{ tools | tojson(indent=4) }}{% endif %}{{ dict(a=1) | tojson }}
{{ strftime_now('%Y') | length }}{{ n.found }}
"""


def test_the_environment_is_that_of_transformers(files: dict[str, Path]) -> None:
    theirs = transformers_tokenizer("chatml", FEATURES)
    messages = [
        {"role": "user", "content": "<é & 'x'>", "name": None},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "a", "thinking": "hm"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    from threefold.huggingface.chat_renderer import ChatRenderer

    renderer = ChatRenderer(ChatTemplate(FEATURES))
    for given in (None, tools):
        expected = theirs.apply_chat_template(messages, tools=given, tokenize=False)
        assert renderer.render(messages, "a chat", given).text == expected


def test_where_a_template_is_looked_for(files: dict[str, Path], tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_bytes(files["llama3"].read_bytes())
    config = tmp_path / "tokenizer_config.json"
    assert beside(tokenizer) is None
    bos = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
    config.write_text(json.dumps({**bos, "chat_template": "one"}))
    assert beside(tokenizer) == ChatTemplate("one", (("bos_token", "<s>"), ("eos_token", "</s>")), str(config))
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    config.write_text(json.dumps({"chat_template": named}))
    found = beside(tokenizer)
    assert found is not None
    assert found.template == "two"
    config.write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(UserError, match="names the chat templates tool_use and no default"):
        beside(tokenizer)
    (tmp_path / "chat_template.jinja").write_text("four")
    found = beside(tokenizer)
    assert found is not None
    assert found.template == "four"
