"""Finest pieces of an exact run's sums, and the pieces that one rank holds."""

from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import NamedTuple

from threefold.comm.differentiable import all_gather_equal, all_reduce
from threefold.comm.mesh import Mesh
from threefold.config import Config
from threefold.exact.layers import RowSum


@dataclass(frozen=True)
class Grain:
    """Finest pieces of the sums of an exact run, all powers of two; an axis of a layout must divide their number."""

    samples: int  # parts of the global batch, at least as many as replicas
    tensor: int  # pieces of heads, inner features and vocabulary
    positions: int  # pieces of the rows of a context piece that sequence parallelism cuts
    context: int = 1  # pieces of a sequence, each a chunk and its mirror image (`context_parts`)
    sample_group: int = 1  # neighboring samples that run at once, and whose gradient is one sum over their positions

    @classmethod
    def of(cls, config: Config) -> "Grain":
        """Return the grain of a resolved config with `train.exact`."""
        train, context = config.train, config.train.grain_context
        positions = gcd(train.grain_tensor, config.data.sequence_length // context)
        return cls(train.grain_samples, train.grain_tensor, positions, context, train.grain_leaf)


class Pieces(NamedTuple):
    """Pieces of a `Grain` that one rank holds: of the features of a tensor-parallel layer, and sums of rows."""

    features: int
    rows: RowSum  # of a sequence as sharded between tensor-parallel layers
    all_rows: RowSum  # of a sequence that this rank holds whole
    heads: RowSum  # of this rank's heads, one head after another, for weights that all heads share

    @classmethod
    def of(cls, grain: Grain, mesh: Mesh, sequence_parallel: bool) -> "Pieces":
        """Return the pieces of this rank."""
        tp, positions, context = mesh.tp, grain.positions, grain.context // mesh.cp.size
        over_tp, features = partial(all_reduce, axis=tp), grain.tensor // tp.size
        split = whole = RowSum(positions, context=context)
        if sequence_parallel and context == 1:
            split = RowSum(positions // tp.size, over_tp)
        elif sequence_parallel:
            gather = partial(all_gather_equal, axis=tp, dim=0)
            split = RowSum(context * positions // tp.size, None, context, gather)
        return cls(features, split, whole, RowSum(features, over_tp, context))
