"""Logits of a custom model: its layers are called as in training, and what is no language model is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.errors import UserError
from threefold.models.custom_batch import inputs_from
from threefold.models.sharding import ModelPlan, VocabLoss
from threefold.models.source import ConfigSource, error_line, skeleton
from threefold.parallel.pipeline.schedules import receive_activations, send_activations
from threefold.parallel.pipeline.stage import CustomBatch, LocalBatch, Stage, StepSamples
from threefold.verify.module_check import module_of

_POSITIONS = 8
"""Number of token ids of the trial before ranks start."""


@dataclass(frozen=True)
class CustomLogits:
    """Forward pass of a custom model from token ids to logits, on one stage of a pipeline."""

    config: Config
    stage: Stage
    dtype: torch.dtype

    def __call__(self, tokens: Tensor, mesh: Mesh | None = None) -> Tensor | None:
        """Return the logits of `tokens`, int64 [B, S], on the last stage, and None on the others.

        They are [B, S, V], or this tensor rank's columns if the plan says so (`gives_columns`). Collective over the pp
        axis of `mesh`; without a mesh, the stage is the whole model.
        """
        pp = None if mesh is None else mesh.pp
        received = None if mesh is None or mesh.pp.is_first else receive_activations(mesh, mesh.pp.index - 1)
        with self._explaining(tokens):
            output = self._samples(tokens).through(self.stage, received)
            if pp is None or pp.is_last:
                return self._checked(output, tokens)
            activations = inputs_from(output, self.stage.layer_names[-1]).args
        assert mesh is not None  # of several stages
        send_activations(mesh, mesh.pp.index + 1, activations)
        return None

    def _samples(self, tokens: Tensor) -> StepSamples:
        """Return the tokens as a batch of the kind that the model was trained with, but without labels and loss."""
        if ConfigSource().loss(self.config) is not None or self._last_takes_no_labels:
            return CustomBatch(tokens, None, self.dtype)
        return LocalBatch(tokens, None)

    @property
    def _last_takes_no_labels(self) -> bool:
        """Whether the last layer cannot compute a loss, so that the loss was a function in Python."""
        last = self.stage.layer_signatures.get(self.stage.model_plan.layers[-1])
        return last is not None and last.takes_one_tensor

    def _checked(self, output: object, tokens: Tensor) -> Tensor:
        last, rows = self.stage.model_plan.layers[-1], self.config.model.vocab_size
        if not isinstance(output, Tensor) or output.shape[:-1] != tokens.shape:
            shape = f" of the shape {[*output.shape]}" if isinstance(output, Tensor) else ""
            raise UserError(
                f"{self._needs}; its last layer {last!r} returns a {type(output).__name__}{shape} for token ids of the "
                f"shape {[*tokens.shape]}."
            )
        if output.shape[-1] != rows and not gives_columns(self.stage.model_plan):
            raise UserError(
                f"model.vocab_size is {rows} but the model's last layer gives {output.shape[-1]} logits; train it "
                f"with model.vocab_size {output.shape[-1]}."
            )
        return output

    @contextmanager
    def _explaining(self, tokens: Tensor) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(error, UserError):
                raise
            where = module_of(error, dict(self.stage.named_modules()))
            raise UserError(
                f"{self._needs}; {repr(where) if where else 'it'} raises {error_line(error)}, for token ids of the "
                f"shape {[*tokens.shape]}."
            ) from error

    @property
    def _needs(self) -> str:
        return (
            f"{ConfigSource().describe(self.config)} cannot generate or evaluate text, for which its layers must turn "
            "token ids alone, int64 [samples, positions], into logits [samples, positions, vocabulary]"
        )


def gives_columns(plan: ModelPlan) -> bool:
    """Return whether the last layer gives this tensor rank's columns of the logits, instead of all."""
    return any(isinstance(rule, VocabLoss) for rule in plan.split.values())


def check_custom_model(config: Config, plan: ModelPlan) -> None:
    """Raise a `UserError` unless a custom model turns token ids into logits, by a trial on the meta device.

    A model whose forward pass needs values passes: the first pass with real tokens makes the same checks.
    """
    make_model, _ = ConfigSource().load(config)
    stage = Stage(skeleton(make_model, config.train.seed), plan, 0, len(plan.layers)).eval()
    tokens = torch.empty(1, min(_POSITIONS, config.data.sequence_length), dtype=torch.int64, device="meta")
    try:
        with torch.device("meta"), torch.no_grad():
            CustomLogits(config, stage, torch.float32)(tokens)
    except UserError as error:
        if "meta" not in str(error.__cause__):
            raise
