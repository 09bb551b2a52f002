"""A trained model, or this rank's part of it, and how tokens run through it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from math import gcd
from pathlib import Path
from typing import Self

import torch
from tokenizers import Tokenizer
from torch import Tensor

from threefold.checkpoint.errors import DamagedCheckpoint
from threefold.checkpoint.folder import TOKENIZER, Checkpoint
from threefold.checkpoint.selection import Damaged, from_first, select_checkpoint
from threefold.checkpoint.tensor_names import MODEL
from threefold.checkpoint.tensors import load_tensors, load_tensors_alone
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.divisors import nearest_divisor
from threefold.data.chat.chat_template import ChatTemplate
from threefold.data.text.document_encoding import DocumentEncoder
from threefold.data.text.text_encoding import SpecialTokens, TextEncoder, TextRule
from threefold.data.text.tokenizer import id_count
from threefold.dtypes import DTYPES
from threefold.errors import UserError
from threefold.huggingface.sidecar_files import PREFIX, end_tokens
from threefold.models.layers.decoder import NOTHING
from threefold.models.registry import make_model, model_plan
from threefold.parallel.parallelism import Parallelism
from threefold.parallel.parallelize import parallelize
from threefold.parallel.pipeline.partition import partition_by_cost
from threefold.parallel.pipeline.placement import StageMap
from threefold.parallel.pipeline.stage import Stage, whole_parameters

_WORTH_THREADS = 10_000_000
"""Parameters from which a token is work for several threads; below, they wait for one another (on a busy machine for
seconds)."""


@dataclass(frozen=True)
class Trained:
    """A trained model on the disk: where its newest good checkpoint is, and what that says of it.

    Attributes:
        checkpoint: where it is.
        config: its own.
        warnings: a sentence that names the damaged checkpoints that were passed over, if any were.
    """

    checkpoint: Checkpoint
    config: Config
    warnings: tuple[str, ...] = ()

    @classmethod
    def find(cls, run: Path, damaged: Damaged | None = None) -> Self:
        """The newest good checkpoint of a run.

        Args:
            run: its folder.
            damaged: checkpoints that loading found damaged.

        Raises:
            UserError: there is none.
        """
        choice = select_checkpoint(
            run, lambda none: f"{run} has {none}; give the run folder of `threefold train`.", damaged
        )
        return cls(choice.checkpoint, choice.config, choice.warnings)

    def check(self, layout: Layout) -> None:
        """Check that the model can be spread over a layout.

        Raises:
            UserError: it cannot.
        """
        plan = model_plan(self.config.model, 1)
        widths = plan.divided_settings("tp")
        for key, width in widths.items():
            if width % layout.tp:
                fits = nearest_divisor(layout.tp, gcd(*widths.values()))
                raise UserError(f"--tp is {layout.tp} but must divide the model's {key} {width}; use {fits}.")
        layers = len(plan.layers)
        if layout.pp > layers:
            raise UserError(
                f"--pp is {layout.pp} but the model has {layers} layers, its embedding and its head included; "
                f"use {layers} at most."
            )

    @property
    def has_tokenizer(self) -> bool:
        return self.checkpoint.facts.tokenizer_sha256 is not None

    @property
    def is_import(self) -> bool:
        """Whether it is as it came from Hugging Face, and has seen no data here."""
        return not self.checkpoint.facts.documents

    def documents(self, special_tokens: SpecialTokens | None = None) -> DocumentEncoder:
        """How it reads texts and conversations: as the data it was trained on was; an import as its tokenizer has it.

        Args:
            special_tokens: what becomes of text that spells one; None is what became of it in the data.

        Raises:
            UserError: as for `tokenizer`.
        """
        tokenizer, facts = self.tokenizer(), self.checkpoint.facts
        rule = facts.rule or TextRule.of(tokenizer)
        if special_tokens is not None:
            rule = replace(rule, special_tokens=special_tokens)
        template = ChatTemplate.beside(self.checkpoint.path / TOKENIZER)
        return DocumentEncoder(TextEncoder(tokenizer, rule), facts.eod, template)

    def ends(self) -> frozenset[int]:
        """The tokens that end a text: that of the data, and those that the files of an import name."""
        eod = self.checkpoint.facts.eod
        return frozenset(end_tokens(self.checkpoint.path, PREFIX)) | ({eod} if eod is not None else set())

    def tokenizer(self) -> Tokenizer:
        """Of the data that the model was trained on.

        Raises:
            UserError: the checkpoint has none that can be read.
        """
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
        """Read this rank's part of the weights, and no more, whatever layout and dtype wrote them.

        What is read is compared with its checksums; where any rank finds damage, all take the newest good checkpoint
        before. Collective over the mesh.

        Args:
            mesh: the ranks; None for this process alone, on the CPU.
            dtype: what to compute in: fp32, bf16, fp16 or fp64.

        Returns:
            the model, whose `trained` says which checkpoint it has.

        Raises:
            UserError: no checkpoint can be read.
        """
        mesh = mesh or Mesh.alone()
        trained, damaged = self, {}
        while True:
            try:
                return trained._load(mesh, dtype)
            except DamagedCheckpoint as damage:
                damaged[damage.path] = damage.reason
                trained = from_first(mesh.world, lambda: type(self).find(self.checkpoint.run_dir, damaged))

    def _load(self, mesh: Mesh, dtype: str) -> "Model":
        config = self.config.model
        plan = model_plan(config, self.config.data.sequence_length)
        stages = StageMap(tuple(partition_by_cost(plan.costs, mesh.pp.size)), tuple(range(mesh.pp.size)))
        (stage,) = parallelize(lambda: make_model(config), plan, Parallelism(mesh, stages, dtype=DTYPES[dtype])).stages
        weights = {MODEL + name: parameter for name, parameter in whole_parameters([stage])}
        (load_tensors_alone if mesh.is_alone else load_tensors)(weights, self.checkpoint.path)
        return Model(self, stage.eval().requires_grad_(False), mesh, DTYPES[dtype])


@dataclass(frozen=True, eq=False)
class Model:
    """This rank's part of a trained model.

    Attributes:
        trained: where it is from.
        stage: its layers.
        mesh: this rank's place.
        dtype: what it computes in.
    """

    trained: Trained
    stage: Stage
    mesh: Mesh
    dtype: torch.dtype

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.trained.tokenizer()

    @cached_property
    def tokens(self) -> int:
        """How many token ids there are; the embedding may have more rows."""
        rows = self.trained.config.model.vocab_size
        return min(id_count(self.tokenizer), rows) if self.trained.has_tokenizer else rows

    @cached_property
    def ends(self) -> frozenset[int]:
        """The tokens that end a text; none where the data had none."""
        return self.trained.ends()

    @property
    def context(self) -> int:
        """Tokens that the model looks at when it writes: as many as it was trained to.

        Where the angles of its rotary positions follow the sequence's length, no more than those for which they do not:
        keys that are kept would have been turned by other angles.
        """
        config = self.trained.config
        if config.model.rope_scaling == "dynamic":
            return min(config.data.sequence_length, config.model.rope_original_positions)
        return config.data.sequence_length

    @cached_property
    def is_small(self) -> bool:
        """Whether a token is too little work to share between threads."""
        return sum(parameter.numel() for parameter in self.stage.parameters()) < _WORTH_THREADS

    @property
    def speaks(self) -> bool:
        """Whether this is the one rank that prints."""
        return self.mesh.rank == 0

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor | None:
        """Run tokens through all layers but the head. Collective over the pipeline.

        Args:
            tokens: int64 [B, S], the same on every rank of a replica.

        Returns:
            what the head takes, [B, S, H], on the last stage; None on the others.
        """
        pp = self.mesh.pp
        x = tokens.to(self.mesh.device)
        if not pp.is_first:
            shape = (*tokens.shape, self.trained.config.model.hidden_size)
            x = pp.receive_(torch.empty(shape, dtype=self.dtype, device=self.mesh.device), pp.index - 1)
        layers = self.stage.layer_names
        for name in layers[:-1] if self.stage.gives_loss else layers:
            x = self.stage.get_submodule(name)(x, NOTHING)
        if pp.is_last:
            return x
        pp.send(x, pp.index + 1)
        return None

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """This tensor rank's columns of the logits, of [..., H] on the last stage: [..., columns]."""
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        out: Tensor = self.stage.get_submodule(self.stage.layer_names[-1])(flat)
        return out.view(*hidden.shape[:-1], out.shape[-1])

    @contextmanager
    def few_threads(self) -> Iterator[None]:
        """As few threads as the work is worth, for the time of the block."""
        before = torch.get_num_threads()
        if before > 1 and self.is_small:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def whole_logits(self, hidden: Tensor) -> Tensor:
        """The logits [..., V] of the tokens there are, the same on every tensor rank. Collective over the tensor axis.

        Args:
            hidden: [..., H] on the last stage.
        """
        part, tp = self.logits(hidden), self.mesh.tp
        if tp.size > 1:
            widest = -(-self.trained.config.model.vocab_size // tp.size)  # the last shards may be narrower
            part = tp.all_gather_equal(torch.nn.functional.pad(part, (0, widest - part.shape[-1])), -1)
        return part[..., : self.tokens]
