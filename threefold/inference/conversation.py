"""Conversation with a trained model: messages so far, answers as they are generated, and what the context holds."""

from collections.abc import Generator

from threefold.data.conversations import Message
from threefold.errors import UserError
from threefold.inference.generate import GenerationRequest, continue_text
from threefold.inference.model import Model


class Conversation:
    """Conversation in which a model, alone on its mesh, answers each message by its chat template."""

    def __init__(self, model: Model, request: GenerationRequest, system: str | None = None) -> None:
        self._model, self._request = model, request
        self._documents = model.trained.documents(request.special_tokens)
        end = self._documents.chats.end_of_turn()
        self._ends = model.ends | (frozenset() if end is None else {end})
        self._before: list[Message] = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[Message] = []
        self.forgotten = 0  # oldest messages that the last answer no longer saw

    def reset(self) -> None:
        """Forget the conversation, but for the system message."""
        self.messages, self.forgotten = [], 0

    def answer(self, message: str) -> Generator[str]:
        """Yield the answer to a message in pieces. If the caller stops early, what it was given is the answer.

        The oldest messages are left out once the conversation is longer than the context. Raises UserError if the
        message alone is.
        """
        self.messages.append({"role": "user", "content": message})
        said = ""
        try:
            prompt = self._prompt()
            for _, piece in continue_text(self._model, [prompt], self._request, self._ends):
                if piece is not None:
                    said += piece
                    yield piece
        finally:
            if said:
                self.messages.append({"role": "assistant", "content": said})
            else:
                self.messages.pop()

    def _prompt(self) -> list[int]:
        """Encode the latest messages that leave the context a token for the answer."""
        context = self._model.context
        for first in range(0, len(self.messages), 2):
            messages = [*self._before, *self.messages[first:]]
            ids: list[int] = self._documents.chats.prompt(messages, "the conversation")
            if len(ids) < context:
                self.forgotten = first
                return ids
        raise UserError(
            f"The message has {len(ids):,} tokens with what the chat template adds, and the model's context is "
            f"{context:,}; shorten it."
        )
