"""Pipeline schedules in Python, as a user writes them in a file: right ones, and one for each mistake."""

TOY = '''
def looped(pp, micro_batches):
    """Two stages a rank, all forward passes first; the weight gradients come last."""
    if micro_batches % 2:
        raise ValueError("an even number is needed")
    ranks = []
    for rank in range(pp):
        mine, numbers = (rank, pp + rank), range(micro_batches)
        order = [(stage, "F", number) for stage in mine for number in numbers]
        order += [(stage, "I", number) for stage in reversed(mine) for number in numbers]
        ranks.append([*order, *(f"{stage}W{number}" for stage in mine for number in numbers)])
    return ranks


def deadlocked(pp, micro_batches):
    return [[f"{rank}{kind}{number}" for number in range(micro_batches) for kind in "BF"] for rank in range(pp)]


def incomplete(pp, micro_batches):
    return [[f"{rank}F{number}" for number in range(micro_batches)] for rank in range(pp)]


def of_two(pp, micro_batches):
    return [["0F0", "0B0"], ["1F0", "1B0"]]


def moving(pp, micro_batches):
    ranks = [[f"{rank}{kind}{number}" for number in range(micro_batches) for kind in "FB"] for rank in range(pp)]
    return ranks[::-1] if micro_batches == 6 else ranks


def broken(pp, micro_batches):
    return ranks


def refused(pp, micro_batches):
    raise ValueError("never")


number = 7
'''
