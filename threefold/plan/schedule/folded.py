"""Schedules whose two stages a rank form a V: what a rank does, spelled out.

A letter is a pass through one of a rank's stages: `f` forward, `b` backward, `i` backward for the input, `w` weight
gradients; small ones are of the stage in the first half of the pipeline, capital ones of that in the second. `q` are
the weight gradients that wait longest, on either, if any do. Each stage takes its micro-batches in turn.
"""

from collections import Counter, deque

from threefold.config.schedule_actions import Action


def zbv_order(pp: int, rank: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """ZB-V of Qi et al. (arXiv 2401.10241, section 6), as torch runs it; `chunks` is 2.

    It is that of at least 2 · pp − 1 micro-batches, of which those that there are not are left out.
    """
    count, after = max(2 * pp - 1, micro_batches), pp - rank
    first_forwards = 2 * pp - 1 - rank  # of the first stage, before both stages take turns
    turns = count - pp
    both = "fiwFIW" * (count - first_forwards) + "iwFIW" * (turns - (count - first_forwards))
    at_end = rank + after
    letters = "f" * (2 * after - 1) + "Ff" * rank + "FIW" * after + both + "iI" * rank + "iw" * after
    letters += "W" * rank + "w" * (at_end - after)
    return tuple(action for action in _spelled(letters, pp, rank) if action.micro_batch < micro_batches)


def dualpipev_order(pp: int, rank: int, chunks: int, micro_batches: int) -> tuple[Action, ...]:
    """DualPipeV (DeepSeek-AI, arXiv 2412.19437, and Qi et al., 2024), as torch runs it; `chunks` is 2.

    A forward and a backward pass that a GPU runs side by side are two actions here, the forward pass first.
    """
    after, last = pp - rank - 1, rank + 1
    letters = "f" * (2 * after) + "fF" * last + "IqF" * after + "fBFb" * (micro_batches - 2 * pp + last) + "BFb" * after
    # Both stages in turn: full backward passes in the first half of them, backward passes for the input in the second.
    full = 2 * (last // 2) + 1 - rank % 2
    letters += "".join("BbIi"[2 * (place >= full) + place % 2] for place in range(2 * last))
    letters += ("qi" if full < 2 * last else "qb") * after + "q" * last
    return tuple(_spelled(letters, pp, rank))


def _spelled(letters: str, pp: int, rank: int) -> list[Action]:
    """The actions of a rank."""
    stages = {True: rank, False: 2 * pp - 1 - rank}
    done: Counter[str] = Counter()
    waiting: deque[Action] = deque()
    order = []
    for letter in letters:
        if letter == "q":
            if waiting:
                order.append(waiting.popleft())
            continue
        stage, kind = stages[letter.islower()], letter.upper()
        turn = "I" if kind == "B" else kind  # backward passes are counted together, whatever they leave
        action = Action(stage, kind, done[f"{turn}{stage}"])
        done[f"{turn}{stage}"] += 1
        order.append(action)
        if kind == "I":
            waiting.append(action._replace(kind="W"))
    return order
