"""Agreement of ranks on data that the user's own code reads: one data set for all, one batch for a whole replica.

A data set that gives each rank its own part, as many do under other systems, would be divided a second time; a sampler
of all ranks would give the ranks of one replica different rows. Both train without an error, on other numbers.
"""

from typing import Any, Final

from threefold.comm.axis import Axis
from threefold.comm.mesh import Mesh
from threefold.data.keyed_reading import KeyedReader, changing, fingerprint_of
from threefold.errors import UserError

_UNKNOWN: Final = -1
"""Number in place of a length or a fingerprint that a data set does not have: it cannot be read, or changes."""


def require_one_data_set(dataset: Any, mesh: Mesh | None, named: str) -> None:
    """Check that a map-style data set is the same on every rank, and at each reading, by its length and first sample.

    `named` names it in messages. The sample is read twice, with the same random numbers on all ranks. Collective over
    the world.
    """
    size, first, changes = _UNKNOWN, _UNKNOWN, None
    begin = named.removesuffix(", which").removesuffix(",")
    try:
        size = len(dataset)
        if size:
            first = _constant(KeyedReader(dataset, begin), 0)
    except UserError as error:
        changes = error
    except Exception:  # reading it for a batch reports that, with the sample's number
        pass
    if mesh is None or mesh.world.size == 1:
        if changes is not None:
            raise changes
        return
    found = mesh.world.gather_numbers(mesh.device, size, first, changes is not None)
    sizes, samples, changed = ([each[column] for each in found] for column in range(3))
    if any(changed):
        raise changes or changing(f"{begin}, whose sample 0")
    if (rank := _other(sizes)) is not None:
        differs = f"{_count(sizes[0])} on rank 0 and {_count(sizes[rank])} on rank {rank}"
    elif (rank := _other(samples)) is not None:
        differs = f"another first sample on rank {rank} than on rank 0"
    else:
        return
    raise UserError(
        f"{named} has {differs}, as a data set that shards itself by rank has, which would be divided twice; give "
        "every rank the whole data set, which is then divided among the replicas."
    )


def require_one_batch(batch: Any, mesh: Mesh, when: str, among: Axis | None = None) -> None:
    """Check that all ranks of a replica have the same batch; `when` begins the message.

    Collective over `among`, which contains whole replicas; None for the world.
    """
    if mesh.world.size == mesh.dp.size:
        return
    axis = mesh.world if among is None else among
    table = axis.gather_numbers(mesh.device, fingerprint_of(batch))
    found = dict(zip(axis.ranks, (number for (number,) in table), strict=True))
    for ranks in mesh.layout.groups("pp", "cp", "tp"):
        rank = next((rank for rank in ranks if found.get(rank) != found.get(ranks[0])), None)
        if rank is not None:
            raise UserError(
                f"{when}, rank {rank} has another batch than rank {ranks[0]}, which belongs to the same replica (dp "
                f"{mesh.layout.coordinates(rank).dp}); give all ranks of a replica the same rows, with "
                f"DistributedSampler(data, num_replicas={mesh.dp.size}, rank=mesh.dp.index) instead of one of all "
                f"{mesh.world.size} ranks, and a data set that does not shard itself by rank."
            )


def require_one_stream(first: int, mesh: Mesh) -> None:
    """Check that an iterable data set yields the same first batch, of fingerprint `first`, on every rank.

    Collective over the world.
    """
    found = [number for (number,) in mesh.world.gather_numbers(mesh.device, first)]
    if (rank := _other(found)) is not None:
        raise UserError(
            f"The data set of the DataLoader yields another first batch on rank {rank} than on rank 0 but must yield "
            "the same on all ranks, each of which keeps its own rows; leave out what shards it by rank, and seed what "
            "it draws alike."
        )


def _constant(reader: KeyedReader, number: int) -> int:
    """Read a sample twice under one key; return its fingerprint."""
    once, again = (fingerprint_of(reader.read([number], [0])[0]) for _ in range(2))
    if once != again:
        raise changing(f"{reader.named}, whose sample {number}")
    return once


def _count(size: int) -> str:
    return "no length" if size == _UNKNOWN else f"{size:,} samples"


def _other(values: list[int]) -> int | None:
    """Return the first rank whose known value differs from the first rank's; None if there is none."""
    if values[0] == _UNKNOWN:
        return None
    return next((rank for rank, value in enumerate(values) if value not in (values[0], _UNKNOWN)), None)
