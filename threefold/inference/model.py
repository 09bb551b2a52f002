"""A trained model: its newest checkpoint, this rank's shards of it, and the forward pass."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from tokenizers import Tokenizer
from torch import Tensor

from threefold.checkpoint.code import with_code
from threefold.checkpoint.errors import MODEL, DamagedCheckpoint
from threefold.checkpoint.folder import TOKENIZER, Checkpoint
from threefold.checkpoint.model_match import require_match
from threefold.checkpoint.selection import Damaged, from_first, select_checkpoint
from threefold.checkpoint.tensors import load_tensors, load_tensors_alone, stored_names
from threefold.comm.axis import local_part
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.model import OWN
from threefold.data.chat_template import ChatTemplate
from threefold.data.encoding import DocumentEncoder
from threefold.data.tokenizer import SpecialTokens, TextEncoder, TextRule, id_count
from threefold.dtypes import DTYPES
from threefold.errors import UserError
from threefold.huggingface.tensor_files import PREFIX, end_tokens
from threefold.models.family import make_model, model_plan
from threefold.models.layers.decoder import NOTHING
from threefold.models.sharding import VocabLoss
from threefold.parallel.moving_buffers import stored_buffers
from threefold.parallel.parallelize import apply_parallelism
from threefold.parallel.pipeline.partition import StageMap, partition_by_cost
from threefold.parallel.pipeline.stage import Stage, whole_parameters
from threefold.parallel.plan_check import check_tensor_axis
from threefold.parallel.settings import Parallelism

_WORTH_THREADS = 10_000_000
"""Parameter count from which one token is enough work for several threads; they slow down smaller models."""


@dataclass(frozen=True)
class Trained:
    """A trained model on disk: its newest good checkpoint.

    Attributes:
        warnings: a sentence that names the damaged checkpoints that were skipped, if any.
        model: for a user's own model, the file that makes it; None uses the checkpoint's copy.
        trust_code: whether the checkpoint's copy of the code may be executed.
    """

    checkpoint: Checkpoint
    config: Config
    warnings: tuple[str, ...] = ()
    model: str | None = None
    trust_code: bool = False

    @classmethod
    def find(
        cls, run: Path, damaged: Damaged | None = None, model: str | None = None, trust_code: bool = False
    ) -> Self:
        """Find the newest good checkpoint of a run.

        Args:
            run: run folder.
            damaged: checkpoints that loading found damaged.
            model, trust_code: code of a user's own model, as in `with_code`.

        Raises:
            UserError: there is no checkpoint, or the code of its model cannot be used.
        """
        choice = select_checkpoint(
            run, lambda none: f"{run} has {none}; give the run folder of `threefold train`.", damaged
        )
        config = with_code(choice.config, choice.checkpoint.path, model, trust_code)
        return cls(choice.checkpoint, config, choice.warnings, model, trust_code)

    def check(self, layout: Layout) -> None:
        """Check that the model supports a layout. Raises UserError if it does not."""
        plan = model_plan(self.config.model, self.config.data.sequence_length)
        if self.is_own:
            require_match(self.config.model, plan, self.checkpoint.path)
        check_tensor_axis(plan, layout.tp, "--tp")
        for key, unit in plan.units("tp").items():
            if not unit.fits(layout.tp):
                multiple = " or be a multiple of it" if unit.repeated else ""
                fits = plan.nearest_size("tp", layout.tp)
                raise UserError(
                    f"--tp is {layout.tp} but must divide the model's {key} {unit.count}{multiple}; use {fits}."
                )
        layers = len(plan.layers)
        if layout.pp > layers:
            raise UserError(
                f"--pp is {layout.pp} but the model has {layers} layers, its embedding and its head included; "
                f"use {layers} at most."
            )

    @property
    def is_own(self) -> bool:
        """Whether this is a user's own model rather than one of the built-in families."""
        return self.config.model.architecture == OWN

    @property
    def has_tokenizer(self) -> bool:
        return self.checkpoint.facts.tokenizer_sha256 is not None

    @property
    def is_import(self) -> bool:
        """Whether the model was imported from Hugging Face and has not been trained since."""
        return not self.checkpoint.facts.documents

    def documents(self, special_tokens: SpecialTokens | None = None) -> DocumentEncoder:
        """Return the encoder of texts and conversations that fits the training data, or an imported model's tokenizer.

        Args:
            special_tokens: whether text that spells a special token becomes that token; None follows the training data.

        Raises:
            UserError: as in `tokenizer`.
        """
        tokenizer, facts = self.tokenizer(), self.checkpoint.facts
        rule = facts.rule or TextRule.of(tokenizer)
        if special_tokens is not None:
            rule = replace(rule, special_tokens=special_tokens)
        template = ChatTemplate.beside(self.checkpoint.path / TOKENIZER)
        return DocumentEncoder(TextEncoder(tokenizer, rule), facts.eod, template)

    def ends(self) -> frozenset[int]:
        """Return the token ids that end a text: the training data's, and those in an imported model's files."""
        eod = self.checkpoint.facts.eod
        return frozenset(end_tokens(self.checkpoint.path, PREFIX)) | ({eod} if eod is not None else set())

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the training data. Raises UserError if there is none or it cannot be read."""
        if not self.has_tokenizer and self.is_import:
            raise UserError(
                f"{self.checkpoint.path} was imported without a tokenizer, so output cannot be decoded; put its "
                "tokenizer.json beside its config.json and import it again."
            )
        if not self.has_tokenizer:
            raise UserError(
                f"{self.checkpoint.path} was trained on {', '.join(self.config.data.corpora)} without a tokenizer, so "
                "output cannot be decoded; resume with --resume and data.tokenizer set to its tokenizer.json."
            )
        path = self.checkpoint.path / TOKENIZER
        try:
            return Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises a bare Exception
            raise UserError(f"The tokenizer {path} cannot be read ({error}).") from None

    def load(self, mesh: Mesh | None = None, dtype: str = "fp32") -> "Model":
        """Load this rank's shards of the weights, in any layout and dtype.

        The checkpoint may have been written in another layout and dtype. Checksums are verified; if any rank finds
        damage, all ranks load the newest good checkpoint before it. Collective over the mesh.

        Args:
            mesh: ranks that share the model; None for this process alone, on the CPU.
            dtype: dtype of the weights and the computation: fp32, bf16, fp16 or fp64.

        Returns:
            the model, whose `trained` is the checkpoint that was loaded.

        Raises:
            UserError: no checkpoint can be read.
        """
        mesh = mesh or Mesh.alone()
        trained, damaged = self, {}
        run, code = self.checkpoint.run_dir, (self.model, self.trust_code)
        while True:
            try:
                return trained._load(mesh, dtype)
            except DamagedCheckpoint as damage:
                damaged[damage.path] = damage.reason
                trained = from_first(mesh.world, lambda: type(self).find(run, damaged, *code))

    def _load(self, mesh: Mesh, dtype: str) -> "Model":
        config = self.config.model
        plan = model_plan(config, self.config.data.sequence_length)
        stages = StageMap(tuple(partition_by_cost(plan.costs, mesh.pp.size)), tuple(range(mesh.pp.size)))
        how = Parallelism(mesh, stages, dtype=DTYPES[dtype])
        (stage,) = apply_parallelism(lambda: make_model(config), plan, how, seed=self.config.train.seed).stages
        weights: dict[str, Tensor] = {MODEL + name: parameter for name, parameter in whole_parameters([stage])}
        names = stored_names(self.checkpoint.path)
        buffers = {MODEL + name: buffer for name, buffer in stored_buffers([stage]).items()}
        weights |= {name: buffer for name, buffer in buffers.items() if name in names}  # older checkpoints have none
        (load_tensors_alone if mesh.is_alone else load_tensors)(weights, self.checkpoint.path)
        return Model(self, stage.eval().requires_grad_(False), mesh, DTYPES[dtype])


@dataclass(frozen=True, eq=False)
class Model:
    """This rank's shards of a trained model: the layers of one stage, in evaluation mode."""

    trained: Trained
    stage: Stage
    mesh: Mesh
    dtype: torch.dtype

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.trained.tokenizer()

    @cached_property
    def tokens(self) -> int:
        """Number of token ids; the embedding may have more rows."""
        rows = self.trained.config.model.vocab_size
        return min(id_count(self.tokenizer), rows) if self.trained.has_tokenizer else rows

    @cached_property
    def ends(self) -> frozenset[int]:
        return self.trained.ends()

    @property
    def context(self) -> int:
        """Context length of generation in tokens: the sequence length of training.

        With dynamic RoPE scaling it is at most the length up to which the angles do not depend on the sequence length,
        because cached keys would have other angles.
        """
        config = self.trained.config
        if config.model.rope_scaling == "dynamic":
            return min(config.data.sequence_length, config.model.rope_original_positions)
        return config.data.sequence_length

    @cached_property
    def is_small(self) -> bool:
        """Whether one token is too little work for several threads."""
        return sum(parameter.numel() for parameter in self.stage.parameters()) < _WORTH_THREADS

    @property
    def prints(self) -> bool:
        return self.mesh.rank == 0

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor | None:
        """Run the forward pass through all layers except the head. Collective over the pp axis.

        Args:
            tokens: int64 [B, S], the same on every rank of a replica.

        Returns:
            input of the head, [B, S, H], on the last stage; None on the others.
        """
        pp = self.mesh.pp
        x = tokens.to(self.mesh.device)
        if not pp.is_first:
            width = self._received_width() if self.trained.is_own else self.trained.config.model.hidden_size
            shape = (*tokens.shape, width)
            x = pp.receive_(torch.empty(shape, dtype=self.dtype, device=self.mesh.device), pp.index - 1)
        layers = self.stage.layer_names
        for name in layers[:-1] if self.stage.gives_loss else layers:
            x = self.stage.get_submodule(name)(x, NOTHING)
        if pp.is_last:
            return x
        if self.trained.is_own:
            pp.send(torch.tensor([x.shape[-1]], device=x.device), pp.index + 1)
        pp.send(x, pp.index + 1)
        return None

    def _received_width(self) -> int:
        """Receive the width of the previous stage's activations, which no setting of a user's own model gives."""
        pp = self.mesh.pp
        return int(pp.receive_(torch.empty(1, dtype=torch.int64, device=self.mesh.device), pp.index - 1))

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute this tp rank's columns of the logits, [..., columns], from `hidden` [..., H] on the last stage."""
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        out: Tensor = self.stage.get_submodule(self.stage.layer_names[-1])(flat)
        if self.trained.is_own and not self._cuts_logits:
            rows = self.trained.config.model.vocab_size
            if out.shape[-1] != rows:
                raise UserError(
                    f"model.vocab_size is {rows} but the model's last layer gives {out.shape[-1]} logits; train it "
                    f"with model.vocab_size {out.shape[-1]}."
                )
            out = local_part(out, self.mesh.tp, -1)
        return out.reshape(*hidden.shape[:-1], out.shape[-1])

    @cached_property
    def _cuts_logits(self) -> bool:
        """Whether the last layer of a user's own model returns only this tp rank's columns of the logits."""
        return any(isinstance(rule, VocabLoss) for rule in self.stage.model_plan.split.values())

    @contextmanager
    def few_threads(self) -> Iterator[None]:
        """Use one torch thread within the block if the model is small."""
        before = torch.get_num_threads()
        if before > 1 and self.is_small:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def whole_logits(self, hidden: Tensor) -> Tensor:
        """Compute the logits [..., V] of all token ids, gathered over the tp ranks. Collective over the tp axis.

        Args:
            hidden: [..., H] on the last stage.
        """
        part, tp = self.logits(hidden), self.mesh.tp
        if tp.size > 1:
            widest = -(-self.trained.config.model.vocab_size // tp.size)  # the last shards may be narrower
            part = tp.all_gather_equal(torch.nn.functional.pad(part, (0, widest - part.shape[-1])), -1)
        return part[..., : self.tokens]
