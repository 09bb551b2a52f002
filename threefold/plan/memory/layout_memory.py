"""The peak memory of the ranks of a layout: states, passes in flight, and the largest moment of a pass."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from threefold.config import Config
from threefold.plan.activations import BlockSizes
from threefold.plan.memory.block_sizes import block_sizes
from threefold.plan.memory.flight import Flight, flights_of
from threefold.plan.memory.layers import LayerBytes, block_layer, embedding_layer, head_layer
from threefold.plan.memory.systems import Keeps
from threefold.plan.memory.walk import Moment, Run, Sharing, backward_moments, forward_moment
from threefold.plan.model_size import ModelSize, RankSize


@dataclass(frozen=True)
class StageRuns:
    """A stage, as far as memory goes.

    Attributes:
        runs: its layers.
        output: bytes of its output, which a pass keeps as well; 0 of the last stage.
        sharing: of its gradients and weights.
        gradient: elements of the largest gradient of a weight.
        sent: bytes of the gradient that it sends to the stage before it; 0 of the first stage.
        hands_on: whether the next stage is on the same rank.
    """

    runs: tuple[Run, ...]
    output: int
    sharing: Sharing
    gradient: int
    sent: int
    hands_on: bool

    @property
    def kept(self) -> int:
        """Bytes that a pass keeps."""
        return self.output + sum(run.count * run.layer.kept for run in self.runs)

    @property
    def deferred(self) -> int:
        """Bytes that remain of it until the pass for the weights."""
        return sum(run.count * run.layer.deferred for run in self.runs)


class LayoutMemory:
    """The memory of the ranks of a layout.

    Args:
        config: resolved.
        device: `cpu` or `cuda`.
        keeps: of the training system.

    Raises:
        UserError: as `stages.stage_memory`.
    """

    def __init__(self, config: Config, device: str, keeps: Keeps) -> None:
        self._config, self._device, self.keeps = config, device, keeps
        self.size = ModelSize(config)
        parallel, train = config.parallel, config.train
        self._micro_batches = train.gradient_accumulation_steps
        self._flights = flights_of(parallel.pipeline_schedule, parallel.pp, parallel.stage_chunks, self._micro_batches)
        self._replayed = self.size.weights.recomputed(train.recompute, train.recompute_every)
        # The allocator of a GPU keeps what it had in the step before.
        self._gradients_grow = self._micro_batches == 1 and device == "cpu"
        self._blocks: dict[object, tuple[BlockSizes, LayerBytes]] = {}

    def peak(self, pp_rank: int) -> tuple[RankSize, Moment]:
        """What a rank has all the time, and beside it at the moment when it has the most."""
        stages = [self._stage(number, pp_rank) for number in self.size.map.held_by(pp_rank)]
        states, moments = self._states(pp_rank), list(self._moments(pp_rank, stages))
        return states, max(moments, key=lambda moment: moment.total)

    def _moments(self, pp_rank: int, stages: Sequence[StageRuns]) -> Iterator[Moment]:
        # The gradient of the input that was sent last.
        sent = max(stage.sent for stage in stages)
        for flight in self._flights[pp_rank]:
            kept = sum(count * stage.kept for count, stage in zip(flight.held, stages, strict=True))
            kept += sum(count * stage.deferred for count, stage in zip(flight.deferred, stages, strict=True))
            kept -= sum(  # what one stage of a rank hands to another of it is there once
                stage.output * min(count, after)
                for stage, (count, after) in zip(stages, pairwise(flight.held), strict=False)
                if stage.hands_on
            )
            kept += sent
            for moment in _of_action(flight, stages[flight.stage]):
                yield moment.plus(activations=kept)
        yield from self._reduction(pp_rank)

    def _reduction(self, pp_rank: int) -> Iterator[Moment]:
        """The end of a step with ZeRO 1, where the first group of gradients is reduce-scattered."""
        if self._config.parallel.zero == 1:
            precision = self._config.precision
            groups = self.size.gathered_together(pp_rank, self.size.largest_place(pp_rank).unshared)
            largest = max(sum(group) for group in groups)
            all_new = sum(map(sum, groups)) * precision.master_itemsize if self._gradients_grow else 0
            yield Moment(
                buffers=largest * precision.master_itemsize,
                weights=-largest * precision.itemsize,
                gradients=all_new,
            )

    def _states(self, pp_rank: int) -> RankSize:
        """What there is from the first micro-batch to the update: of ZeRO without what is gathered for a layer."""
        parallel, precision = self._config.parallel, self._config.precision
        place = self.size.largest_place(pp_rank)
        found = self.size.rank(pp_rank, place)
        wide = precision.master_itemsize
        narrow = precision.itemsize if precision.itemsize < wide else 0
        added = precision.itemsize if precision.dtype in self.keeps.narrow_gradients else wide
        if not parallel.zero:
            if self.keeps.shards_optimizer:
                replicas = parallel.dp * parallel.cp
                weights = found.parameters * narrow + found.parameters * wide // replicas
                found = found._replace(weights=weights, optimizer=found.optimizer // replicas)
            return found._replace(gradients=found.parameters * added)
        whole = self.size.weights.held(self.size.layers_of_rank(pp_rank), place.unshared).all
        gathered = whole * precision.itemsize if parallel.zero < 3 else 0
        gradients = 0 if self._gradients_grow else (whole if parallel.zero == 1 else found.parameters) * added
        return RankSize(found.parameters, found.parameters * wide + gathered, gradients, found.optimizer)

    def _stage(self, number: int, pp_rank: int) -> StageRuns:
        config, place = self._config, self.size.largest_place(pp_rank)
        weights, layers = self.size.weights, self.size.layers_of(number)
        whole = place.unshared
        together = weights.sharing(layers)
        tied = weights.held(together, whole).all
        runs = []
        for (_, layer), alike in groupby(layers, key=lambda name: (weights.kinds[name], self._layer(name))):
            names = list(alike)
            own = 0 if names[0] in together else weights.held(names[:1], whole).all
            ends = {"is_head": names[-1] == weights.plan.layers[-1], "is_embedding": names[0] == weights.plan.layers[0]}
            runs.append(Run(layer, len(names), own, **ends))
        zero, precision = config.parallel.zero, config.precision
        sharing = Sharing(
            zero,
            max(1, place.zero.count),
            precision.itemsize,
            precision.master_itemsize,
            tied,
            self.keeps.kernels.gradients_in_place,
            self._micro_batches > 1,
            self._gradients_grow,
        )
        block, _ = self._block(0)
        outer = block.own_tokens * block.hidden * block.itemsize
        ranks = self.size.map.ranks
        is_last = number == len(ranks) - 1
        return StageRuns(
            tuple(runs),
            0 if is_last else outer,
            sharing,
            max(run.layer.largest for run in runs if not run.is_embedding or len(runs) == 1),
            outer if number else 0,
            not is_last and ranks[number + 1] == pp_rank,
        )

    def _layer(self, name: str) -> LayerBytes:
        config, layers = self._config, self.size.weights.plan.layers
        if name not in (layers[0], layers[-1]):
            return self._block(int(name.rpartition(".")[2]))[1]
        model, (block, _) = config.model, self._block(0)
        if name == layers[-1]:
            chunk = config.train.loss_chunk_size if self.keeps.chunked_loss else 0
            if self.keeps.whole_logits:
                block = replace(block, tp=1, sequence_parallel=False)
            return head_layer(block, model.vocab_size, chunk)
        learned = model.position_embedding == "learned"
        positions = model.max_position_embeddings if learned else 0
        dropout = model.embedding_dropout if model.architecture == "gpt" else model.hidden_dropout
        return embedding_layer(block, model.vocab_size, positions, dropout > 0, self._device)

    def _block(self, layer: int) -> tuple[BlockSizes, LayerBytes]:
        model = self._config.model
        replayed = f"blocks.{layer}" in self._replayed
        key = model.has_experts(layer), model.window(layer), replayed
        if key not in self._blocks:
            sizes = block_sizes(self._config, self._device, layer)
            experts = None if sizes.experts is None else replace(sizes.experts, even=True)
            attention = self.keeps.attention(sizes.attention)
            sizes = replace(sizes, kernels=self.keeps.kernels, attention=attention, experts=experts)
            self._blocks[key] = sizes, block_layer(sizes, self._config.train.recompute if replayed else "none")
        return self._blocks[key]


def _of_action(flight: Flight, stage: StageRuns) -> Iterator[Moment]:
    """The largest moments of an action, beside all that is held when it begins."""
    if flight.kind == "F":
        yield forward_moment(stage.runs, stage.sharing)
    elif flight.kind == "W":
        yield Moment(activations=stage.deferred, gradients=stage.sharing.gradient(stage.gradient))
    else:
        yield from backward_moments(stage.runs, stage.sharing, flight.kind == "I")
