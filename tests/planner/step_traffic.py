"""Formulas for the communication of a training step: number of collectives and bytes of each kind, on each axis.

From sizes alone they give the numbers that the mesh's recorder counts during a step; `docs/parallel/traffic.md` has
them as a table. They hold for a decoder without experts: an embedding, blocks of attention and MLP, and a head.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from threefold.comm.layout import Coordinates, shard_bounds
from threefold.config import Config
from threefold.models.sharding import covers
from threefold.parallel.gradients import in_buckets
from threefold.parallel.pipeline.partition import StageMap
from threefold.planner.block import WeightShape, describe_model
from threefold.planner.model_size import ShardCoordinates, ShardIndex, local_shape

_ITEMSIZE = {"fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2}
_COUNT = 2 * 8  # bytes of the number of valid tokens, and of padding tokens
_LOSS_AND_NORM = 9 * 8  # with seven requests to end the run


@dataclass(frozen=True)
class Volume:
    """Number of collectives of one operation, and their total bytes as `Event` counts them."""

    count: int = 0
    nbytes: int = 0


Table = dict[str, dict[str, Volume]]
"""Volume of each operation on each axis, by axis and operation."""

_WIRE = {
    "all_reduce": lambda nbytes, ranks: 2 * nbytes * (ranks - 1) / ranks,
    "all_reduce_max": lambda nbytes, ranks: 2 * nbytes * (ranks - 1) / ranks,
    "all_gather": lambda nbytes, ranks: nbytes * (ranks - 1) / ranks,
    "reduce_scatter": lambda nbytes, ranks: nbytes * (ranks - 1) / ranks,
    "all_to_all": lambda nbytes, ranks: nbytes * (ranks - 1) / ranks,
    "send": lambda nbytes, ranks: nbytes,
}


def wire_bytes(operation: str, nbytes: float, ranks: int) -> float:
    """Return the bytes that each rank sends in a ring algorithm, which is optimal in bandwidth.

    Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (JPDC 2009).

    Args:
        operation: `Event.operation`.
        nbytes: bytes of the collective, as `Event` counts them.
        ranks: size of the axis.
    """
    return float(_WIRE[operation](nbytes, ranks))


def step_traffic(config: Config, stages: StageMap, place: Coordinates) -> Table:
    """Return the collectives of one rank in one training step of a GPT, or of a Llama without experts.

    Args:
        config: resolved config of the run.
        stages: map of its layers (embedding, blocks, head) to pipeline stages.
        place: coordinates of the rank.

    Returns:
        Axes and operations that have any traffic.
    """
    step = _Step(config, stages, place)
    table: Table = {}
    for axis, operation, count, nbytes in step.collectives():
        if count:
            before = table.setdefault(axis, {}).get(operation, Volume())
            table[axis][operation] = Volume(before.count + count, before.nbytes + count * nbytes)
    return table


Carried = tuple[str, str, int, int]
"""Axis, operation, count, and bytes of each."""


class _Step:
    """Sizes of a rank, from which its collectives follow."""

    def __init__(self, config: Config, stages: StageMap, place: Coordinates) -> None:
        self.config, self.stages, self.place = config, stages, place
        model, parallel, train = config.model, config.parallel, config.train
        self.parallel = parallel
        self.itemsize = _ITEMSIZE[config.precision.dtype]
        self.wide = max(4, self.itemsize)  # itemsize of losses
        self.summed = self.wide if config.precision.master_weights else self.itemsize  # itemsize of gradients
        self.micro_batches = train.gradient_accumulation_steps
        self.tokens = train.micro_batch_size * config.data.sequence_length // parallel.cp
        self.activation = self.tokens * model.hidden_size * self.itemsize
        self.mine = stages.held_by(place.pp)
        layers = {layer for stage in self.mine for layer in range(*stages.layers(stage))}
        self.has_embedding, self.has_head = 0 in layers, model.num_layers + 1 in layers
        blocks = layers & set(range(1, model.num_layers + 1))
        self.blocks = len(blocks)
        self.held = ShardCoordinates(tp=ShardIndex(place.tp, parallel.tp))
        description = describe_model(config.model, config.data.sequence_length)
        self.plan = description.plan
        self.frozen = config.optimizer.frozen or ()
        self.layers = [each for number, each in enumerate(description.weights.values()) if number in layers]
        replayed = blocks & set(range(1, model.num_layers + 1, train.recompute_every))
        self.replayed_cores = len(replayed) if train.recompute != "none" else 0
        self.replayed = len(replayed) if train.recompute == "full" else 0

    def collectives(self) -> Iterator[Carried]:
        yield from self._scalars()
        yield from self._gradients()
        if self.parallel.tp > 1:
            yield from self._tensor_shared() if self.parallel.sequence_parallel else self._tensor()
            if self.has_head:
                yield from self._loss()
            yield from self._repeated_heads()
        if self.parallel.cp > 1:
            yield from self._context()
        if self.parallel.pp > 1:
            yield from self._pipeline()
            yield from self._ties()

    def _scalars(self) -> Iterator[Carried]:
        """Yield the all-reduces of token and padding counts, and of the loss, the gradient norm and the stop flag."""
        parallel = self.parallel
        yield "dp", "all_reduce", int(parallel.dp > 1), _COUNT
        world = parallel.dp * parallel.tp * parallel.pp * parallel.cp
        yield "world", "all_reduce", int(world > 1), _LOSS_AND_NORM

    def _gradients(self) -> Iterator[Carried]:
        """Yield each gradient once, in buckets, over the ranks that hold the same weights; for ZeRO see `_shared`."""
        dp, cp = self.parallel.dp, self.parallel.cp
        axis = "dp·cp" if dp > 1 < cp else "dp" if dp > 1 else "cp"
        if self.parallel.zero:
            yield from self._shared(axis)
        elif dp * cp > 1:
            compression = self.parallel.gradient_compression
            agrees = int(compression == "fp16")  # on a power of two as the scale
            longest = self._parameters(self.held._replace(tp=ShardIndex(0, self.parallel.tp)))
            sizes = list(zip(longest, self._parameters(self.held), strict=True))
            for bucket in in_buckets(sizes, lambda size: self.summed * size[0]):
                elements = sum(size[0] if dp * cp > 2 else size[1] for size in bucket)
                yield axis, "all_reduce", 1, elements * (self.summed if compression == "none" else 2)
                yield axis, "all_reduce_max", agrees, self.summed
                yield "tp", "all_reduce_max", agrees * (self.parallel.tp > 1), self.summed

    def _shared(self, axis: str) -> Iterator[Carried]:
        """Yield ZeRO's gathers and reduce-scatters by layer, rows padded to equal shards, and its sum over replicas."""
        stage, shards = self.parallel.zero, self.parallel.zero_shards * self.parallel.cp
        layers, gathered = list(self._shapes(self.held)), list(self._shapes(self.held, stage == 3))
        if self.stages.ranks == (0,) and self.config.model.tie_embeddings:
            for each in (layers, gathered):
                each[0] += each.pop()  # they share a weight
        for shapes, all_shapes in zip(layers, gathered, strict=True):
            padded, whole = (
                sum(-(-rows // shards) * shards * columns for rows, columns in each) for each in (shapes, all_shapes)
            )
            yield axis, "all_gather", (2 * self.micro_batches if stage == 3 else 1) * (whole > 0), whole * self.itemsize
            yield axis, "reduce_scatter", (1 if stage == 1 else self.micro_batches) * (padded > 0), padded * self.summed
        if self.parallel.zero_shards < self.parallel.dp:
            held = sum(self._of_shard(rows) * columns for shapes in layers for rows, columns in shapes)
            yield axis, "all_reduce", 1, held * self.summed

    def _of_shard(self, rows: int) -> int:
        """Return how many of `rows` are this replica's when they are sharded over the replicas."""
        cp, shards = self.parallel.cp, self.parallel.zero_shards
        start, end = shard_bounds(rows, shards * cp, self.place.dp % shards * cp + self.place.cp)
        return end - start

    def _tensor(self) -> Iterator[Carried]:
        """Yield all-reduces: forward after embedding and half blocks, backward before half blocks and head."""
        each = self.has_embedding + 4 * self.blocks + self.has_head + self._replayed_sums()
        yield "tp", "all_reduce", self.micro_batches * each, self.activation
        partial = self.summed * sum(self._held_whole(per_head=True))
        yield "tp", "all_reduce", int(partial > 0), partial

    def _tensor_shared(self) -> Iterator[Carried]:
        """Yield a gather before and a reduce-scatter after each half block, their adjoints in the backward pass, and
        the input gathered again; gradients of replicated weights are all-reduced."""
        gathers = 6 * self.blocks + self.has_embedding + 2 * self.has_head + 2 * self.replayed
        scatters = 4 * self.blocks + self.has_embedding + self.has_head + self._replayed_sums()
        yield "tp", "all_gather", self.micro_batches * gathers, self.activation
        yield "tp", "reduce_scatter", self.micro_batches * scatters, self.activation
        held_whole = self.summed * sum(self._held_whole())
        yield "tp", "all_reduce", int(held_whole > 0), held_whole

    def _replayed_sums(self) -> int:
        """Count the sums of recomputed half blocks; the last is skipped unless dropout needs its output."""
        return self.replayed * (2 if self.config.model.hidden_dropout else 1)

    def _loss(self) -> Iterator[Carried]:
        """Yield one maximum per token, and two sums per token in one all-reduce."""
        yield "tp", "all_reduce_max", self.micro_batches, self.tokens * self.wide
        yield "tp", "all_reduce", self.micro_batches, 2 * self.tokens * self.wide

    def _repeated_heads(self) -> Iterator[Carried]:
        """Yield queries, keys and values gathered where ranks share a key-value head, over these ranks, or over the
        whole axis where they do not divide evenly; and the reduce-scatters of their gradients."""
        model, tp = self.config.model, self.parallel.tp
        if model.num_key_value_heads >= tp:
            return
        sharing = tp // model.num_key_value_heads
        rows = (model.num_attention_heads + 2 * model.num_key_value_heads) * model.head_dim
        over_all = sharing == tp or rows % tp > 0
        axis, ranks = ("tp", tp) if over_all else ("tp shares", sharing)
        features = -(-rows // tp) * ranks * self.tokens * self.itemsize
        yield axis, "all_gather", self.micro_batches * (self.blocks + self.replayed), features
        yield axis, "reduce_scatter", self.micro_batches * self.blocks, features

    def _keys_and_values(self) -> int:
        """Return the bytes of the keys and values of a rank's heads and positions."""
        model = self.config.model
        heads = max(model.num_key_value_heads // self.parallel.tp, 1)
        return 2 * heads * model.head_dim * self.tokens * self.itemsize

    def _context(self) -> Iterator[Carried]:
        """Yield one gather of each block's keys and values, and the reduce-scatter of their gradients."""
        if self.parallel.cp_method == "ring":
            yield from self._ring()
            return
        keys_and_values = self._keys_and_values() * self.parallel.cp
        yield "cp", "all_gather", self.micro_batches * (self.blocks + self.replayed_cores), keys_and_values
        yield "cp", "reduce_scatter", self.micro_batches * self.blocks, keys_and_values

    def _ring(self) -> Iterator[Carried]:
        """Yield sends of keys and values to all other ranks, forward and backward, and of wide gradients all around."""
        own, passes = self._keys_and_values(), 2 * self.blocks + self.replayed_cores
        yield "cp", "send", self.micro_batches * passes * (self.parallel.cp - 1), own
        gradients = own // self.itemsize * self.wide
        yield "cp", "send", self.micro_batches * self.blocks * self.parallel.cp, gradients

    def _pipeline(self) -> Iterator[Carried]:
        """Yield sends of activations to the next stage and of gradients to the previous one, across ranks."""
        ranks = self.stages.ranks
        shares = self.parallel.tp if self.parallel.sequence_parallel else 1
        neighbours = [n for stage in self.mine for n in (stage - 1, stage + 1) if 0 <= n < len(ranks)]
        sends = sum(ranks[neighbour] != self.place.pp for neighbour in neighbours)
        yield "pp", "send", self.micro_batches * sends, self.activation // shares

    def _ties(self) -> Iterator[Carried]:
        """Yield the gradient sum of a weight that the first and last layer share, where two ranks have them."""
        if self.config.model.tie_embeddings and self.has_embedding != self.has_head:
            rows = self._of_shard(self._rows()) if self.parallel.zero else self._rows()
            yield "tie", "all_reduce", 1, self.summed * rows * self.config.model.hidden_size

    def _rows(self) -> int:
        start, end = shard_bounds(self.config.model.vocab_size, self.parallel.tp, self.place.tp)
        return end - start

    def _parameters(self, place: ShardCoordinates) -> Iterator[int]:
        """Yield the elements of each parameter on the tensor-parallel rank at `place`, in model order."""
        yield from (rows * columns for shapes in self._shapes(place) for rows, columns in shapes)

    def _shapes(self, place: ShardCoordinates, with_frozen: bool = False) -> Iterator[list[tuple[int, int]]]:
        """Yield the rows and columns of each layer's trained parameters on this rank, with 1 column for a vector."""
        for weights in self._weights(with_frozen):
            yield [_matrix(local_shape(weight.shape, weight.split, weight.last_name, place)) for weight in weights]

    def _held_whole(self, per_head: bool = False) -> Iterator[int]:
        """Yield the elements of parameters that the tensor axis does not split: positions, norms and row-parallel
        biases; with `per_head`, only those that each rank applies to its own heads."""
        share = self._of_shard if self.parallel.zero else int
        for weights in self._weights():
            for weight in weights:
                if per_head and not self.plan.has_partial_gradient(weight.name):
                    continue
                if weight.split.cut_dim(weight.last_name, "tp") is None:
                    rows, columns = _matrix(weight.shape)
                    yield share(rows) * columns

    def _weights(self, with_frozen: bool = False) -> Iterator[tuple[WeightShape, ...]]:
        """Yield the trained parameters of each layer of this rank in model order, tied ones where they are first used,
        and frozen ones if asked."""
        seen: set[WeightShape] = set()
        for layer in self.layers:
            trained = (each for each in layer if with_frozen or not any(covers(one, each.name) for one in self.frozen))
            yield tuple(weight for weight in trained if weight not in seen)
            seen |= set(layer)


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    return shape[0], prod(shape[1:])
