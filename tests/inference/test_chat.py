"""`threefold chat`: what a conversation remembers, what it does without a terminal, and what the keys do in one."""

import io
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.command import Command
from threefold.data.conversations import Chat
from threefold.errors import UserError
from threefold.inference.conversation import Conversation
from threefold.inference.generate import GenerationRequest, Sampling, complete, generate_text
from threefold.inference.model import Model, Trained

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}{{ m.content }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
GREEDY = GenerationRequest(4, Sampling(0.0))


@pytest.fixture
def template(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jinja"
    path.write_text(TEMPLATE)
    return path


@pytest.fixture
def model(runs: Callable[[str], Path], template: Path) -> Model:
    return replace(Trained.find(runs("rope")), chat_template=template).load()


def typed(threefold: Command, monkeypatch: pytest.MonkeyPatch, content: bytes, *arguments: str | Path):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(content), "latin1"))
    return threefold("chat", *arguments)


def test_an_answer_continues_the_whole_conversation(model: Model) -> None:
    conversation, messages = Conversation(model, GREEDY, "S"), [{"role": "system", "content": "S"}]
    for message in ("a", "b"):
        messages.append({"role": "user", "content": message})
        pieces = [piece for _, piece in generate_text(model, [Chat("", tuple(messages))], GREEDY) if piece is not None]
        assert list(conversation.answer(message)) == pieces
        messages.append({"role": "assistant", "content": "".join(pieces)})
    assert conversation.messages == messages[1:]
    assert conversation.forgotten == 0
    conversation.reset()
    assert conversation.messages == []


def test_what_was_said_before_an_interruption_is_remembered(model: Model) -> None:
    conversation = Conversation(model, GREEDY)
    whole = list(Conversation(model, GREEDY).answer("a"))
    pieces = conversation.answer("a")
    first = next(pieces)
    pieces.close()
    assert whole[0] == first
    assert conversation.messages[1:] == [{"role": "assistant", "content": first}]
    (again,) = complete(model, [[5, 6]], GREEDY)
    assert len(again) == 4, "the model works as before"


def test_the_oldest_messages_are_forgotten(model: Model) -> None:
    conversation, forgotten = Conversation(model, GREEDY), []
    for message in "abcdef":
        list(conversation.answer(message))
        forgotten.append(conversation.forgotten)
    assert forgotten[0] == 0 < forgotten[-1]
    assert forgotten == sorted(forgotten)
    assert all(each % 2 == 0 for each in forgotten), "a question goes with its answer"
    before = list(conversation.messages)
    with pytest.raises(UserError, match=r"The message has \d\d tokens with .* context is 16; shorten it"):
        list(conversation.answer("the statement " * 9))
    assert conversation.messages == before


def test_lines_without_a_terminal(
    threefold: Command, runs: Callable[[str], Path], template: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs("rope")
    options = (run, "--chat-template", template, "--temperature", "0", "--max-new-tokens", "3")
    ended = typed(threefold, monkeypatch, "é\r\n\nb\n/reset\né".encode(), *options)
    assert (ended.status, ended.error) == (0, "")
    first, *others, last = ended.output.removesuffix("\n").split("\n")
    assert first == last
    assert others
    assert "is not UTF-8 text" in typed(threefold, monkeypatch, b"\xe9\n", *options).refusal


def test_a_run_without_a_template_is_told_what_to_do(threefold: Command, runs: Callable[[str], Path]) -> None:
    refusal = threefold("chat", runs("rope")).refusal
    assert "has no chat template" in refusal
    assert "--chat-template" in refusal
    assert "threefold generate" in refusal


@pytest.mark.slow
def test_the_keys_of_a_terminal(runs: Callable[[str], Path], template: Path) -> None:
    """Ctrl-C ends an answer, or is answered where none is written; Ctrl-D ends the program."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "threefold", "chat", str(runs("rope")), "--chat-template", str(template)]
    child = subprocess.Popen(
        [*command, "--max-new-tokens", "1000000"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    os.close(theirs)
    seen = b""

    def until(wanted: bytes, after: int = 0) -> int:
        nonlocal seen
        ends = time.monotonic() + 60
        while (found := seen.find(wanted, after)) < 0:
            assert time.monotonic() < ends, seen
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096)
        return found + len(wanted)

    at = until(b"> ", until(b"Ctrl-D the program."))
    os.write(ours, b"hello\n")
    at = until(b"hello", at)
    while len(seen) < at + 200:  # the answer is being written
        seen += os.read(ours, 4096)
    os.kill(child.pid, signal.SIGINT)
    at = until(b"> ", len(seen))
    os.kill(child.pid, signal.SIGINT)
    at = until(b"> ", until(b"Ctrl-D ends the program.", at))
    os.write(ours, b"/reset\n")
    until(b"> ", at)
    os.write(ours, b"\x04")
    assert child.wait(60) == 0, seen
    os.close(ours)


def test_sampling_follows_the_seed(model: Model) -> None:
    said = [
        "".join(Conversation(model, replace(GREEDY, seed=seed, sampling=Sampling())).answer("a")) for seed in (1, 1, 2)
    ]
    assert said[0] == said[1] != said[2]
