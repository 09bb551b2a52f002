"""Random numbers that are the same in every layout: the order of the samples, dropout, initial values, random streams.

The order of the samples is a keyed pseudo-random permutation, which needs no memory and no start-up. The sampler, in
this file, is stateless: the samples of a step are a function of the seed and the number of samples consumed before it.
Every row of every global batch has a counter, `consumed_samples + row`. The counter's epoch is `counter // n` and its
sample is `permutation(counter % n)`, under a permutation of the n samples that is keyed by (seed, epoch). Nothing
depends on the number of ranks, and nothing has to be replayed on resume.
"""

import hashlib
from typing import Final

import numpy as np
from numpy.typing import NDArray

Int64Array = NDArray[np.int64]
Float64Array = NDArray[np.float64]

MAX_ITEMS: Final = 2**62
_ROUNDS: Final = 8
# Below 64 points a Feistel network has too few distinct keyed permutations; cycle walking covers the difference.
_MIN_BITS: Final = 6
_MULTIPLIER_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2: Final = np.uint64(0x94D049BB133111EB)


class KeyedPermutation:
    """Pseudo-random permutation of range(n), keyed by (seed, epoch, purpose), with O(1) memory and start-up.

    An unbalanced Feistel network over the smallest power of two that holds n (Luby and Rackoff, 1988). Its round
    function is the finalizer of SplitMix64 (Steele, Lea and Flood, 2014). Cycle walking (Black and Rogaway, 2002) keeps
    results below n: fewer than two rounds per item on average once n > 32.
    """

    def __init__(self, n: int, seed: int, epoch: int = 0, purpose: str = "samples") -> None:
        if not 1 <= n <= MAX_ITEMS:
            raise ValueError(f"a permutation holds 1 to 2**62 items, not {n}")
        self.n = n
        bits = max(_MIN_BITS, (n - 1).bit_length())
        self._low_bits = bits // 2
        self._high_bits = bits - self._low_bits
        digest = hashlib.blake2b(f"threefold {purpose} {seed} {epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)

    def __call__(self, indices: Int64Array) -> Int64Array:
        """Return the items at `indices` (int64, any shape, each in [0, n)): same shape, int64."""
        points = indices.astype(np.uint64).ravel()
        if self.n == 1:
            return np.zeros(indices.shape, dtype=np.int64)
        points = self._network(points)
        outside = np.flatnonzero(points >= self.n)
        while outside.size:
            walked = self._network(points[outside])
            points[outside] = walked
            outside = outside[walked >= self.n]
        return points.astype(np.int64).reshape(indices.shape)

    def _network(self, points: NDArray[np.uint64]) -> NDArray[np.uint64]:
        low_bits = np.uint64(self._low_bits)
        high = points >> low_bits
        low = points & np.uint64((1 << self._low_bits) - 1)
        for i in range(0, _ROUNDS, 2):
            # Each half changes by a function of the other alone, so every round can be undone: a bijection.
            high = high ^ _scramble(low, self._keys[i], self._high_bits)
            low = low ^ _scramble(high, self._keys[i + 1], self._low_bits)
        return (high << low_bits) | low


def _scramble(half: NDArray[np.uint64], key: np.uint64, bits: int) -> NDArray[np.uint64]:
    mixed = half ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * _MULTIPLIER_1
    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MULTIPLIER_2
    return mixed >> np.uint64(64 - bits)


def samples_at(counters: Int64Array, n: int, seed: int) -> Int64Array:
    """Return the sample in [0, n) that each global counter (`consumed_samples + row`) of a run reads: int64 [rows]."""
    epochs, positions = np.divmod(counters, n)
    samples = np.empty_like(counters)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        samples[here] = KeyedPermutation(n, seed, int(epoch))(positions[here])
    return samples
