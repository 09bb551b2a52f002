"""What the ranks of a process group tell each other over its store while they set something up."""

from datetime import timedelta
from typing import Final

import torch.distributed as dist

from threefold.torch_private.distributed import default_store, process_group_timeout

_REFUSAL: Final = 1 << 32
"""What a vote against counts, beside the one that every vote counts."""


class StoreExchange:
    """Messages and votes of the ranks of a process group.

    A gather over the process group takes a message from each rank to each; these take some requests to the store a
    rank. Telling and voting do not wait for other ranks, so that a rank can set several groups up at once.

    Every rank of the group makes one, and as many as the others.

    Args:
        group: a CPU process group; ranks wait as long as its collectives do.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.ranks, self.index = dist.get_process_group_ranks(group), dist.get_rank(group)
        self.timeout = process_group_timeout(group)
        store = default_store()
        place = f"threefold/exchange/{group.group_name}"
        count = store.add(
            f"{place}/{self.index}", 1
        )  # the same on every rank, so that no message of an earlier one is read
        self._store = dist.PrefixStore(f"{place}/{count}th", store)

    def tell(self, name: str, text: str) -> None:
        """Tell every rank something under a name; one rank of the group does."""
        self._store.set(name, text)

    def told(self, name: str) -> str:
        """What a rank tells under this name; waits for it."""
        self._store.wait([name], timedelta(seconds=self.timeout))
        return str(self._store.get(name).decode())

    def vote(self, name: str, yes: bool) -> None:
        """Vote on what has this name; every rank of the group does once."""
        count = self._store.add(f"{name}/votes", 1 if yes else 1 + _REFUSAL)
        if count % _REFUSAL == len(self.ranks):
            self._store.set(name, str(int(count < _REFUSAL)))

    def agreed(self, name: str) -> bool:
        """Whether all ranks have voted for it; waits until they have voted."""
        return self.told(name) == "1"
