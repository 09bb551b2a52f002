"""Compare one process with a layout: same model, batches and steps on both sides, and every number checked."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.devices import device_of
from threefold.comm.layout import Layout
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.config.by_step import entries_of, value_at
from threefold.config.resolve import resolve
from threefold.constants import IGNORE_INDEX
from threefold.data.loader import Batch, BatchSlice
from threefold.models.source import ConfigSource
from threefold.parallel.parallelize import ChunkSizes
from threefold.parallel.parameter import Weight, offset
from threefold.train.step import Engine
from threefold.verify import reference
from threefold.verify.batches import BatchSource
from threefold.verify.compare import (
    AVERAGE,
    GRADIENT,
    INITIAL,
    LOSS,
    NORM,
    TOLERANCE,
    WEIGHT,
    Comparison,
    Error,
    Held,
    coverage,
    relative_error,
)
from threefold.verify.worker_pool import WorkerPool


@dataclass(frozen=True)
class Case:
    """Small model and its training; sizes are odd where possible."""

    dp: int = 1
    tp: int = 1
    pp: int = 1
    cp: int = 1
    schedule: str = "1f1b"
    dtype: str = "fp32"
    layers: int = 3
    heads: int = 12  # divisible by 2, 3 and 4
    head_dim: int = 3
    ffn: int = 60
    vocab: int = 67
    sequence: int = 11
    batch: int = 24  # divisible by each dp and accumulation
    accumulation: int = 2
    dropout: float = 0.0
    positions: str = "learned"
    model: tuple[tuple[str, Any], ...] = ()  # further settings of the model, lists as tuples
    documents: bool = False
    uneven: bool = True
    counted: tuple[int, int] | None = None  # positions whose labels count, if not all
    tie: bool = True
    optimizer: str = "adamw"
    update: tuple[tuple[str, Any], ...] = ()  # further settings of the optimizer, ("optimizer.key", value)
    groups: tuple[tuple[tuple[str, Any], ...], ...] = ()  # of the optimizer, each as its items
    steps: int = 3
    clip: float = 0.5
    compile: bool = False
    shared_memory: bool = True
    device: str = "cpu"
    settings: tuple[tuple[str, Any], ...] = ()  # further settings that change no result, ("section.key", value)

    def with_layout(self, dp: int, tp: int, pp: int, **changes: Any) -> "Case":
        return replace(self, **{"dp": dp, "tp": tp, "pp": pp, **changes})

    @property
    def unsplit(self) -> "Case":
        """Return the case for one process, which is the same for every layout, schedule and accumulation."""
        parts = 1 if len(entries_of(self.batch)) == 1 else 0  # a number that divides batches of every size
        alone = replace(self, dp=1, tp=1, pp=1, cp=1, schedule="1f1b", accumulation=parts, settings=())
        return replace(alone, compile=False, shared_memory=True, device="cpu")

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp * self.cp

    @property
    def config(self) -> Config:
        hidden = self.heads * self.head_dim
        given: dict[str, dict[str, Any]] = {
            "model": {
                "num_layers": self.layers,
                "hidden_size": hidden,
                "num_attention_heads": self.heads,
                "ffn_hidden_size": self.ffn,
                "vocab_size": self.vocab,
                "max_position_embeddings": self.sequence + 2,
                "hidden_dropout": self.dropout,
                "attention_dropout": self.dropout,
                "initializer_range": 0.08,
                "tie_embeddings": self.tie,
                "position_embedding": self.positions,
                "rope_theta": 100.0,
                **{name: list(value) if isinstance(value, tuple) else value for name, value in self.model},
            },
            "data": {"path": "unused", "sequence_length": self.sequence, "separate_documents": self.documents},
            "parallel": {"dp": self.dp, "tp": self.tp, "pp": self.pp, "cp": self.cp, "schedule": self.schedule},
            "train": {
                "max_steps": 100,
                "global_batch_size": self.batch,
                "gradient_accumulation_steps": self.accumulation or None,
                "seed": 11,
                "device": "cpu",
                "compile": self.compile,
            },
            "precision": {"dtype": self.dtype},
            "optimizer": {
                "name": self.optimizer,
                "lr": 0.3 if self.optimizer == "sgd" else 3e-3,
                "warmup_steps": 2,
                "weight_decay": 0.1,
                "clip_grad_norm": self.clip,
            },
        }
        if self.optimizer != "lion":
            # With 1e-8, Adam's first steps would follow the sign of rounding noise.
            given["optimizer"]["eps"] = 1e-5
        if self.groups:
            given["optimizer"]["groups"] = list(map(dict, self.groups))
        for key, value in (*self.update, *self.settings):
            section, name = key.split(".")
            given.setdefault(section, {})[name] = list(value) if isinstance(value, tuple) else value
        return resolve(Config.model_validate(given), self.vocab)


LLAMA_SIZES = (
    ("architecture", "llama"),
    ("num_key_value_heads", 6),
    ("head_dim", 4),
    ("qkv_bias", True),
    ("qk_norm", True),
    ("sliding_window", 5),
    ("full_attention_layers", 1),
)
LLAMA = Case(
    model=LLAMA_SIZES, positions="rope", sequence=12, dropout=0.1, documents=True, tie=False, dtype="fp64", steps=2
)
WIDE_SIZES = (
    *(("architecture", "llama"), ("num_key_value_heads", 6), ("head_dim", 8), ("sliding_window", 5)),
    *(("attention_pattern", "2 sliding : 1 full"), ("sliding_rope_theta", 30.0), ("rotary_share", 0.5)),
    *(("qk_norm", True), ("qk_norm_over", "width"), ("attention_gate", True), ("proj_bias", True)),
    *(("norm_position", "after"), ("embedding_scale", 3.0), ("rope_scaling", "yarn"), ("rope_factor", 2.0)),
    *(("rope_original_positions", 7), ("sliding_rope_scaling", False)),
)
"""Norms after each half and over all heads, gates of attention, sliding and full layers, and what goes with these."""
WIDE = replace(LLAMA, model=WIDE_SIZES)
BOTH_SIZES: tuple[tuple[str, Any], ...] = (
    *(("architecture", "llama"), ("num_key_value_heads", 6), ("head_dim", 4), ("sliding_window", 3)),
    *(("attention_pattern", ("full", "sliding", "full")), ("qk_norm", True), ("norm_position", "both")),
    *(("norm_offset", True), ("gate_activation", "gelu_tanh"), ("logit_softcap", 0.7), ("attention_scale", 0.4)),
)
"""Norms of 1 + their weights before and after each half, other gates, capped logits, another scale of scores."""
BOTH = replace(LLAMA, model=BOTH_SIZES, tie=True)
MOE_SIZES: tuple[tuple[str, Any], ...] = (
    ("architecture", "llama"),
    ("num_key_value_heads", 6),
    ("head_dim", 4),
    ("num_experts", 4),
    ("experts_per_token", 2),
    ("expert_ffn_hidden_size", 18),
    ("expert_capacity_factor", 0.8),
    ("shared_expert_ffn_hidden_size", 12),
    ("shared_expert_gate", True),
    ("dense_layers", 1),
    ("router_aux_loss", 0.1),
    ("router_z_loss", 0.01),
)
BIASED_SIZES: tuple[tuple[str, Any], ...] = (  # as in DeepSeek-V3
    *(item for item in MOE_SIZES if not item[0].startswith(("expert_capacity", "shared_expert_gate", "router"))),
    ("num_experts", 8),
    ("router", "sigmoid"),
    ("router_bias_rate", 0.01),
    ("router_groups", 4),
    ("router_groups_chosen", 2),
    ("routed_scale", 2.5),
    ("router_sequence_loss", 0.1),
)
OSS_SIZES: tuple[tuple[str, Any], ...] = (  # as in gpt-oss
    *(item for item in MOE_SIZES if not item[0].startswith(("expert_capacity", "shared_expert"))),
    ("router", "softmax_chosen"),
    ("router_bias", True),
    ("expert_bias", True),
    ("expert_gate_limit", 0.3),
)
MOE = Case(model=MOE_SIZES, positions="rope", sequence=12, dropout=0.1, tie=False, dtype="fp64", steps=2)
DEEPSEEK_SIZES: tuple[tuple[str, Any], ...] = (
    ("architecture", "deepseek"),
    ("query_rank", 10),
    ("key_value_rank", 14),
    ("plain_head_dim", 5),
    ("rope_head_dim", 4),
    ("value_head_dim", 7),
    ("rope_scaling", "yarn"),
    ("rope_factor", 3.0),
    ("rope_original_positions", 6),
    ("rope_mscale_all_dim", 0.8),
)
DEEPSEEK = Case(
    model=DEEPSEEK_SIZES, positions="rope", sequence=24, dropout=0.1, documents=True, tie=False, dtype="fp64", steps=2
)


def over(dp: int, tp: int, pp: int, *settings: tuple[str, Any], ep: int = 1, **changes: Any) -> Case:
    return MOE.with_layout(dp, tp, pp, settings=(("parallel.ep", ep), *settings), **changes)


def with_recompute(case: Case, mode: str, every: int = 1) -> Case:
    return replace(case, settings=(*case.settings, ("train.recompute", mode), ("train.recompute_every", every)))


class Trace(reference.Trace):
    """Results of a run, with the weights after its last step only."""

    @property
    def final(self) -> dict[str, Tensor]:
        return self.weights[-1]

    @classmethod
    def last(cls, trace: reference.Trace) -> "Trace":
        """Return a trace of one process with the weights after its last step only."""
        found = cls(trace.initial, trace.losses, trace.norms, trace.gradients, trace.weights[-1:])
        return replace(found, averages=trace.averages[-1:])


def global_batch(case: Case, step: int) -> tuple[Tensor, Tensor]:
    """Return random tokens and labels; `uneven` masks a different share of each row, some rows entirely."""
    generator = torch.Generator().manual_seed(1000 + step)
    size = value_at(case.batch, step)
    tokens = torch.randint(0, case.vocab, (size, value_at(case.sequence, step)), generator=generator)
    labels = torch.randint(0, case.vocab, (size, value_at(case.sequence, step)), generator=generator)
    if case.uneven:
        share = torch.linspace(-0.1, 1.05, size).unsqueeze(1)
        labels[torch.rand(labels.shape, generator=generator) < share] = IGNORE_INDEX
    if case.counted:
        first, end = case.counted
        labels[:, :first] = labels[:, end:] = IGNORE_INDEX
    return tokens, labels


def documents_of(case: Case, step: int) -> Tensor | None:
    """Return random document bounds in each sample; the first and the last row are one document."""
    if not case.documents:
        return None
    generator = torch.Generator().manual_seed(2000 + step)
    begins = torch.rand(value_at(case.batch, step), value_at(case.sequence, step), generator=generator) < 0.2
    begins[0] = begins[-1] = False
    return begins.cumsum(1)


def shard_of(case: Case, step: int, dp: int) -> Batch:
    tokens, labels = global_batch(case, step)
    size = value_at(case.batch, step) // case.dp
    rows = torch.arange(dp * size, (dp + 1) * size)
    documents = documents_of(case, step)
    batch = Batch(tokens[rows], labels[rows], rows, None if documents is None else documents[rows])
    if not dict(case.update).get("preference.beta"):
        return batch
    assert documents is not None
    generator = torch.Generator().manual_seed(3000 + step)
    references = -30 * torch.rand(len(tokens), 2, generator=generator, dtype=torch.float64)
    return replace(batch, documents=batch.documents.clamp(max=2), references=references[rows])


@dataclass(frozen=True)
class CaseRows(BatchSource):
    case: Case

    def read(self, config: Config, step: int, part: BatchSlice) -> Batch:
        return shard_of(self.case.unsplit, step, 0)

    def batch(self, config: Config, step: int, dp_index: int = 0, dp: int = 1) -> Batch:
        """Return a batch with the labels that the case masks, and no others."""
        return shard_of(self.case.unsplit, step, 0)


def one_process(case: Case) -> Trace:
    """Train the unsplit model without the engine: torch's optimizer and clipping, and the whole batch in one pass."""
    config = case.config
    make, plan = ConfigSource().load(config)
    return Trace.last(reference.one_process(make, plan, config, CaseRows(case), case.steps))


def make_engine(case: Case, chunks: ChunkSizes | None = None) -> Engine:
    config = case.config
    layout, exact = Layout.from_config(config.parallel), config.train.exact
    mesh = Mesh(layout, device_of(case.device), shared_memory=case.shared_memory, in_tree=exact)
    make, plan = ConfigSource().load(config)
    return Engine(make, plan, mesh, config, chunks=chunks)


def whole_tensors(engine: Engine, attribute: str) -> dict[str, Tensor]:
    """Gather an attribute of each weight (`master`; of trained ones `gradient` or `average`) as whole tensors.

    Uses one exchange among the ranks that share it.
    """
    entries: Sequence[Weight] = engine.model.weights if attribute == "master" else engine.optimizer.entries
    if attribute == "average":
        values = {entry.name: average for entry, average in engine.optimizer.averages()}
    else:
        values = {entry.name: getattr(entry, attribute) for entry in entries}
    mine = {entry.name: (offset(entry.parameter), values[entry.name].detach().cpu()) for entry in entries}
    parts = engine.mesh.tp.gather_objects(mine)
    for axis in (engine.mesh.ep, *([] if (zero := engine.parallelism.zero) is None else [zero.shards])):
        parts = [part for parts in axis.gather_objects(parts) for part in parts]
    joined = {}
    for entry in entries:
        pieces = [part[entry.name] for part in parts]
        tensor = torch.full(entry.parameter.shape, torch.nan, dtype=pieces[0][1].dtype)
        if tensor.shape == mine[entry.name][1].shape:
            pieces = [mine[entry.name]]  # this rank holds it whole
        for start, piece in pieces:
            tensor[tuple(slice(a, a + size) for a, size in zip(start, piece.shape, strict=True))] = piece
        joined[entry.name] = tensor
    return joined


def in_layout(case: Case) -> Trace:
    """Train with the engine on this rank of the layout."""
    engine = make_engine(case)
    return trained(engine, case.steps, lambda step: shard_of(case, step, engine.mesh.dp.index))


def trained(
    engine: Engine, steps: int, batch_of: Callable[[int], Any], after: Callable[[int], None] = lambda step: None
) -> Trace:
    """Train for some steps on the batches of a replica, and call `after` with each step."""
    trace = Trace(initial=whole_tensors(engine, "master"))
    for step in range(steps):
        loss, tokens = engine.compute_gradients(batch_of(step), step)
        trace.gradients.append(whole_tensors(engine, "gradient"))
        result = engine.update(loss, tokens, step)
        trace.losses.append(result.loss)
        trace.norms.append(result.grad_norm)
        after(step)
    trace.weights.append(whole_tensors(engine, "master"))
    if engine.optimizer.average is not None:
        trace.averages.append(whole_tensors(engine, "average"))
    return trace


_SHORT = {INITIAL: "initial", LOSS: "loss", GRADIENT: "grad", NORM: "norm", WEIGHT: "final", AVERAGE: "average"}


def _whole(name: str, tensor: Tensor) -> Held:
    return Held(name, 0, (0,) * tensor.dim(), tuple(tensor.shape))


def _where(error: Error) -> str:
    step = "" if error.what in (INITIAL, WEIGHT, AVERAGE) else f"step {error.step - 1} "
    return f"rank {error.rank} {step}{_SHORT[error.what]} {error.parameter}".strip()


def departures(expected: Trace, ranks: list[Trace], case: Case) -> list[str]:
    """Return all differences between the ranks' traces and that of one process, worst first."""
    limit = TOLERANCE[case.dtype]
    parts = [[_whole(name, weight) for name, weight in trace.initial.items()] for trace in ranks]
    errors: list[Error] = []
    for rank, (trace, held) in enumerate(zip(ranks, parts, strict=True)):
        comparison = Comparison(expected, {part.name: part for part in held}, rank, floor=0.0)
        comparison.initial(trace.initial)
        for step, (loss, norm) in enumerate(zip(trace.losses, trace.norms, strict=True)):
            comparison.scalars(step, loss, norm)
            comparison.gradients(step, trace.gradients[step])
        # The gradient of key biases is rounding alone (softmax ignores a constant), which Adam scales up to a step.
        if case.dtype == "fp64" or case.optimizer == "sgd":
            comparison.weights(-1, trace.final)
            comparison.averages(-1, trace.averages[-1] if trace.averages else {})
        errors += comparison.errors
    errors.sort(key=lambda error: error.relative, reverse=True)
    found = [f"{_where(error)}: relative error {error.relative:.3g}" for error in errors if not error.relative <= limit]
    missing = coverage(parts, {name: tuple(weight.shape) for name, weight in expected.initial.items()})
    return found if missing is None else [missing, *found]


def check(pool: WorkerPool, expected: Callable[[Case], Trace], case: Case) -> None:
    """Compare all ranks of a layout with one process."""
    found = departures(expected(case), pool.run(case.world_size, in_layout, case), case)
    assert not found, "\n".join(found[:10])


def narrow_departures(expected: Trace, traces: list[Trace], limit: float) -> list[str]:
    """Return losses, norms or gradients of the first step that differ from fp32 by more than rounding explains."""
    found = []
    for trace in traces:
        if not abs(trace.losses[0] / expected.losses[0] - 1) <= limit:
            found.append(f"loss {trace.losses[0]} is not {expected.losses[0]}")
        if not abs(trace.norms[0] / expected.norms[0] - 1) <= limit:
            found.append(f"norm {trace.norms[0]} is not {expected.norms[0]}")
        for name, gradient in trace.gradients[0].items():
            if not relative_error(gradient, expected.gradients[0][name]) <= 4 * limit:
                found.append(f"grad {name}")
    return found
