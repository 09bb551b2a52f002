"""What ranks tell each other over the store while they set their memory up."""

import torch.distributed as dist

from threefold.comm.shared_memory_setup import StoreExchange


def told_and_voted(against: tuple[int, ...]) -> tuple[str, bool, bool]:
    """What rank 1 tells; whether all agree on what the ranks `against` refuse; and on the same in a later exchange."""
    first, second = StoreExchange(dist.group.WORLD), StoreExchange(dist.group.WORLD)
    rank = dist.get_rank()
    assert (first.ranks, first.index) == ([0, 1, 2], rank)
    for exchange, text in ((first, "früher"), (second, "later")):
        if rank == 1:
            exchange.tell("word", text)
    first.vote("ready", rank not in against)
    second.vote("ready", True)
    assert second.told("word") == "later"
    return first.told("word"), first.agreed("ready"), second.agreed("ready")


def test_ranks_are_told_and_agree(pool) -> None:
    assert pool.run(3, told_and_voted, ()) == [("früher", True, True)] * 3


def test_one_vote_against_is_enough(pool) -> None:
    assert pool.run(3, told_and_voted, (1,)) == [("früher", False, True)] * 3
    assert pool.run(3, told_and_voted, (0, 1, 2)) == [("früher", False, True)] * 3
