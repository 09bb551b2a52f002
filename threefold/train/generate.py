"""Text from a trained model, in one process."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor

from threefold.checkpoint.folder import CONFIG, TOKENIZER, newest
from threefold.checkpoint.tensors import load_tensors_alone
from threefold.config import load_config
from threefold.data.tokenizer import id_count
from threefold.errors import UserError
from threefold.models.registry import Model, make_model, model_plan
from threefold.train.state import MODEL

_WORTH_THREADS = 10_000_000
"""Parameters from which a token is work for several threads; below, they wait for one another (on a busy machine for
seconds)."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: what the logits are divided by; 0 takes the likeliest.
        top_k: choose among so many likeliest tokens; 0 or None for all.
        top_p: choose among the fewest likeliest tokens that together have this probability; 0, 1 or None for all.

    Raises:
        UserError: a value out of range.
    """

    temperature: float = 0.8
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise UserError(
                f"--temperature is {self.temperature:g} but must be at least 0; 0 takes the likeliest token."
            )
        if self.top_k is not None and self.top_k < 0:
            raise UserError(f"--top-k is {self.top_k} but must be at least 0; 0 chooses among all tokens.")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p:g} but must lie between 0 and 1; 1 chooses among all tokens.")

    def choose(self, logits: Tensor, generator: torch.Generator) -> int:
        """A token by its logits [V]."""
        if self.temperature == 0:
            return int(logits.argmax())
        ordered, tokens = (logits.float() / self.temperature).sort(descending=True, stable=True)
        kept = self.top_k or ordered.numel()
        probabilities = ordered[:kept].softmax(0)
        if self.top_p:
            # A token is in as long as those before it do not have the mass yet, so the first always is.
            before = probabilities.cumsum(0) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        return int(tokens[torch.multinomial(probabilities, 1, generator=generator)])


@dataclass(frozen=True, eq=False)
class Writer:
    """A trained model and its tokenizer.

    Attributes:
        model: the whole model, in fp32.
        tokenizer: of its data.
        eod: the token that ends a document, if there is one.
        context: tokens that the model was trained to look back on.
        step: updates it was trained for.
    """

    model: Model
    tokenizer: Tokenizer
    eod: int | None
    context: int
    step: int

    @classmethod
    def load(cls, run: Path) -> "Writer":
        """The newest whole checkpoint of a run, whatever layout and dtype made it.

        Raises:
            UserError: there is none, or it cannot be read.
        """
        checkpoint = newest(run)
        if checkpoint is None:
            raise UserError(f"{run} has no complete checkpoint; give the run folder of `threefold train`.")
        config = load_config(checkpoint.path / CONFIG)
        with torch.device("meta"):
            model = make_model(config.model)
        weights = {name: torch.empty(tensor.shape) for name, tensor in model.named_parameters()}
        load_tensors_alone({MODEL + name: tensor for name, tensor in weights.items()}, checkpoint.path)
        ties = model_plan(config.model, config.data.sequence_length).ties
        model.load_state_dict(weights | {name: weights[owner] for name, owner in ties.items()}, assign=True)
        if checkpoint.facts.tokenizer_sha256 is None:
            raise UserError(
                f"{run} was trained on {', '.join(config.data.corpora)} without a tokenizer, so there are no words "
                "for its tokens; go on with --resume and data.tokenizer set to their tokenizer.json."
            )
        tokenizer = Tokenizer.from_file(str(checkpoint.path / TOKENIZER))
        return cls(model.eval(), tokenizer, checkpoint.facts.eod, config.data.sequence_length, checkpoint.step)

    @cached_property
    def is_small(self) -> bool:
        """Whether a token is too little work to share between threads."""
        return sum(tensor.numel() for tensor in self.model.parameters()) < _WORTH_THREADS

    def stream(self, prompt: str, max_new_tokens: int, sampling: Sampling, seed: int) -> Iterator[str]:
        """What follows a prompt, in pieces of text as they come; ends early where the document does.

        Raises:
            UserError: the prompt is empty, or `max_new_tokens` is below 1.
        """
        require_text([prompt])
        tokens = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        if max_new_tokens < 1:
            raise UserError(f"--max-new-tokens is {max_new_tokens} but must be at least 1.")
        generator = torch.Generator().manual_seed(seed)
        told = self._text(tokens)
        for _ in range(max_new_tokens):
            token = sampling.choose(self._next_logits(tokens), generator)
            if token == self.eod:
                break
            tokens.append(token)
            text = self._text(tokens)
            if not text.endswith("\ufffd"):  # the rest of a character is still to come
                yield text[len(told) :]
                told = text
        if (text := self._text(tokens)) != told:
            yield text[len(told) :]

    @torch.no_grad()
    def _next_logits(self, tokens: list[int]) -> Tensor:
        with _threads(1 if self.is_small else torch.get_num_threads()):
            x = self.model.embed(torch.tensor([tokens[-self.context :]]))
            for block in self.model.blocks:
                x = block(x)
            logits = self.model.head(x[:, -1])[0]
        # The embedding may have more rows than the tokenizer has tokens.
        return logits[: id_count(self.tokenizer)]

    def _text(self, tokens: list[int]) -> str:
        return str(self.tokenizer.decode(tokens))


def generate(
    run: Path,
    prompts: list[str],
    max_new_tokens: int = 100,
    temperature: float = 0.8,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
) -> Iterator[str]:
    """Each prompt with what the newest checkpoint of `run` writes on from it.

    Args:
        run: the folder of a run.
        prompts: none may be empty.
        max_new_tokens: tokens to add to each; fewer where the document ends.
        temperature, top_k, top_p: see `Sampling`.
        seed: of the choices, the same for every prompt.

    Raises:
        UserError: no complete checkpoint, an empty prompt, or a value out of range.
    """
    sampling = Sampling(temperature, top_k, top_p)
    require_text(prompts)
    writer = Writer.load(run)
    for prompt in prompts:
        yield prompt + "".join(writer.stream(prompt, max_new_tokens, sampling, seed))


def require_text(prompts: list[str]) -> None:
    """Check that there is something to go on from in each prompt.

    Raises:
        UserError: one is empty.
    """
    if not all(prompts):
        raise UserError("--prompt is empty; give at least one character to go on from.")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
