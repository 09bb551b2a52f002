"""Tests of the tests of context parallelism: each known silent mistake, put back, must make the comparison fail."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from tests.parallel.support import case
from tests.support.mistakes import Patch, sharded_by, with_mistake
from tests.support.parity import departures, in_layout
from threefold.comm.axis import Axis
from threefold.comm.mesh import Mesh
from threefold.constants import IGNORE_INDEX
from threefold.data.loader import Batch
from threefold.models.layers import attention
from threefold.models.layers.decoder import NOTHING, PositionEmbedding, SampleInfo
from threefold.models.sharding import OverContext, OverSequence
from threefold.ops import tiles
from threefold.parallel import context
from threefold.parallel import context as ring
from threefold.parallel.pipeline.stage import LocalBatch
from threefold.parallel.shard_modules import SHARDINGS
from threefold.random.dropout import Dropout
from threefold.random.rng import Slice
from threefold.train.step_batch import BatchPreparation

pytestmark = pytest.mark.slow  # they test the tests; the quick run has those of the other two files


def labels_shifted_after_the_split() -> list[Patch]:
    """The last token of each chunk is asked for the first of the rank's next chunk, which is not what follows it."""
    work = BatchPreparation.local_batch

    def shifted(self: BatchPreparation, batch: Batch, *facts: Tensor | None) -> LocalBatch:
        cut = self.positions
        held = cut.indices(batch.tokens.shape[1] // cut.shares, torch.device("cpu"))
        follow = torch.cat([batch.labels[:, held[1:] - 1], torch.full((len(batch.labels), 1), IGNORE_INDEX)], 1)
        right = work(self, batch, *facts)
        return LocalBatch(right.tokens, follow, right.samples)

    return [(BatchPreparation, "local_batch", shifted)]


def learned_positions_restart_on_each_rank() -> list[Patch]:
    make = SHARDINGS[OverSequence].make
    return [
        sharded_by(
            OverSequence,
            lambda rule, module, context: (
                module if isinstance(module, PositionEmbedding) else make(rule, module, context)
            ),
        )
    ]


def rotary_positions_restart_on_each_rank() -> list[Patch]:
    return [sharded_by(OverContext, lambda rule, module, context: module)]


def plain_causal_mask_on_balanced_chunks() -> list[Patch]:
    """Keys stay in the order of the ranks, as if each rank held one run of the sequence."""
    return [(context, name, lambda cp: list(range(2 * cp))) for name in ("_places", "_held")]


def causal_mask_aligned_with_the_first_key() -> list[Patch]:
    def later(queries: int, keys: int, device: torch.device) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool, device=device).triu(1)

    return [(attention, "later", later)]


def tiles_from_the_first_key_on() -> list[Patch]:
    """The queries of every chunk are taken for the first of the sequence."""

    right = tiles.tiles

    def first(rows: int, queries: range, *rest: Any) -> Iterator[tiles.Tile]:
        for tile in right(rows, range(len(queries)), *rest):
            moved = range(tile.queries.start + queries.start, tile.queries.stop + queries.start)
            yield dataclasses.replace(tile, queries=moved)

    return [(tiles, "tiles", first)]


def documents_attend_across() -> list[Patch]:
    forward = context.ContextParallelAttention.forward

    def across(self: Any, q: Tensor, k: Tensor, v: Tensor, samples: SampleInfo = NOTHING) -> Tensor:
        return forward(self, q, k, v, SampleInfo(samples.keys))

    return [(context.ContextParallelAttention, "forward", across)]


def _documents_from_the_first(argument: int) -> Callable[..., Iterator[tiles.Tile]]:
    """The tiles of documents that are counted from the first of the queries (1) or keys (2)."""

    right = tiles.tiles

    def shifted(rows: int, queries: range, keys: range, mask: tiles.AttentionMask, *rest: Any, **more: Any) -> Any:
        first = (rows, queries, keys)[argument].start
        documents = None if mask.documents is None else mask.documents.roll(first, 1)
        return right(rows, queries, keys, tiles.AttentionMask(mask.window, documents), *rest, **more)

    return shifted


def documents_of_the_first_positions_for_every_chunk() -> list[Patch]:
    return [(tiles, "tiles", _documents_from_the_first(1))]


def key_gradients_not_returned_to_their_owner() -> list[Patch]:
    """Each rank keeps what its own queries gave its own keys."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        by_rank = context._take_chunks(grad, ctx.dim, context._held(ctx.axis.size))
        return by_rank.chunk(ctx.axis.size, ctx.dim)[ctx.axis.index], None, None

    return [(context._GatherSequence, "backward", staticmethod(backward))]


def key_gradients_returned_to_another_rank() -> list[Patch]:
    """In the order of the sequence instead of that of the ranks."""

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.axis.reduce_scatter(grad, ctx.dim), None, None

    return [(context._GatherSequence, "backward", staticmethod(backward))]


def mean_of_means_over_the_context_ranks() -> list[Patch]:
    count = BatchPreparation._count

    def own(self: BatchPreparation, batch: Batch) -> tuple[int, int]:
        cut = self.positions
        held = cut.indices(batch.labels.shape[1] // cut.shares, batch.labels.device)
        counted, padding = count(
            self, dataclasses.replace(batch, tokens=batch.tokens[:, held], labels=batch.labels[:, held])
        )
        return max(1, counted * self.mesh.cp.size), padding

    return [(BatchPreparation, "_count", own)]


def gradients_not_summed_over_the_context_ranks() -> list[Patch]:
    make = Mesh._make_axes

    def without_context(self: Mesh, everyone: tuple[int, ...]) -> None:
        make(self, everyone)
        self.replicas = self.dp

    return [(Mesh, "_make_axes", without_context)]


def attention_mask_by_local_row() -> list[Patch]:
    indices = staticmethod(lambda size, device: torch.arange(size, device=device))
    return [(context.SequenceChunk, "indices", lambda self, size, device: indices(size, device))]


def attention_mask_of_a_shorter_sequence() -> list[Patch]:
    """Rows of the second head and on are counted as if the sequence ended with the chunk."""
    return [(context.SequenceChunk, "whole", lambda self, size: size)]


def hidden_mask_by_local_position() -> list[Patch]:
    make = SHARDINGS[OverSequence].make

    def restart(rule: OverSequence, module: Any, context: Any) -> Any:
        return module.of_part({1: Slice()}) if isinstance(module, Dropout) else make(rule, module, context)

    return [sharded_by(OverSequence, restart)]


def attention_dropout_loses_its_stream() -> list[Patch]:
    """The core that takes the place of the model's own draws from the stream of no layer."""
    of_chunk = context.of_chunk

    def unnamed(core: Any, heads: Any, queries: Any) -> Any:
        with patch.object(core.dropout, "name", ""):
            return of_chunk(core, heads, queries)

    return [(context, "of_chunk", unnamed)]


def ring_gradients_end_a_rank_short() -> list[Patch]:
    """They have visited every rank, but are not sent home by the last one."""
    backward, shift = ring._Attention.backward, Axis.start_shift

    def one_less(ctx: Any, grad: Tensor) -> Any:
        calls = []

        def counted(self: Axis, tensor: Tensor) -> Callable[[], Tensor]:
            calls.append(tensor)
            return (lambda: tensor) if len(calls) == 2 * self.size - 1 else shift(self, tensor)

        with patch.object(Axis, "start_shift", counted):
            return backward(ctx, grad)

    return [(ring._Attention, "backward", staticmethod(one_less))]


def ring_parts_joined_without_their_weights() -> list[Patch]:
    """The mean over the parts that a rank's keys fall into, instead of the mean over the keys."""
    return [(torch, "logaddexp", lambda sofar, new: torch.maximum(sofar, new))]


def ring_attends_to_what_comes_later() -> list[Patch]:
    def all_of_it(self: tiles.Tile, device: torch.device) -> Tensor:
        return torch.zeros(len(self.queries), len(self.keys), dtype=torch.bool, device=device)

    return [(tiles.Tile, "hidden", all_of_it)]


def ring_leaves_out_the_chunks_of_others() -> list[Patch]:
    """A rank's queries attend to its own keys alone."""
    part = ring._Ring.of_owner
    return [
        (
            ring._Ring,
            "of_owner",
            lambda self, owner, *rest: part(self, owner, *rest) if owner == self.axis.index else iter(()),
        )
    ]


def ring_mask_by_the_place_in_the_block() -> list[Patch]:
    drop = ring._RingTile.drop

    def by_place(self: Any, *rest: Any) -> Tensor:
        local = range(self.at_keys.start, self.at_keys.stop)
        return drop(dataclasses.replace(self, tile=dataclasses.replace(self.tile, keys=local)), *rest)

    return [(ring._RingTile, "drop", by_place)]


def ring_documents_of_the_own_chunks() -> list[Patch]:
    """Documents are those of the first positions for the keys of every chunk."""
    return [(ring, "tiles", _documents_from_the_first(2))]


RING = {"cp": 2, "settings": (("parallel.cp_method", "ring"),)}
CONTEXT, WITH_TENSOR = {"cp": 2}, {"cp": 2, "tp": 2}

MISTAKES = [
    (labels_shifted_after_the_split, CONTEXT, "loss"),
    (learned_positions_restart_on_each_rank, CONTEXT, "loss"),
    (rotary_positions_restart_on_each_rank, {"cp": 2, "positions": "rope"}, "loss"),
    (plain_causal_mask_on_balanced_chunks, CONTEXT, "loss"),
    (causal_mask_aligned_with_the_first_key, CONTEXT, "loss"),
    (tiles_from_the_first_key_on, {"cp": 2, "dropout": 0.0}, "loss"),
    (documents_attend_across, {"cp": 2, "documents": True}, "loss"),
    (documents_of_the_first_positions_for_every_chunk, {"cp": 2, "documents": True}, "loss"),
    (key_gradients_not_returned_to_their_owner, CONTEXT, "grad blocks.0.attn.qkv.weight"),
    (key_gradients_returned_to_another_rank, CONTEXT, "grad blocks.0.attn.qkv.weight"),
    (mean_of_means_over_the_context_ranks, CONTEXT, "grad"),
    (gradients_not_summed_over_the_context_ranks, CONTEXT, "grad"),
    (attention_mask_by_local_row, CONTEXT, "loss"),
    (attention_mask_of_a_shorter_sequence, WITH_TENSOR, "loss"),
    (hidden_mask_by_local_position, CONTEXT, "loss"),
    (attention_dropout_loses_its_stream, CONTEXT, "loss"),
    (ring_gradients_end_a_rank_short, RING, "grad blocks.0.attn.qkv.weight"),
    (ring_parts_joined_without_their_weights, RING, "loss"),
    (ring_attends_to_what_comes_later, RING, "loss"),
    (ring_leaves_out_the_chunks_of_others, RING, "loss"),
    (ring_mask_by_the_place_in_the_block, RING, "loss"),
    (ring_documents_of_the_own_chunks, {**RING, "documents": True}, "loss"),
]


@pytest.mark.parametrize(("mistake", "changes", "sign"), MISTAKES, ids=[mistake.__name__ for mistake, *_ in MISTAKES])
def test_mistake_is_found(
    pool, expected, mistake: Callable[[], list[Patch]], changes: dict[str, Any], sign: str
) -> None:
    spread = case(**changes)
    found = departures(expected(spread), pool.run(spread.world_size, with_mistake, mistake, in_layout, spread), spread)
    assert any(sign in departure for departure in found), found[:5]


def test_without_a_mistake_nothing_is_found(pool, expected) -> None:
    spread = case(cp=2, tp=2, positions="rope", documents=True)
    assert not departures(expected(spread), pool.run(spread.world_size, with_mistake, list, in_layout, spread), spread)
