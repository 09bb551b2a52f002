"""The largest moments of a pass through a stage: layer by layer, what is there beside all that was kept before."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from threefold.plan.memory.layers import LayerBytes


class Moment(NamedTuple):
    """Bytes by cause at a moment of a pass, beside what is there when it begins.

    Attributes:
        activations: less than zero for what the pass has freed.
        working: in passing: gradients of activations and of weights, and what is computed again.
        logits: the working set of the head.
        gradients: of weights, until they are reduced.
        weights: gathered (ZeRO 3).
        buffers: of collectives.
    """

    activations: float = 0
    working: float = 0
    logits: float = 0
    gradients: float = 0
    weights: float = 0
    buffers: float = 0

    @property
    def total(self) -> float:
        return sum(self)

    def plus(self, **changes: float) -> "Moment":
        return self._replace(**{name: getattr(self, name) + value for name, value in changes.items()})


@dataclass(frozen=True)
class Run:
    """Layers alike that follow one another in a stage.

    Attributes:
        layer: bytes of each and a micro-batch.
        count: how many there are.
        elements: of the weights of each that a rank has once they are gathered, without those that it shares.
        is_head, is_embedding: whether it is the last layer of the model, or the first.
    """

    layer: LayerBytes
    count: int
    elements: int
    is_head: bool = False
    is_embedding: bool = False


@dataclass(frozen=True)
class GradientSharing:
    """What a stage does with gradients and gathered weights.

    Attributes:
        zero: as `parallel.zero`.
        ranks: over which a copy is sharded.
        narrow, wide: bytes of an element of what is computed with, and of what is updated.
        tied: elements of weights that layers of the stage share, gathered around all of them.
        in_place: whether there are no gradients of weights beside their sums.
        repeated: whether a micro-batch has gone before.
        grows: whether the sums of gradients take memory only as a backward pass makes them.
    """

    zero: int = 0
    ranks: int = 1
    narrow: int = 4
    wide: int = 4
    tied: int = 0
    in_place: bool = False
    repeated: bool = True
    grows: bool = False

    @property
    def gathers_again(self) -> bool:
        """Whether weights are freed after each use."""
        return self.zero == 3

    @property
    def reduces_each(self) -> bool:
        """Whether the gradients of a layer are reduce-scattered after its backward pass."""
        return self.zero > 1

    def new_gradients(self, elements: float) -> float:
        """Bytes of gradients, added up over micro-batches, that a backward pass has made of so many elements; 0 where
        they were there before."""
        if not self.zero or not self.grows:
            return 0
        return elements * self.wide / (1 if self.zero == 1 else self.ranks)

    def gradient(self, elements: float) -> float:
        """Bytes of gradients of weights as a backward pass computes them."""
        return 0 if self.in_place else elements * self.narrow


def forward_moment(runs: Sequence[Run], sharing: GradientSharing) -> Moment:
    """The largest moment of a forward pass, whose activations are all counted: the end of it."""
    last = runs[-1]
    moment = Moment()
    if last.is_head:
        moment = moment.plus(logits=last.layer.forward)
    if sharing.gathers_again:
        moment = moment.plus(weights=sharing.narrow * (last.elements + sharing.tied))
    return moment


def backward_moments(runs: Sequence[Run], sharing: GradientSharing, deferring: bool) -> Iterator[Moment]:
    """Those of a backward pass that can be its largest, one or a few for each run of layers.

    Args:
        runs: of the stage, in order.
        sharing: of its gradients.
        deferring: whether gradients of weights wait for a pass of their own.
    """
    scattered = _last_group(runs, sharing) if sharing.reduces_each and sharing.repeated else 0
    freed, tied, reduced = 0.0, 0.0, 0.0  # a tied weight has one gradient once both of its uses have theirs
    for place in range(len(runs) - 1, -1, -1):
        run, layer = runs[place], runs[place].layer
        # Torch gathers the layer before meanwhile, but not the embeddings, whose backward pass needs no weights.
        before = runs[place - 1].elements if place and not runs[place - 1].is_embedding else 0
        each = layer.kept - (layer.deferred if deferring else 0)
        for number in sorted({0, max(0, run.count - 2), run.count - 1}):
            ahead = run.elements if number < run.count - 1 else before
            if number:
                scattered = run.elements
            new = sharing.new_gradients(reduced + number * run.elements)
            for moment in _of_layer(run, sharing, freed + number * each, tied, ahead, scattered, deferring):
                yield moment.plus(gradients=new)
        freed += run.count * each
        reduced += run.count * run.elements
        scattered = run.elements or scattered
        tied = layer.largest or (run.count and sharing.tied) if run.is_head else tied


def _of_layer(
    run: Run, sharing: GradientSharing, freed: float, tied: float, ahead: float, scattered: float, deferring: bool
) -> Iterator[Moment]:
    """The moments of the backward pass of one layer.

    Args:
        freed: bytes that layers after it have freed.
        tied: elements of a gradient that waits for its second use.
        ahead: elements of the weights of the layer before, which are gathered meanwhile.
        scattered: elements whose reduce-scatter still has its buffer.
        deferring: as in `backward_moments`.
    """
    layer, narrow, wide = run.layer, sharing.narrow, sharing.wide
    own = run.elements + (sharing.tied if run.is_head or run.is_embedding else 0)
    start = Moment(activations=-freed, gradients=sharing.gradient(tied))
    if sharing.reduces_each:
        start = start.plus(buffers=scattered * wide)
    if sharing.gathers_again:
        start = start.plus(weights=(run.elements + sharing.tied) * narrow, buffers=ahead * narrow)
    cause = {"logits" if run.is_head else "working": layer.backward}
    largest = 0 if deferring and not run.is_embedding else sharing.gradient(layer.largest)
    yield start.plus(**cause, gradients=largest)
    if run.is_head and not deferring:  # the weight's gradient, once the probabilities are freed
        yield start.plus(activations=-layer.kept, logits=layer.ending, gradients=sharing.gradient(own))
    if sharing.zero:
        ended = start.plus(activations=-layer.kept, working=layer.ending, gradients=sharing.gradient(own))
        yield ended
        if sharing.reduces_each:
            freed_weights = run.elements * narrow if sharing.gathers_again else 0
            buffers = own * wide * (1 + 1 / sharing.ranks) - scattered * wide
            yield ended.plus(weights=-freed_weights, working=-layer.ending, buffers=buffers)


def _last_group(runs: Sequence[Run], sharing: GradientSharing) -> int:
    """Elements of what is reduce-scattered last in a backward pass."""
    return sharing.tied or next((run.elements for run in runs if run.elements), 0)
