"""The least memory of all options of a mesh at once: what a rank holds whatever the order of its passes.

The parts are those of `plan.memory`: states, and for as many passes as the schedule has in flight what each keeps; of
what is there in passing, only the largest set of one layer's backward pass. So the exact peak is no smaller.
"""

from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import numpy as np

from threefold.comm.layout import Coordinates
from threefold.config.resolve import is_derived
from threefold.config.schema import Config, ParallelConfig
from threefold.parallel.shard_shapes import Place, place_of
from threefold.plan.memory.layer_memory import LayerMemory
from threefold.plan.memory.layout_memory import standing_states
from threefold.plan.memory.systems import Keeps
from threefold.plan.model_size import RankSize, optimizer_states
from threefold.plan.model_weights import model_weights
from threefold.plan.search.bounds.rank_layers import LayerKinds, RankLayers
from threefold.plan.search.choice import LayoutChoice
from threefold.plan.search.costs import Array
from threefold.plan.search.in_layout import in_layout
from threefold.plan.search.space import MeshSizes, Options

_STATE_ALONE, _WEIGHTS_TOO = 1, 3  # values of parallel.zero
_KEPT, _BACKWARD, _DEFERRED = range(3)


class _Held(NamedTuple):
    """What ranks hold of all passes at their peak, at least.

    Attributes:
        layers: of each kind, once for each pass, [rows, micro, kinds].
        outputs: of stages that hand them on, once for each pass, [rows, micro].
    """

    layers: Array
    outputs: Array

    @classmethod
    def of(cls, mesh: MeshSizes, ranks: RankLayers, micro_batches: Array) -> "_Held":
        """Those of as many passes as a rank has in flight, most of them through its smallest stages."""
        chunks = ranks.of_row(ranks.chunks)[:, None]
        rounds = micro_batches // np.maximum(1, micro_batches // mesh.pp)
        # The table counts rounds of pp micro-batches, where there may be fewer.
        passes = ranks.passes[:, None] - (chunks - 1) * np.maximum(0, mesh.pp - rounds)
        passes = np.clip(passes, 1, micro_batches * chunks)
        # A stage holds two rounds of its micro-batches and the beginning of a third, or all where that is fewer.
        room = np.maximum(np.minimum(micro_batches, 2 * rounds + mesh.pp), passes / chunks)
        full = np.minimum(passes // room, chunks).astype(int)
        rows, most = np.arange(len(ranks.counts))[:, None], ranks.smallest.shape[1] - 1
        before, after = (ranks.smallest[rows, np.minimum(full + more, most)] for more in (0, 1))
        layers = room[..., None] * before + (passes - room * full)[..., None] * (after - before)
        has_last = (ranks.counts[:, -1] > 0)[:, None]
        # The last stage goes back at once, so that few of its passes are held where others make up the number.
        several = (chunks > 1) & np.isfinite(ranks.passes[:, None])
        layers[..., -1] = np.where(several, np.minimum(layers[..., -1], 1), layers[..., -1])
        handed = np.where(ranks.folded[:, None], 0, passes)  # from one stage to the next of the same rank: there once
        return cls(layers, np.where(has_last, np.maximum(0, handed - room), handed))


class LeastBytes:
    """The memory of one config on one type of device.

    Args:
        config: on one rank, resolved.
        device: `cpu` or `cuda`.
        keeps: of the training system.
        kinds: of the layers of its model.
    """

    def __init__(self, config: Config, device: str, keeps: Keeps, kinds: LayerKinds) -> None:
        self._config, self._device, self._keeps, self._kinds = config, device, keeps, kinds
        self._weights = model_weights(config.model, config.data.sequence_length)
        self._names = [self._weights.plan.layers[layer] for layer in kinds.first]
        self._states = [optimizer_states(config.optimizer, hidden) for hidden in (True, False)]
        self._largest = config.train.global_batch_size
        self._held: dict[Place, Array] = {}
        self._layers: dict[object, Array] = {}

    def __call__(self, mesh: MeshSizes, options: Options, ranks: RankLayers) -> Array:
        """Bytes that the rank with the most needs at least, in all dims."""
        sizes = np.array([each["train.micro_batch_size"] for each in options.micro_batch])
        modes = [each["train.recompute"] for each in options.recompute]
        shards = [each["parallel.sequence_parallel"] for each in options.sequence_parallel]
        counts = mesh.share // sizes
        states = self._states_of(mesh, options, ranks, False)[:, None, :]  # [rows, micro, zero]
        if self._device == "cpu":
            growing = self._states_of(mesh, options, ranks, True)[:, None, :]
            states = np.where((counts == 1)[:, None], growing, states)
        held = _Held.of(mesh, ranks, counts)
        buffers = self._buffers(mesh, options, ranks, counts)  # [rows, micro, zero]
        found = np.empty(options.shape)
        for sequence, sharded in enumerate(shards):
            for place, mode in enumerate(modes):
                activations = self._moving(mesh, ranks, sizes, held, sharded, mode)  # [rows, micro]
                moving = (activations[:, :, None] + buffers) * (1 + self._keeps.fragmentation)
                most = np.maximum.reduceat(moving + states, ranks.starts, axis=0)  # [schedule, micro, zero]
                found[:, sequence, place] = most.transpose(1, 0, 2)
        return found

    def _moving(
        self, mesh: MeshSizes, ranks: RankLayers, sizes: Array, held: "_Held", sharded: bool, mode: str
    ) -> Array:
        """Activations, and the largest set of one layer's backward pass, [rows, micro]."""
        one, two, last = (self._of_kinds(mesh, size, sharded, mode) for size in (1, 2, self._largest))
        # What grows faster than the batch is above the line through the first two, what grows slower above the chord.
        growth = np.minimum(two - one, (last - one) / max(1, self._largest - 1))
        each = one[..., None] + growth[..., None] * (sizes - 1)  # [kept, backward, deferred; kinds, output; micro]
        layers, output = each[:, :-1], each[_KEPT, -1]
        kept = np.einsum("rmk,km->rm", held.layers, layers[_KEPT]) + held.outputs * output
        waiting = np.einsum("rmk,km->rm", held.layers, np.minimum(layers[_KEPT], layers[_DEFERRED]))
        backward = np.where((ranks.counts > 0)[..., None], layers[_BACKWARD], np.inf).min(axis=1)
        return np.where(ranks.deferred[:, None] > 0, waiting, kept) + backward

    def _buffers(self, mesh: MeshSizes, options: Options, ranks: RankLayers, micro_batches: Array) -> Array:
        """Of ZeRO: the weights of a layer, gathered, and the gradients of one before they are scattered, [rows, micro,
        zero]."""
        narrow, wide = self._config.precision.itemsize, self._config.precision.master_itemsize
        layers = self._table(self._place(mesh, 0))[:-1].sum(axis=1)
        least = np.where(ranks.counts > 0, layers, np.inf).min(axis=1)[:, None]
        repeated = np.where(micro_batches > 1, least * wide, 0)
        columns = []
        for settings in options.zero:
            zero = settings["parallel.zero"]
            gathered = least * narrow if zero == _WEIGHTS_TOO else 0
            columns.append(gathered + (repeated if zero > _STATE_ALONE else np.zeros_like(repeated)))
        return np.stack(columns, axis=-1)

    def _of_kinds(self, mesh: MeshSizes, size: int, sharded: bool, mode: str) -> Array:
        """Bytes of a layer of each kind, and of the output of a block, [kept, backward and deferred; kinds and 1]."""
        key = mesh.tp, mesh.cp, mesh.ep, size, sharded, mode
        if key not in self._layers:
            choice = LayoutChoice(mesh.dp, mesh.tp, mesh.pp, mesh.cp, mesh.ep, 0, "1f1b", 1, size, 1, mode, sharded)
            self._layers[key] = self._of_layers(in_layout(self._config, choice), mode)
        return self._layers[key]

    def _of_layers(self, config: Config, mode: str) -> Array:
        chunks = [config.train.loss_chunk_size]
        if is_derived(self._config, "train.loss_chunk_size"):
            chunks = [0, 1]  # between whose bytes are those of every other one
        memories = []
        for chunk in chunks:
            changed = config.model_copy(update={"train": config.train.model_copy(update={"loss_chunk_size": chunk})})
            replayed = self._weights.recomputed(mode, 1)
            memories.append(LayerMemory(changed, self._device, self._keeps, self._weights.plan.layers, replayed))
        found = [memories[0].of(name) for name in self._names[:-1]]
        rows = [[each.kept, each.backward, each.deferred] for each in found]
        heads = [memory.of(self._names[-1]) for memory in memories]
        head = np.min([[each.kept, each.backward, each.deferred] for each in heads], axis=0)
        return np.array([*rows, head, [memories[0].output, 0, 0]], dtype=float).T

    def _states_of(self, mesh: MeshSizes, options: Options, ranks: RankLayers, grow: bool) -> Array:
        """Weights, gradients and optimizer state, [rows, zero].

        Args:
            mesh, options, ranks: as of `__call__`.
            grow: whether there are no gradients before the backward pass.
        """
        precision = self._config.precision
        narrow, wide = precision.itemsize, precision.master_itemsize
        columns = []
        for settings in options.zero:
            zero = settings["parallel.zero"]
            place = self._place(mesh, zero)
            own, whole = (self._elements(ranks, each) for each in (place, place.unshared))
            held: Any = own.sum(axis=1)
            copies = held * narrow if narrow < wide else 0
            size = RankSize(held, held * wide + copies, held * wide, own @ np.array(self._states) * wide)
            parallel = _parallel(mesh, zero)
            size = standing_states(size, cast(int, whole.sum(axis=1)), parallel, precision, self._keeps, grow)
            columns.append(size.weights + size.gradients + size.optimizer)
        return np.stack(columns, axis=-1)

    def _place(self, mesh: MeshSizes, zero: int) -> Place:
        return place_of(_parallel(mesh, zero), Coordinates(0, 0, 0, 0))

    def _elements(self, ranks: RankLayers, place: Place) -> Array:
        """Of the weights that a rank holds, hidden matrices and others, [rows, 2]."""
        table = self._table(place)
        has_both = (ranks.counts[:, 0] > 0) & (ranks.counts[:, self._kinds.head] > 0)
        return ranks.counts @ table[:-1] - has_both[:, None] * table[-1]

    def _table(self, place: Place) -> Array:
        """Elements of a layer of each kind, and of those that the first and the last share, hidden and others,
        [kinds and 1, 2]."""
        if place not in self._held:
            alone = [self._weights.held([name], place) for name in self._names]
            first, last = alone[0], alone[self._kinds.head]
            both = self._weights.held([self._names[0], self._names[self._kinds.head]], place)
            tied = [first.hidden + last.hidden - both.hidden, first.others + last.others - both.others]
            self._held[place] = np.array([*([each.hidden, each.others] for each in alone), tied], dtype=float)
        return self._held[place]


def _parallel(mesh: MeshSizes, zero: int) -> ParallelConfig:
    """The sizes of a mesh under their names in a config, without the time that a config takes."""
    axes = {axis: getattr(mesh, axis) for axis in ("dp", "tp", "pp", "cp", "ep")}
    return cast(ParallelConfig, SimpleNamespace(**axes, zero_shards=mesh.dp, zero=zero))
