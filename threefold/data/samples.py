"""The interface between a loader and samples of any token format."""

from dataclasses import dataclass
from typing import Protocol

from threefold.random.permutation import Int64Array, samples_at


class Samples(Protocol):
    """Samples of one length S, the same on every rank."""

    def __len__(self) -> int:
        """Number of samples."""

    def ordered(self, counters: Int64Array, seed: int) -> Int64Array:
        """The sampler: the sample that a run reads as its n-th, for each n in `counters`: int64 [rows], a function of
        (seed, n) alone."""

    def labelled(self, indices: Int64Array) -> tuple[Int64Array, Int64Array]:
        """Inputs and labels of samples: two int64 [rows, S]; ignored labels are -100 (IGNORE_INDEX).

        Args:
            indices: int64 [rows].

        Raises:
            UserError: the files are damaged.
        """

    def documents(self, indices: Int64Array) -> Int64Array:
        """The document of each input token, from which the attention mask follows: int64 [rows, S], which never falls
        along a row."""

    def positions(self, indices: Int64Array) -> Int64Array | None:
        """The position of each input token of samples where documents under a separating attention mask count from 0:
        int64 [rows, S]; None where positions count from the start of the sample."""

    def padding(self, indices: Int64Array) -> Int64Array:
        """How many of the input tokens of samples only fill them up to their length: int64 [rows]."""

    @property
    def parts(self) -> "tuple[MixturePart, ...]":
        """The corpora that the samples come from, whose weights add up to 1."""

    def epochs(self, counter: int) -> dict[str, float]:
        """Passes over each part of a mixture, by name, after `counter` samples of a run; empty where there is none."""

    @property
    def notes(self) -> tuple[str, ...]:
        """A sentence for each thing that a user should know of how the samples were made."""


@dataclass(frozen=True)
class MixturePart:
    """One corpus of a mixture: its name, its samples, and the share of it among the samples that a run reads."""

    name: str
    samples: Samples
    weight: float


class SingleCorpus(Samples, Protocol):
    """What samples of one corpus have in common, read in a keyed order and with positions from the sample's start."""

    @property
    def parts(self) -> tuple[MixturePart, ...]:
        return (MixturePart("", self, 1.0),)

    def ordered(self, counters: Int64Array, seed: int) -> Int64Array:
        return samples_at(counters, len(self), seed)

    def epochs(self, counter: int) -> dict[str, float]:
        return {}

    @property
    def notes(self) -> tuple[str, ...]:
        return ()

    def positions(self, indices: Int64Array) -> Int64Array | None:
        return None


@dataclass(frozen=True)
class ConsumedSamples:
    """How many training samples a run has consumed before each of its steps, from where it starts or is resumed.

    What a step reads follows from it, as the order of the samples is a permutation of this count. It is the step times
    the global batch size as long as that stays; a run may be resumed with another, and counts on.

    Attributes:
        per_step: the global batch size.
        step: updates made at the point.
        samples: consumed there.
    """

    per_step: int
    step: int = 0
    samples: int = 0

    @property
    def has_one_size(self) -> bool:
        """Whether all samples so far were consumed in batches of this size, as far as their number tells."""
        return self.samples == self.step * self.per_step

    def before(self, step: int) -> int:
        """Samples consumed before `step` (0 for the first), which is not before the point."""
        return self.samples + (step - self.step) * self.per_step

    def steps_until(self, samples: int) -> int:
        """The first step before which at least so many samples are consumed, if all batches were of this size."""
        return self.step - (self.samples - samples) // self.per_step
