"""Which group of `optimizer.groups` a weight is in, for the optimizer, the planner, and a run that resumes."""

from collections.abc import Iterable, Sequence
from difflib import get_close_matches

from threefold.config import Config, OptimizerConfig
from threefold.config.optimizer import OptimizerGroup
from threefold.errors import UserError
from threefold.models.sharding import ModelPlan, covers


def last_match(patterns: Sequence[str], name: str) -> int:
    """Return the number, from 1, of the last pattern that matches a weight, or a module around it; 0 if none does."""
    return max((number for number, pattern in enumerate(patterns, 1) if covers(pattern, name)), default=0)


def group_of(parts: Sequence[OptimizerGroup], name: str) -> OptimizerGroup:
    """Return the part of `OptimizerConfig.parts` that a weight is in: by `last_match`, and the first if none does."""
    return parts[last_match([part.match for part in parts[1:]], name)]


def optimizer_changes(names: Iterable[str], before: OptimizerConfig, now: OptimizerConfig) -> str:
    """Return the first weight whose state in one run's optimizer does not fit another's, with both optimizers' names.

    Empty if there is none.
    """
    old, new, frozen = before.parts, now.parts, (*(before.frozen or ()), *(now.frozen or ()))
    for name in names:
        if any(covers(pattern, name) for pattern in frozen):
            continue
        one, other = group_of(old, name).config, group_of(new, name).config
        if one.name != other.name:
            return f"the weight {name} had {one.name}, whose state does not fit {other.name}"
        if one.name == "sgd" and bool(one.momentum) != bool(other.momentum):
            return f"the weight {name} had momentum {one.momentum:g}, and sgd resumes one only where it was above 0"
    return ""


def check_groups(config: Config, plan: ModelPlan, names: Iterable[str]) -> None:
    """Raise a `UserError` if a group of `optimizer.groups` has none of the trained weights, given by name."""
    parts, known = config.optimizer.parts, [name for name in names if name not in plan.frozen]
    where = f"{config.origin('optimizer.groups')}optimizer.groups"
    for number, part in enumerate(parts[1:], 1):
        found = [name for name in known if covers(part.match, name)]
        if found and all(group_of(parts, name) is not part for name in found):
            raise UserError(
                f"{where} has {part.match!r} as group {number} but later groups match all its weights, such as "
                f"{found[0]}, and the last one decides; put it after them, or leave it out."
            )
        if found:
            continue
        tied = next((user for user in plan.ties if covers(part.match, user)), "")
        anywhere = f"**.{part.match.removeprefix('*.')}"
        if tied:
            use = f"; {tied} is tied, so use {plan.ties[tied]!r}"
        elif any(covers(anywhere, name) for name in known):
            use = f"; use {anywhere!r}, as * is one part of a name"
        else:
            parts_of = (name.split(".") for name in known)
            names = {".".join(each[:end]) for each in parts_of for end in range(1, len(each) + 1)}
            use = f"; the nearest name is {get_close_matches(part.match, sorted(names), n=1, cutoff=0)[0]!r}"
        raise UserError(f"{where} has {part.match!r} as group {number}, which matches no trained weight{use}.")
