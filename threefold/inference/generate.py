"""Text generation: sampling of the next token (temperature, top-k, top-p), and the loop over batches of prompts."""

import warnings
from collections import Counter, deque
from collections.abc import Generator, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from threefold.data.conversations import Chat
from threefold.data.tokenizer import SpecialTokens, decoded
from threefold.errors import DivergenceError, UserError
from threefold.inference.inputs import Prompt, require_text
from threefold.inference.model import Cache, Model, Trained, caching
from threefold.random.rng import stream_key


@dataclass(frozen=True)
class Sampling:
    """Settings for sampling the next token."""

    temperature: float = 0.8  # divisor of the logits; 0 is greedy decoding
    top_k: int | None = None  # sample from the k most likely tokens; 0 or None for all
    # Nucleus: sample from the smallest set of most likely tokens with at least this total probability, after `top_k`
    # (Holtzman et al., arXiv 1904.09751); 0, 1 or None for all.
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:  # NaN too
            raise UserError(f"--temperature is {self.temperature:g} but must be at least 0; 0 is greedy.")
        if self.top_k is not None and self.top_k < 0:
            raise UserError(f"--top-k is {self.top_k} but must be at least 0; 0 samples from all tokens.")
        if self.top_p is not None and not 0 <= self.top_p <= 1:
            raise UserError(f"--top-p is {self.top_p:g} but must be between 0 and 1; 1 samples from all tokens.")

    def choose(self, logits: Tensor, uniform: Tensor) -> Tensor:
        """Sample a token for each row of `logits` [B, V] with `uniform` random numbers, fp64 [B]: int64 [B].

        Raises a `DivergenceError` if a row has NaN or no finite greatest logit.
        """
        if not logits.amax(-1).isfinite().all():  # the greatest of a row with NaN is NaN
            raise DivergenceError(
                "The model's logits for the next token are not finite, so none can be chosen: its weights or "
                "activations hold NaN or infinity, as after a training run that diverged; use an earlier checkpoint."
            )
        if self.temperature == 0:
            return logits.argmax(-1)
        ordered, tokens = logits.double().sort(dim=-1, descending=True, stable=True)
        # Below the greatest, so that no quotient by a tiny temperature is infinite there.
        probabilities = ((ordered - ordered[:, :1]) / self.temperature)[:, : self.top_k or None].softmax(-1)
        if self.top_p:
            # A token is kept while the sum before it is below the threshold, so the first is always kept.
            before = probabilities.cumsum(-1) - probabilities
            probabilities = probabilities.masked_fill(before >= self.top_p, 0)
        sums = probabilities.cumsum(-1)
        place = torch.searchsorted(sums, uniform.unsqueeze(-1) * sums[:, -1:], right=True)
        last = (probabilities > 0).sum(-1, keepdim=True) - 1  # the product may be rounded up to the whole sum
        return tokens.gather(-1, place.minimum(last)).squeeze(-1)


def uniform(seed: int, sequence: str, position: int) -> float:
    """Return a random number in [0, 1) for the token at `position` of a sequence, a function of the arguments alone."""
    return (stream_key("choice", seed, sequence, position) >> 10) / 2**53


@dataclass(frozen=True)
class GenerationRequest:
    """Settings of text generation."""

    max_new_tokens: int = 100  # per prompt; fewer if the document ends
    sampling: Sampling = field(default_factory=Sampling)
    seed: int = 0
    batch_size: int = 16
    special_tokens: SpecialTokens | None = None  # in prompts; None follows the training data of the model
    show_special: bool = False  # in the generated text

    def __post_init__(self) -> None:
        for option in ("max_new_tokens", "batch_size"):
            if (value := getattr(self, option)) < 1:
                raise UserError(f"--{option.replace('_', '-')} is {value} but must be at least 1.")


@dataclass
class _Sequence:
    """A prompt, by its number, and the tokens generated for it so far."""

    number: int
    tokens: list[int]  # including the prompt's
    key: str  # of its random numbers: the prompt's tokens, and how often the same prompt came before
    left: int  # tokens that may still be generated
    start: int = 0  # index of the first token in the context window
    is_cached: bool = False  # the KV cache holds all tokens from `start` to the last but one


def generate_tokens(
    model: Model, prompts: Sequence[Sequence[int]], request: GenerationRequest, ends: frozenset[int] | None = None
) -> Iterator[tuple[int, int | None]]:
    """Yield each generated token with the index of its prompt as it is chosen, and None at a sequence's end.

    The tokens generated for a prompt depend only on the prompt, the sampling settings and the seed, not on the layout
    or on the other prompts (a repeated prompt gets other random numbers). Collective over the mesh, whose dp must be 1.
    Prompts and settings are the same on every rank. `ends` are the ids that end a sequence; None uses the model's.
    """
    ends = model.ends if ends is None else ends
    if not all(len(prompt) for prompt in prompts):
        raise UserError("A prompt is empty; give at least one token to continue.")
    waiting: deque[_Sequence] = deque()
    seen: Counter[str] = Counter()
    for number, prompt in enumerate(prompts):
        text = ",".join(map(str, prompt))
        waiting.append(_Sequence(number, list(prompt), f"{seen[text]}:{text}", request.max_new_tokens))
        seen[text] += 1
    rows = min(request.batch_size, len(waiting))
    longest = max((len(prompt) for prompt in prompts), default=0) + request.max_new_tokens
    # It is unknown which modules of a custom model look at other positions, so it runs without a cache.
    keeping = nullcontext() if model.trained.is_custom else caching(model.stage, rows, min(model.context, longest))
    with keeping as cache:
        active = [waiting.popleft() for _ in range(rows)]
        while active:
            chosen = _choose(model, active, _next_logits(model, cache, active), request)
            for sequence, token in zip(active, chosen, strict=True):
                sequence.left -= 1
                if token in ends:
                    sequence.left = 0
                else:
                    sequence.tokens.append(token)
                    yield sequence.number, token
                if not sequence.left:
                    yield sequence.number, None
            # Waiting sequences take the rows of those that have ended.
            after = [sequence if sequence.left or not waiting else waiting.popleft() for sequence in active]
            rows_left = [row for row, sequence in enumerate(after) if sequence.left]
            if cache is not None and 0 < len(rows_left) < len(after):
                cache.keep(rows_left, model.mesh.device)
            active = [after[row] for row in rows_left]


def complete(model: Model, prompts: Sequence[Sequence[int]], request: GenerationRequest) -> list[list[int]]:
    """Return the token ids generated for each prompt; see `generate_tokens`."""
    added: list[list[int]] = [[] for _ in prompts]
    for number, token in generate_tokens(model, prompts, request):
        if token is not None:
            added[number].append(token)
    return added


def generate_text(
    model: Model, prompts: Sequence[Prompt], request: GenerationRequest
) -> Iterator[tuple[int, str | None]]:
    """Yield the index of each prompt with a piece of its text, in whole characters, and with None at its end.

    The answer to a conversation ends where the chat template ends the assistant's turn; see `generate_tokens`.
    """
    require_text(prompts)
    begun, ends = encode_prompts(model.trained, prompts, request)
    yield from continue_text(model, begun, request, ends)


def continue_text(
    model: Model, begun: Sequence[list[int]], request: GenerationRequest, ends: frozenset[int]
) -> Generator[tuple[int, str | None]]:
    """Yield as `generate_text`, for prompts that are encoded; `ends` are the ids that end a text."""
    texts = [_Text(model, tokens, request.show_special) for tokens in begun]
    for number, token in generate_tokens(model, begun, request, ends):
        if piece := texts[number].add(token):
            yield number, piece
        if token is None:
            yield number, None


def encode_prompts(
    trained: Trained, prompts: Sequence[Prompt], request: GenerationRequest
) -> tuple[list[list[int]], frozenset[int]]:
    """Return the token ids of each prompt, and the token ids that end a continuation."""
    documents, ends = trained.documents(request.special_tokens), trained.ends()
    if any(isinstance(prompt, Chat) for prompt in prompts) and (end := documents.chats.end_of_turn()) is not None:
        ends |= {end}
    begun = [
        documents.text.encode(prompt)
        if isinstance(prompt, str)
        else documents.chats.prompt(prompt.messages, prompt.where)
        for prompt in prompts
    ]
    return begun, ends


def generate(run: Path, prompts: Sequence[str], request: GenerationRequest | None = None) -> list[str]:
    """Return each prompt with its continuation by the newest checkpoint of `run`, generated in this process."""
    require_text(prompts)
    texts, model = list(prompts), Trained.find(run).load()
    for warning in model.trained.warnings:
        warnings.warn(warning, stacklevel=2)
    with model.few_threads():
        for number, piece in generate_text(model, prompts, request or GenerationRequest()):
            texts[number] += piece or ""
    return texts


class _Text:
    """Incremental detokenizer of one sequence."""

    def __init__(self, model: Model, tokens: list[int], show_special: bool) -> None:
        self._tokenizer, self._tokens, self._skipped = model.tokenizer, list(tokens), not show_special
        self._emitted = ""
        self.add(None)

    def add(self, token: int | None) -> str:
        """Return the text that a token adds, which is empty while a character is incomplete; None ends the text."""
        if token is not None:
            self._tokens.append(token)
        text = decoded(self._tokenizer, self._tokens, self._skipped)
        if token is not None and text.endswith("\ufffd"):
            return ""
        piece, self._emitted = text[len(self._emitted) :], text
        return piece


def _next_logits(model: Model, cache: Cache | None, active: list[_Sequence]) -> Tensor | None:
    """Return the logits [B, V] of each sequence's next token on the last stage; None elsewhere."""
    for sequence in active:
        if len(sequence.tokens) - sequence.start > model.context:
            # A new prompt keeps the context; a cached sequence half of it, as truncation invalidates the KV cache.
            kept = (model.context + 1) // 2 if sequence.is_cached else model.context
            sequence.start, sequence.is_cached = len(sequence.tokens) - kept, False
    if cache is None:  # from all tokens again, padded on the right
        held = [sequence.tokens[sequence.start :] for sequence in active]
        for sequence in active:
            sequence.is_cached = True  # so that truncation keeps half of the context, as with a cache
        lasts = [len(tokens) - 1 for tokens in held]
        hidden = model.hidden(_padded(held))
        return None if hidden is None else model.whole_logits(hidden[torch.arange(len(held)), lasts])
    # Prefill the rows that do not have all tokens but the last.
    new = {row: sequence.tokens[sequence.start : -1] for row, sequence in enumerate(active) if not sequence.is_cached}
    for row in new:
        active[row].is_cached = True
    if new := {row: tokens for row, tokens in new.items() if tokens}:
        cache.cursor.fill(list(new), [len(tokens) for tokens in new.values()], model.mesh.device)
        model.hidden(_padded(list(new.values())))
    device = model.mesh.device
    cache.cursor.advance([len(sequence.tokens) - 1 - sequence.start for sequence in active], device)
    hidden = model.hidden(torch.tensor([sequence.tokens[-1:] for sequence in active]))
    return None if hidden is None else model.whole_logits(hidden[:, 0])


def _padded(rows: list[list[int]]) -> Tensor:
    longest = max(map(len, rows))
    return torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in rows])


def _choose(model: Model, active: list[_Sequence], logits: Tensor | None, request: GenerationRequest) -> list[int]:
    """Sample the next token of each sequence on one rank and broadcast it to all."""
    mesh = model.mesh
    chosen = torch.zeros(len(active), dtype=torch.int64, device=mesh.device)
    if logits is not None:
        draws = [uniform(request.seed, sequence.key, len(sequence.tokens)) for sequence in active]
        numbers = torch.tensor(draws, dtype=torch.float64, device=mesh.device)
        chosen.copy_(request.sampling.choose(logits, numbers))
    found: list[int] = mesh.world.broadcast_(chosen, mesh.layout.rank_of(pp=mesh.pp.size - 1)).tolist()
    return found
