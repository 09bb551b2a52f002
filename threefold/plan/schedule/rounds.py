"""Schedules that alternate forward and backward passes, as one family: what a rank does, from a few numbers.

1F1B and interleaved 1F1B (Narayanan et al., arXiv 2104.04473, section 2.2), GPipe, ZB-H1 and ZB-H2 (Qi et al., arXiv
2401.10241, section 2), and torch's interleaved zero bubble, differ in how many forward passes come before the first
backward pass, and in how long weight gradients wait. `torch.distributed.pipelining` has most of them too; its objects
also work out the sends of all ranks, which takes minutes where the planner has milliseconds.
"""

from dataclasses import dataclass

from threefold.config.schedule_actions import Action


@dataclass(frozen=True)
class Rounds:
    """A schedule of this family.

    Attributes:
        hop: forward passes that a rank is ahead of the rank after it, before its first backward pass; None for all.
        wait: on rank r, weight gradients are those of wait · r backward passes before; None where a backward pass
            computes them at once.
    """

    hop: int | None
    wait: int | None = None

    def order(self, pp: int, rank: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
        """The actions of a rank.

        Args:
            pp: pipeline ranks.
            rank: its coordinate.
            chunks: stages of each rank; stage n is on rank n modulo pp.
            micro_batches: of a step, in equal rounds of at least pp where there are several chunks.
        """
        passes, in_round = chunks * micro_batches, micro_batches // max(1, micro_batches // pp)
        ahead = passes if self.hop is None else min(passes, (chunks - 1) * in_round + self.hop * (pp - 1 - rank))
        # Pass n of a kind is of chunk (n / in_round) modulo chunks, of the micro-batch that is next there.
        nth = []
        for number in range(passes):
            turn, place = divmod(number, in_round)
            nth.append((turn % chunks, turn // chunks * in_round + place))
        forwards = [Action(chunk * pp + rank, "F", number) for chunk, number in nth]
        kind = "B" if self.wait is None else "I"
        backwards = [Action((chunks - 1 - chunk) * pp + rank, kind, number) for chunk, number in nth]
        order = forwards[:ahead]
        if self.wait is None:
            for forward, backward in zip(forwards[ahead:], backwards, strict=False):
                order += forward, backward
            return (*order, *backwards[passes - ahead :])
        behind = self.wait * rank
        weights = [action._replace(kind="W") for action in backwards]
        for number, backward in enumerate(backwards):
            order += forwards[ahead + number : ahead + number + 1]
            order.append(backward)
            order += weights[number - behind : number - behind + 1] if number >= behind else ()
        return (*order, *weights[max(0, passes - behind) :])


def looped_bfs_order(pp: int, rank: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """Breadth-first pipeline parallelism (Lamy-Poirier, arXiv 2211.05953): all micro-batches through one of a rank's
    stages before the next, and back in the opposite order."""
    forwards = [Action(chunk * pp + rank, "F", number) for chunk in range(chunks) for number in range(micro_batches)]
    return (*forwards, *(action._replace(kind="B") for action in reversed(forwards)))
