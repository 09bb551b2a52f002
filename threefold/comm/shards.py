"""How a dim is cut among the ranks of an axis, as arithmetic without torch."""


def shard_bounds(size: int, shards: int, index: int) -> tuple[int, int]:
    """First and past-the-last element of a shard, cut as `torch.chunk` does: the last may be short or empty."""
    step = -(-size // shards)
    return min(index * step, size), min((index + 1) * step, size)
