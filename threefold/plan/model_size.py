"""Parameter counts of a model, and the memory of each rank's shards: counted from shapes, without processes."""

from typing import NamedTuple

from threefold.comm.layout import Coordinates
from threefold.config import Config, OptimizerConfig
from threefold.config.optimizer import BUILT_IN
from threefold.parallel.pipeline.stage_map import stage_map
from threefold.parallel.shard_shapes import Place, place_of
from threefold.plan.model_weights import model_weights

_STATE_ALONE, _WEIGHTS_TOO = 1, 3  # values of parallel.zero


class StageSize(NamedTuple):
    """A pipeline stage.

    Attributes:
        pp_rank: the coordinate on the pp axis of the rank that has it.
        layers: the names of its layers.
        parameters: of these; a tied weight is counted once, at the first stage that uses it.
    """

    pp_rank: int
    layers: tuple[str, ...]
    parameters: int


class RankSize(NamedTuple):
    """The memory of a rank.

    Attributes:
        parameters: those that it keeps, frozen ones too.
        weights: bytes of them, and of the copies that it computes with.
        gradients: bytes.
        optimizer: bytes of the optimizer state.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int

    @property
    def bytes(self) -> int:
        """All of it."""
        return self.weights + self.gradients + self.optimizer


class ModelSize:
    """A model under a layout.

    Args:
        config: resolved.

    Attributes:
        parameters: of the whole model, tied weights counted once.
        active: parameters active per token: of the experts, as many as each token is sent to.
        weights: of the whole model.
        map: its pipeline stages.

    Raises:
        UserError: the layers cannot be partitioned into the stages as the config says.
    """

    def __init__(self, config: Config) -> None:
        self._config = config
        self.weights = model_weights(config.model, config.data.sequence_length)
        self.map = stage_map(self.weights.plan, config)
        whole = self.weights.held(self.weights.layers, Place())
        self.parameters = whole.all
        idle = config.model.num_experts - config.model.experts_per_token
        self.active = self.parameters - (whole.experts // config.model.num_experts * idle if whole.experts else 0)

    def stages(self) -> list[StageSize]:
        """The stages of the pipeline, in order."""
        found, counted = [], 0
        for number, pp_rank in enumerate(self.map.ranks):
            until = self.weights.held(self._names(0, number), Place()).all
            found.append(StageSize(pp_rank, self.layers_of(number), until - counted))
            counted = until
        return found

    def rank(self, pp_rank: int, place: Place) -> RankSize:
        """The peak memory of a rank in a step, without activations.

        The formulas are those of docs/parallel/data.md. Gathered and scattered buffers are not among it.

        Args:
            pp_rank: its coordinate on the pp axis.
            place: its coordinates on the others.
        """
        precision, zero = self._config.precision, self._config.parallel.zero
        narrow, wide = precision.itemsize, precision.master_itemsize
        layers = self.layers_of_rank(pp_rank)
        own = self.weights.held(layers, place)
        held, trained = own.all, own.trained
        hidden, others = (optimizer_states(self._config.optimizer, hidden) for hidden in (True, False))
        states = (own.hidden * hidden + own.others * others) * wide
        if not zero:
            copies = held * narrow if narrow < wide else 0
            return RankSize(held, held * wide + copies, trained * wide, states)
        whole = self.weights.held(layers, place.unshared)
        largest = max(max(group) for group in self.gathered_together(pp_rank, place.unshared))
        gathered = (largest if zero == _WEIGHTS_TOO else whole.all) * narrow
        summed = max(max(group) for group in self.gathered_together(pp_rank, place.unshared, trained=True))
        if zero == _STATE_ALONE:
            gradients = max(trained * wide, whole.trained * wide + (summed * narrow if narrow < wide else 0))
        else:
            gradients = trained * wide + summed * narrow
        return RankSize(held, held * wide + gathered, gradients, states)

    def largest_rank(self, pp_rank: int) -> RankSize:
        """Of the ranks at a place of the pp axis, the one that holds the most: the first, as none has longer parts."""
        return self.rank(pp_rank, self.largest_place(pp_rank))

    def largest_place(self, pp_rank: int) -> Place:
        """The place of the rank that holds the most."""
        return place_of(self._config.parallel, Coordinates(0, pp_rank, 0, 0))

    def layers_of(self, stage: int) -> tuple[str, ...]:
        """The names of the layers of a stage."""
        return self._names(stage, stage)

    def layers_of_rank(self, pp_rank: int) -> list[str]:
        """Those of all stages of a rank."""
        return [name for stage in self.map.held_by(pp_rank) for name in self.layers_of(stage)]

    def gathered_together(self, pp_rank: int, place: Place, trained: bool = False) -> list[tuple[int, int]]:
        """With ZeRO: the elements that a rank gathers at once, weights and experts that are gathered by themselves; for
        each layer, and for the layers of each stage that share weights, which come last.

        Args:
            pp_rank: coordinate of the rank on the pp axis.
            place: the others, without those of ZeRO.
            trained: whether frozen weights are left out, which have no gradients.
        """
        apart = self._config.parallel.ep > 1
        found = []
        for stage in self.map.held_by(pp_rank):
            layers = self.layers_of(stage)
            together = self.weights.sharing(layers)
            groups = [[name] for name in layers if name not in together]
            for group in [*groups, together]:
                held = self.weights.held(group, place)
                if trained:  # models with experts of their own freeze none
                    held = held._replace(frozen=0)
                found.append((held.dense, held.experts) if apart else (held.all, 0))
        return found

    def _names(self, first: int, last: int) -> tuple[str, ...]:
        """The layers of some stages, the last included."""
        return self.weights.plan.layers[self.map.bounds[first] : self.map.bounds[last + 1]]


def optimizer_states(config: OptimizerConfig, hidden: bool) -> int:
    """Tensors of a weight's shape that the optimizer keeps for it.

    Args:
        config: which optimizer.
        hidden: whether it is a matrix of a layer between the first and the last.

    Raises:
        UserError: the optimizer is another package's or the user's and cannot be imported or made.
    """
    if config.name in BUILT_IN:
        return BUILT_IN[config.name].states(config, hidden)
    from threefold.train.optimizers.own import update_rule  # imports torch

    return update_rule(config).states_per_element(config, hidden)
