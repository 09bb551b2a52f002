"""A trained model for the Language Model Evaluation Harness (EleutherAI's `lm_eval`), which is installed beside it.

    python -m threefold.inference.harness --model threefold --model_args run=runs/tuned --tasks hellaswag

runs the harness's own command line, to which the model `threefold` is added. In Python, `ThreefoldLM("runs/tuned")` is
the `model` of `lm_eval.simple_evaluate`. Requests become tokens as in training, and are scored as by `threefold eval`.
"""

import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from threefold.comm.mesh import Mesh
from threefold.dtypes import DTYPES
from threefold.errors import UserError
from threefold.inference.eval_tasks import Window, score
from threefold.inference.generate import GenerationRequest, Sampling, continue_text
from threefold.inference.model import Trained
from threefold.launch.device import choose_device, gpu_count

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    if error.name != "lm_eval":
        raise
    lacking = "The Language Model Evaluation Harness is not installed; install it with pip install lm_eval."
    if __name__ == "__main__":
        sys.exit(f"Error: {lacking}")
    raise UserError(lacking) from None

Pair = tuple[Any, list[int], list[int]]  # texts, and the tokens of a context and of what follows it


@register_model("threefold")
class ThreefoldLM(TemplateLM):
    """The newest checkpoint of `run` as a model of the harness, in this process.

    Args:
        max_length: context in tokens; None for the sequence length of training.
        seed: of texts that are sampled.
        average: evaluate the moving average of the weights.
    """

    def __init__(
        self,
        run: str | Path,
        batch_size: int | str = 16,
        max_length: int | None = None,
        dtype: str = "fp32",
        device: str | None = None,
        seed: int = 0,
        model: str | None = None,
        trust_code: bool = False,
        average: bool = False,
        max_batch_size: Any = None,
    ) -> None:
        super().__init__()
        if dtype not in DTYPES:
            raise UserError(f"dtype is {dtype} but must be one of {', '.join(DTYPES)}; use fp32.")
        self.batch_size = int(batch_size) if str(batch_size).isdecimal() else 16  # "auto" measures memory there
        wanted: Any = "auto" if device in (None, "auto") else str(device).partition(":")[0]
        if wanted == "cuda" and not gpu_count():  # the command's default, which its own models take for a wish too
            wanted = "auto"
        chosen: Literal["cpu", "cuda"] = choose_device(wanted, dtype, 1)
        trained = Trained.find(Path(run), model=model, trust_code=trust_code, average=average)
        self._model = trained.load(Mesh.alone(chosen), dtype)
        self._device = torch.device(chosen)
        self._seed, self._name = seed, str(run)
        self._documents = self._model.trained.documents()
        self.max_length = max_length or self._model.context

    @property
    def eot_token_id(self) -> int:
        if (eod := self._documents.eod) is None:
            raise UserError(f"{self._name} has no end-of-document token, which the harness begins texts with.")
        return eod

    @property
    def prefix_token_id(self) -> int:
        """Token before a text without a context: the beginning of texts, or the end-of-document token."""
        return next(iter(self._documents.text.rule.beginning), None) or self.eot_token_id

    @property
    def tokenizer_name(self) -> str:
        return f"{self._name} {self._model.trained.checkpoint.facts.tokenizer_sha256}"

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Encode a text as in training; without its beginning if `add_special_tokens` is false."""
        text = self._documents.text
        ids, beginning = text.encode(string), len(text.rule.beginning)
        return ids[beginning:] if add_special_tokens is False else ids

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        template = self._model.trained.template
        return None if not chat_template or template is None else template.template

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text of a conversation, as the chat template of the run renders it."""
        from threefold.huggingface.chat_renderer import ChatRenderer

        if (template := self._model.trained.template) is None:
            raise UserError(f"{self._name} has no chat template; evaluate it without --apply_chat_template.")
        return ChatRenderer(template).render(chat_history, "a request", prompted=add_generation_prompt).text

    def _loglikelihood_tokens(self, requests: list[Pair], **_: Any) -> list[tuple[float, bool]]:
        texts, windows = [], []
        for number, (_texts, context, continuation) in enumerate(requests):
            if not 0 < len(continuation) <= self.max_length:
                raise UserError(
                    f"A request has {len(continuation)} tokens to score but the context is {self.max_length}; give "
                    "max_length, or another task."
                )
            # One more than the context, as the last is not an input.
            tokens = np.array([*context, *continuation][-(self.max_length + 1) :], np.int64)
            texts.append(tokens)
            windows.append(Window(number, 0, len(tokens) - 1, len(tokens) - len(continuation)))
        if not windows:
            return []
        with self._model.few_threads():
            scores = score(self._model, texts, windows, self.batch_size)
        counts = [window.counted for window in windows]
        return [
            (-loss, hits == count)
            for loss, hits, count in zip(scores.losses.tolist(), scores.hits.tolist(), counts, strict=True)
        ]

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each whole text, in windows that each predict as many tokens as fit."""
        pairs, owners = list[Pair](), list[int]()
        for number, request in enumerate(requests):
            (text,) = request.args
            ids = self.tok_encode(text)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.max_length, 1):
                pairs.append((None, *make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (likelihood, _) in zip(owners, self._loglikelihood_tokens(pairs), strict=True):
            totals[number] += likelihood
        return totals

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Continue each context until a stop string, the end of the document, or the largest number of tokens."""
        found = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(number)
        for numbers in groups.values():
            given = normalize_gen_kwargs(requests[numbers[0]].args[1], 256)
            for first in range(0, len(numbers), self.batch_size):
                some = numbers[first : first + self.batch_size]
                texts = self._until([requests[number].args[0] for number in some], dict(given))
                for number, text in zip(some, texts, strict=True):
                    found[number] = text
        return found

    def _until(self, contexts: list[str], settings: dict[str, Any]) -> list[str]:
        stops, most = [stop for stop in settings.pop("until", None) or () if stop], settings.pop("max_gen_toks")
        room = self.max_length - most
        if room < 1:
            raise UserError(
                f"A task generates {most} tokens but the context is {self.max_length}; give max_gen_toks below that."
            )
        settings.pop("do_sample", None)
        names = ("temperature", "top_k", "top_p")
        sampling = Sampling(*(settings.pop(name, None) or 0 for name in names))
        if settings:
            raise UserError(
                f"{', '.join(settings)} of a task is not known here; leave it out of its generation_kwargs."
            )
        request = GenerationRequest(most, sampling, self._seed, self.batch_size)
        begun = [self.tok_encode(context)[-room:] or [self.prefix_token_id] for context in contexts]
        texts, going = [""] * len(begun), set(range(len(begun)))
        pieces = continue_text(self._model, begun, request, self._model.ends)
        with self._model.few_threads(), closing(pieces):
            for number, piece in pieces:
                texts[number] += piece or ""
                if piece is None or any(stop in texts[number] for stop in stops):
                    going.discard(number)
                if not going:
                    break
        return [postprocess_generated_text(text, stops, None) for text in texts]


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    try:
        cli_evaluate()
    except UserError as error:
        sys.exit(f"Error: {error}")
