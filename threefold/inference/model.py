"""A trained model: its newest checkpoint, this rank's shards of it, the forward pass, and the KV cache."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Self

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional as F

from threefold.checkpoint.code import with_code
from threefold.checkpoint.errors import MODEL, DamagedCheckpoint
from threefold.checkpoint.folder import PREFIX, TOKENIZER, Damaged, from_first
from threefold.checkpoint.index import require_match, weight_names
from threefold.checkpoint.manifest import Checkpoint
from threefold.checkpoint.tensors import load_tensors
from threefold.comm.axis import local_part
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.adapter import AdapterConfig
from threefold.config.model import CUSTOM
from threefold.data.conversations import ChatTemplate, template_of
from threefold.data.encoding import DocumentEncoder
from threefold.data.tokenizer import SpecialTokens, TextEncoder, TextRule, id_count, loaded
from threefold.dtypes import DTYPES
from threefold.errors import UserError
from threefold.foreign import FolderFiles
from threefold.huggingface.files import end_tokens
from threefold.inference.custom_logits import CustomLogits, check_custom_model, gives_columns
from threefold.inference.inputs import check_layout, find_checkpoint
from threefold.models.layers.attention import CausalAttention, Rotary
from threefold.models.layers.decoder import NOTHING, PositionEmbedding, SampleInfo
from threefold.models.layers.latent_attention import LatentAttention
from threefold.models.layers.rope_scaling import BY_LENGTH
from threefold.models.source import ConfigSource
from threefold.ops.attention import masked_attention
from threefold.parallel.context import require_standard
from threefold.parallel.parallelize import Parallelism, TrainingSettings, apply_parallelism
from threefold.parallel.pipeline.partition import StageMap, partition_by_cost
from threefold.parallel.pipeline.stage import Stage, whole_parameters
from threefold.parallel.running_statistics import stored_buffers


@dataclass(frozen=True)
class Trained:
    """A trained model on disk: its newest good checkpoint."""

    checkpoint: Checkpoint
    config: Config
    warnings: tuple[str, ...] = ()
    model: str | None = None  # file of a custom model; None uses the checkpoint's copy
    trust_code: bool = False  # that copy may be executed
    chat_template: Path | None = None  # instead of the one in the checkpoint
    average: bool = False  # whether the moving average of the weights takes their place
    step: str | None = None  # of the only checkpoint that counts, as in `select_checkpoint`

    @classmethod
    def find(
        cls,
        run: Path,
        damaged: Damaged | None = None,
        model: str | None = None,
        trust_code: bool = False,
        average: bool = False,
        step: str | None = None,
    ) -> Self:
        """Find the newest good checkpoint of a run, but for the `damaged` ones; `average` is as in `weight_names`, and
        the rest as in `with_code`."""
        choice = find_checkpoint(run, damaged, step)
        config = with_code(choice.config, choice.checkpoint.path, model, trust_code)
        if average:
            weight_names(choice.checkpoint.path, average)  # raises if there is none
        return cls(choice.checkpoint, config, choice.warnings, model, trust_code, average=average, step=step)

    def check(self, layout: Layout) -> None:
        _, plan = ConfigSource().load(self.config)
        if self.is_custom:
            require_match(self.config, self.checkpoint.path)
        check_layout(plan, layout)
        if self.is_custom:
            check_custom_model(self.config, plan)

    @property
    def is_custom(self) -> bool:
        return self.config.model.architecture == CUSTOM

    def documents(self, special_tokens: SpecialTokens | None = None) -> DocumentEncoder:
        """Return the encoder that fits the training data, or an import's tokenizer, but for `special_tokens`."""
        tokenizer, facts = self.tokenizer(), self.checkpoint.facts
        rule = facts.rule or TextRule.of(tokenizer)
        if special_tokens is not None:
            rule = replace(rule, special_tokens=special_tokens)
        for token in (*rule.beginning, *(() if facts.eod is None else (facts.eod,))):
            if token >= self.config.model.vocab_size:
                raise UserError(
                    f"{self.checkpoint.path} was trained with token {token:,} around texts and the model's embedding "
                    f"has {self.config.model.vocab_size:,} rows; give an intact checkpoint of the run."
                )
        return DocumentEncoder(TextEncoder(tokenizer, rule), facts.eod, self.template)

    @cached_property
    def template(self) -> ChatTemplate | None:
        return template_of(self.chat_template, self.checkpoint.path / TOKENIZER)

    def ends(self) -> frozenset[int]:
        """Return the token ids that end a text: the training data's, and those in an imported model's files."""
        eod = self.checkpoint.facts.eod
        return frozenset(end_tokens(self.checkpoint.path, PREFIX)) | ({eod} if eod is not None else set())

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer of the training data. Raises UserError if there is none or it cannot be read."""
        facts, folder = self.checkpoint.facts, self.checkpoint.path
        if facts.tokenizer_sha256 is None and not facts.documents:
            raise UserError(
                f"{folder} was imported without a tokenizer, so output cannot be decoded; put its tokenizer.json "
                "beside its config.json and import it again."
            )
        if facts.tokenizer_sha256 is None:
            raise UserError(
                f"{folder} was trained on {', '.join(self.config.data.corpora)} without a tokenizer, so output cannot "
                "be decoded; resume with --resume and data.tokenizer set to its tokenizer.json."
            )
        tokenizer = loaded(FolderFiles(folder).text(TOKENIZER), f"the tokenizer {folder / TOKENIZER}")
        rows = self.config.model.vocab_size
        if rows is not None and (count := id_count(tokenizer)) > rows:
            raise UserError(
                f"the tokenizer {folder / TOKENIZER} has token ids up to {count - 1:,} and the model's embedding has "
                f"{rows:,} rows; put the model's own tokenizer there, with ids up to {rows - 1:,}."
            )
        return tokenizer

    def load(self, mesh: Mesh | None = None, dtype: str = "fp32") -> "Model":
        """Load this rank's shards of the weights, in any layout and dtype. Collective over the mesh.

        The checkpoint may have been written in another layout and dtype. Checksums are verified; if any rank finds
        damage, all ranks load the newest good checkpoint before it, which is the model's `trained`. Without a mesh,
        this process is alone, on the CPU.
        """
        mesh = mesh or Mesh.alone()
        trained, damaged, run = self, {}, self.checkpoint.run_dir
        given = self.model, self.trust_code, self.average, self.step
        while True:
            try:
                return trained._load(mesh, dtype)
            except DamagedCheckpoint as damage:
                damaged[damage.path] = damage.reason
                found = from_first(mesh.world, lambda: self.find(run, damaged, *given))
                trained = replace(found, chat_template=self.chat_template)

    def _load(self, mesh: Mesh, dtype: str) -> "Model":
        config = self.config
        if config.model.mtp_layers:  # which are of training alone
            config = _without_prediction(config)
        make_model, plan = ConfigSource().load(config)
        stages = StageMap(tuple(partition_by_cost(plan.costs, mesh.pp.size)), tuple(range(mesh.pp.size)))
        # The seed determines buffers that a constructor draws.
        how = Parallelism(mesh, stages, TrainingSettings(seed=self.config.train.seed, dtype=DTYPES[dtype]))
        (stage,) = apply_parallelism(make_model, plan, how, trains=False).stages
        weights: dict[str, Tensor] = {**dict(whole_parameters([stage])), **stored_buffers([stage])}
        stored = weight_names(self.checkpoint.path, self.average)
        weights = {stored.get(name, MODEL + name): weight for name, weight in weights.items()}
        load_tensors(weights, self.checkpoint.path, alone=mesh.is_alone)
        return Model(self, stage.eval().requires_grad_(False), mesh, DTYPES[dtype])


def _without_prediction(config: Config) -> Config:
    """Return a config without the layers that predict further tokens, and without adapters of these alone."""
    model, adapter = config.model.model_copy(update={"mtp_layers": 0}), config.adapter
    if adapter.targets:
        targets = [each for each in adapter.targets if not each.startswith("head.depths.")]
        adapter = adapter.model_copy(update={"targets": targets}) if targets else AdapterConfig()
    return config.model_copy(update={"model": model, "adapter": adapter})


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
        has_tokenizer = self.trained.checkpoint.facts.tokenizer_sha256 is not None
        return min(id_count(self.tokenizer), rows) if has_tokenizer else rows

    @cached_property
    def ends(self) -> frozenset[int]:
        return self.trained.ends()

    @property
    def context(self) -> int:
        """Context length of generation in tokens: the sequence length of training.

        With dynamic RoPE scaling or LongRoPE at most the length up to which angles are fixed, as cached keys would
        have other angles.
        """
        config = self.trained.config
        if config.model.rope_scaling in BY_LENGTH:
            return min(config.data.sequence_length, config.model.rope_original_positions)
        return config.data.sequence_length

    @property
    def prints(self) -> bool:
        return self.mesh.rank == 0

    @torch.no_grad()
    def hidden(self, tokens: Tensor) -> Tensor | None:
        """Run the forward pass through all layers except the head. Collective over the pp axis.

        `tokens`, int64 [B, S], are the same on every rank of a replica. Returns the input of the head, [B, S, H], on
        the last stage, and None on the others. A custom model has no head that could run on some positions alone,
        so of it the result is the logits themselves, as the last layer returns them.
        """
        pp = self.mesh.pp
        x = tokens.to(self.mesh.device)
        if self.trained.is_custom:
            return CustomLogits(self.trained.config, self.stage, self.dtype)(x, self.mesh)
        if not pp.is_first:
            width = self.trained.config.model.hidden_size
            x = pp.receive_(torch.empty((*tokens.shape, width), dtype=self.dtype, device=x.device), pp.index - 1)
        layers = self.stage.layer_names
        for name in layers[:-1] if self.stage.gives_loss else layers:
            x = self.stage.get_submodule(name)(x, NOTHING)
        if pp.is_last:
            return x
        pp.send(x, pp.index + 1)
        return None

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """Compute this tp rank's columns of the logits, [..., columns], from `hidden` [..., H] on the last stage."""
        if self.trained.is_custom:
            return hidden if gives_columns(self.stage.model_plan) else local_part(hidden, self.mesh.tp, -1)
        flat = hidden.reshape(1, -1, hidden.shape[-1])
        out: Tensor = self.stage.get_submodule(self.stage.layer_names[-1])(flat)
        return out.reshape(*hidden.shape[:-1], out.shape[-1])

    @contextmanager
    def few_threads(self) -> Iterator[None]:
        """Use one torch thread within the block if the model is small."""
        before = torch.get_num_threads()
        # With fewer parameters, one token is too little work for several threads, which make it slower.
        if before > 1 and sum(parameter.numel() for parameter in self.stage.parameters()) < 10_000_000:
            torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)

    def whole_logits(self, hidden: Tensor) -> Tensor:
        """Compute all logits [..., V] from `hidden` [..., H] on the last stage. Collective over the tp axis."""
        part, tp = self.logits(hidden), self.mesh.tp
        if tp.size > 1:
            widest = -(-self.trained.config.model.vocab_size // tp.size)  # the last shards may be narrower
            part = tp.all_gather_equal(F.pad(part, (0, widest - part.shape[-1])), -1)
        return part[..., : self.tokens]


# The KV cache keeps the keys and values of earlier tokens, so decoding a token costs the work of one token. The model
# is unchanged: within a `caching` block, a cached module replaces each `CausalAttention`, and the positions (learned
# or rotary) come from a `Cursor`.


class Cursor:
    """Positions of the current tokens in their samples; implements `Positions` of the sequence dim.

    Samples of a batch may differ in length. They are padded on the right, where causal attention ignores the padding:
    it comes after every token of its sample, and its cache slots are overwritten before a later position attends to
    them. With a sliding window the cache is a ring buffer with as many slots as the window.
    """

    positions: Tensor  # int64 [B, S] (or [1, S], shared by all samples)
    rows: Tensor | None  # int64 [B], cache rows to prefill; None when every row gets one more token
    lasts: Tensor  # int64 [B], last position of each sample that is not padding
    used: int  # slots that any row has used

    def fill(self, rows: Sequence[int], lengths: Sequence[int], device: torch.device) -> None:
        """Prefill: the next forward pass holds the first tokens of these rows, padded on the right."""
        self.positions = torch.arange(max(lengths), device=device).unsqueeze(0)
        self.rows = torch.tensor(rows, device=device)
        self.lasts = torch.tensor(lengths, device=device) - 1
        self.used = max(lengths)

    def advance(self, positions: Sequence[int], device: torch.device) -> None:
        """Decode: the next forward pass holds one token per row, at these positions."""
        self.rows = None
        self.lasts = torch.tensor(positions, device=device)
        self.positions = self.lasts.unsqueeze(1)
        self.used = max(positions) + 1

    def held(self, slots: int) -> Tensor:
        """Return the position in each slot (p is in slot p modulo `slots`), int64 [B, slots]; negative if unused."""
        lasts = self.lasts.unsqueeze(1)
        return lasts - (lasts - torch.arange(slots, device=lasts.device)) % slots

    def indices(self, size: int, device: torch.device) -> Tensor:
        return self.positions

    def whole(self, size: int) -> int:
        return size


class CachedAttention(nn.Module):
    """`CausalAttention` with a KV cache: new tokens attend to all earlier tokens of their samples.

    `core` is attention over whole sequences, without dropout; `rows` are the samples of a batch. Each has at most
    `slots` cached positions, or as many as the sliding window. Keys and values are [rows, kv heads, slots, d].
    """

    def __init__(self, core: CausalAttention, cursor: Cursor, rows: int, slots: int) -> None:
        super().__init__()
        require_standard(core, "the KV cache", "a model of --model, which runs without a cache")
        self.core, self.cursor, self.rows = core, cursor, rows
        self.slots = min(slots, core.window or slots)
        self.cached: tuple[Tensor, ...] = ()  # keys and values

    def forward(self, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """Cache `k`, `v` [B, S, kv heads, d] and attend from `q` [B, S, heads, d] → [B, S, heads · d]."""
        if not self.cached:
            self.cached = tuple(x.new_zeros(self.rows, x.shape[2], self.slots, x.shape[3]) for x in (k, v))
        keys, values = self.cached
        held = self.cursor.held(self.slots)
        if self.cursor.rows is not None:
            row, position = torch.arange(len(k), device=k.device).unsqueeze(1), held.clamp(min=0)
            for kept, new in ((keys, k), (values, v)):
                kept[self.cursor.rows] = new[row, position].transpose(1, 2)
            return self.core(q, k, v, samples)
        every = torch.arange(len(k), device=k.device)
        slot = self.cursor.lasts % self.slots
        keys[every, :, slot], values[every, :, slot] = k[:, 0], v[:, 0]
        used = min(self.cursor.used, self.slots)
        keys, values, hidden = keys[:, :, :used], values[:, :, :used], held[:, None, None, :used] < 0
        out = masked_attention(q.transpose(1, 2), keys, values, hidden, self.core.scoring)
        return out.transpose(1, 2).flatten(2)


class CachedLatentAttention(nn.Module):
    """`LatentAttention` that caches latents and the rotary part of keys alone, [rows, slots, rank + rotary].

    New tokens attend to them in the absorbed form, which computes no keys and values of earlier tokens again.
    """

    def __init__(self, attention: LatentAttention, cursor: Cursor, rows: int, slots: int) -> None:
        super().__init__()
        require_standard(attention.core, "the KV cache", "a model of --model, which runs without a cache")
        self.attention, self.cursor, self.rows, self.slots = attention, cursor, rows, slots
        self.cached: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        """Cache the latents of `x` [B, S, H] and attend from it → [B, S, H]."""
        attention = self.attention
        q, latents = attention.queries(x), attention.latents(x)
        if not self.cached:
            self.cached = (latents.new_zeros(self.rows, self.slots, latents.shape[-1]),)
        (kept,) = self.cached
        held = self.cursor.held(self.slots)
        if self.cursor.rows is not None:
            row, position = torch.arange(len(x), device=x.device).unsqueeze(1), held.clamp(min=0)
            kept[self.cursor.rows] = latents[row, position]
            return attention.proj(attention.core(q, *attention.keys_and_values(latents), samples))
        kept[torch.arange(len(x), device=x.device), self.cursor.lasts % self.slots] = latents[:, 0]
        used = min(self.cursor.used, self.slots)
        return attention.proj(attention.absorbed(q, kept[:, :used], held[:, :used] < 0))


class Cache:
    """KV cache of all layers of a stage, and the cursor that they share."""

    def __init__(self, cursor: Cursor, attentions: "list[CachedAttention | CachedLatentAttention]") -> None:
        self.cursor, self._attentions = cursor, attentions

    def keep(self, rows: Sequence[int], device: torch.device) -> None:
        kept = torch.tensor(rows, device=device)
        for attention in self._attentions:
            attention.cached = tuple(each[kept] for each in attention.cached)

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for attention in self._attentions for each in attention.cached)


@contextmanager
def caching(model: nn.Module, rows: int, slots: int) -> Iterator[Cache]:
    """Equip the attention layers of a model or stage, in evaluation mode, with a KV cache within the block.

    It must not be split along the sequence. A batch has `rows` samples of at most `slots` tokens.
    """
    cursor = Cursor()
    cached: list[CachedAttention | CachedLatentAttention] = []
    replaced: list[tuple[nn.Module, str, nn.Module]] = []
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            made: nn.Module
            if isinstance(child, LatentAttention):
                made = CachedLatentAttention(child, cursor, rows, slots)
            elif isinstance(child, CausalAttention) and not isinstance(parent, LatentAttention):
                made = CachedAttention(child, cursor, rows, slots)
            elif isinstance(child, Rotary | PositionEmbedding):
                made = child.of_positions(cursor)
            else:
                continue
            if isinstance(made, CachedAttention | CachedLatentAttention):
                cached.append(made)
            setattr(parent, name, made)
            replaced.append((parent, name, child))
    try:
        yield Cache(cursor, cached)
    finally:
        for parent, name, child in replaced:
            setattr(parent, name, child)
